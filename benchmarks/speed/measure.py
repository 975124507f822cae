"""One run of one contestant: started, fed, watched, compared with the truth, ended."""

from __future__ import annotations

import itertools
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from benchmarks.speed.contestants import Assignment, Contestant
from benchmarks.speed.feed import LiveFeed, create_topic
from benchmarks.speed.latency import latencies
from benchmarks.speed.process import Child, ContestantFailed, Moment
from benchmarks.speed.records import PARTITIONS, RATE, Records, Work, difference, generate, truth
from benchmarks.speed.watch import Point, Watch

Kind = Literal["backlog", "live"]
KINDS: tuple[Kind, ...] = ("backlog", "live")
STEADY_AFTER, STEADY_UNTIL = 0.2, 0.5
"""The steady rate begins with the first commit after this share of the records, if it comes within the second share."""

_READY_SECONDS = 90.0
_BACKLOG_SECONDS = 240.0
_DRAIN_SECONDS = 90.0
_LEAD_SECONDS = 0.5
_LOOK_EVERY = 0.02
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Place:
    """Where runs happen: the broker's address and a folder."""

    bootstrap: str
    folder: Path


@dataclass(frozen=True)
class Figures:
    """What one run gave; None where the kind of run has no such figure.

    `cores` are CPU seconds a second, `elsewhere` those of programs that have nothing to do with the run.
    """

    peer: str
    work: Work
    kind: Kind
    session_s: float
    first_batch_s: float | None
    cpu_s: float
    cores: float
    peak_mb: float
    commits: int
    elsewhere: float
    records: int
    rate: float | None = None
    steady_rate: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    worst_ms: float | None = None
    feed_late_ms: float | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON; what is not there is left out."""
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items() if v is not None}


class WrongOutput(Exception):
    """An output is not the truth; the run has no figures."""


def backlog(contestant: Contestant, work: Work, place: Place, topic: str, records: Records) -> Figures:
    """Read a topic that is full already. The clock runs from the word that the contestant is ready."""
    expected = truth(records, work)
    assignment = replace(_assignment(contestant, work, "backlog", place, topic, len(records)), rows=expected.num_rows)
    watch = contestant.watch(assignment)
    watch.start()
    child = contestant.start(assignment)
    try:
        child.wait_ready(_READY_SECONDS)
        before, began = child.usage.now(), Moment.now()
        _until_done(watch, child, assignment, expected.num_rows, _BACKLOG_SECONDS)
        used, ended = child.usage.now(), Moment.now()
    finally:
        child.stop()
        watch.stop()
    _compare(watch, expected, assignment)
    shutil.rmtree(assignment.folder)
    done = _done(watch.points, assignment, expected.num_rows)
    assert done is not None
    seconds = done.seen - child.ready_at
    return Figures(
        peer=contestant.name,
        work=work,
        kind="backlog",
        session_s=child.ready_at - child.started,
        first_batch_s=_first_batch(watch.points, child.ready_at),
        cpu_s=used.cpu_seconds - before.cpu_seconds,
        cores=(used.cpu_seconds - before.cpu_seconds) / seconds,
        peak_mb=used.peak_mb,
        commits=len(watch.points),
        elsewhere=began.elsewhere(ended),
        records=len(records),
        rate=len(records) / seconds,
        steady_rate=_steady(watch.points, done, len(records)),
    )


def live(contestant: Contestant, work: Work, place: Place, *, seed: int, seconds: int, warm_up: int) -> Figures:
    """Send records at their times to a contestant that waits for them; those of the warm-up are not measured."""
    topic = f"live-{next(_numbers)}"
    create_topic(place.bootstrap, topic)
    count = RATE * (warm_up + seconds)
    assignment = _assignment(contestant, work, "live", place, topic, count + PARTITIONS)
    watch = contestant.watch(assignment)
    watch.start()
    child = contestant.start(assignment)
    try:
        child.wait_ready(_READY_SECONDS)
        records = generate(count, seed, began_ms=(time.time() + _LEAD_SECONDS) * 1000)
        expected = truth(records, work)
        feed = LiveFeed(place.bootstrap, topic, records)
        began = float(records.sent_ms[0])
        since, until = began + warm_up * 1000, began + (warm_up + seconds) * 1000
        feed.start()
        try:
            _sleep_until(since, child)
            before, first = child.usage.now(), Moment.now()
            _sleep_until(until, child)
            used, last = child.usage.now(), Moment.now()
            feed.wait(_DRAIN_SECONDS)
        finally:
            feed.stop()
        _until_done(watch, child, assignment, expected.num_rows, _DRAIN_SECONDS)
    finally:
        child.stop()
        watch.stop()
    _compare(watch, expected, assignment)
    found = latencies(records, watch.arrivals(), work, since_ms=since, until_ms=until)
    shutil.rmtree(assignment.folder)
    return Figures(
        peer=contestant.name,
        work=work,
        kind="live",
        session_s=child.ready_at - child.started,
        first_batch_s=_first_batch(watch.points, began / 1000),
        cpu_s=used.cpu_seconds - before.cpu_seconds,
        cores=(used.cpu_seconds - before.cpu_seconds) / seconds,
        peak_mb=used.peak_mb,
        commits=sum(since <= point.seen * 1000 < until for point in watch.points),
        elsewhere=first.elsewhere(last),
        records=len(records),
        p50_ms=float(np.percentile(found, 50)),
        p99_ms=float(np.percentile(found, 99)),
        worst_ms=float(found.max()),
        feed_late_ms=feed.worst_ms,
    )


def _assignment(contestant: Contestant, work: Work, kind: Kind, place: Place, topic: str, records: int) -> Assignment:
    folder = place.folder / f"{next(_numbers)}-{contestant.name}-{work}-{kind}"
    folder.mkdir(parents=True)
    return Assignment(work, topic, place.bootstrap, folder, records, live=kind == "live")


def _done(points: list[Point], assignment: Assignment, rows: int) -> Point | None:
    """The commit after which everything is there: all records, and all rows of an output that only grows."""
    for point in points:
        whole = assignment.work == "running" or point.rows is None or point.rows >= rows
        if whole and point.records >= assignment.records:
            return point
    return None


def _until_done(watch: Watch, child: Child, assignment: Assignment, rows: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _done(watch.points[-1:], assignment, rows) is None:
        child.check()
        watch.check()
        if time.monotonic() > deadline:
            last = watch.points[-1] if watch.points else None
            raise ContestantFailed(f"{assignment.records} records were not done within {seconds:.0f} s; last: {last}")
        time.sleep(_LOOK_EVERY)


def _compare(watch: Watch, expected: pa.Table, assignment: Assignment) -> None:
    wrong = difference(watch.output(), expected, assignment.work)
    if wrong is not None:
        raise WrongOutput(f"{assignment.folder.name}: {wrong}")


def _first_batch(points: list[Point], ready: float) -> float | None:
    return next((point.seen - ready for point in points if point.records), None)


def _steady(points: list[Point], done: Point, records: int) -> float | None:
    """Records a second without the start, which is the same share of the work for everybody."""
    first = next(point for point in points if point.records >= STEADY_AFTER * records)
    if first.records > STEADY_UNTIL * records:
        return None
    return (done.records - first.records) / (done.seen - first.seen)


def _sleep_until(at_ms: float, child: Child) -> None:
    while (left := at_ms / 1000 - time.time()) > 0:
        child.check()
        time.sleep(min(left, 0.5))
