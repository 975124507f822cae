"""The rows of a batch are divided alike in the driver's memory and by tasks, which see them in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from streaming_jobs.declare.rules import Between, Holds, NotNull, RowRules, Unique
from streaming_jobs.errors import OutputMismatch, RuleBroken
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta import dead_letters
from streaming_jobs.sinks.delta.row_engine import Files, RowEngine, RowTask, told_schema
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.upsert_order import ROW_COLUMN, order_of
from streaming_jobs.sinks.delta.writers import Preparation, prepare_write
from streaming_jobs.sinks.row_rules import BROKEN_COLUMN
from streaming_jobs.sinks.schemas import quarantine_of
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.delta_table import InProcess, rows_in
from tests.support.worlds import STREAM, entry

SCHEMA = StructType([StructField("k", StringType()), StructField("n", LongType())])
RULES = RowRules(
    (
        NotNull("k", on_fail="quarantine"),
        Between("n", 0, 9, on_fail="drop"),
        Holds("n > 1"),
        NotNull("n", on_fail="fail"),
    )
)


def rows(*verdicts: int) -> pa.Table:
    """Rows in three pieces, with these verdicts; the texts of every fifth are not UTF-8."""
    count = len(verdicts)
    raw = pa.array([b"\xff" if n % 5 == 4 else b"k%d" % (n % 3) for n in range(count)], pa.binary())
    table = pa.table(
        {
            "k": pa.Array.from_buffers(pa.string(), count, raw.buffers()),
            "n": pa.array(range(count), pa.int64()),
            "__partition": pa.array([1] * count, pa.int32()),
            "__offset": pa.array(range(100, 100 + count), pa.int64()),
            BROKEN_COLUMN: pa.array(verdicts, pa.int64()),
        }
    )
    return pa.concat_tables([table.slice(0, 2), table.slice(2, 4), table.slice(6)])


def shown(sink: DeltaSink, aside: DeltaSink, made: PendingWrite) -> tuple[Any, ...]:
    """Whatever a batch leaves behind."""
    for write in made.before:
        assert (write.name, write.commit(entry(0, aside.name)) is not None) == (aside.name, True)
    assert made.commit(entry(0, sink.name)) is not None
    refused = [] if made.rejected is None else dead_letters._from_rows(made.rejected).to_pylist()
    return rows_in(sink), rows_in(aside), refused, made.rows, dict(made.outcome.broken), made.outcome.dropped


def tables(settings: Settings, name: str, **declared: Any) -> tuple[DeltaSink, DeltaSink]:
    sink = ensure_sink(settings, Declared(name, **declared), STREAM, SCHEMA, generation=1)
    aside = Declared(f"{name}_quarantine")
    return sink, ensure_sink(settings, aside, STREAM, quarantine_of(name, SCHEMA), generation=1)


@pytest.mark.parametrize("verdicts", [[0] * 10, [4] * 10, [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 0], [1] * 7, [2] * 7])
def test_an_append_leaves_the_same_by_both_ways(home: Settings, verdicts: list[int]) -> None:
    left = []
    for driver in (True, False):
        sink, aside = tables(home, "a" if driver else "b")
        frame: Any = InProcess(rows(*verdicts), sink.schema)
        how = {"driver": driver, "spark_commits": False}
        left.append(
            shown(
                sink,
                aside,
                prepare_write(sink, frame, **how, batch=(1, 0), topics=["t"], rules=RULES, quarantine=aside),
            )
        )
    assert left[0] == left[1] and len(left[0][2]) == len(verdicts) // 5


def test_a_row_that_stops_the_stream_does_so_by_both_ways_and_leaves_no_file(home: Settings) -> None:
    said = []
    for driver in (True, False):
        sink, aside = tables(home, "t")
        frame: Any = InProcess(rows(0, 8, 1, 8, 9, 8, 0), sink.schema)
        with pytest.raises(RuleBroken) as broken:
            how = {"driver": driver, "spark_commits": False}
            prepare_write(sink, frame, **how, batch=(1, 0), rules=RULES, quarantine=aside)
        said.append(broken.value.found)
        assert not [*sink.path.rglob("*.parquet")] and not [*aside.path.rglob("*.parquet")]
    assert said[0].startswith("table t: 3 rows break n_not_null") and said[1].startswith("table t: 3 rows break")


def test_a_task_has_all_rows_of_its_keys_and_reduces_them_as_the_driver_does(home: Settings) -> None:
    sink, _ = tables(home, "t", keys=["k"])
    order = order_of(sink.schema, (), by_position=True)
    engine = RowEngine(sink.declared, sink.schema, order, RULES, (1, 0), ("t",))
    table = rows(0, 0, 4, 0, 0, 1, 2, 0, 0, 0)
    whole = Preparation(sink, engine, sink).in_memory(table)
    arriving = table.append_column(ROW_COLUMN, pa.array(range(table.num_rows))).take([*reversed(range(table.num_rows))])
    told = pa.Table.from_batches([*RowTask(engine).yielded(iter(arriving.to_batches()))])
    written = told.filter(pa.compute.equal(told["__kind"], 0)).select(["k", "n"])
    assert sorted(written.to_pylist(), key=repr) == sorted(whole.table.to_pylist(), key=repr)
    assert told.schema.names == [*table.column_names, *told_schema(StructType([])).fieldNames()]
    unordered = RowTask(RowEngine(sink.declared, sink.schema, order))
    without = arriving.drop_columns(["__partition", "__offset", BROKEN_COLUMN])
    with pytest.raises(OutputMismatch, match="several rows for the key"):
        list(unordered.yielded(iter(without.to_batches())))


def test_rows_that_are_equal_in_a_batch_are_marked_where_a_task_has_all_of_them(home: Settings) -> None:
    sink, _ = tables(home, "t")
    rules = RowRules((Unique("k", on_fail="drop"),))
    task = RowTask(RowEngine(sink.declared, sink.schema, order_of(sink.schema, (), by_position=False), rules))
    marked = pa.Table.from_batches([*task.marked(("k",), 1, iter(rows(*[0] * 6).to_batches()))])
    assert marked[BROKEN_COLUMN].to_pylist() == [1, 0, 1, 1, 0, 1], "k0, k1, k2, k0, not UTF-8, k2"


def test_quarantined_rows_get_into_the_quarantines_columns_whatever_their_order(home: Settings) -> None:
    """Spark matches the columns that a task yields by their position."""
    sink, _ = tables(home, "t")
    engine = RowEngine(sink.declared, sink.schema, order_of(sink.schema, (), by_position=False), RULES, (1, 0), ("t",))
    table = rows(0, 1, 0, 1, 0, 0)
    quarantined = engine.divide(table).quarantined
    assert quarantined is not None
    made = engine.aside(quarantined)
    later = pa.field("added_later", pa.float64())
    declared = pa.schema([later, *reversed(list(made.schema))])
    yielded = pa.Table.from_batches([*RowTask(engine).aside(declared, iter(quarantined.to_batches()))])
    assert yielded.column_names == declared.names and yielded["added_later"].null_count == yielded.num_rows
    assert yielded.drop_columns(["added_later"]).to_pylist() == [
        {name: row[name] for name in reversed(made.column_names)} for row in made.to_pylist()
    ]


@pytest.mark.parametrize("order_by", [(), ("n",)])
def test_float_keys_that_sql_holds_to_be_equal_are_one_key(home: Settings, order_by: tuple[str, ...]) -> None:
    """A merge of both rows of such a key would be refused for ever."""
    schema = StructType([StructField("k", DoubleType()), StructField("n", LongType())])
    sink = ensure_sink(home, Declared("t", keys=["k"], order_by=order_by), STREAM, schema, generation=1)
    order = order_of(sink.schema, order_by, by_position=True)
    keys = np.array([0.0, -0.0, np.nan, np.nan, 1.0])
    keys.view(np.uint64)[3] |= 1  # another NaN
    events = {"k": keys, "n": [1, 2, 3, 4, 5], "__partition": [0] * 5, "__offset": range(5), BROKEN_COLUMN: [0] * 5}
    types = {"k": pa.float64(), "n": pa.int64(), "__partition": pa.int32(), "__offset": pa.int64()}
    table = pa.table({name: pa.array(values, types.get(name, pa.int64())) for name, values in events.items()})
    engine = RowEngine(sink.declared, sink.schema, order, topics=("t",))
    assert sorted(engine.divide(table).written["n"].to_pylist()) == [2, 4, 5]


def test_files_are_written_before_a_task_holds_too_many_bytes(home: Settings) -> None:
    sink, _ = tables(home, "t")
    files = Files(sink.path, sink.path / "g0001" / "b000000000-x")
    text = pa.table({"k": pa.array(["x" * 1_000_000] * 10), "n": pa.array(range(10), pa.int64())})
    for _ in range(8):
        files.add("", text)
        assert sum(each.nbytes for each in files._waiting) < 64 << 20
    (path,) = files.close()
    assert pq.ParquetFile(sink.path / path).metadata.num_row_groups == 2
