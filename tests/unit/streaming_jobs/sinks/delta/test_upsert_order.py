"""The order of upserts: the greatest event of a key wins, whatever the batches are and however events arrive."""

from __future__ import annotations

import random
from datetime import timedelta
from itertools import chain, count
from pathlib import Path

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from streaming_jobs.declare.columns import POSITION_COLUMN
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.sinks import schemas
from streaming_jobs.sinks.delta import maintenance
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.pending_writes import ArrowMerge
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN
from streaming_jobs.sinks.delta.writers import remembered_in
from streaming_jobs.sinks.schemas import POSITION_FIELD, is_position
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory
from tests.support.orders import COLUMNS, HOSTILE, NAN, STREAM, Event, Tables, arrow, expected, merged, pairs, read

pytestmark = pytest.mark.slow

_NUMBER = count()
EXAMPLES = [12, pytest.param(100, marks=pytest.mark.long)]
"""How many sequences of events are tried; each makes a table of its own."""


def tried(examples: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


ats = st.sampled_from([None, -1.0, -0.0, 0.0, 1.0, 2.0, NAN])
numbers = st.sampled_from([None, None, 0, 1])
everything = st.builds(
    lambda key, order, delete: Event(key, *order, delete, partition=key % 3),
    st.integers(0, 3),
    st.tuples(ats, numbers) | st.just((None, None)),
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


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("by_position", [True, False], ids=["with _source", "without"])
def test_the_table_is_the_same_whatever_the_batches_of_keys_that_live_in_one_partition(
    tmp_path: Path, by_position: bool, examples: int
) -> None:
    @tried(examples)
    @given(st.lists(everything, max_size=40), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 1000))
    def check(events: list[Event], borders: list[int], seed: int) -> None:
        rows, _ = play(tmp_path, events, borders, seed, by_position=by_position)
        assert rows == expected(read(events), by_position=by_position)

    check()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_events_with_an_order_may_come_from_any_partition_in_any_order(tmp_path: Path, examples: int) -> None:
    @tried(examples)
    @given(
        st.lists(scattered, max_size=30), st.lists(st.integers(0, 30), max_size=6), st.randoms(use_true_random=False)
    )
    def check(events: list[Event], borders: list[int], chance: random.Random) -> None:
        placed = read(events)
        truth = expected(placed, by_position=True)
        arriving = list(enumerate(placed))
        chance.shuffle(arriving)
        tables = Tables.make(Settings.load({"home": tmp_path / f"{next(_NUMBER)}"}))
        ends = sorted({min(border, len(events)) for border in borders} | {len(events)})
        for begin, end in zip([0, *ends], ends, strict=False):
            tables.upsert(arrow(arriving[begin:end], by_position=True), by_position=True, crash=chance.random() < 0.3)
        assert tables.shown() == truth

    check()


@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.simpleString())
@pytest.mark.parametrize("batches", [1, 2])
def test_every_value_has_its_place_in_the_order(settings: SettingsFactory, kind: DataType, batches: int) -> None:
    tables = Tables.make(settings(), types={"k": LongType(), "at": kind, "value": LongType()})
    sampled = pairs(HOSTILE[kind])
    at = tables.sink.handle.schema().to_arrow()
    at_type = pa.schema(at).field("at").type
    halves = []
    for place in (0, 1):
        columns = {
            "k": pa.array(range(len(sampled)), pa.int64()),
            "at": pa.array([pair[place] for pair in sampled], at_type),
            "value": pa.array([place] * len(sampled), pa.int64()),
            POSITION_COLUMN: pa.array([place] * len(sampled), pa.int64()),
            DELETE_COLUMN: pa.array([False] * len(sampled)),
        }
        halves.append(pa.table(columns))
    for rows in halves if batches == 2 else [pa.concat_tables(reversed(halves))]:
        tables.upsert(rows, by_position=True)
    assert tables.shown() == {key: int(pair[2] >= 0) for key, pair in enumerate(sampled)}


def one(key: int, at: float | None, n: int = 0, *, delete: bool = False, place: int = 0) -> list[tuple[int, Event]]:
    """One event; its number is its place."""
    return [(place, Event(key, at, n if at is not None else None, delete, 0, place))]


def tombstone(key: int, place: int) -> list[tuple[int, Event]]:
    return [(place, Event(key, None, None, True, 0, place))]


