"""What a preview costs: its own time, and that of the batches of the stream beside which it runs.

    python -m benchmarks.preview --rounds 2 --out benchmarks/results/preview.json

A stream reads 100,000 records, and then 2,000 records a second. In each round it is left alone for 20 s, then
`recourse preview` replays everything since its start with the same code, at its own priority, and finds no difference.
The figures are medians of whole batches (StreamingQueryProgress, triggerExecution) of all rounds, and of the command; a
preview replays the records that came meanwhile too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks.beside import beside, recourse
from benchmarks.measuring import Figures, quiet, save, table, workshop
from benchmarks.speed import flows
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.records import generate

_HELD = 100_000


def main() -> int:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preview", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    run = ("preview", "stateless", "--last", "1 hour", "--no-suites")
    with workshop({}) as shop:
        create_topic(shop.bootstrap, flows.TOPIC)
        feed_backlog(shop.bootstrap, flows.TOPIC, generate(_HELD, seed=1))
        shop.finish(shop.start(flows.stateless), seconds=300)
        quietly = [recourse(shop, *run) for _ in range(options.rounds)]
        seen = beside(shop, flows.stateless, options.rounds, lambda look: recourse(shop, *run, look=look))
    runs: list[Figures] = [
        {"preview": "of 100,000 records, no stream beside it", "s": statistics.median(quietly)},
        {"preview": "beside a stream, of what it has read by then", "s": statistics.median(seen.took)},
    ]
    batches = seen.figures("preview")
    sys.stdout.write(f"{table(runs)}\n{table(batches)}")
    save(options.out, runs=runs, batches=batches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
