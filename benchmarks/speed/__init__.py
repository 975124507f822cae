"""How fast: the product and its peers on three works, from a backlog and live. `python -m benchmarks.speed --help`."""