@pytest.mark.parametrize("by_position", [True, False])
def test_a_tombstone_takes_away_what_was_read_before_it_and_what_comes_after_counts_anew(
    settings: SettingsFactory, by_position: bool
) -> None:
    tables = Tables.make(settings())

    def upsert(*events: list[tuple[int, Event]]) -> None:
        tables.upsert(arrow([*chain(*events)], by_position=by_position), by_position=by_position)

    upsert(one(1, 9.0), one(2, 9.0), one(3, 9.0, delete=True), one(4, 9.0))
    upsert(tombstone(1, 5), [*tombstone(2, 6), *one(2, 1.0, place=7)], [*tombstone(3, 8), *one(3, 1.0, place=9)])
    assert tables.shown() == {2: 7, 3: 9, 4: 0}
    assert tables.kept.handle.to_pyarrow_table().num_rows == 0
    upsert([*tombstone(4, 10), *one(4, 2.0, delete=True, place=11)], one(3, 0.0, place=12))
    assert tables.shown() == {2: 7, 3: 9}
    upsert(one(4, 1.0, place=13), one(2, 1.0, place=14))
    assert tables.shown() == {2: 14, 3: 9}
    upsert(one(4, 2.0, place=15))
    assert tables.shown() == {2: 14, 3: 9, 4: 15}


def test_a_delete_is_remembered_until_its_time_is_over_and_no_longer(settings: SettingsFactory) -> None:
    tables = Tables.make(settings())
    tables.upsert(arrow(one(1, 5.0, delete=True), by_position=True), by_position=True)
    tables.upsert(arrow(one(1, 4.0, place=1), by_position=True), by_position=True)
    assert tables.shown() == {}
    version = tables.kept.handle.version()
    assert maintenance.forget(tables.kept, timedelta(hours=1), 1) == 0
    assert tables.kept.handle.version() == version, "nothing to remove is no commit"
    assert maintenance.forget(tables.kept, timedelta(0), 1) == 1
    commit, foreign = newest(tables.kept.path, STREAM)
    assert commit is not None and commit.entry is not None and commit.entry.batch == 0 and foreign == []
    tables.upsert(arrow(one(1, 4.0, place=2), by_position=True), by_position=True)
    assert tables.shown() == {1: 2}


