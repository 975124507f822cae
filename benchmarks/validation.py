"""What the validation of a table costs: its own time, and that of the batches of the stream that writes the table.

    python -m benchmarks.validation --rounds 3 --out benchmarks/results/validation.json

A stream writes 2,000 records a second to a table that holds 100,000 rows from the start. In each round it is left alone
for 20 s, then `recourse quality run --slice all` reads its table, as a process of its own and with the priority that
Dagster's runs have. The figures are medians of whole batches (StreamingQueryProgress, triggerExecution) of all rounds,
and of the command. It is timed without a stream before, and a second run of the suite in one process after that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.beside import Look, beside, recourse
from benchmarks.measuring import Figures, Workshop, quiet, save, table, workshop
from benchmarks.speed import flows
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.records import DROPPED_SHARE, generate
from orchestration.quality.suites import NICENESS
from quality.runs.runner import RunRequest, run_suite
from quality.suites import suite
from streaming_jobs.catalog.topology import Topology

_HELD = 100_000


@suite(table="stateless", key=["id"], slice="all")
def payments_rows() -> list[Any]:
    """Eight expectations, of each usual kind."""
    import great_expectations.expectations as gxe

    return [
        gxe.ExpectColumnValuesToNotBeNull(column="id"),
        gxe.ExpectColumnValuesToNotBeNull(column="account"),
        gxe.ExpectColumnValuesToBeBetween(column="amount", min_value=0),
        gxe.ExpectColumnValuesToBeBetween(column="net", min_value=0),
        gxe.ExpectColumnValuesToBeInSet(column="kind", value_set=["card", "cash", "wire", "note"]),
        gxe.ExpectColumnValuesToMatchRegex(column="account", regex="^.+$"),
        gxe.ExpectColumnMeanToBeBetween(column="amount", min_value=1),
        gxe.ExpectTableRowCountToBeBetween(min_value=1),
    ]


def validate(shop: Workshop, *, priority: int = 0, look: Look = lambda: None) -> float:
    """Seconds of `recourse quality run` in a process of its own; raises RuntimeError if it is not green."""
    suites = json.dumps(["benchmarks.validation"])
    run = ("quality", "run", payments_rows.name, "--slice", "all")
    return recourse(shop, *run, priority=priority, look=look, RECOURSE_QUALITY__SUITES=suites)


def warm(shop: Workshop) -> float:
    """Seconds of a second run in one process."""
    topology = Topology.load(["benchmarks.speed.flows"])
    request = RunRequest(slice="all")
    run_suite(shop.settings, topology, payments_rows, request)
    began = time.monotonic()
    run_suite(shop.settings, topology, payments_rows, request)
    return time.monotonic() - began


def main() -> int:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    with workshop({}) as shop:
        create_topic(shop.bootstrap, flows.TOPIC)
        feed_backlog(shop.bootstrap, flows.TOPIC, generate(int(_HELD / (1 - DROPPED_SHARE)) + 1, seed=1))
        shop.finish(shop.start(flows.stateless), seconds=300)
        cold = [validate(shop) for _ in range(options.rounds)]
        again = warm(shop)
        seen = beside(shop, flows.stateless, options.rounds, lambda look: validate(shop, priority=NICENESS, look=look))
    runs: list[Figures] = [
        {"run of a suite of eight expectations": "a command, no stream", "s": statistics.median(cold)},
        {"run of a suite of eight expectations": "a second one in a process", "s": again},
        {"run of a suite of eight expectations": "a command beside a stream", "s": statistics.median(seen.took)},
    ]
    batches = seen.figures("validation")
    sys.stdout.write(f"{table(runs)}\n{table(batches)}")
    save(options.out, runs=runs, batches=batches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
