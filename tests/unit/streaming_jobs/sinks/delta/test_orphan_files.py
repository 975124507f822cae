"""Files that no version of a table lists: the choice of those to delete, which never includes a listed one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import TableSettings
from streaming_jobs.sinks.delta import orphan_files
from streaming_jobs.sinks.delta.maintenance import TableMaintenance, crowded
from streaming_jobs.sinks.delta.orphan_files import Unlisted, due
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory
from tests.support.delta_table import AWKWARD

SCHEMA = StructType([StructField("k", StringType()), StructField("n", LongType())])
NOW = 1_000_000.0
HOUR = timedelta(hours=1)
MB = 1 << 20


@pytest.fixture
def sink(settings: SettingsFactory) -> DeltaSink:
    return opened(settings, Declared("t", partition_by=["k"]))


@pytest.fixture
def upserts(settings: SettingsFactory) -> DeltaSink:
    return opened(settings, Declared("u", keys=["k"]))


def opened(settings: SettingsFactory, declared: Declared) -> DeltaSink:
    return ensure_sink(settings({"table.checkpoint_interval": 5}), declared, "s", SCHEMA, generation=1)


def rows(batch: int) -> pa.Table:
    return pa.table({"k": list(AWKWARD), "n": pa.array([batch] * len(AWKWARD), pa.int64())})


def append(sink: DeltaSink, batch: int) -> None:
    ArrowAppend(sink, rows(batch)).commit(LedgerEntry("batch", "s", "t", 1, batch))


def merge(sink: DeltaSink, batch: int) -> None:
    ArrowMerge(sink, rows(batch)).commit(LedgerEntry("batch", "s", "u", 1, batch))


def data(sink: DeltaSink) -> set[Path]:
    return set(sink.path.rglob("*.parquet")) - set((sink.path / "_delta_log").iterdir())


def upkeep(sink: DeltaSink, **settings: Any) -> TableMaintenance:
    return TableMaintenance(sink, TableSettings(**settings), 1)


def aged(path: Path, hours: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"something")
    os.utime(path, (time.time() - hours * 3600,) * 2)
    return path


def put_off(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    """Everything looks at a clock that is ahead."""
    later = time.time() + hours * 3600
    monkeypatch.setattr(time, "time", lambda: later)


def test_no_listed_file_goes_whatever_its_folder_is_called_and_however_old_it_is(sink: DeltaSink) -> None:
    for batch in range(7):
        append(sink, batch)
    for file in data(sink):
        os.utime(file, (0, 0))
    assert upkeep(sink, deleted_file_retention="0 s", deleted_files_max_mb=0).remove_unlisted() == 0
    rows = DeltaTable(sink.path).to_pyarrow_table().sort_by([("n", "ascending"), ("k", "ascending")]).to_pylist()
    assert rows == [{"k": k, "n": n} for n in range(7) for k in sorted(AWKWARD)]


@pytest.mark.parametrize("batches", [3, 12])  # removals that only the log's commits tell of, and a checkpoint
def test_a_removed_file_stays_for_its_retention_counted_from_its_removal_and_going_is_no_commit(
    upserts: DeltaSink, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    for batch in range(batches):
        merge(upserts, batch)
    for file in data(upserts):
        os.utime(file, (0, 0))  # the file is old, its removal is not
    version = upserts.handle.version()
    assert upkeep(upserts).remove_unlisted() == 0
    put_off(monkeypatch, 0.9)
    assert upkeep(upserts).remove_unlisted() == 0
    put_off(monkeypatch, 1.2)
    assert upkeep(upserts).remove_unlisted() == batches - 1
    table = DeltaTable(upserts.path)
    assert table.version() == version and table.to_pyarrow_table()["n"].to_pylist() == [batches - 1] * len(AWKWARD)


def test_above_the_size_the_oldest_removed_files_go_earlier_but_none_of_the_last_minute(
    upserts: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in range(6):
        merge(upserts, batch)
    young = aged(upserts.path / "part-of-a-writer-that-lives.parquet", hours=0.1)
    tight = upkeep(upserts, deleted_files_max_mb=0)
    assert tight.remove_unlisted() == 0
    put_off(monkeypatch, 0.05)
    assert tight.remove_unlisted() == 5
    assert young.exists() and DeltaTable(upserts.path).to_pyarrow_table().num_rows == len(AWKWARD)


def test_what_died_leaves_goes_and_what_is_not_the_tables_stays(sink: DeltaSink) -> None:
    append(sink, 0)
    gone = [
        aged(sink.path / "g0001" / "b000000001-dead" / "_temporary" / "0" / "part-0.parquet", 2),
        aged(sink.path / "g0001" / "b000000001-dead" / "k=a" / ".part-0.parquet.crc", 2),
        aged(sink.path / "g0001" / "b000000001-dead" / "_SUCCESS", 2),
        aged(sink.path / "k=plain" / "part-0.snappy.parquet#1", 2),
        aged(sink.path / "_change_data" / "cdc-0.parquet", 2),
    ]
    stays = [
        aged(sink.path / "g0001" / "b000000002-live" / "part-0.parquet", 0.5),
        aged(sink.path / "_staging" / "plan" / "part-0.parquet", 2),
        aged(sink.path / "notes.txt", 2),
    ]
    assert upkeep(sink).remove_unlisted() == len(gone)
    assert not any(path.exists() for path in gone) and all(path.exists() for path in stays)
    old = time.time() - 7200
    for folder, _, _ in os.walk(sink.path / "g0001"):
        os.utime(folder, (old, old))
    for _ in range(4):
        upkeep(sink).remove_unlisted()
        for folder, _, _ in os.walk(sink.path / "g0001" / "b000000001-dead"):
            os.utime(folder, (old, old))  # it lost what was in it just now
    assert [path.name for path in (sink.path / "g0001").iterdir()] == ["b000000002-live"]


def test_nothing_goes_when_the_log_cannot_be_read(upserts: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in range(7):
        merge(upserts, batch)
    before = data(upserts)
    put_off(monkeypatch, 3)
    next((upserts.path / "_delta_log").glob("*.checkpoint.parquet")).write_bytes(b"damaged")
    assert upkeep(upserts).remove_unlisted() == 0
    assert data(upserts) == before


def test_a_table_that_only_spark_may_write_is_left_alone(upserts: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    merge(upserts, 0)
    stray = aged(upserts.path / "part-0.parquet", 3)
    monkeypatch.setattr(DeltaSink, "direct", False)
    assert upkeep(upserts).remove_unlisted() == 0 and stray.exists()


def test_unlisted_files_are_looked_for_once_a_minute_at_most(
    upserts: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(TableMaintenance, "remove_unlisted", lambda self: looks.append(time.monotonic()))
    one = upkeep(upserts)
    for _ in range(100):
        one.after_commit()
    assert looks == []  # a session that has just begun is not held up
    one._sweep_at = 0.0
    for _ in range(100):
        one.after_commit()
    assert len(looks) == 1 and one._sweep_at >= looks[0] + 60


def file(age: float, size: int = MB, *, removed: bool = True) -> Unlisted:
    return Unlisted(Path(f"{age}-{size}-{removed}"), size, NOW - age, removed)


@pytest.mark.parametrize(
    ("files", "max_bytes", "gone"),
    [
        ([file(4000), file(3000)], 10 * MB, [4000]),
        ([file(300), file(500), file(400)], 2 * MB, [500]),
        ([file(300), file(500), file(400)], MB, [500, 400]),
        ([file(4000), file(300), file(500)], 2 * MB, [4000]),  # what is past its retention makes room
        ([file(30), file(40)], 0, []),
        ([file(300, removed=False), file(200)], 0, [200]),  # a writer may still need what was never listed
        ([], 0, []),
    ],
)
def test_which_files_are_due(files: list[Unlisted], max_bytes: int, gone: list[float]) -> None:
    due_files = due(files, now=NOW, retention=HOUR, max_bytes=max_bytes)
    assert [NOW - one.since for one in due_files] == gone


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"a": [1000] * 100}, MB),
        ({"a": [1000] * 99}, None),
        ({f"{n}": [1000] for n in range(200)}, None),  # one file per partition cannot become fewer
        ({f"{n}": [1000, 1000] for n in range(50)}, MB),
        ({"a": [MB] * 8}, 8 * MB),
        ({"a": [MB] * 4, "b": [MB] * 4}, None),
        ({"a": [MB // 2] * 7 + [1000] * 100}, MB),
        ({"a": [5 * MB] * 8 + [1000] * 100}, 64 * MB),
        ({"a": [40 * MB] * 1000}, None),  # large enough
    ],
)
def test_small_files_are_compacted_with_their_like(sizes: Mapping[str, list[int]], wanted: int | None) -> None:
    files = [(partition, size) for partition, each in sizes.items() for size in each]
    assert crowded(files, enough=100, target=64 * MB) == wanted


def test_compaction_asks_by_partition(sink: DeltaSink) -> None:
    one = upkeep(sink, compact_after_files=2 * len(AWKWARD))
    append(sink, 0)
    assert one.compaction_size() is None
    append(sink, 1)
    assert one.compaction_size() == MB
    one.compact(MB)
    assert one.compaction_size() is None
    assert len(sink.handle.file_uris()) == len(AWKWARD)
    assert len(orphan_files.find(sink.path, sink.handle.get_add_actions()["path"].to_pylist())) == 2 * len(AWKWARD)
