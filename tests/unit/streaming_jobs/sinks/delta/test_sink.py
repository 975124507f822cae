"""A stream's table: made once, widened by columns only, and committed to exactly once, whoever else commits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streaming_jobs.errors import CommitRefused, Fenced, ForeignWrite, OutputMismatch, PermanentError
from streaming_jobs.ledger import Txn
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta import sink as delta
from streaming_jobs.sinks.delta import unencoded_paths
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.parquet import add_actions
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.delta.table_files import table_files
from streaming_jobs.sinks.delta.table_setup import ensure_sink
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN
from streaming_jobs.sinks.delta.upsert_rows import last_per_key
from streaming_jobs.sinks.delta.writers import ArrowAppend, ArrowMerge, ParquetAppend
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory
from tests.support.worlds import OUTPUT, STREAM, append, entry

TABLE = "evens"
ROWS = pa.table({"k": ["x", "y"], "n": [1, 2]})
AWKWARD = ("a b", "c:d", "50%", "e/f", "gö", "x=y", "%20", "日本", "it's", 'a"b', "a?b#c", "a\\b", "[x]{y}", "plain")


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    return settings()


Make = Callable[..., DeltaSink]


@pytest.fixture
def make(home: Settings) -> Make:
    def make(output: StructType = OUTPUT, *, generation: int = 1, stream: str = STREAM, **declared: Any) -> DeltaSink:
        return ensure_sink(home, Declared(TABLE, **declared), stream, output, generation=generation)

    return make


def rows_in(sink: DeltaSink) -> list[dict[str, Any]]:
    """The table's rows as any reader sees them."""
    rows: list[dict[str, Any]] = DeltaTable(sink.path).to_pyarrow_table().to_pylist()
    return sorted(rows, key=repr)


def fields(**types: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


# making and widening


def test_a_new_table_is_opened_in_its_generation_and_holds_nothing(make: Make) -> None:
    sink = make(generation=3)
    assert sink.position == Txn(3, -1)
    assert rows_in(sink) == []
    assert [(c.entry and c.entry.kind, c.changes_data) for c in walk(sink.path)] == [("schema", False)]


def test_a_new_table_carries_its_owner_and_its_upkeep(make: Make, home: Settings) -> None:
    configuration = make(description="Rows").handle.metadata().configuration
    assert configuration[delta.STREAM_PROPERTY] == STREAM
    assert configuration["delta.logRetentionDuration"] == "interval 3600 seconds"
    assert configuration["delta.checkpointInterval"] == str(home.table.checkpoint_interval)
    assert configuration["delta.enableExpiredLogCleanup"] == "false"  # Upkeep does it


def test_a_new_table_stays_within_the_profile_that_both_writers_know(make: Make) -> None:
    sink = make(StructType([StructField("k", StringType(), nullable=False)]))
    protocol = sink.handle.protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)
    assert sink.direct


def test_every_column_of_a_table_may_be_null_also_inside_and_comments_stay(make: Make) -> None:
    inner = StructType([StructField("a", LongType(), nullable=False)])
    made = make(
        StructType(
            [
                StructField("k", StringType(), False, {"comment": "the key"}),
                StructField("s", inner, False),
                StructField("l", ArrayType(inner, False), False),
                StructField("m", MapType(StringType(), LongType(), False), False),
            ]
        )
    ).schema
    assert made["k"].metadata == {"comment": "the key"}
    assert all(field.nullable for field in made.fields)
    assert made["s"].dataType.fields[0].nullable  # type: ignore[attr-defined]
    assert made["l"].dataType.containsNull  # type: ignore[attr-defined]
    assert made["m"].dataType.valueContainsNull  # type: ignore[attr-defined]


def test_a_watermark_of_the_stream_is_no_property_of_the_table(make: Make) -> None:
    output = StructType(
        [StructField("t", TimestampType(), True, {"spark.watermarkDelayMs": 10_000, "comment": "when"})]
    )
    assert make(output).schema["t"].metadata == {"comment": "when"}


def test_a_second_start_finds_the_table_and_commits_nothing(make: Make) -> None:
    first, second = make(), make()
    assert second.table_id == first.table_id
    assert second.handle.version() == 0


