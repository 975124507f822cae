"""The kill loop's streams that write tables, their feed, and the rows that each makes of a record.

The rows are known here before the streams have run: by one rule per table for every version (`version_reader.py`), by
the truths of the flights, and by `compare_rules` for the streams with row rules.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from deltalake.exceptions import TableNotFoundError

from streaming_jobs.errors import TransientError
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.content import TOPIC
from streaming_jobs.examples.flights.feeder import CHUNK, PARTITIONS, feed, survey
from streaming_jobs.examples.flights.streams import STREAMS as FLIGHT_STREAMS
from streaming_jobs.examples.flights.truth import KEYS, TruthCheck, as_frame, compare, differences, truth
from streaming_jobs.platform import table_rows
from streaming_jobs.runtime.crash_points import POINTS
from streaming_jobs.settings import Settings
from streaming_jobs.storage.locations import Location
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.chaos.background import Background
from streaming_jobs.verification.chaos.faults import Phase, Steps, schedule
from streaming_jobs.verification.chaos.flight_damages import DamageOutcome, run_scenarios
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.kill_loop import BURST, LoopPlan
from streaming_jobs.verification.chaos.sessions import Tell
from streaming_jobs.verification.chaos.version_reader import (
    ConcurrentReader,
    Elsewhere,
    Newest,
    Places,
    Total,
    WatchedStream,
    Windows,
)
from streaming_jobs.verification.delta_log import read_commit, versions
from streaming_jobs.verification.ledger_chain import TableFault
from streaming_jobs.verification.subject import DROPPED, QUARANTINED

_PLACE = ("source_partition", "source_offset")
_BY_PLACE = Places(*_PLACE)


def _with_rows_elsewhere(stream: str, table: str, rule: Places | Newest, elsewhere: str) -> WatchedStream:
    return WatchedStream(stream, table, TOPIC, rule, (Elsewhere(elsewhere, *_PLACE),))


SHIPPED = (
    WatchedStream("flights_clean", "flights_clean", TOPIC, _BY_PLACE),
    WatchedStream("airport_hours", "airport_hours", TOPIC, Windows(("window_start", "origin"), "flights")),
    WatchedStream("carrier_totals", "carrier_totals", TOPIC, Total("carrier", "flights")),
)
"""The three shipped streams."""
SPLIT = _with_rows_elsewhere("flights_split", "flights_short", _BY_PLACE, "flights_long")
"""The stream of two tables that only the kill loop runs (`flight_streams.py`)."""
JUDGED = _with_rows_elsewhere("flights_judged", "flights_judged", _BY_PLACE, "flights_judged_quarantine")
NEWEST = _with_rows_elsewhere(
    "flights_newest", "flights_newest", Newest(*_PLACE, ("carrier", "flight")), "flights_newest_quarantine"
)
"""The streams with row rules that only the kill loop runs; a quarantine commits before its table."""
LATENESS = "5 days"
"""Lateness of airport_hours here: four days drop nothing (docs/flights.md), the shipped ten would close no window."""
_SECONDS_A_KILL, _SECONDS_ON_A_CLUSTER = 60, 240
"""How long the feeder's records last for each kill: on a cluster, lost executors are replaced before the next kill."""


