"""Delta tables on an object store: what a commit asks of it, lost answers, races, and what maintenance leaves alone."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake.exceptions import CommitFailedError, DeltaError
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.errors import CommitImpossible, ConfigurationError, Fenced, PreflightRefused, TransientError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.table_rows import rows as rows_of
from streaming_jobs.settings import Settings, StreamSettings, TableSettings
from streaming_jobs.sinks.base import BatchOfRows
from streaming_jobs.sinks.delta import dead_letters, maintenance
from streaming_jobs.sinks.delta.parquet import add_actions
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge, ParquetAppend
from streaming_jobs.sinks.delta.row_engine import Files
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.delta.store import STORE, ensure_sink
from streaming_jobs.sinks.schemas import DEAD_LETTERS
from streaming_jobs.sinks.stored import SavedAs
from streaming_jobs.storage import locations
from streaming_jobs.storage.locations import StorePath, files_below
from streaming_jobs.stream import DeltaTable
from tests.conftest import ON_BOTH_SERVERS, SettingsFactory
from tests.support.store_server import Fault, StoreServer

COLUMNS = StructType([StructField("id", LongType()), StructField("place", StringType())])
PLAIN, KEYED = DeltaTable("t"), DeltaTable("u", keys=["id"])
ODD = ["two words", "a/b", "50%", "über:all", ""]


def entry(batch: int, generation: int = 1, kind: str = "batch") -> LedgerEntry:
    return LedgerEntry(kind, "s", "t", generation, batch)  # type: ignore[arg-type]


def made(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "place": [f"p{n}" for n in ids]})


@pytest.fixture
def stored(settings: SettingsFactory, tables_on_a_store: dict[str, Any]) -> Settings:
    return settings(tables_on_a_store)


@pytest.fixture
def sink(stored: Settings) -> DeltaSink:
    return ensure_sink(stored, PLAIN, "s", COLUMNS, generation=1)


def ids(sink: DeltaSink) -> list[int]:
    return sorted(rows_of(sink.path)["id"].to_pylist())


def test_an_append_takes_seven_requests_and_none_writes_the_log_without_a_condition(
    sink: DeltaSink, object_store: StoreServer
) -> None:
    ArrowAppend(sink, made(0)).commit(entry(0))
    object_store.clear()
    for batch in range(1, 4):
        ArrowAppend(sink, made(batch)).commit(entry(batch))
    asked = object_store.requests()
    assert len(asked) <= 3 * 7, [f"{each.method} {each.key}" for each in asked]
    assert object_store.unconditional_writes(r"_delta_log/\d+\.json") == []
    assert ids(sink) == [0, 1, 2, 3]


def test_a_commit_whose_answer_is_lost_was_made_once(sink: DeltaSink, object_store: StoreServer) -> None:
    object_store.inject(Fault("answer lost", key=r"_delta_log/0+1\.json"))
    assert ArrowAppend(sink, made(0)).commit(entry(0)) == 1, "it is found in the table, and is this driver's own"
    assert ArrowAppend(sink, made(0)).commit(entry(0)) is None
    assert (ids(sink), sink.position) == ([0], Txn(1, 0))


@ON_BOTH_SERVERS
def test_of_two_drivers_one_commits_a_batch(stored: Settings, sink: DeltaSink) -> None:
    other = open_sink(stored, PLAIN, "s")
    assert other is not None
    for batch in range(8):
        with ThreadPoolExecutor(2) as threads:
            done = [threads.submit(ArrowAppend(each, made(batch)).commit, entry(batch)) for each in (sink, other)]
            assert sorted(d.result() is None for d in done) == [False, True]
    assert ids(sink) == list(range(8))


def _commits(url: str, options: dict[str, str], writer: int, count: int) -> int:
    """Append `count` rows, a commit each, by deltalake alone; returns how many commits were refused and made again."""
    refused = 0
    for n in range(count):
        while True:
            table = deltalake.DeltaTable(url, storage_options=options)
            try:
                deltalake.write_deltalake(
                    table,
                    made(writer * count + n),
                    mode="append",
                    commit_properties=deltalake.CommitProperties(max_commit_retries=0),
                )
            except CommitFailedError:
                refused += 1
                continue
            break
    return refused


@pytest.mark.long
@pytest.mark.parametrize("object_store", ["versity"], indirect=True)
def test_of_400_commits_of_two_processes_that_race_none_is_lost(sink: DeltaSink, object_store: StoreServer) -> None:
    """On a server that holds races itself; moto's are held by our recorder."""
    arguments = [(str(sink.path), dict(object_store.options), writer, 200) for writer in range(2)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        refused = [each.result() for each in [processes.submit(_commits, *each) for each in arguments]]
    assert min(refused) > 0, "they raced"
    assert deltalake.DeltaTable(str(sink.path), storage_options=dict(object_store.options)).version() == 400
    assert ids(sink) == list(range(400))


def test_a_table_that_is_made_anew_meanwhile_gets_no_commit_of_before(stored: Settings, sink: DeltaSink) -> None:
    ArrowAppend(sink, made(0)).commit(entry(0))
    for name, _ in list(files_below(sink.path)):
        (sink.path / name).unlink()
    again = ensure_sink(stored, PLAIN, "s", COLUMNS, generation=1)
    with pytest.raises(DeltaError, match="Invalid table version"):
        ArrowAppend(sink, made(1)).commit(entry(1))
    assert [name for name, _ in files_below(again.path / "_delta_log")] == ["00000000000000000000.json"]


def test_delta_spark_never_commits_there(sink: DeltaSink) -> None:
    batch = BatchOfRows(generation=1, batch=0, driver=False)
    assert sink.write_path(batch) == (False, False)
    with pytest.raises(CommitImpossible, match="overwrites"):
        sink.for_batches(StreamSettings(committer="spark")).write_path(batch)


def test_delta_spark_never_commits_dead_letters_there(stored: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with features beyond deltalake's goes the way of delta-spark, also where nobody asks for its path."""
    letters = ensure_sink(stored, DeltaTable("letters"), "s", DEAD_LETTERS, generation=1)
    monkeypatch.setattr(DeltaSink, "direct", False)
    frame = SimpleNamespace(mapInArrow=lambda *_: None, columns=[])
    spark, source = SimpleNamespace(), SimpleNamespace(bad_records=lambda *_: frame)
    monkeypatch.setattr(dead_letters, "fitted", lambda *_: frame)
    with pytest.raises(CommitImpossible, match="table letters is on an object store"):
        letters.prepare_letters(spark, [(source, None, 1)], [], BatchOfRows(1, 0, driver=True))  # type: ignore[arg-type, list-item]


def test_files_that_executors_write_become_files_of_the_table(stored: Settings) -> None:
    """Also those of partitions whose values a URL has to escape."""
    declared = replace(PLAIN, partition_by=["place"])
    sink = ensure_sink(stored, declared, "s", COLUMNS, generation=1)
    files = Files(sink.path, sink.path / "g0001" / "b000000000-a")
    for number, place in enumerate(ODD[:3]):
        files.add(f"place={place.replace('%', '%25').replace('/', '%2F')}", pa.table({"id": [number]}))
    actions, count = add_actions(sink.path, files.close(), ["place"], sink.bounded)
    ParquetAppend(sink, actions, count).commit(entry(0))
    assert sorted(rows_of(sink.path).select(["id", "place"]).to_pylist(), key=lambda row: row["id"]) == [
        {"id": number, "place": place} for number, place in enumerate(ODD[:3])
    ]


@pytest.mark.parametrize("declared", [replace(PLAIN, partition_by=["place"]), replace(KEYED, partition_by=["place"])])
def test_a_staged_table_is_published_without_moving_a_file(
    stored: Settings, object_store: StoreServer, declared: DeltaTable
) -> None:
    """Partition values that a URL has to escape; an upsert rewrites a file of before in the staged table."""
    sink = ensure_sink(stored, declared, "s", COLUMNS, generation=1)
    rows = pa.table({"id": pa.array(range(len(ODD)), pa.int64()), "place": ODD})
    write = ArrowMerge if declared.keys else ArrowAppend
    write(sink, rows).commit(entry(0))
    staged_at = stored.with_tables(StorePath(f"{stored.tables}/*/_staged-1"))
    staged = STORE.create(staged_at, declared, "s", sink.content(), entry(0, 2, "publish"))
    changed = pa.table({"id": pa.array([2 if declared.keys else 9], pa.int64()), "place": ["50%"]})
    write(staged, changed).commit(entry(1, 2))
    object_store.clear()
    done = sink.replace_rows(staged.content(), entry(1, 2, "publish"), "r-1")
    assert (done.came, done.stayed) == ((1, 4) if declared.keys else (1, 5))
    assert not [each for each in object_store.requests() if each.method == "PUT" and each.key.endswith(".parquet")]
    for name, _ in list(files_below(sink.path / "_staged-1" / "_delta_log")):
        (sink.path / "_staged-1" / "_delta_log" / name).unlink()
    assert ids(sink) == ([0, 1, 2, 3, 4] if declared.keys else [0, 1, 2, 3, 4, 9])
    assert (
        sink.complete(sink.version)
        and sink.replace_rows(staged_content := sink.content(), entry(1, 2, "publish"), "r-1").version is None
    )
    assert sink.has_content(staged_content)


def test_maintenance_deletes_what_no_version_no_savepoint_and_no_staged_table_has(
    stored: Settings, sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """An hour after it left the table: an older driver may be paused, and deletes have no condition."""
    ArrowAppend(sink, made(0)).commit(entry(0))
    saved = SavedAs("s", "g0001-b000000000", tmp_path)
    kept = STORE.retain([(sink, sink.version)], saved)
    ArrowAppend(sink, made(1)).commit(entry(1))
    staged_at = stored.with_tables(StorePath(f"{stored.tables}/*/_staged-1"))
    staged = STORE.create(staged_at, PLAIN, "s", sink.no_rows(), entry(0, 2, "publish"))
    ArrowAppend(staged, made(7)).commit(entry(1, 2))
    sink.replace_rows(sink.no_rows(), entry(1, 2, "publish"), "r-1")
    upkeep = sink.upkeep(TableSettings(deleted_files_max_mb=1), generation=2)
    assert upkeep.remove_unlisted() == 0
    later = time.time() + 7200
    monkeypatch.setattr(maintenance.time, "time", lambda: later)
    assert upkeep.remove_unlisted() == 1 and not upkeep.put_off
    again = STORE.retained(stored, kept, saved)["t"]
    assert ids(STORE.create(stored.with_tables(stored.tables / "again"), PLAIN, "s", again, None)) == [0]
    assert ids(staged) == [7]
    STORE.release(stored, saved)
    assert upkeep.remove_unlisted() == 1


def test_of_a_commit_that_the_store_refuses_another_drivers_is_told_from_the_own(
    stored: Settings, sink: DeltaSink
) -> None:
    other = open_sink(stored, PLAIN, "s")
    assert other is not None
    ArrowAppend(other, made(7)).commit(entry(0))
    assert ArrowAppend(sink, made(0)).commit(entry(0)) is None
    assert ids(sink) == [7]


def test_nothing_is_published_of_which_a_file_is_gone(stored: Settings, sink: DeltaSink) -> None:
    """Such as after a VACUUM of another program: the table would lose its rows for files that nobody can read."""
    ArrowAppend(sink, made(0)).commit(entry(0))
    staged = STORE.create(
        stored.with_tables(StorePath(f"{stored.tables}/*/_staged-1")), PLAIN, "s", sink.no_rows(), entry(0, 2)
    )
    ArrowAppend(staged, made(9)).commit(entry(1, 2))
    for name in [name for name, _ in files_below(staged.path) if name.endswith(".parquet")]:
        (staged.path / name).unlink()
    with pytest.raises(PreflightRefused, match="_staged-1/part-.* of table t is gone"):
        sink.replace_rows(staged.content(), entry(1, 2, "publish"), "r-1")
    assert ids(sink) == [0]


def test_savepoints_keep_their_files_when_the_tables_are_elsewhere(
    settings: SettingsFactory,
    stored: Settings,
    tables_on_a_store: dict[str, Any],
    sink: DeltaSink,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    """A prefix that was copied, or a URL that is spelled otherwise."""
    ArrowAppend(sink, made(0)).commit(entry(0))
    STORE.retain([(sink, sink.version)], SavedAs("s", "g0001-b000000000", tmp_path))
    sink.replace_rows(sink.no_rows(), entry(1, 2, "publish"), "r-1")
    moved = settings({**tables_on_a_store, "tables_dir": f"{tables_on_a_store['tables_dir']}-moved"})
    for name, _ in list(files_below(sink.path)):
        (moved.tables / "t" / name).write_bytes((sink.path / name).read_bytes())
    there = open_sink(moved, PLAIN, "s")
    assert there is not None
    later = time.time() + 7200
    monkeypatch.setattr(maintenance.time, "time", lambda: later)
    assert there.upkeep(TableSettings(), generation=2).remove_unlisted() == 0


def test_the_log_shows_a_removal_for_an_hour_whatever_the_setting_says(
    settings: SettingsFactory, tables_on_a_store: dict[str, Any]
) -> None:
    """A checkpoint drops older ones, and a file without one would be due by its own age."""
    sink = ensure_sink(
        settings({**tables_on_a_store, "table.deleted_file_retention": "0 s"}), PLAIN, "s", COLUMNS, generation=1
    )
    assert sink.handle.metadata().configuration["delta.deletedFileRetentionDuration"] == "interval 3600 seconds"
    for batch in range(3):
        ArrowAppend(sink, made(batch)).commit(entry(batch))
    sink.replace_rows(sink.no_rows(), entry(3, 2, "publish"), "r-1")
    sink.handle.create_checkpoint()
    upkeep = sink.upkeep(TableSettings(deleted_file_retention=timedelta(0), deleted_files_max_mb=0), generation=2)
    assert upkeep.remove_unlisted() == 0


def test_maintenance_deletes_many_objects_by_one_request_and_checks_the_epoch_before_each(
    sink: DeltaSink, object_store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in range(5):
        (sink.path / "g0001" / f"b-{batch}.parquet").write_bytes(b"left over")
        ArrowAppend(sink, made(batch)).commit(entry(batch))
    sink.handle.create_checkpoint()
    upkeep = sink.upkeep(TableSettings(log_versions=1), generation=1)
    later, fenced = time.time() + 7200, [False, False, True]
    monkeypatch.setattr(maintenance.time, "time", lambda: later)

    def check_epoch() -> None:
        if fenced.pop(0):
            raise Fenced("another driver", "")

    object_store.clear()
    with monkeypatch.context() as patch:
        patch.setattr(locations, "_PER_REQUEST", 2)
        patch.setattr(sink, "check_epoch", check_epoch)
        assert upkeep.remove_unlisted() == 0 and "another driver" in upkeep.put_off["removing unlisted files"]
    assert len([name for name, _ in files_below(sink.path / "g0001")]) == 1
    assert upkeep.remove_unlisted() == 1 and upkeep.shorten_log() == 5
    asked = [each for each in object_store.requests() if each.method in ("DELETE", "POST")]
    assert [each.method for each in asked] == ["POST"] * 4, asked
    assert ids(sink) == [0, 1, 2, 3, 4]


def test_a_savepoint_of_a_version_whose_files_are_gone_is_refused(sink: DeltaSink, tmp_path: Any) -> None:
    ArrowAppend(sink, made(0)).commit(entry(0))
    for name in [name for name, _ in files_below(sink.path) if name.endswith(".parquet")]:
        (sink.path / name).unlink()
    assert not sink.complete(sink.version)
    with pytest.raises(PreflightRefused, match="1 files of table t are gone"):
        STORE.retain([(sink, sink.version)], SavedAs("s", "g0001-b000000000", tmp_path))


@pytest.mark.parametrize("url", ["ftp://lake/tables", "s3:/lake", "s3://", "hdfs://host/tables"])
def test_other_schemes_are_refused(settings: SettingsFactory, url: str) -> None:
    with pytest.raises(ConfigurationError, match="is on no store that is supported"):
        settings({"tables_dir": url})


def test_a_store_that_refuses_or_does_not_answer_is_named_and_the_batch_is_written_once_later(
    sink: DeltaSink, object_store: StoreServer
) -> None:
    for kind, words in (("denied", "refuses access"), ("unavailable", "did not answer")):
        object_store.inject(Fault(kind, key="_delta_log", times=100))  # type: ignore[arg-type]
        with pytest.raises((DeltaError, OSError)) as raised:
            ArrowAppend(sink, made(0)).commit(entry(0))
        error = classify(raised.value)
        assert isinstance(error, TransientError) and words in error.found and "\x1b" not in error.found
        object_store.clear()
    object_store.inject(Fault("denied", "GET", key="_delta_log", times=100))
    with pytest.raises(ConfigurationError, match="the store refuses access to s3://lake/"):
        list(sink.commits())
    object_store.clear()
    assert ArrowAppend(sink, made(0)).commit(entry(0)) == 1
    assert ids(sink) == [0]
