"""A command beside a stream at work: how long it takes, and how long the stream's batches take meanwhile."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measuring import Figures, Started, Workshop, quantile
from benchmarks.speed import flows
from benchmarks.speed.feed import LiveFeed
from benchmarks.speed.process import clean_environment
from benchmarks.speed.records import RATE, generate
from streaming_jobs.stream import Stream

ALONE, LONGEST = 20.0, 120.0
"""Seconds in which the stream is left alone in each round; the longest that a command may take."""
Look = Callable[[], object]
Command = Callable[[Look], float]
"""Runs once and calls the function that it is given often; returns its seconds."""


def recourse(
    shop: Workshop,
    *arguments: str,
    priority: int = 0,
    ok: Collection[int] = (0,),
    look: Look = lambda: None,
    **environment: str,
) -> float:
    """Seconds of a `recourse` command in a process of its own; raises RuntimeError for another exit code than `ok`."""
    variables = clean_environment(
        RECOURSE_HOME=str(shop.settings.home),
        RECOURSE_KAFKA__BOOTSTRAP_SERVERS=shop.bootstrap,
        RECOURSE_FLOWS=json.dumps(["benchmarks.speed.flows"]),
        **environment,
    )
    command = ["nice", "-n", str(priority), str(Path(sys.executable).with_name("recourse")), *arguments]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None:
                look()
                if time.monotonic() - began > LONGEST:
                    raise RuntimeError(f"recourse {arguments[0]} did not end within {LONGEST:.0f} s")
                time.sleep(0.1)
        finally:
            child.kill()
            child.wait()
        took = time.monotonic() - began
        if child.returncode not in ok:
            output.seek(0)
            raise RuntimeError(f"recourse {arguments[0]} ended with {child.returncode}:\n{output.read()[-2000:]}")
    return took


@dataclass
class Beside:
    """What was seen: milliseconds of whole batches alone and under the command, seconds of the commands."""

    alone: list[float] = field(default_factory=list)
    under: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    def figures(self, command: str) -> list[Figures]:
        """A row for the batches alone, and one for those under the command."""
        plain = statistics.median(self.alone)
        return [
            {"batches": name, "number": len(each), "median ms": (median := statistics.median(each)),
             "p90 ms": quantile(each, 0.9), "to alone": median / plain}
            for name, each in (("alone", self.alone), (f"under {command}", self.under))
        ]  # fmt: skip


def beside(shop: Workshop, stream: Stream, rounds: int, command: Command) -> Beside:
    """A stream at 2,000 records a second: in each round it is left alone, then the command runs."""
    seconds = (rounds * (ALONE + LONGEST)) + ALONE
    began_ms = time.time() * 1000 + 3000
    feed = LiveFeed(shop.bootstrap, flows.TOPIC, generate(int(seconds * RATE), seed=2, began_ms=began_ms))
    started = shop.start(stream, trigger="continuous")
    feed.start()
    seen = Beside()
    try:
        _left_alone(lambda: started.look(shop.spark))
        for _ in range(rounds):
            seen.alone += _batches(started, shop, _left_alone)
            seen.under += _batches(started, shop, lambda look: seen.took.append(command(look)))
    finally:
        feed.stop()
        started.running.request_stop()
        shop.finish(started, seconds=60)
    return seen


def _batches(started: Started, shop: Workshop, during: Callable[[Look], object]) -> list[float]:
    """Milliseconds of each batch that ended while `during` ran; it calls the function that it is given often."""
    started.look(shop.spark)
    before = set(started.progress)
    during(lambda: started.look(shop.spark))
    return [float(started.progress[batch]["triggerExecution"]) for batch in started.progress if batch not in before]


def _left_alone(look: Look) -> None:
    deadline = time.monotonic() + ALONE
    while time.monotonic() < deadline:
        look()
        time.sleep(0.1)