def test_a_table_that_is_not_there_is_told_by_none(home: Settings) -> None:
    assert open_sink(home, Declared("nothing"), STREAM) is None


def test_a_column_that_is_new_in_the_output_is_added_and_null_in_old_rows(make: Make) -> None:
    append(make(), entry(0), ROWS)
    sink = make(fields(k=StringType(), n=LongType(), delay=DoubleType()))
    assert sink.schema.fieldNames() == ["k", "n", "delay"]
    append(sink, entry(1), pa.table({"k": ["z"], "n": [3], "delay": [1.5]}))
    assert {row["k"]: row["delay"] for row in rows_in(sink)} == {"x": None, "y": None, "z": 1.5}
    note = next(c.entry.note for c in walk(sink.path) if c.entry and c.entry.kind == "schema")
    assert note == "added delay"


def test_adding_a_column_changes_no_rows_and_keeps_the_position(make: Make) -> None:
    append(make(), entry(0), ROWS)
    sink = make(fields(k=StringType(), n=LongType(), delay=DoubleType()))
    assert sink.position == Txn(1, 0)
    assert newest(sink.path, STREAM)[1] == []


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (fields(k=StringType()), "column n is gone"),
        (fields(k=StringType(), n=StringType()), "column n would change from bigint to string"),
        (fields(k=StringType(), n=IntegerType()), "column n would change from bigint to int"),
        (fields(k=StringType(), m=LongType()), "column n is gone"),
    ],
)
def test_any_other_change_of_columns_is_refused_and_named(make: Make, output: StructType, named: str) -> None:
    make()
    with pytest.raises(OutputMismatch, match=named) as refused:
        make(output)
    assert "a table gains columns only" in refused.value.next_step
    assert make().handle.version() == 0


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (fields(k=StringType()), "column n is missing"),
        (fields(k=StringType(), n=LongType(), o=LongType()), "column o is not declared"),
        (fields(k=StringType(), n=DoubleType()), "column n is double, declared bigint"),
    ],
)
def test_an_output_that_is_not_what_the_table_declares_is_refused(make: Make, output: StructType, named: str) -> None:
    with pytest.raises(OutputMismatch, match=named):
        make(output, schema=OUTPUT)


def test_no_table_is_left_behind_by_a_refused_output(make: Make, home: Settings) -> None:
    with pytest.raises(OutputMismatch, match="no column 'month'"):
        make(partition_by=["month"])
    with pytest.raises(OutputMismatch, match="no column 'id'"):
        make(keys=["id"])
    assert open_sink(home, Declared(TABLE), STREAM) is None


def test_another_partitioning_is_refused(make: Make) -> None:
    make(partition_by=["k"])
    with pytest.raises(OutputMismatch, match=r"partitioned by \['k'\], the sink declares \[\]"):
        make()


def test_changed_upkeep_settings_reach_the_table_at_the_next_start(make: Make, settings: SettingsFactory) -> None:
    append(make(), entry(0), ROWS)
    changed = settings({"table.checkpoint_interval": 7, "table.log_retention": "2 hours"})
    sink = ensure_sink(changed, Declared(TABLE), STREAM, OUTPUT, generation=1)
    configuration = DeltaTable(sink.path).metadata().configuration
    assert configuration["delta.checkpointInterval"] == "7"
    assert configuration["delta.logRetentionDuration"] == "interval 7200 seconds"
    assert newest(sink.path, STREAM)[1] == []
    assert sink.position == Txn(1, 0)


def test_a_table_with_a_check_constraint_is_not_for_deltalake(make: Make) -> None:
    make().handle.alter.add_constraint({"positive": "n > 0"})
    assert not make().direct


@pytest.mark.parametrize(
    ("plain", "special"),
    [
        ('"configuration":{', '"configuration":{"delta.columnMapping.mode":"name",'),
        (r"\"name\":\"n\",\"type\":\"long\",\"nullable\":true,\"metadata\":{", None),
        ('"minWriterVersion":2}', '"minWriterVersion":7,"writerFeatures":["appendOnly","identityColumns"]}'),
    ],
    ids=["column mapping", "generated column", "feature outside the profile"],
)
def test_a_table_with_features_outside_the_profile_is_not_for_deltalake(
    make: Make, plain: str, special: str | None
) -> None:
    first = make().path / "_delta_log" / f"{0:020d}.json"
    text = first.read_text()
    assert plain in text
    first.write_text(text.replace(plain, special or plain + r"\"delta.generationExpression\":\"1\""))
    sink = DeltaSink(first.parent.parent, Declared(TABLE), STREAM, DeltaTable(first.parent.parent))
    assert not sink.direct


