"""A table's log is read as Delta writes it: one action per line, and a line ends only at a line feed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.ledger.entry import Txn
from streaming_jobs.platform.delta_log import actions
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


def test_every_reader_of_the_log_understands_values_with_line_separators(sink: DeltaSink) -> None:
    newest_commit, foreign = newest(sink.path, STREAM)
    assert newest_commit is not None and newest_commit.entry is not None
    assert (newest_commit.entry.txn, foreign) == (Txn(1, 0), [])
    assert [commit.version for commit in walk(sink.path)] == [1, 0]
    assert len(table_files(sink.path, 1)) == 1
    live = DeltaTable(sink.path).get_add_actions()["path"].to_pylist()
    assert orphan_files.find(sink.path, live) == []
    assert read_commit(sink.path, 1).changes_rows


def test_upkeep_of_a_table_with_line_separators_goes_on(sink: DeltaSink, settings: SettingsFactory) -> None:
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
