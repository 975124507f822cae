"""What evaluates a suite's expectations on a slice: pandas for small ones, Spark for large ones."""
