"""The order of upserts: the greatest event of a key wins, whatever the batches are and however events arrive."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import hypothesis
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pyspark.sql.types import DataType, LongType

from streaming_jobs.settings import Settings
from streaming_jobs.sinks.order import DELETE_COLUMN
from streaming_jobs.stream import POSITION_COLUMN
from tests.conftest import SettingsFactory
from tests.orders import HOSTILE, NAN, Event, Tables, arrow, expected, pairs, read

_NUMBER = count()
slow = hypothesis.settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
ats = st.sampled_from([None, -1.0, -0.0, 0.0, 1.0, 2.0, NAN])
numbers = st.sampled_from([None, None, 0, 1])
everything = st.builds(
    lambda key, at, n, delete: Event(key, at, n, delete, partition=key % 3),
    st.integers(0, 4),
    ats,
    numbers,
    st.booleans(),
)
scattered = st.builds(Event, st.integers(0, 2), ats, numbers, st.booleans(), st.integers(0, 2)).filter(
    lambda event: not event.tombstone
)


def play(
    home: Path, events: list[Event], borders: list[int], seed: int, *, by_position: bool
) -> tuple[dict[int, int], list[int]]:
    """The events in batches with these borders, rows of a batch in any order, some batches killed half way."""
    chance = random.Random(seed)
    tables = Tables.make(Settings.load({"home": home / f"{next(_NUMBER)}"}))
    numbered = list(enumerate(read(events)))
    ends = sorted({min(border, len(events)) for border in borders} | {len(events)})
    for begin, end in zip([0, *ends], ends, strict=False):
        batch = numbered[begin:end]
        if by_position:
            chance.shuffle(batch)
        tables.upsert(arrow(batch, by_position=by_position), by_position=by_position, crash=chance.random() < 0.3)
    return tables.shown(), ends


@pytest.mark.parametrize("by_position", [True, False], ids=["with _source", "without"])
@slow
@given(st.lists(everything, max_size=40), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 1000))
def test_the_table_is_the_same_whatever_the_batches_of_keys_that_live_in_one_partition(
    tmp_path: Path, by_position: bool, events: list[Event], borders: list[int], seed: int
) -> None:
    found, _ = play(tmp_path, events, borders, seed, by_position=by_position)
    assert found == expected(read(events), by_position=by_position)


@slow
@given(st.lists(scattered, max_size=30), st.lists(st.integers(0, 30), max_size=6), st.randoms(use_true_random=False))
def test_events_with_an_order_may_come_from_any_partition_in_any_order(
    tmp_path: Path, events: list[Event], borders: list[int], chance: random.Random
) -> None:
    placed = read(events)
    truth = expected(placed, by_position=True)
    arriving = list(enumerate(placed))
    chance.shuffle(arriving)
    tables = Tables.make(Settings.load({"home": tmp_path / f"{next(_NUMBER)}"}))
    ends = sorted({min(border, len(events)) for border in borders} | {len(events)})
    for begin, end in zip([0, *ends], ends, strict=False):
        tables.upsert(arrow(arriving[begin:end], by_position=True), by_position=True, crash=chance.random() < 0.3)
    assert tables.shown() == truth


@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.simpleString())
@pytest.mark.parametrize("batches", [1, 2])
def test_every_value_has_its_place_in_the_order(settings: SettingsFactory, kind: DataType, batches: int) -> None:
    tables = Tables.make(settings(), types={"k": LongType(), "at": kind, "value": LongType()})
    found = pairs(HOSTILE[kind])
    at = tables.sink.handle.schema().to_arrow()
    at_type = pa.schema(at).field("at").type
    halves = []
    for place in (0, 1):
        columns = {
            "k": pa.array(range(len(found)), pa.int64()),
            "at": pa.array([pair[place] for pair in found], at_type),
            "value": pa.array([place] * len(found), pa.int64()),
            POSITION_COLUMN: pa.array([place] * len(found), pa.int64()),
            DELETE_COLUMN: pa.array([False] * len(found)),
        }
        halves.append(pa.table(columns))
    for rows in halves if batches == 2 else [pa.concat_tables(reversed(halves))]:
        tables.upsert(rows, by_position=True)
    assert tables.shown() == {key: int(pair[2] >= 0) for key, pair in enumerate(found)}
