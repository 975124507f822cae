"""A stream's table at each start: made once, within the profile, and widened by columns only.

Files whose paths stand in the log as they are get others, in a commit that changes no row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
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
from structlog.testing import capture_logs

from streaming_jobs.errors import CommitRefused, OutputMismatch, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta import sink as delta
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.replace_rows import rename_unencoded
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.table_files import table_files
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory
from tests.support.delta_table import ROWS, TABLE, Make, rows_in
from tests.support.worlds import OUTPUT, STREAM, append, entry


def fields(**types: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


def test_a_new_table_is_opened_in_its_generation_and_a_second_start_commits_nothing(make: Make) -> None:
    sink = make(generation=3)
    assert sink.position == Txn(3, -1) and rows_in(sink) == []
    assert [(c.entry and c.entry.kind, c.changes_data) for c in walk(sink.path)] == [("schema", False)]
    second = make(generation=3)
    assert second.table_id == sink.table_id and second.handle.version() == 0


def test_a_new_table_carries_owner_and_upkeep_within_the_profile_that_both_writers_know(
    make: Make, home: Settings
) -> None:
    configuration = make(description="Rows").handle.metadata().configuration
    assert configuration[delta.STREAM_PROPERTY] == STREAM
    assert configuration["delta.logRetentionDuration"] == "interval 3600 seconds"
    assert configuration["delta.checkpointInterval"] == str(home.table.checkpoint_interval)
    assert configuration["delta.enableExpiredLogCleanup"] == "false"  # Upkeep does it
    sink = make(StructType([StructField("k", StringType(), nullable=False)]))
    protocol = sink.handle.protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)
    assert sink.direct


def test_columns_may_be_null_also_inside_and_keep_comments_but_no_watermark(make: Make) -> None:
    inner = StructType([StructField("a", LongType(), nullable=False)])
    made = make(
        StructType(
            [
                StructField("k", StringType(), False, {"comment": "the key"}),
                StructField("s", inner, False),
                StructField("l", ArrayType(inner, False), False),
                StructField("m", MapType(StringType(), LongType(), False), False),
                StructField("t", TimestampType(), True, {"spark.watermarkDelayMs": 10_000, "comment": "when"}),
            ]
        )
    ).schema
    assert made["t"].metadata == {"comment": "when"}
    assert made["k"].metadata == {"comment": "the key"}
    assert all(field.nullable for field in made.fields)
    assert made["s"].dataType.fields[0].nullable  # type: ignore[attr-defined]
    assert made["l"].dataType.containsNull  # type: ignore[attr-defined]
    assert made["m"].dataType.valueContainsNull  # type: ignore[attr-defined]


def test_a_column_that_is_new_in_the_output_is_added_and_null_in_old_rows_and_the_position_stays(make: Make) -> None:
    append(make(), entry(0), ROWS)
    sink = make(fields(k=StringType(), n=LongType(), delay=DoubleType()))
    assert sink.schema.fieldNames() == ["k", "n", "delay"] and sink.position == Txn(1, 0)
    assert newest(sink.path, STREAM)[1] == []
    append(sink, entry(1), pa.table({"k": ["z"], "n": [3], "delay": [1.5]}))
    assert {row["k"]: row["delay"] for row in rows_in(sink)} == {"x": None, "y": None, "z": 1.5}
    note = next(c.entry.note for c in walk(sink.path) if c.entry and c.entry.kind == "schema")
    assert note == "added delay"


def test_code_that_lacks_a_column_of_the_table_starts(make: Make) -> None:
    """As after a deploy that was taken back: the column stays, and is null in the rows of this code."""
    make()
    with capture_logs() as logs:
        sink = make(fields(k=StringType()))
    assert sink.schema.fieldNames() == ["k", "n"] and sink.handle.version() == 0
    assert [(line["event"], line["table"], line["columns"]) for line in logs] == [("columns_left_null", TABLE, ["n"])]


def test_a_column_of_the_keys_is_no_struct_array_or_map(make: Make) -> None:
    for kind in (StructType([StructField("a", LongType())]), ArrayType(LongType()), MapType(StringType(), LongType())):
        schema = StructType([StructField("k", kind)])
        with pytest.raises(UsageError, match="'k' of its keys has the type"):
            Declared("t", schema, keys=["k"])
        with pytest.raises(UsageError, match="'k' of its keys has the type"):
            make(schema, keys=["k"])


@pytest.mark.parametrize(
    ("output", "named"),
    [
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


def refuse_links_into(folder: Path) -> Callable[[Path, Path], None]:
    link = os.link

    def refusing(source: Path, target: Path) -> None:
        if target.parent == folder:
            raise FileExistsError(target)
        link(source, target)

    return refusing


def test_a_commit_that_comes_first_leaves_the_paths_as_they_were(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = make(partition_by=["k"])
    lay_raw_paths(sink)
    monkeypatch.setattr(os, "link", refuse_links_into(sink.path / "_delta_log"))
    with pytest.raises(CommitRefused, match="by somebody else"):
        rename_unencoded(sink, 1)
    assert len(rows_in(sink)) == 5 and not list((sink.path / "_delta_log").glob("*.tmp"))