# exactly once


def test_a_batch_is_committed_with_its_rows_its_transaction_and_its_entry(make: Make) -> None:
    sink = make()
    assert append(sink, entry(0), ROWS) == 1
    assert rows_in(sink) == ROWS.to_pylist()
    assert sink.position == Txn(1, 0)
    commit, _ = newest(sink.path, STREAM)
    assert commit is not None and commit.entry == entry(0)


def test_a_batch_that_is_in_the_table_is_not_written_again(make: Make) -> None:
    sink = make()
    append(sink, entry(0), ROWS)
    assert append(sink, entry(0), ROWS) is None
    assert append(make(), entry(0), ROWS) is None
    assert len(rows_in(sink)) == 2


def test_a_batch_before_the_newest_one_is_in_the_table(make: Make) -> None:
    sink = make()
    append(sink, entry(0), ROWS)
    append(sink, entry(5), ROWS)
    assert append(sink, entry(3), ROWS) is None


def test_two_drivers_with_one_batch_write_it_once(make: Make) -> None:
    one, other = make(), make()
    assert append(one, entry(0), ROWS) == 1
    assert append(other, entry(0), ROWS) is None
    assert len(rows_in(one)) == 2


def test_a_driver_that_loses_the_race_inside_the_commit_finds_its_batch_done(make: Make) -> None:
    one, other = make(), make()

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        append(other, entry(0), ROWS)
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    assert one.commit(entry(0), write) is None
    assert len(rows_in(one)) == 2


def test_a_driver_of_an_older_generation_is_fenced(make: Make) -> None:
    old, new = make(), make()
    append(old, entry(7), ROWS)
    fence = entry(-1, kind="fence", generation=2, plan="r1")
    assert new.commit(fence, lambda *_: None) is not None
    with pytest.raises(Fenced, match=f"table {TABLE} is in generation 2, this driver belongs to 1"):
        append(old, entry(8), ROWS)
    assert len(rows_in(old)) == 2


def test_a_fence_that_comes_inside_the_commit_stops_it(make: Make) -> None:
    old, new = make(), make()

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        new.commit(entry(-1, kind="fence", generation=2), lambda *_: None)
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    with pytest.raises(Fenced):
        old.commit(entry(0), write)
    assert rows_in(old) == []


def test_a_new_generation_starts_with_its_batch_0(make: Make) -> None:
    sink = make()
    append(sink, entry(7), ROWS)
    assert append(sink, entry(0, generation=2), ROWS) is not None
    assert sink.position == Txn(2, 0)


def test_a_foreign_commit_without_rows_between_is_passed_and_the_batch_is_there_once(make: Make) -> None:
    sink = make()
    attempts: list[int] = []

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        attempts.append(handle.version())
        if len(attempts) <= 2:
            nothing = DeltaTable(sink.path)
            nothing.create_write_transaction([], mode="append", schema=nothing.schema())
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    assert sink.commit(entry(0), write) == 3
    assert attempts == [0, 1, 2]
    assert sorted(row["k"] for row in rows_in(sink)) == ["x", "y"]


def test_rows_that_somebody_else_writes_between_two_batches_are_refused(make: Make) -> None:
    sink = make()
    append(sink, entry(0), ROWS)
    write_deltalake(sink.path, pa.table({"k": ["foreign"], "n": [0]}), mode="append")
    with pytest.raises(ForeignWrite, match="version 2 of table") as raised:
        append(sink, entry(1), ROWS)
    assert "streams accept" in raised.value.next_step
    assert sorted(row["k"] for row in rows_in(sink)) == ["foreign", "x", "y"]


