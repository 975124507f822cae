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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measuring import Figures, Started, Workshop, quantile, quiet, save, table, workshop
from benchmarks.speed import flows
from benchmarks.speed.feed import LiveFeed, create_topic, feed_backlog
from benchmarks.speed.process import clean_environment
from benchmarks.speed.records import DROPPED_SHARE, RATE, generate
from orchestration.quality.suites import NICENESS
from quality.runs.runner import RunRequest, run_suite
from quality.suites import suite
from streaming_jobs.topology import Topology

_HELD, _ALONE, _LONGEST = 100_000, 20.0, 120.0


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


def validate(shop: Workshop, *, priority: int = 0, meanwhile: Callable[[], object] = lambda: None) -> float:
    """Seconds of `recourse quality run` in a process of its own; raises RuntimeError if it is not green."""
    environment = clean_environment(
        RECOURSE_HOME=str(shop.settings.home),
        RECOURSE_KAFKA__BOOTSTRAP_SERVERS=shop.bootstrap,
        RECOURSE_FLOWS=json.dumps(["benchmarks.speed.flows"]),
        RECOURSE_QUALITY__SUITES=json.dumps(["benchmarks.validation"]),
    )
    command = ["nice", "-n", str(priority), str(Path(sys.executable).with_name("recourse"))]
    command += ["quality", "run", payments_rows.name, "--slice", "all"]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None:
                meanwhile()
                if time.monotonic() - began > _LONGEST:
                    raise RuntimeError(f"the validation did not end within {_LONGEST:.0f} s")
                time.sleep(0.1)
        finally:
            child.kill()
            child.wait()
        took = time.monotonic() - began
        if child.returncode:
            output.seek(0)
            raise RuntimeError(f"the validation failed:\n{output.read()[-2000:]}")
    return took


def batches_of(started: Started, shop: Workshop, during: Callable[[Callable[[], object]], object]) -> list[float]:
    """Milliseconds of each batch that ended while `during` ran; it calls the function that it is given often."""
    started.look(shop.spark)
    before = set(started.progress)
    during(lambda: started.look(shop.spark))
    return [float(started.progress[batch]["triggerExecution"]) for batch in started.progress if batch not in before]


def left_alone(look: Callable[[], object], seconds: float = _ALONE) -> None:
    """Do nothing but look."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        look()
        time.sleep(0.1)


def beside_a_stream(shop: Workshop, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of batches alone and under validation, seconds of the validations."""
    seconds = (rounds * (_ALONE + _LONGEST)) + _ALONE
    feed = LiveFeed(
        shop.bootstrap, flows.TOPIC, generate(int(seconds * RATE), seed=2, began_ms=time.time() * 1000 + 3000)
    )
    started = shop.start(flows.stateless, trigger="continuous")
    feed.start()
    alone, under, took = [], [], []
    try:
        left_alone(lambda: started.look(shop.spark))
        for _ in range(rounds):
            alone += batches_of(started, shop, left_alone)
            under += batches_of(
                started, shop, lambda look: took.append(validate(shop, priority=NICENESS, meanwhile=look))
            )
    finally:
        feed.stop()
        started.running.request_stop()
        shop.finish(started, seconds=60)
    return alone, under, took


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
        alone, under, took = beside_a_stream(shop, options.rounds)
    runs: list[Figures] = [
        {"run of a suite of eight expectations": "a command, no stream", "s": statistics.median(cold)},
        {"run of a suite of eight expectations": "a second one in a process", "s": again},
        {"run of a suite of eight expectations": "a command beside a stream", "s": statistics.median(took)},
    ]
    plain = statistics.median(alone)
    batches: list[Figures] = [
        {"batches": name, "number": len(each), "median ms": statistics.median(each), "p90 ms": quantile(each, 0.9),
         "to alone": statistics.median(each) / plain}
        for name, each in (("alone", alone), ("under validation", under))
    ]  # fmt: skip
    sys.stdout.write(f"{table(runs)}\n{table(batches)}")
    save(options.out, runs=runs, batches=batches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