@dataclass(frozen=True)
class TableFindings:
    """Every version that was read meanwhile, the truth of each table, the row rules, and the damages afterwards."""

    versions_read: int
    versions_unseen: int
    faults: tuple[TableFault, ...]
    truth: tuple[TruthCheck, ...]
    rules: tuple[RuleCheck, ...] = ()
    scenarios: tuple[DamageOutcome, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every version was read and is whole, every table true, and every damage refused."""
        equal = all(check.ok for check in self.truth) and all(check.ok for check in self.rules)
        return equal and not self.faults and not self.versions_unseen and all(one.ok for one in self.scenarios)


class FlightObserver:
    """Reads every version of the tables while the streams are killed."""

    def __init__(self, home: Home, plan: LoopPlan) -> None:
        self._home, self._plan = home, plan
        self._watched = [watched for watched in home.subjects if watched.stream in plan.streams]
        self._reader = ConcurrentReader(self._watched, home.settings.tables)
        self.start, self.stop = self._reader.start, self._reader.stop

    def compare(self, fed: int, tell: Tell) -> TableFindings:
        self._reader.finish()
        tell(f"{self._reader.seen:,} versions read")
        settings, with_truth = self._home.settings, {watched.table for watched in self._watched} & KEYS.keys()
        checks = compare(settings, FLIGHT_STREAMS, fed / dataset.TOTAL) if with_truth else []
        return TableFindings(
            self._reader.seen,
            self._reader.unseen,
            tuple(self._reader.faults),
            tuple(check for check in checks if check.table in with_truth),
            tuple(compare_rules(settings.tables, name, fed) for name in self._plan.streams if name in EXPECTED),
            tuple(run_scenarios(self._home, tell)) if self._plan.scenarios else (),
        )


class FlightSubject:
    """The shipped streams, one of two tables, and two whose rules take rows out."""

    streams = (*SHIPPED, SPLIT, JUDGED, NEWEST)
    stages = (tuple(watched.stream for watched in streams),)
    fed = TOPIC
    rate, max_offsets = 60.0, 200
    settings: Mapping[str, Any] = {
        "flows": ["streaming_jobs.examples.flights.streams", "streaming_jobs.verification.chaos.flight_streams"],
        "streams.airport_hours.lateness": LATENESS,
        # On a cluster, executors write the others: a MERGE by Spark would take the cores for many seconds.
        "streams.carrier_totals.path": "auto",
        "streams.flights_newest.path": "auto",
    }
    points: Mapping[str, tuple[str, ...]] = {
        # In a stream of one table nothing is committed before that point: it would repeat the point before it.
        watched.stream: tuple(p for p in POINTS if watched.secondary or p != "secondary_committed")
        for watched in streams
    }
    """The named points of each stream."""

    def steps(self, plan: LoopPlan) -> tuple[Steps, Sequence[int]]:
        points = {stream: self.points[stream] for stream in plan.streams}
        faults = schedule(plan.seed, plan.kills, points, cluster=bool(plan.master))
        return faults.phases, faults.broker_after

    def topics(self, _: LoopPlan) -> Mapping[str, int]:
        return {TOPIC: PARTITIONS}

    def feed(self, home: Home, plan: LoopPlan, steps: Steps) -> FlightFeed:
        seconds = _SECONDS_ON_A_CLUSTER if plan.master else _SECONDS_A_KILL
        steady = int(plan.rate * seconds * (plan.kills + 2))
        bursts = sum(step.burst for step in steps if isinstance(step, Phase)) * BURST
        return FlightFeed(home.settings, rate=plan.rate, records=steady + bursts)

    def observer(self, home: Home, plan: LoopPlan) -> FlightObserver:
        return FlightObserver(home, plan)


FLIGHTS = FlightSubject()


_AGAIN_AFTER = 0.5
_CHUNK = 50
_LOOK_EVERY = 0.05


class FlightFeed(Background):
    """Feeds real flights at a steady rate in a thread, through every restart of the broker, until it is stopped.

    `held` flights are in the topic, always the first ones in order of departure. A burst is fed at full speed, and the
    steady rate continues after it.
    """

    def __init__(self, settings: Settings, *, rate: float, records: int) -> None:
        """`rate` is in records per second; `records` is the most that it sends."""
        super().__init__("feeder")
        self.held = 0
        self._settings, self._rate = settings, rate
        self._most = min(max(records, 1), dataset.TOTAL)
        self._cut = threading.Event()
        self._burst_to = 0

    @property
    def dry(self) -> bool:
        return self.held >= self._most

    def stop(self) -> None:
        self.ended.set()
        self._cut.set()
        super().stop()

    def burst(self, records: int, seconds: float) -> int:
        """Feed this many records at once; returns the number of flights in the topic then, after `seconds` at most.

        Raises the feeder's error, and TransientError.
        """
        self._burst_to = target = min(self.held + records, self._most)
        self._cut.set()
        deadline = time.monotonic() + seconds
        while self.held < target:
            self.check()
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{self.held:,} of {target:,} flights are in the topic after {seconds:.0f} s", "check the broker"
                )
            time.sleep(_LOOK_EVERY)
        return self.held

    def finish(self) -> int:
        """Stop, and send the rest of an interrupted chunk; returns the number of flights that the topic then holds."""
        self.stop()
        self.check()
        there = np.ones(dataset.TOTAL, dtype=bool)
        there[survey(self._settings).missing] = False
        count = int(np.flatnonzero(there)[-1]) + 1 if there.any() else 0
        if not there[:count].all():
            feed(self._settings, rate=None, share=count / dataset.TOTAL)
        self.held = count
        return count

    def work(self) -> None:
        while not self.ended.is_set() and not self.dry:
            self._cut.clear()
            if self.ended.is_set():  # between the two lines above
                return
            burst = self._burst_to > self.held
            try:
                report = feed(
                    self._settings,
                    rate=None if burst else self._rate,
                    share=(self._burst_to if burst else self._most) / dataset.TOTAL,
                    progress=self._progressed,
                    stop=self._cut,
                    chunk=CHUNK if burst else _CHUNK,
                )
                self.held = report.held
            except TransientError:  # the broker is being restarted
                self.ended.wait(_AGAIN_AFTER)

    def _progressed(self, held: int, _: int) -> None:
        self.held = held


# The expected effect of the row rules of `flight_streams.py`, computed with pandas from the flights' own columns.
#
# Nothing here uses the rules, Spark or the ledger's reader: the conditions are written a second time, on the rows that
# `examples/flights/truth.py` computes. Tables and quarantines have to have exactly these rows, and the ledger entries
# exactly these numbers.


@dataclass(frozen=True)
class Expected:
    """The rows of a table and its quarantine, the numbers of good and dropped records, and of rows by broken rule."""

    table: pd.DataFrame
    quarantine: pd.DataFrame
    good: int
    dropped: int
    broken: Mapping[str, int]


@dataclass(frozen=True)
class RuleCheck:
    """One stream with row rules against the truth: the expected numbers, and in words what differs."""

    stream: str
    records: int
    good: int
    quarantined: int
    dropped: int
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if rows and numbers are the expected ones, and no record is unaccounted for."""
        return not self.differences and self.records == self.good + self.quarantined + self.dropped

    def __str__(self) -> str:
        parts = f"{self.good:,} good + {self.quarantined:,} quarantined + {self.dropped:,} dropped"
        return f"{self.records:,} records = {parts}"


def judged(flights: pd.DataFrame) -> Expected:
    cancelled = flights["dep_delay"].isna()
    near_or_far = (flights["distance"] < 400) | (flights["distance"] > 2000)
    late = (flights["dep_delay"] > 15).fillna(False).astype(bool)
    aside = cancelled | near_or_far
    names = cancelled.map({True: "dep_delay_not_null ", False: ""}) + near_or_far.map(
        {True: "distance_between", False: ""}
    )
    columns = ["carrier", "flight", "dep_delay", "arr_delay", "air_time", "distance", *_PLACE]
    good = flights[~aside & ~late][columns]
    broken = {
        "dep_delay_not_null": cancelled,
        "distance_between": near_or_far,
        "dep_delay_between": late,
        "air_time_between": (flights["air_time"] > 240).fillna(False),
        "arrived": flights["arr_delay"].isna() & ~cancelled,
    }
    return Expected(
        good,
        flights[aside][columns].assign(_rules=names[aside].str.strip()),
        len(good),
        int((late & ~aside).sum()),
        {name: int(rows.sum()) for name, rows in broken.items()},
    )


def newest(flights: pd.DataFrame) -> Expected:
    """The rows of `flights_newest`: the last good flight of each number, which is always in one partition."""
    late = (flights["dep_delay"] > 5).fillna(False).astype(bool)
    placed = flights[["carrier", "flight", "dep_delay", *_PLACE]]
    good = placed[~late]
    return Expected(
        good.sort_values([*_PLACE]).drop_duplicates(["carrier", "flight"], keep="last"),
        placed[late].assign(_rules="dep_delay_between"),
        len(good),
        0,
        {"dep_delay_between": int(late.sum())},
    )


EXPECTED: Mapping[str, Callable[[pd.DataFrame], Expected]] = {"flights_judged": judged, "flights_newest": newest}
"""By stream, which has a table of the same name, what its rules should have done."""


def compare_rules(tables: Location, stream: str, records: int) -> RuleCheck:
    """Compare a stream that has read the first `records` flights, and nothing else, with the truth; only reads."""
    expected = EXPECTED[stream](truth("flights_clean", records / dataset.TOTAL, partitions=PARTITIONS))
    texts = [f"{stream}: {text}" for text in _rows(tables / stream, expected.table)]
    quarantine = f"{stream}_quarantine"
    texts += [f"{quarantine}: {text}" for text in _rows(tables / quarantine, expected.quarantine)]
    numbers = {
        f"{QUARANTINED}{stream}": len(expected.quarantine),
        f"{DROPPED}{stream}": expected.dropped,
        "dead_letters": 0,
        **expected.broken,
    }
    found = _of_entries(tables / stream, stream)
    texts += [
        f"the entries of {stream} count {found[name]:,} of {name}, expected are {number:,}"
        for name, number in numbers.items()
        if found[name] != number
    ]
    return RuleCheck(stream, records, expected.good, len(expected.quarantine), expected.dropped, tuple(texts))


def _rows(table: Location, expected: pd.DataFrame) -> list[str]:
    try:
        rows = as_frame(table_rows.rows(table))
    except TableNotFoundError:
        return [f"the table does not exist, expected are {counted(len(expected), 'row')}"]
    if missing := set(expected.columns) - set(rows.columns):
        return [f"it has no column {', '.join(sorted(missing))}"]
    actual = rows[list(expected.columns)]
    if "_rules" in actual:
        actual = actual.assign(_rules=actual["_rules"].map(" ".join))
    return differences(expected, actual, _PLACE)


def _of_entries(table: Location, name: str) -> Counter[str]:
    """The numbers of all batches together."""
    numbers: Counter[str] = Counter()
    for version in versions(table):
        entry = read_commit(table, version).entry
        if entry is not None and entry.kind == "batch":
            numbers.update(entry.rows)
            numbers.update(entry.broken.get(name, {}))
    return numbers
