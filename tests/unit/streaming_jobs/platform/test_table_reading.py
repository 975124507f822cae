"""A table's log is read as Delta writes it: one action per line, and a line ends only at a line feed.

Its rows are read as Arrow, by no file system that needs Python when the interpreter ends.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import LongType, StringType, StructField, StructType

import orchestration
import reprocessing
import streaming_jobs
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.platform.delta_log import actions
from streaming_jobs.platform.table_rows import dataset, rows
from streaming_jobs.sinks.delta import orphan_files
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.table_files import table_files
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.verification.delta_log import read_commit
from tests.conftest import SettingsFactory
from tests.support.worlds import STREAM, entry

SEPARATORS = ("\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\r\n")
COLUMNS = StructType([StructField("k", StringType()), StructField("p", StringType()), StructField("n", LongType())])


@pytest.fixture(params=SEPARATORS, ids=lambda text: "+".join(f"U{ord(c):04X}" for c in text))
def sink(request: pytest.FixtureRequest, settings: SettingsFactory) -> DeltaSink:
    """A table whose only value, bound and partition value holds a line separator."""
    declared = Declared("odd", partition_by=["p"])
    sink = ensure_sink(settings(), declared, STREAM, COLUMNS, generation=1)
    odd = f"a{request.param}b"
    ArrowAppend(sink, pa.table({"k": [odd], "p": [odd], "n": [1]})).commit(entry(0))
    return sink


def test_every_reader_of_the_log_understands_values_with_line_separators_and_upkeep_of_such_a_table_goes_on(
    sink: DeltaSink, settings: SettingsFactory
) -> None:
    newest_commit, foreign = newest(sink.path, STREAM)
    assert newest_commit is not None and newest_commit.entry is not None
    assert (newest_commit.entry.txn, foreign) == (Txn(1, 0), [])
    assert [commit.version for commit in walk(sink.path)] == [1, 0]
    assert len(table_files(sink.path, 1)) == 1
    live = DeltaTable(sink.path).get_add_actions()["path"].to_pylist()
    assert orphan_files.find(sink.path, live) == []
    assert read_commit(sink.path, 1).changes_rows
    upkeep = TableMaintenance(sink, settings().table, 1)
    sink.handle.delete()
    assert upkeep.shorten_log() == 0
    assert upkeep.remove_unlisted() == 0  # removed just now: within its retention
    live = sink.handle.get_add_actions()["path"].to_pylist()
    assert [file.removed for file in orphan_files.find(sink.path, live)] == [True]


def test_blank_lines_are_no_actions_and_a_torn_one_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "0.json"
    file.write_text('{"txn":{"appId":"a"}}\n\n{"add":{"path":"x\u2028y"}}\r\n', encoding="utf-8", newline="")
    assert list(actions(file)) == [{"txn": {"appId": "a"}}, {"add": {"path": "x\u2028y"}}]
    file.write_text('{"txn":{"app', encoding="utf-8")
    with pytest.raises(json.JSONDecodeError):
        list(actions(file))


VALUES: list[str | None] = [
    "a b",
    "ä",
    "日本",
    "a/b",
    "a%b",
    "a%20b",
    "a:b",
    "x=y",
    "a\u2028b",
    "😀",
    "a#b?c",
    "*",
    "a+b",
]
VALUES += [".", " ", None]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    held = pa.table({"p": pa.array(VALUES), "v": list(range(len(VALUES)))})
    write_deltalake(tmp_path / "table", held, partition_by=["p"])
    write_deltalake(tmp_path / "table", pa.table({"p": ["more"], "v": [-1]}), mode="append")
    return tmp_path / "table"


def test_the_rows_are_those_that_deltalake_reads_whatever_the_partitions_are_called(table: Path) -> None:
    read, known = rows(table).sort_by("v"), DeltaTable(table).to_pyarrow_table().sort_by("v")
    assert read.equals(known) and read["p"].to_pylist() == ["more", *VALUES]
    assert rows(table, 0, ["v"]).sort_by("v")["v"].to_pylist() == list(range(len(VALUES)))


def test_no_file_of_it_is_closed_by_python(table: Path) -> None:
    """Arrow closes files in threads of its own; one that needs Python while the interpreter ends aborts the process."""
    used = dataset(DeltaTable(table), table).filesystem
    assert isinstance(used, pafs.SubTreeFileSystem) and isinstance(used.base_fs, pafs.LocalFileSystem)


def test_nothing_reads_rows_in_another_way() -> None:
    modules = [
        path
        for package in (streaming_jobs, reprocessing, orchestration)
        for path in Path(str(package.__file__)).parent.rglob("*.py")
    ]
    others = [p.name for p in modules if re.search(r"\.to_pyarrow_(table|dataset)\(", p.read_text("utf-8"))]
    assert len(modules) > 150 and others == ["table_rows.py"]