def test_rows_that_somebody_else_writes_during_a_batch_are_refused(make: Make) -> None:
    sink = make()

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        write_deltalake(sink.path, pa.table({"k": ["foreign"], "n": [0]}), mode="append")
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    with pytest.raises(ForeignWrite):
        sink.commit(entry(0), write)
    assert [row["k"] for row in rows_in(sink)] == ["foreign"]


def test_a_compaction_by_hand_between_two_batches_is_no_foreign_row(make: Make) -> None:
    sink = make()
    for batch in range(3):
        append(sink, entry(batch), ROWS)
    DeltaTable(sink.path).optimize.compact()
    append(sink, entry(3), ROWS)
    assert len(rows_in(sink)) == 8


def test_a_table_that_never_holds_still_is_given_up_for_now(make: Make) -> None:
    sink = make()
    attempts: list[int] = []

    def write(*_: object) -> None:
        attempts.append(1)
        DeltaTable(sink.path).alter.set_table_properties({"delta.checkpointInterval": str(90 + len(attempts))})
        raise CommitFailedError("somebody was first")

    with pytest.raises(CommitRefused, match="committed to by others"):
        sink.commit(entry(0), write)
    assert len(attempts) > 3
    assert sink.position == Txn(1, -1)


def test_any_other_failure_of_the_write_goes_up_and_leaves_nothing(make: Make) -> None:
    sink = make()

    def write(*_: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        sink.commit(entry(0), write)
    assert make().position == Txn(1, -1)


# the ways rows travel


def test_an_append_without_rows_still_records_the_batch(make: Make) -> None:
    sink = make()
    assert ArrowAppend(sink, ROWS.slice(0, 0)).commit(entry(0)) == 1
    commit, foreign = newest(sink.path, STREAM)
    assert commit is not None and commit.entry is not None
    assert (commit.entry.txn, commit.changes_data) == (Txn(1, 0), False)
    assert foreign == []


def upsert(sink: DeltaSink, batch: int, rows: pa.Table) -> int | None:
    return ArrowMerge(sink, last_per_key(rows, sink.declared.keys, []), None).commit(entry(batch))


def test_an_upsert_has_one_row_a_key(make: Make) -> None:
    sink = make(keys=["k"])
    upsert(sink, 0, ROWS)
    upsert(sink, 1, pa.table({"k": ["y", "z"], "n": [20, 30]}))
    assert rows_in(sink) == [{"k": "x", "n": 1}, {"k": "y", "n": 20}, {"k": "z", "n": 30}]


def test_an_upsert_that_is_repeated_changes_nothing(make: Make) -> None:
    sink = make(keys=["k"])
    upsert(sink, 0, ROWS)
    upsert(sink, 1, pa.table({"k": ["x"], "n": [100]}))
    assert upsert(sink, 0, ROWS) is None
    assert rows_in(sink)[0] == {"k": "x", "n": 100}


def test_an_upsert_deletes_the_keys_that_are_marked_and_inserts_none_of_them(make: Make) -> None:
    sink = make(keys=["k"], delete_when="n IS NULL")
    upsert(sink, 0, ROWS)
    marked = pa.table({"k": ["x", "q", "y"], "n": [None, None, 5], DELETE_COLUMN: [True, True, False]})
    upsert(sink, 1, marked)
    assert rows_in(sink) == [{"k": "y", "n": 5}]


def test_a_merge_without_effect_still_records_the_batch(make: Make) -> None:
    sink = make(keys=["k"])
    upsert(sink, 0, ROWS)
    marked = pa.table({"k": ["nobody"], "n": [0], DELETE_COLUMN: [True]})
    assert upsert(sink, 1, marked) is not None
    assert sink.position == Txn(1, 1)
    commit, _ = newest(sink.path, STREAM)
    assert commit is not None and commit.entry is not None and commit.entry.batch == 1
    assert rows_in(sink) == ROWS.to_pylist()


def test_a_merge_of_no_rows_still_records_the_batch(make: Make) -> None:
    sink = make(keys=["k"])
    assert ArrowMerge(sink, ROWS.slice(0, 0), None).commit(entry(0)) == 1
    assert sink.position == Txn(1, 0)


@pytest.mark.parametrize("key", ["k", "a b", "Käse", "order", "a.b"])
def test_any_column_name_can_be_the_key_of_an_upsert(make: Make, key: str) -> None:
    sink = make(StructType([StructField(key, StringType()), StructField("n", LongType())]), keys=[key])
    for batch, number in enumerate((1, 2)):
        upsert(sink, batch, pa.table({key: ["x"], "n": [number]}))
    assert rows_in(sink) == [{key: "x", "n": 2}]


def spark_escaped(value: str) -> str:
    """A partition value in the name of a folder as Spark writes it (`ExternalCatalogUtils.escapePathName`)."""
    return "".join(f"%{ord(c):02X}" if c in "\"#%'*/:=?\\{[]^\x7f" or ord(c) < 32 else c for c in value)


def staged_files(sink: DeltaSink, values: Mapping[str | None, int]) -> Path:
    """Files below the table as Spark's executors leave them, one per value of `k`."""
    folder = sink.path / "g0001" / "b000000000-1a2b3c4d"
    for value, number in values.items():
        name = "__HIVE_DEFAULT_PARTITION__" if value is None else spark_escaped(value)
        (folder / f"k={name}").mkdir(parents=True)
        pq.write_table(pa.table({"n": [number]}), folder / f"k={name}" / "part-00000-7d.c000.snappy.parquet")
    return folder


def test_partition_values_of_any_kind_come_back_from_files_that_executors_wrote(make: Make) -> None:
    sink = make(partition_by=["k"])
    values = {value: number for number, value in enumerate((*AWKWARD, None))}
    actions, count = add_actions(sink.path, staged_files(sink, values), ["k"], sink.bounded)
    assert ParquetAppend(sink, actions, count).commit(entry(0)) == 1
    assert {row["k"]: row["n"] for row in rows_in(sink)} == values


def test_partition_values_of_any_kind_come_back_from_the_driver(make: Make) -> None:
    sink = make(partition_by=["k"])
    values = {value: number for number, value in enumerate((*AWKWARD, None))}
    table = pa.table({"k": pa.array(list(values), pa.string()), "n": list(values.values())})
    assert ArrowAppend(sink, table).commit(entry(0)) == 1
    assert {row["k"]: row["n"] for row in rows_in(sink)} == values


def lay_raw_paths(sink: DeltaSink) -> None:
    """A commit as delta-spark made it before: partition values that are not ASCII stand in the paths as they are."""
    adds = []
    for number, value in enumerate(("日本", "日本", "gö", "plain", "plain")):
        file = sink.path / f"k={value}" / f"part-{number}.parquet"
        file.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"n": pa.array([number], pa.int64())}), file)
        stats = {"numRecords": 1, "minValues": {"n": number}, "maxValues": {"n": number}, "nullCount": {"n": 0}}
        add = {"path": str(file.relative_to(sink.path)), "partitionValues": {"k": value}, "size": file.stat().st_size}
        adds.append({"add": {**add, "modificationTime": 1, "dataChange": True, "stats": json.dumps(stats)}})
    info = {"commitInfo": {"operation": "WRITE", "userMetadata": entry(0).encode()}}
    txn = {"txn": {"appId": sink.app_id, "version": entry(0).txn.version}}
    lines = [json.dumps(action, ensure_ascii=False) for action in (info, txn, *adds)]
    (sink.path / "_delta_log" / f"{sink.handle.version() + 1:020d}.json").write_text("\n".join(lines), encoding="utf-8")
    sink.refresh()


