"""The flights as records: complete, typed, in order, with a rule for the hours the clock repeats or skips."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pandas as pd
import pytest

from streaming_jobs.errors import UsageError
from streaming_jobs.examples.flights import dataset

pytestmark = pytest.mark.slow

INTEGERS = {"year", "month", "day", "dep_delay", "arr_delay", "flight", "air_time", "distance"}
TEXTS = {"carrier", "tailnum", "origin", "dest"}
TIMES = {"sched_dep", "actual_dep"}
MAY_BE_NULL = {"actual_dep", "dep_delay", "arr_delay", "tailnum", "air_time"}


@pytest.fixture(scope="module")
def all_records() -> dataset.FlightRecords:
    return dataset.records()


@pytest.fixture(scope="module")
def raw() -> pd.DataFrame:
    return dataset.read("flights.csv.zip")


def test_every_flight_is_a_record_also_a_cancelled_one_with_carrier_and_number_as_its_key(
    all_records: dataset.FlightRecords, raw: pd.DataFrame
) -> None:
    assert len(all_records) == len(all_records.values) == len(all_records.timestamps) == 336_776
    assert len(dataset.departures()) == len(raw)
    assert sum(b'"cancelled":true' in line for line in all_records.values) == 8_255
    record = json.loads(all_records.values[1000])
    assert all_records.keys[1000] == f"{record['carrier']}{record['flight']}".encode()


def test_fields_are_typed_and_null_only_where_a_flight_has_no_such_thing(all_records: dataset.FlightRecords) -> None:
    for line in all_records.values[::97]:
        record = json.loads(line)
        assert record.keys() == INTEGERS | TEXTS | TIMES | {"cancelled"}
        assert {name for name, value in record.items() if value is None} <= MAY_BE_NULL
        assert all(type(record[name]) is int for name in INTEGERS if record[name] is not None)
        assert all(type(record[name]) is str for name in TEXTS | TIMES if record[name] is not None)
        for name in TIMES:
            assert record[name] is None or re.fullmatch(r"201[34]-\d\d-\d\dT\d\d:\d\d:00Z", record[name])
        assert record["cancelled"] is (record["actual_dep"] is None) is (record["dep_delay"] is None)


def test_timestamp_is_the_actual_departure_or_the_schedule_of_a_cancelled_flight(
    all_records: dataset.FlightRecords,
) -> None:
    for line, stamp in list(zip(all_records.values, all_records.timestamps, strict=True))[::97]:
        record = json.loads(line)
        text = record["actual_dep"] or record["sched_dep"]
        assert stamp == datetime.fromisoformat(text).timestamp() * 1000


def test_order_is_that_of_departure_and_equal_times_keep_the_order_of_the_file(
    all_records: dataset.FlightRecords, raw: pd.DataFrame
) -> None:
    assert all_records.timestamps == sorted(all_records.timestamps)
    [(busiest, count)] = Counter(all_records.timestamps).most_common(1)
    at_once = [i for i, stamp in enumerate(all_records.timestamps) if stamp == busiest]
    assert len(at_once) == count > 10
    identity = ["year", "month", "day", "carrier", "flight", "origin"]
    raw_position = {tuple(row): position for position, row in enumerate(raw[identity].itertuples(index=False))}
    rows = dataset.departures().iloc[at_once][identity].itertuples(index=False)
    positions = [raw_position[tuple(row)] for row in rows]
    assert positions == sorted(positions)


def test_event_time_is_out_of_order_by_as_much_as_a_flight_is_late() -> None:
    event = dataset.departures()["sched_dep"]
    behind = (event.cummax() - event).max()
    assert behind == pd.Timedelta(hours=21, minutes=40)


def test_utc_of_every_flight_equals_the_package_s_own_utc_hour_and_none_is_in_an_hour_that_the_clock_repeats_or_skips(
    raw: pd.DataFrame,
) -> None:
    clock = raw["sched_dep_time"]
    local = pd.to_datetime(raw[["year", "month", "day"]]) + pd.to_timedelta(clock // 100 * 60 + clock % 100, unit="min")
    published = pd.to_datetime(raw["time_hour"], utc=True) + pd.to_timedelta(raw["minute"], unit="min")
    assert (dataset.to_utc(local) == published).all()
    november = raw[(raw["month"] == 11) & (raw["day"] == 3) & raw["sched_dep_time"].between(100, 159)]
    march = raw[(raw["month"] == 3) & (raw["day"] == 10) & raw["sched_dep_time"].between(200, 259)]
    assert november.empty
    assert march.empty


@pytest.mark.parametrize(
    ("clock", "utc"),
    [
        ("2013-11-03 01:30", "2013-11-03 05:30"),  # exists twice: the first pass, still daylight saving time
        ("2013-11-03 00:59", "2013-11-03 04:59"),
        ("2013-11-03 02:00", "2013-11-03 07:00"),
        ("2013-03-10 02:30", "2013-03-10 07:30"),  # never existed: read with the offset in force before
        ("2013-03-10 01:59", "2013-03-10 06:59"),
        ("2013-03-10 03:00", "2013-03-10 07:00"),
    ],
)
def test_hours_that_the_clock_repeats_or_skips_follow_fold_0(clock: str, utc: str) -> None:
    converted = dataset.to_utc(pd.Series(pd.to_datetime([clock]))).iloc[0]
    assert converted == pd.Timestamp(utc, tz="UTC")
    python = datetime.fromisoformat(clock).replace(tzinfo=ZoneInfo(dataset.LOCAL_ZONE), fold=0)
    assert converted == python.astimezone(UTC)


def test_a_share_is_the_first_flights_in_order_and_static_tables_are_at_hand(
    all_records: dataset.FlightRecords,
) -> None:
    some = dataset.records(0.01)
    assert len(some) == dataset.flights_in(0.01) == 3_367
    assert some.values == all_records.values[:3_367]
    assert some.keys == all_records.keys[:3_367]
    assert {"carrier", "name"} == set(dataset.airlines().columns)
    assert set(dataset.departures()["carrier"]) <= set(dataset.airlines()["carrier"])
    assert {"EWR", "JFK", "LGA"} <= set(dataset.airports()["faa"])
    assert len(dataset.planes()) == 3_322
    assert set(dataset.weather()["origin"]) == {"EWR", "JFK", "LGA"}


@pytest.mark.parametrize("share", [0, -0.5, 1.01])
def test_a_share_outside_the_flights_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="share"):
        dataset.flights_in(share)


@pytest.mark.parametrize(
    ("key", "hashed"),
    # Values of Kafka's own test of its murmur2 (UtilsTest.testMurmur2).
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafka_s(key: bytes, hashed: int) -> None:
    assert dataset.murmur2(key) == hashed & 0xFFFFFFFF


def test_flights_spread_over_all_partitions_and_a_key_stays_in_one(all_records: dataset.FlightRecords) -> None:
    partitions = dataset.partitions(4)
    assert sorted(set(partitions.tolist())) == [0, 1, 2, 3]
    places: dict[bytes, set[int]] = {}
    for key, partition in zip(all_records.keys, partitions.tolist(), strict=True):
        places.setdefault(key, set()).add(partition)
    assert all(len(keys) == 1 for keys in places.values())


def test_the_memory_of_the_flights_is_given_back() -> None:
    """In a process of its own: what others have allocated would decide otherwise."""
    script = """
import psutil
from streaming_jobs.examples.flights import dataset, feeder
size = lambda: psutil.Process().memory_info().rss / 2**20
dataset.read("airlines.csv")
before = size()
records = dataset.records(0.4)
dataset.partitions(4)
held = size()
del records
dataset.release()
print(held - before, size() - before)
assert len(dataset.departures(0.001)) > 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    held, left = (float(text) for text in done.stdout.split())
    assert held > 40
    assert left < held / 4, f"{left:.0f} MB of {held:.0f} MB are still held"
