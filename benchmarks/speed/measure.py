"""One run of one contestant: started, fed, watched, compared with the truth, ended; and what its latencies were."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.feeds import LiveFeed, create_topic
from benchmarks.place import Place
from benchmarks.processes import Child, ChildFailed, Reading
from benchmarks.run import wait_until
from benchmarks.speed.contestants import Assignment, Contestant, Watch
from benchmarks.speed.records import (
    ACCOUNTS,
    LATENESS_MS,
    LIKE_STATELESS,
    PARTITIONS,
    RATE,
    WINDOW_MS,
    Floats,
    Integers,
    Records,
    Work,
    difference,
    generate,
    truth,
)
from benchmarks.speed.report import Run
from benchmarks.speed.watch import SEEN, Point

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


class WrongOutput(Exception):
    """An output is not the truth; the run has no figures."""


@dataclass
class Attempt:
    """A contestant at work: its process is ready, its output is watched."""

    peer: str
    assignment: Assignment
    watch: Watch
    child: Child

    def done(self, points: list[Point], rows: int) -> Point | None:
        """The commit after which everything is there: all records, and all rows of an output that only grows."""
        for point in points:
            whole = self.assignment.work == "running" or point.rows is None or point.rows >= rows
            if whole and point.records >= self.assignment.records:
                return point
        return None

    def wait(self, rows: int, seconds: float) -> None:
        """Until everything is there; raises ChildFailed."""

        def check() -> None:
            self.child.check()
            self.watch.check()

        def done() -> bool:
            return self.done(self.watch.points[-1:], rows) is not None

        try:
            wait_until(done, seconds, "all records done", every=_LOOK_EVERY, check=check)
        except TimeoutError as error:
            raise ChildFailed(f"{error}; last: {self.watch.points[-1:]}") from None

    def figures(self, began: Reading, ended: Reading, seconds: float, *, first_from: float, **further: float) -> Run:
        """What a run gives, rounded; the first batch counts from `first_from` on."""
        cpu, points = ended.cpu_seconds - began.cpu_seconds, self.watch.points
        figures: Run = {
            "session_s": self.child.ready_at - self.child.started,
            "first_batch_s": next(point.seen - first_from for point in points if point.records),
            "cpu_s": cpu,
            "cores": cpu / seconds,
            "peak_mb": ended.peak_mb,
            "commits": len(points),
            "elsewhere": began.elsewhere(ended),
            "records": self.assignment.records,
            **further,
        }
        kind = "live" if self.assignment.live else "backlog"
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
        return {"peer": self.peer, "work": self.assignment.work, "kind": kind, **rounded}


@contextmanager
def _attempt(contestant: Contestant, assignment: Assignment) -> Iterator[Attempt]:
    assignment.folder.mkdir(parents=True)
    watch = contestant.watch(assignment)
    watch.start()
    child = contestant.start(assignment)
    child.usage.start()
    try:
        child.wait_ready(_READY_SECONDS)
        yield Attempt(contestant.name, assignment, watch, child)
    finally:
        child.stop()
        watch.stop()


def backlog(contestant: Contestant, work: Work, place: Place, topic: str, records: Records) -> Run:
    """Read a topic that is full already. The clock runs from the word that the contestant is ready."""
    expected = truth(records, work)
    assignment = _assignment(contestant, work, "backlog", place, topic, len(records))
    with _attempt(contestant, replace(assignment, rows=expected.num_rows)) as attempt:
        began = attempt.child.usage.now()
        attempt.wait(expected.num_rows, _BACKLOG_SECONDS)
        ended = attempt.child.usage.now()
    _compare(attempt.watch, expected, assignment)
    shutil.rmtree(assignment.folder)
    done = attempt.done(attempt.watch.points, expected.num_rows)
    assert done is not None
    ready = attempt.child.ready_at
    seconds = done.seen - ready
    steady = steady_rate(attempt.watch.points, done, len(records))
    rates = {"rate": len(records) / seconds, **({} if steady is None else {"steady_rate": steady})}
    return attempt.figures(began, ended, seconds, first_from=ready, **rates)


def live(contestant: Contestant, work: Work, place: Place, *, seed: int, seconds: int, warm_up: int) -> Run:
    """Send records at their times to a contestant that waits for them; those of the warm-up are not measured."""
    topic = f"live-{next(_numbers)}"
    create_topic(place.bootstrap, topic)
    count = RATE * (warm_up + seconds)
    assignment = _assignment(contestant, work, "live", place, topic, count + PARTITIONS)
    with _attempt(contestant, assignment) as attempt:
        records = generate(count, seed, began_ms=(time.time() + _LEAD_SECONDS) * 1000)
        expected = truth(records, work)
        feed = LiveFeed(place.bootstrap, topic, records, work)
        start = float(records.sent_ms[0])
        since, until = start + warm_up * 1000, start + (warm_up + seconds) * 1000
        feed.start()
        try:
            _sleep_until(since, attempt.child)
            began = attempt.child.usage.now()
            _sleep_until(until, attempt.child)
            ended = attempt.child.usage.now()
            feed.wait(_DRAIN_SECONDS)
        finally:
            feed.stop()
        attempt.wait(expected.num_rows, _DRAIN_SECONDS)
    watch = attempt.watch
    _compare(watch, expected, assignment)
    latency = latencies(records, watch.arrivals(), work, since_ms=since, until_ms=until)
    shutil.rmtree(assignment.folder)
    p50, p99 = np.percentile(latency, (50, 99)).tolist()
    return attempt.figures(
        began, ended, seconds, first_from=start / 1000,
        commits=sum(since <= point.seen * 1000 < until for point in watch.points),
        p50_ms=p50, p99_ms=p99, worst_ms=float(latency.max()), feed_late_ms=feed.worst_ms,
    )  # fmt: skip


def _assignment(contestant: Contestant, work: Work, kind: Kind, place: Place, topic: str, records: int) -> Assignment:
    folder = place.folder / f"{next(_numbers)}-{contestant.name}-{work}-{kind}"
    return Assignment(work, topic, place.bootstrap, folder, records, live=kind == "live")


def _compare(watch: Watch, expected: pa.Table, assignment: Assignment) -> None:
    wrong = difference(watch.output(), expected, assignment.work)
    if wrong is not None:
        raise WrongOutput(f"{assignment.folder.name}: {wrong}")


def steady_rate(points: list[Point], done: Point, records: int) -> float | None:
    """Records a second without the start, which is the same share of the work for everybody."""
    first = next(point for point in points if point.records >= STEADY_AFTER * records)
    if first.records > STEADY_UNTIL * records:
        return None
    return (done.records - first.records) / (done.seen - first.seen)


def _sleep_until(at_ms: float, child: Child) -> None:
    while (left := at_ms / 1000 - time.time()) > 0:
        child.check()
        time.sleep(min(left, 0.5))


def latencies(records: Records, arrivals: pa.Table, work: Work, *, since_ms: float, until_ms: float) -> Floats:
    """From the time at which a record was sent to the time at which it was readable in the output, ms.

    Of what was sent (or could close) in that time, ms since 1970; the same rules hold for every contestant. A record of
    the stateless work is readable with its own row; of the running total with the first total of its account that
    counts it. A window is readable with its row, and is counted from the first record that lets it close: the first one
    whose event is as late as the window's end and the lateness after it. Of rows that came twice the first counts.
    Raises LookupError for a record that never became readable.
    """
    measures = {"windowed": _windowed, "running": _running, **dict.fromkeys(LIKE_STATELESS, _stateless)}
    sent, seen = measures[work](records, arrivals)
    measured = (sent >= since_ms) & (sent < until_ms)
    if missing := int(np.isnan(seen[measured]).sum()):
        raise LookupError(f"{missing} records of {work} never became readable")
    latency: Floats = seen[measured] - sent[measured]
    return latency


def _stateless(records: Records, arrivals: pa.Table) -> tuple[Floats, Floats]:
    seen = np.full(len(records), np.nan)
    np.fmin.at(seen, arrivals["id"].to_numpy(), arrivals[SEEN].to_numpy() * 1000)
    kept = ~records.dropped
    return records.sent_ms[kept], seen[kept]


def _windowed(records: Records, arrivals: pa.Table) -> tuple[Floats, Floats]:
    end = arrivals["start"].cast(pa.int64()).to_numpy() + WINDOW_MS
    reached = np.maximum.accumulate(records.at_ms)
    closes = np.searchsorted(reached, end + LATENESS_MS, side="left")
    return records.sent_ms[closes], arrivals[SEEN].to_numpy() * 1000


def _running(records: Records, arrivals: pa.Table) -> tuple[Floats, Floats]:
    account = pc.cast(pc.utf8_slice_codeunits(arrivals["account"], 1), pa.int64()).to_numpy()
    counts, times = arrivals["count"].to_numpy(), arrivals[SEEN].to_numpy() * 1000
    seen = np.full(len(records), np.nan)
    for sent, totals in zip(_by_account(records.account), _by_account(account), strict=True):
        reached = np.maximum.accumulate(counts[totals])
        first = np.searchsorted(reached, np.arange(1, len(sent) + 1), side="left")
        there = first < len(reached)
        seen[sent[there]] = times[totals][first[there]]
    return records.sent_ms, seen


def _by_account(account: Integers) -> list[Integers]:
    """The positions of each account, in order."""
    order = np.argsort(account, kind="stable")
    borders = np.searchsorted(account[order], np.arange(1, ACCOUNTS + PARTITIONS))
    return list(np.split(order, borders))