def test_the_upkeep_removes_old_deletes(settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables.make(settings())
    tables.upsert(arrow(one(1, 5.0, delete=True), by_position=True), by_position=True)
    monkeypatch.setattr(maintenance, "_LOOK_EVERY", 1)
    TableMaintenance(tables.kept, settings().table, 1).after_commit()
    TableMaintenance(tables.kept, settings().table, 1, forgets=timedelta(hours=1)).after_commit()
    assert tables.kept.handle.to_pyarrow_table().num_rows == 1
    TableMaintenance(tables.kept, settings().table, 1, forgets=timedelta(0)).after_commit()
    assert tables.kept.handle.to_pyarrow_table().num_rows == 0


def test_a_table_of_before_gains_the_position_and_its_rows_are_older_than_every_position(
    settings: SettingsFactory,
) -> None:
    output = StructType([StructField(c, kind) for c, kind in COLUMNS.items()])
    declared = Declared("rows", keys=["k"], order_by=["at", "n"], delete_when="gone")
    old = ensure_sink(settings(), declared, STREAM, output, generation=1)
    rows = arrow(one(1, 5.0) + one(2, 5.0), by_position=False).select(list(COLUMNS))
    ArrowMerge(old, rows).commit(LedgerEntry("batch", STREAM, "rows", 1, 0))
    tables = Tables.make(settings())
    assert is_position(tables.sink.schema[POSITION_COLUMN])
    tables.batch = 0
    late = arrow(one(1, 4.0, place=7) + one(2, 5.0, place=7), by_position=True)
    tables.upsert(late, by_position=True)
    assert tables.shown() == {1: 0, 2: 7}
    # And code that no longer returns _source goes on with the table: what arrives later wins a tie.
    again = ensure_sink(settings(), declared, STREAM, output, generation=1)
    assert POSITION_COLUMN in again.schema.fieldNames()
    tables.upsert(arrow(one(2, 5.0, place=3), by_position=False), by_position=False)
    assert tables.shown() == {1: 0, 2: 3}


def test_the_position_is_no_part_of_what_the_function_returns(settings: SettingsFactory) -> None:
    output = StructType([StructField(c, kind) for c, kind in COLUMNS.items()])
    declared = Declared("rows", schema=output, keys=["k"], order_by=["at"])
    with_position = StructType([*output.fields, POSITION_FIELD])
    assert ensure_sink(settings(), declared, STREAM, with_position, generation=1).schema.fieldNames() == [
        *COLUMNS,
        POSITION_COLUMN,
    ]
    misspelt = Declared("others", keys=["k"], order_by=["att"])
    with pytest.raises(UsageError, match="order_by 'att' is not a column of its rows") as refused:
        ensure_sink(settings(), misspelt, STREAM, with_position, generation=1)
    assert "at" in refused.value.next_step
    taken = StructType([*output.fields, StructField(POSITION_COLUMN, LongType())])
    with pytest.raises(UsageError, match="the column name _position is taken"):
        ensure_sink(settings(), Declared("others", keys=["k"], order_by=["at"]), STREAM, taken, generation=1)
    assert ensure_sink(settings(), Declared("plain"), STREAM, taken, generation=1).schema == taken


def test_rows_without_a_key_stay_as_returned_and_a_batch_without_rows_reads_no_remembered_deletes(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables.make(settings())
    rows = arrow(one(1, 1.0), by_position=True)
    rows = rows.set_column(0, "k", pa.array([None], pa.int64()))
    staged = merged(tables.sink, rows, tables.kept, by_position=True)
    assert staged.rows == 0 and staged.rejected is not None
    assert set(staged.rejected.column_names) == {*COLUMNS, "__topic", "__partition", "__offset", DELETE_COLUMN}
    rows = arrow([(0, Event(1, 5.0, None, True, 0))], by_position=True)
    tables.upsert(rows, by_position=True)
    monkeypatch.setattr(DeltaTable, "to_pyarrow_dataset", None)
    staged = merged(tables.sink, rows.slice(0, 0), tables.kept, by_position=True)
    assert staged.rows == 0 and staged.before == []


def not_null(rows: pa.Table) -> pa.Table:
    """As Spark brings columns that the function has made never null."""
    fields = [field.with_nullable(field.name not in ("k", "at", "n")) for field in rows.schema]
    return pa.Table.from_arrays(rows.columns, schema=pa.schema(fields))


def test_a_column_that_is_no_longer_nullable_meets_the_deletes_remembered_of_it(settings: SettingsFactory) -> None:
    tables = Tables.make(settings())
    tables.upsert(arrow([(0, Event(1, 5.0, None, True, 0))], by_position=False), by_position=False)
    for number, at in enumerate((5.0, 4.0, 6.0), 1):
        rows = arrow([(number, Event(1, at, 0, False, 0)), (number, Event(2, at, 0, False, 0))], by_position=False)
        tables.upsert(not_null(rows), by_position=False)
    assert len(tables.shown()) == 2


def test_only_files_that_may_hold_a_key_of_the_batch_are_read(settings: SettingsFactory) -> None:
    tables = Tables.make(settings())

    def events(*keys: int, delete: bool = True) -> pa.Table:
        return arrow([(n, Event(key, 5.0, None, delete, 0)) for n, key in enumerate(keys)], by_position=False)

    for keys in ((1, 3), (1000, 1003), (2000, 2003)):
        tables.upsert(events(*keys), by_position=False)
    (away,) = (file for file in tables.kept.handle.file_uris() if pq.read_table(file)["k"].to_pylist() == [1, 3])
    Path(away).unlink()
    late = events(1003, 2500, delete=False)
    assert remembered_in(tables.kept).of_keys(late, ["k"])["k"].to_pylist() == [1003]
    with pytest.raises(FileNotFoundError):
        remembered_in(tables.kept).of_keys(events(2, 1003), ["k"])


def test_several_keys_and_partitions_are_looked_up_together(settings: SettingsFactory) -> None:
    """A remembered delete of (1, b) and one of (2, a) are none of (1, a)."""
    declared = Declared("rows", keys=["k", "p"], order_by=["at"], delete_when="gone", partition_by=["p"])
    output = StructType(
        [StructField("k", LongType()), StructField("p", StringType()), StructField("at", LongType()), POSITION_FIELD]
    )
    sink = ensure_sink(settings(), declared, STREAM, output, generation=1)
    assert declared.deletes is not None
    kept = ensure_sink(settings(), declared.deletes, STREAM, schemas.deletes_of(declared, output), generation=1)
    tables = Tables(sink, kept)

    def events(*rows: tuple[int, str, int, bool]) -> pa.Table:
        k, p, at, gone = zip(*rows, strict=True)
        columns = {"k": pa.array(k, pa.int64()), "p": pa.array(p), "at": pa.array(at, pa.int64())}
        return pa.table(columns | {POSITION_COLUMN: pa.nulls(len(rows), pa.int64()), DELETE_COLUMN: pa.array(gone)})

    tables.upsert(events((1, "b", 5, True), (2, "a", 5, True), (1, "c", 5, False)), by_position=False)
    tables.upsert(
        events((1, "a", 1, False), (1, "b", 1, False), (2, "a", 9, False), (1, "c", 4, True)), by_position=False
    )
    stored = DeltaTable(sink.path).to_pyarrow_table().select(["k", "p", "at"]).to_pylist()
    assert sorted(tuple(row.values()) for row in stored) == [(1, "a", 1), (1, "c", 5), (2, "a", 9)]
