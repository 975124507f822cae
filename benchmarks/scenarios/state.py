"""How long `recourse state` takes on a live stream, by the number of keys in its state.

    python -m benchmarks state --keys 1000000 --rounds 3

The state is that of the running totals in `benchmarks/speed/flows.py`, after one record for each key. The stream then
reads 200 records a second, while `state show` and `state list` read, each in a process of its own. Exit code 1: a
command took longer than ten seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from benchmarks.feeds import LiveFeed, create_topic, feed_backlog
from benchmarks.place import Place, place, wait_for_batches
from benchmarks.processes import REPOSITORY, Child
from benchmarks.run import Report, Row, median, progress, verdict
from benchmarks.speed.contestants import Assignment, Recourse
from benchmarks.speed.records import Work, account_name, generate

_STREAM: Work = "running"
_TOPIC, _FLOWS = "payments", "benchmarks.speed.flows"
_GOAL = 10.0
_LIVE_SECONDS = 300


def run(
    report: Report,
    *,
    keys: Annotated[int, "of the state"] = 1_000_000,
    rounds: Annotated[int, "how often each command runs"] = 3,
    rate: Annotated[int, "records per second that arrive meanwhile"] = 200,
) -> None:
    backlog = generate(keys, seed=1)
    with place(heap_mb=512) as here:
        create_topic(here.bootstrap, _TOPIC)
        feed_backlog(here.bootstrap, _TOPIC, replace(backlog, account=np.arange(len(backlog))))
        work = Assignment(_STREAM, _TOPIC, here.bootstrap, here.folder, len(backlog), live=False)
        session = Recourse("recourse").start(work)
        try:
            wait_for_batches(
                here.settings(), [_STREAM], session, lambda s: s.totals is not None and s.totals.records >= len(backlog)
            )
            progress(f"a state of {len(backlog):,} keys")
            began = time.time() * 1000
            live = LiveFeed(here.bootstrap, _TOPIC, generate(rate * _LIVE_SECONDS, seed=2, began_ms=began, rate=rate))
            live.start()
            try:
                report.table("state", list(_measured(here, session, keys, rounds)))
            finally:
                live.stop()
        finally:
            session.stop()


def _measured(here: Place, session: Child, keys: int, rounds: int) -> list[Row]:
    last = account_name(keys - 1)
    commands: dict[str, tuple[Sequence[str], Callable[[Any], bool]]] = {
        "state show": (["show", _STREAM, "--key", last], lambda found: [e["key"]["account"] for e in found] == [last]),
        "state list": (["list", _STREAM], lambda found: [store["rows"] >= keys for store in found] == [True]),
    }
    rows: list[Row] = []
    for name, (arguments, right) in commands.items():
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            found = _recourse(here, "state", *arguments, "--output", "json")
            seconds.append(time.perf_counter() - began)
            progress(f"{name}: {seconds[-1]:.1f} s")
            session.check()
            if not right(found):
                raise LookupError(f"{name} printed {found}")
        good = verdict(max(seconds) <= _GOAL)
        rows.append(
            {"command": name, "keys": keys, "median s": median(seconds), "longest s": max(seconds), "verdict": good}
        )
    return rows


def _recourse(here: Place, *arguments: str) -> Any:
    """What a command prints as JSON; raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "orchestration.cli", *arguments]
    environment = here.environment([_FLOWS], BENCHMARK_TOPIC=_TOPIC)
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, timeout=300)
    return json.loads(done.stdout)
