"""Maintenance keeps a table's files and log bounded, on real tables, without a JVM."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.errors import Fenced
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import TableSettings
from streaming_jobs.sinks.delta import orphan_files
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory

pytestmark = pytest.mark.slow

SCHEMA = StructType([StructField("n", LongType())])
KEYED = StructType([StructField("k", LongType()), StructField("text", StringType())])


@pytest.fixture
def sink(settings: SettingsFactory) -> DeltaSink:
    made = settings({"table.checkpoint_interval": 10, "table.log_retention": "1 hour"})
    return ensure_sink(made, Declared("t"), "s", SCHEMA, generation=1)


def append(sink: DeltaSink, batch: int) -> None:
    rows = pa.table({"n": pa.array([batch], pa.int64())})
    ArrowAppend(sink, rows).commit(LedgerEntry("batch", "s", "t", 1, batch, rows={"written": 1}))


def logs(sink: DeltaSink) -> list[Path]:
    return sorted((sink.path / "_delta_log").glob("*.json"))


def age(files: list[Path], hours: float) -> None:
    then = time.time() - hours * 3600
    for file in files:
        os.utime(file, (then, then))


def test_many_small_files_become_few_and_the_rows_and_the_place_stay(sink: DeltaSink) -> None:
    upkeep = TableMaintenance(sink, TableSettings(compact_after_files=20), 1)
    for batch in range(100):
        append(sink, batch)
        upkeep.after_commit()
    assert len(sink.handle.file_uris()) <= 51
    compaction = [c for c in walk(sink.path) if c.entry and c.entry.kind == "upkeep"]
    assert compaction and not any(c.changes_data for c in compaction)
    assert newest(sink.path, "s")[1] == []
    append(sink, 100)
    assert sorted(DeltaTable(sink.path).to_pyarrow_table()["n"].to_pylist()) == list(range(101))


def test_nothing_is_compacted_when_it_is_switched_off(sink: DeltaSink) -> None:
    upkeep = TableMaintenance(sink, TableSettings(compact_after_files=0), 1)
    for batch in range(100):
        append(sink, batch)
        upkeep.after_commit()
    assert not [c for c in walk(sink.path) if c.entry and c.entry.kind == "upkeep"]


def test_a_foreign_commit_in_between_puts_the_compaction_off_and_loses_nothing(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in range(5):
        append(sink, batch)
    write_deltalake(sink.path, pa.table({"n": pa.array([99], pa.int64())}), mode="append")
    monkeypatch.setattr(sink, "refresh", lambda: None)  # the compaction does not see the commit that came first
    TableMaintenance(sink, TableSettings(), 1).compact()
    assert sorted(DeltaTable(sink.path).to_pyarrow_table()["n"].to_pylist()) == [0, 1, 2, 3, 4, 99]


def test_merges_that_rewrite_a_table_are_cleaned_up_by_bytes_and_not_by_commits(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty merges of random keys write forty tables; the regular look comes after fifty."""
    monkeypatch.setattr(orphan_files, "AT_LEAST", timedelta())  # a reader has no minute here
    bounds = TableSettings(deleted_files_max_mb=2)
    upserts = ensure_sink(settings(), Declared("u", keys=["k"]), "s", KEYED, generation=1)
    upkeep = TableMaintenance(upserts, bounds, 1)
    most = 0
    for batch in range(40):
        rows = pa.table({"k": list(range(8)), "text": [os.urandom(30_000).hex() for _ in range(8)]})
        ArrowMerge(upserts, rows).commit(LedgerEntry("batch", "s", "u", 1, batch))
        upkeep.after_commit()
        live = set(upserts.handle.file_uris())
        gone = [path for path in upserts.path.glob("*.parquet") if str(path) not in live]
        most = max(most, sum(path.stat().st_size for path in gone))
    assert upserts.removed_bytes > 10 << 20
    assert most <= 2.5 * (1 << 20) + 600_000, f"{most / 2**20:.1f} MB of files that no version lists"
    assert DeltaTable(upserts.path).to_pyarrow_table().num_rows == 8


@pytest.mark.parametrize("text", [b"", b"null"], ids=["empty", "no action"])
def test_a_damaged_log_puts_upkeep_off_and_ends_no_stream(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    """The batch is committed by then. A task that was put off is reported until it succeeds."""
    upkeep = TableMaintenance(sink, TableSettings(), 1)
    for batch in range(49):
        append(sink, batch)
        upkeep.after_commit()
    append(sink, 49)
    damaged = logs(sink)[-1]
    content = damaged.read_bytes()
    damaged.write_bytes(b"{" + text)
    upkeep.after_commit()
    assert "shortening the log of table t was put off: REC-021 version 50 in" in upkeep.put_off["shortening the log"]
    damaged.write_bytes(content)
    upkeep.compact()  # it was put off too: the damaged commit was not loaded yet
    upkeep.shorten_log()
    assert upkeep.put_off == {}


@pytest.mark.parametrize("error", [DeltaError("kernel"), ValueError("no such column"), OSError("full"), Fenced("on")])
def test_no_step_of_upkeep_ends_the_stream_or_keeps_the_others_from_their_work(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    upkeep = TableMaintenance(sink, TableSettings(), 1, forgets=timedelta(days=1))
    upkeep._sweep_at = 0.0
    monkeypatch.setattr(upkeep, "compaction_size", fails)
    monkeypatch.setattr("streaming_jobs.sinks.delta.maintenance.forget", fails)
    monkeypatch.setattr("streaming_jobs.sinks.delta.orphan_files.find", fails)
    monkeypatch.setattr("streaming_jobs.sinks.delta.maintenance.expired", fails)
    for batch in range(50):
        append(sink, batch)
        upkeep.after_commit()
    assert set(upkeep.put_off) == {
        "compaction",
        "removing old deletes",
        "removing unlisted files",
        "shortening the log",
    }
    monkeypatch.undo()
    upkeep.shorten_log()
    upkeep.remove_unlisted()
    assert set(upkeep.put_off) == {"compaction", "removing old deletes"}
