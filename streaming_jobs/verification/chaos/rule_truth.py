"""The expected effect of the row rules of `streams.py`, computed with pandas from the flights' own columns.

Nothing here uses the rules, Spark or the ledger's reader: the conditions are written a second time, on the rows that
`examples/flights/truth.py` computes. Tables and quarantines have to have exactly these rows, and the ledger entries
exactly these numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from deltalake.exceptions import TableNotFoundError

from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.feeder import PARTITIONS
from streaming_jobs.examples.flights.truth import as_frame, differences, truth
from streaming_jobs.platform import table_rows
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.delta_log import read_commit, versions
from streaming_jobs.verification.subject import DROPPED, QUARANTINED

_PLACE = ["source_partition", "source_offset"]


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
    """The rows of `flights_judged`."""
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
        good.sort_values(_PLACE).drop_duplicates(["carrier", "flight"], keep="last"),
        placed[late].assign(_rules="dep_delay_between"),
        len(good),
        0,
        {"dep_delay_between": int(late.sum())},
    )


EXPECTED: Mapping[str, Callable[[pd.DataFrame], Expected]] = {"flights_judged": judged, "flights_newest": newest}
"""By stream, which has a table of the same name, what its rules should have done."""


def compare_rules(tables: Path, stream: str, records: int) -> RuleCheck:
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


def _rows(table: Path, expected: pd.DataFrame) -> list[str]:
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


def _of_entries(table: Path, name: str) -> Counter[str]:
    """The numbers of all batches together."""
    numbers: Counter[str] = Counter()
    for version in versions(table):
        entry = read_commit(table, version).entry
        if entry is not None and entry.kind == "batch":
            numbers.update(entry.rows)
            numbers.update(entry.broken.get(name, {}))
    return numbers