@pytest.mark.parametrize("shortened", [False, True], ids=["commits", "checkpoint"])
def test_files_with_unencoded_paths_get_others_before_deltalake_removes_them(make: Make, shortened: bool) -> None:
    sink = make(partition_by=["k"])
    lay_raw_paths(sink)
    if shortened:
        sink.handle.create_checkpoint()
    there = rows_in(sink)
    sink = make(partition_by=["k"])
    assert rows_in(sink) == there
    assert not [path for path in table_files(sink.path, sink.handle.version()) if not path.isascii()]
    renamed = sink.handle.version()
    assert make(partition_by=["k"]).handle.version() == renamed
    assert not any(commit.changes_data for commit in walk(sink.path) if commit.version > 1)
    sink.handle.optimize.compact()
    assert rows_in(sink) == there
    assert DeltaTable(sink.path).to_pyarrow_table(filters=[("k", "=", "日本")]).num_rows == 2
    sink.refresh()
    assert append(sink, entry(1), ROWS) is not None
    assert len(rows_in(sink)) == len(there) + ROWS.num_rows


def test_a_commit_that_comes_first_leaves_the_paths_as_they_were(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = make(partition_by=["k"])
    lay_raw_paths(sink)
    monkeypatch.setattr(unencoded_paths.os, "link", refuse_links_into(sink.path / "_delta_log"))
    with pytest.raises(CommitRefused, match="by somebody else"):
        unencoded_paths.rename(sink, 1)
    assert len(rows_in(sink)) == 5 and not list((sink.path / "_delta_log").glob("*.tmp"))


def refuse_links_into(folder: Path) -> Callable[[Path, Path], None]:
    link = os.link

    def refusing(source: Path, target: Path) -> None:
        if target.parent == folder:
            raise FileExistsError(target)
        link(source, target)

    return refusing


def test_a_reader_skips_files_by_the_statistics_of_executors_and_misses_nothing(make: Make) -> None:
    sink = make(partition_by=["k"])
    actions, _ = add_actions(sink.path, staged_files(sink, {"a": 1, "b": 2, "c": 3}), ["k"], sink.bounded)
    sink.commit(entry(0), lambda _, properties: sink.commit_actions(list(actions), properties))
    rows = DeltaTable(sink.path).to_pyarrow_table(filters=[("n", "=", 2)])
    assert rows.to_pylist() == [{"k": "b", "n": 2}]


def test_files_that_executors_wrote_are_committed_once(make: Make) -> None:
    sink = make(partition_by=["k"])
    actions, count = add_actions(sink.path, staged_files(sink, {"a": 1}), ["k"], sink.bounded)
    staged = ParquetAppend(sink, actions, count)
    assert staged.commit(entry(0)) == 1
    assert staged.commit(entry(0)) is None
    assert len(rows_in(sink)) == 1


def test_the_log_is_read_again_only_when_there_is_something_new(
    make: Make, home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, reads = make(), []
    reading = DeltaTable.update_incremental
    monkeypatch.setattr(DeltaTable, "update_incremental", lambda self: (reads.append(1), reading(self)))
    sink.refresh()
    assert not reads
    write_deltalake(sink.path, ROWS, mode="append")
    sink.refresh()
    assert len(reads) == 1 and sink.handle.version() == 1


def test_a_log_that_went_on_past_a_sleeping_driver_is_read_again(make: Make) -> None:
    sink = make()
    for _ in range(3):
        write_deltalake(sink.path, ROWS, mode="append")
    other = DeltaTable(sink.path)
    other.create_checkpoint()
    for version in range(3):  # what a clean-up leaves: neither our version nor the one after it
        (sink.path / "_delta_log" / f"{version:020d}.json").unlink()
    sink.refresh()
    assert sink.handle.version() == 3


def test_a_commit_that_can_never_be_made_is_told_at_once(make: Make) -> None:
    """An append-only table takes no removal: that is no race with somebody else, and is not tried again."""
    sink = make()
    ArrowAppend(sink, ROWS).commit(entry(0))
    sink.handle.alter.set_table_properties({"delta.appendOnly": "true"})
    sink.refresh()
    sink.committed()
    file = next(iter(table_files(sink.path, sink.handle.version()).values()))
    tries = []

    def write(_: DeltaTable, properties: CommitProperties) -> None:
        tries.append(1)
        sink.commit_actions([file.remove(1)], properties)

    with pytest.raises(PermanentError, match="append-only"):
        sink.commit(entry(1), write)
    assert len(tries) == 1


def test_a_commit_that_lost_a_race_is_tried_again(make: Make) -> None:
    sink = make()
    tries = []

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        tries.append(1)
        if len(tries) < 3:
            DeltaTable(sink.path).alter.set_table_properties({"delta.checkpointInterval": str(90 + len(tries))})
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    assert sink.commit(entry(0), write) is not None
    assert len(tries) == 3 and len(rows_in(sink)) == ROWS.num_rows
