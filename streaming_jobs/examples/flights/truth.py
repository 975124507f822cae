"""The expected content of the three tables, computed with pandas from the package's own columns, and the comparison.

Nothing here uses Spark or the record builder: UTC is the package's `time_hour`, not the result of our rule for
local times, and a row's place in the topic from the partition of its key. Integers, texts and times must be
equal; the mean delay may differ by `MEAN_TOLERANCE`, for the order in which floating point sums are taken.

A window of airport_hours is in the table once the watermark (greatest event time less the lateness) has
reached its end. Those still open are counted and compared when later records have closed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import numpy as np
import pandas as pd
import pyarrow as pa
from deltalake.exceptions import TableNotFoundError
from numpy.typing import NDArray

from streaming_jobs.catalog.truths import NotComparable, Record
from streaming_jobs.errors import BrokerUnreachable, UsageError
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.content import TOPIC, rank
from streaming_jobs.platform import table_rows
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.status import read_status
from streaming_jobs.stream import Stream
from streaming_jobs.text.spelling import counted

KEYS = {
    "flights_clean": ("sched_dep", "carrier", "flight", "origin"),
    "airport_hours": ("window_start", "origin"),
    "carrier_totals": ("carrier",),
}
MEAN_TOLERANCE = 1e-9
"""Greatest difference of two equal means, as a part of the value."""
_SHOWN = 3
_MOST_PARTITIONS = 256


@dataclass(frozen=True)
class TruthCheck:
    """One table against the truth: row counts, and in words what differs or is still open."""

    table: str
    ok: bool
    expected_rows: int
    found_rows: int
    detail: str


def truth(table: str, share: float = 1.0, *, partitions: int = 4) -> pd.DataFrame:
    """All rows that `table` holds once the first `share` of the flights is read and every window is closed."""
    return _rows_of(table, _flights(share), partitions)


def truth_of(table: str, records: Iterable[Record]) -> pd.DataFrame:
    """All rows that `table` holds once these records of one feed are read and every window is closed.

    Only position and key are taken from the records: the flights are the package's. Raises NotComparable for
    records that do not form exactly one feed.
    """
    return _rows_of(table, *_held(records))


def _rows_of(table: str, flights: pd.DataFrame, partitions: int) -> pd.DataFrame:
    if table == "flights_clean":
        return _clean(flights, partitions)
    if table == "airport_hours":
        return _hours(flights)
    if table == "carrier_totals":
        return _totals(flights)
    raise UsageError(f"there is no truth for table '{table}'", f"the tables are: {', '.join(KEYS)}")


def watermark(share: float, lateness: timedelta) -> pd.Timestamp:
    """The last watermark of airport_hours: windows that end at or before it are closed."""
    newest: pd.Timestamp = _flights(share)["sched_dep"].max()
    return newest - lateness


def compare(settings: Settings, streams: Sequence[Stream], share: float = 1.0) -> list[TruthCheck]:
    """Compare the streams' tables with the truth for the first `share` of the flights; only reads.

    Call it when the streams have read everything: rows of unread records are reported as missing. A topic that
    holds another number of records than one such feed is reported as not comparable. Without a broker the
    tables are compared all the same.
    """
    held, fed = _records_in_topic(settings), dataset.flights_in(share)
    if held is not None and held != fed:
        reason = f"not comparable: topic {TOPIC} holds {held:,} records, one feed of these flights has {fed:,}"
        return [TruthCheck(stream.primary.name, False, 0, 0, reason) for stream in streams]
    checks = [_compared(settings, stream, share) for stream in streams]
    return checks + [check for stream in streams if (check := _dead_letters(settings, stream))]


def as_frame(rows: pa.Table) -> pd.DataFrame:
    """Arrow rows for pandas, with integers that stay integers where there are nulls."""
    # pandas' own choice for them, float64, would compare with rounding.
    frame: pd.DataFrame = rows.to_pandas(types_mapper={pa.int32(): pd.Int64Dtype(), pa.int64(): pd.Int64Dtype()}.get)
    return frame


def differences(
    expected: pd.DataFrame, actual: pd.DataFrame, keys: Sequence[str], tolerance: float = MEAN_TOLERANCE
) -> list[str]:
    """The differences of two sets of rows, in words; empty when they are equal. Order does not matter."""
    by = list(keys)
    if set(expected.columns) != set(actual.columns):
        return [f"columns are {sorted(actual.columns)}, expected {sorted(expected.columns)}"]
    texts = []
    doubled = actual[actual.duplicated(by, keep="first")]
    if len(doubled):
        texts.append(_rows(doubled, by, "rows twice or more"))
    both = expected.merge(actual.drop_duplicates(by), on=by, how="outer", suffixes=("", "_found"), indicator=True)
    for side, name in (("left_only", "rows missing"), ("right_only", "rows not expected")):
        rows = both[both["_merge"] == side]
        if len(rows):
            texts.append(_rows(rows, by, name))
    both = both[both["_merge"] == "both"]
    for column in expected.columns.difference(by):
        wanted, got = both[column], both[f"{column}_found"]
        if pd.api.types.is_float_dtype(wanted) or pd.api.types.is_float_dtype(got):
            wanted, got = wanted.astype("float64"), got.astype("float64")
            equal = (wanted - got).abs() <= tolerance * wanted.abs().clip(lower=1)
        else:
            equal = (wanted == got).fillna(False).astype(bool)
        rows = both[~(equal | (wanted.isna() & got.isna()))]
        if len(rows):
            first = rows.iloc[0]
            place = ", ".join(f"{key}={first[key]}" for key in by)
            texts.append(
                f"{counted(len(rows), 'row')} with another {column}, first {first[f'{column}_found']} "
                f"instead of {first[column]} at {place}"
            )
    return texts


def _compared(settings: Settings, stream: Stream, share: float) -> TruthCheck:
    table = stream.primary.name
    actual = _read(settings, table)
    expected = truth(table, share, partitions=_partitions(actual) if table == "flights_clean" else 4)
    note = ""
    if table == "airport_hours":
        closed_at = watermark(share, _lateness(settings, stream))
        open_rows = expected[expected["window_end"] > closed_at]
        expected = expected[expected["window_end"] <= closed_at]
        note = f"; still open, since they end after {closed_at:%Y-%m-%d %H:%M} UTC: {counted(len(open_rows), 'window')}"
    if actual is None:
        return TruthCheck(table, False, len(expected), 0, "the table does not exist yet")
    texts = differences(expected, actual, KEYS[table])
    if late := _late_rows(settings, stream):
        texts.append(f"the watermark dropped {late:,} late rows (Spark's figure)")
    return TruthCheck(table, not texts, len(expected), len(actual), ("; ".join(texts) or "every row is equal") + note)


def _late_rows(settings: Settings, stream: Stream) -> int:
    status = read_status(settings, stream.name)
    return status.late_rows_dropped if status else 0


def _dead_letters(settings: Settings, stream: Stream) -> TruthCheck | None:
    letters = _read(settings, stream.dead_letters)
    if letters is None or letters.empty:
        return None
    return TruthCheck(stream.dead_letters, False, 0, len(letters), f"not decoded: {counted(len(letters), 'record')}")


def _read(settings: Settings, table: str) -> pd.DataFrame | None:
    try:
        rows = table_rows.rows(settings.tables / table)
    except TableNotFoundError:
        return None
    return as_frame(rows)


def _records_in_topic(settings: Settings) -> int | None:
    try:
        topics = Topics.of(settings.kafka, bootstrap_servers(settings))
        return topics.offsets(TOPIC).total if topics.describe(TOPIC) else 0
    except BrokerUnreachable:
        return None


def _lateness(settings: Settings, stream: Stream) -> timedelta:
    declared = next(iter(stream.sources.values())).delay
    delay = settings.for_stream(stream.name).lateness or declared
    if delay is None:
        raise UsageError(f"stream {stream.name} has no lateness", "declare one with its event time")
    return delay


def _partitions(rows: pd.DataFrame | None) -> int:
    return 4 if rows is None or rows.empty else int(rows["source_partition"].max()) + 1


def _rows(rows: pd.DataFrame, keys: Sequence[str], name: str) -> str:
    first = [" ".join(str(row[key]) for key in keys) for _, row in rows.head(_SHOWN).iterrows()]
    return f"{len(rows):,} {name}, first {' | '.join(first)}"


def _held(records: Iterable[Record]) -> tuple[pd.DataFrame, int]:
    """The flights that lie at these places in a topic that was fed once, and its partitions."""
    keys = {(record.partition, record.offset): record.key or b"" for record in records}
    flights, partitions = _all_flights(), _partitions_of(keys)
    known = dataset.keys_of(flights)
    partition = _partition(known, partitions)
    places = zip(partition.tolist(), rank(partition).tolist(), strict=True)
    held = np.array([keys.get(place) == key for place, key in zip(places, known, strict=True)])
    if held.sum() != len(keys):
        raise NotComparable(f"topic {TOPIC} holds {len(keys) - held.sum():,} records that are not those of one feed")
    return flights[held], partitions


def _partitions_of(keys: Mapping[tuple[int, int], bytes]) -> int:
    """Number of partitions of the topic: the one with which every key falls into the partition that it has."""
    pairs = {(partition, key) for (partition, _), key in keys.items()}
    least = max((partition for partition, _ in pairs), default=0) + 1
    for count in range(least, _MOST_PARTITIONS + 1):
        if all(dataset.partition_of(key, count) == partition for partition, key in pairs):
            return count
    raise NotComparable(f"the records of topic {TOPIC} do not lie in the partitions of their keys")


def _flights(share: float) -> pd.DataFrame:
    return _all_flights().iloc[: dataset.flights_in(share)]


@lru_cache(maxsize=1)
def _all_flights() -> pd.DataFrame:
    raw = dataset.read("flights.csv.zip")
    sched_dep = pd.to_datetime(raw["time_hour"], utc=True) + pd.to_timedelta(raw["minute"], unit="min")
    actual_dep = sched_dep + pd.to_timedelta(raw["dep_delay"], unit="min")
    flights = raw.assign(sched_dep=sched_dep, actual_dep=actual_dep, cancelled=raw["dep_time"].isna())
    departs_at = actual_dep.fillna(sched_dep)
    return flights.iloc[np.argsort(departs_at.to_numpy(), kind="stable")].reset_index(drop=True)


def _clean(flights: pd.DataFrame, partitions: int) -> pd.DataFrame:
    partition = _partition(dataset.keys_of(flights), partitions)
    same = ["carrier", "flight", "sched_dep", "actual_dep", "tailnum", "origin", "dest", "distance", "cancelled"]
    return flights[same].assign(
        flight_date=pd.to_datetime(flights[["year", "month", "day"]]).dt.date,
        **{column: flights[column].astype("Int64") for column in ("dep_delay", "arr_delay", "air_time")},
        month=flights["sched_dep"].to_numpy(dtype="datetime64[M]").astype(str),
        source_partition=partition,
        source_offset=rank(partition),
    )


def _partition(keys: Sequence[bytes], partitions: int) -> NDArray[np.int64]:
    known = {key: dataset.partition_of(key, partitions) for key in set(keys)}
    return np.array([known[key] for key in keys], dtype=np.int64)


def _hours(flights: pd.DataFrame) -> pd.DataFrame:
    in_hours = flights.assign(window_start=flights["sched_dep"].dt.floor("h"))
    rows = in_hours.groupby(["window_start", "origin"], as_index=False).agg(
        flights=("flight", "size"),
        cancelled=("cancelled", "sum"),
        mean_dep_delay=("dep_delay", "mean"),
        max_dep_delay=("dep_delay", "max"),
    )
    rows["max_dep_delay"] = rows["max_dep_delay"].astype("Int64")
    return rows.assign(window_end=rows["window_start"] + pd.Timedelta(hours=1))


def _totals(flights: pd.DataFrame) -> pd.DataFrame:
    rows = flights.groupby("carrier", as_index=False).agg(
        flights=("flight", "size"), dep_delay_minutes=("dep_delay", "sum"), cancelled=("cancelled", "sum")
    )
    return rows.astype({"dep_delay_minutes": "int64"})
