"""What stays of a table for the streams that read it: versions and files, within the bounds."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log_cleanup import LogFile, bounded
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.stored import Need
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTopic
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.table_sources.readers import TableReaders
from streaming_jobs.table_sources.versions import TableVersions
from tests.conftest import SettingsFactory
from tests.support.objects import path_of
from tests.support.written_table import WrittenTable

HOUR = timedelta(hours=1)


def log(newest: int) -> list[LogFile]:
    """The commits of versions `newest` to 0, one second apart, of one byte each."""
    return [LogFile(Path(str(v)), "commit", v, 1000.0 - newest + v, 1) for v in range(newest, -1, -1)]


@pytest.mark.parametrize(
    ("needs", "retention", "size", "stays"),
    [
        ([], HOUR, 1000, None),
        ([Need(40, 41)], HOUR, 1000, 40),
        ([Need(40, 85)], timedelta(seconds=20), 1000, 80),
        ([Need(40, 92)], HOUR, 10, 91),
        ([Need(95, 96)], timedelta(seconds=20), 1000, 95),
        ([Need(40, 79)], timedelta(seconds=20), 1000, None),
        ([Need(40, 90)], HOUR, 10, None),
        ([Need(40, 90), Need(95, 97)], HOUR, 10, 95),
        ([Need(0, None), Need(95, 97)], HOUR, 10, 91),
        ([Need(99, 101)], timedelta(0), 1, 100),
    ],
)
def test_what_each_reader_needs_stays_within_both_bounds_and_nothing_for_one_that_is_beyond_them(
    needs: list[Need], retention: timedelta, size: int, stays: int | None
) -> None:
    found = bounded(log(100), needs, now=1000.0, retention=retention, max_bytes=size, removed=lambda _: 0)
    assert found == stays


def test_files_that_left_the_table_count_for_the_versions_before() -> None:
    def removed(commit: LogFile) -> int:
        return 500 if commit.version == 95 else 0

    for most, stays in ((500, 95), (600, 60)):
        found = bounded(log(100), [Need(60, 98)], now=1000.0, retention=HOUR, max_bytes=most, removed=removed)
        assert found == stays


def batch_of(settings: Settings, stream: str, number: int, start: int, end: int) -> None:
    """The checkpoint of a reader whose batch `number` read versions [start, end)."""
    record = replace(stream_record.first(stream), topics=(BoundTopic("numbers", "id", {0: 0}),), tag=None)
    stream_record.save(settings, record)
    folder = StreamFolder.of(settings, stream).checkpoint(1).folder
    for log_name in ("offsets", "commits", "sources/0"):
        (folder / log_name).mkdir(parents=True, exist_ok=True)
    (folder / "sources" / "0" / "0").write_text('v1\n{"numbers": {"0": 0}}')
    for batch, at in ((number - 1, start), (number, end)):
        if batch >= 0:
            (folder / "offsets" / str(batch)).write_text(f'v1\n{{}}\n{{"numbers": {{"0": {at}}}}}')
    for batch in range(number + 1):
        (folder / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')


def test_a_reader_needs_the_version_before_its_last_batch(settings: SettingsFactory) -> None:
    home = settings()
    readers = TableReaders(home, "numbers", ("one", "two"))
    assert readers.needs() == [], "none has ever run"
    batch_of(home, "one", 0, 0, 7)
    assert readers.needs() == [Need(6, 6)], "the content of its first batch"
    batch_of(home, "one", 3, 20, 25)
    assert readers.needs() == [Need(19, 25)]
    batch_of(home, "two", 1, 11, 25)
    assert set(readers.needs()) == {Need(19, 25), Need(10, 25)}
    replay = home.model_copy(update={"state_dir": home.state / "recoveries" / "one-0001" / "state"})
    batch_of(replay, "one", 2, 5, 8)
    assert set(readers.needs()) == {Need(19, 25), Need(10, 25), Need(4, 8)}, "a replay counts too"
    path_of(StreamFolder.of(home, "two").record).write_text("{")
    assert Need(0, None) in readers.needs(), "as long as it is not known, everything stays"


def test_a_reader_that_was_declared_after_the_writers_start_is_found_by_its_record(settings: SettingsFactory) -> None:
    home = settings()
    readers = TableReaders(home, "numbers", (), "id")
    batch_of(home, "late", 3, 20, 25)
    assert readers.needs() == [Need(19, 25)]
    assert TableReaders(home, "numbers", (), "another").needs() == []
    (home.state / "odd").mkdir()
    (home.state / "odd" / "stream.json").write_text("{")
    assert readers.needs() == [Need(19, 25)], "it may read anything"


def maintenance(home: Settings, unread: int | None) -> TableMaintenance:
    sink = open_sink(home, Declared("numbers"), "count")
    assert isinstance(sink, DeltaSink)
    return TableMaintenance(sink, home.table, 1, unread=lambda: [] if unread is None else [Need(unread, unread)])


def test_a_reader_keeps_no_more_than_the_bytes_of_files_that_left_the_table(settings: SettingsFactory) -> None:
    home = settings({"table.log_versions": 2, "table.log_retention": "0 seconds", "table.unread_max_mb": 1})
    home.tables.mkdir(parents=True)
    table = WrittenTable(home.tables / "numbers").make()
    for number in range(1, 6):
        table.batch(number)
    commit = table.path / "_delta_log" / f"{table.compact():020d}.json"
    table.batch(7)
    DeltaTable(table.path).create_checkpoint()
    lines = [json.loads(line) for line in commit.read_text().splitlines()]
    for line in lines:
        line.get("remove", {})["size"] = 1 << 20
    commit.write_text("\n".join(map(json.dumps, lines)))
    maintenance(home, 3).shorten_log()
    assert not TableVersions(table.path, "count").has(3)


@pytest.mark.parametrize(("unread", "there"), [(3, True), (None, False)])
def test_upkeep_leaves_the_versions_and_the_files_that_a_reader_needs(
    settings: SettingsFactory, unread: int | None, there: bool
) -> None:
    home = settings({"table.log_versions": 2, "table.log_retention": "0 seconds"})
    home = home.model_copy(update={"table": home.table.model_copy(update={"deleted_file_retention": timedelta(0)})})
    home.tables.mkdir(parents=True)
    table = WrittenTable(home.tables / "numbers").make()
    for number in range(1, 6):
        table.batch(number)
    compacted = table.compact()
    table.batch(7)
    DeltaTable(table.path).create_checkpoint()
    for file in (table.path / "_delta_log").iterdir():
        os.utime(file, (time.time(), time.time()))
    versions = TableVersions(table.path, "count")
    files = {number: versions.version(number).files[0].path for number in (2, 3, 4, 5)}
    content = versions.content(3)
    upkeep = maintenance(home, unread)
    upkeep.remove_unlisted()
    upkeep.shorten_log()
    assert {n: (table.path / path).exists() for n, path in files.items()} == dict.fromkeys((2, 3, 4, 5), there)
    assert versions.has(3) is there and versions.has(compacted + 1)
    assert (versions.first() <= 3) is there
    log = table.path / "_delta_log"
    assert not (log / f"{5:020d}.json").exists(), "the log is short in any case"
    if there:
        assert versions.content(3) == content and [v.number for v in versions.between(4, 7)] == [4, 5, 6]
        assert versions.time_of_next(3) == versions.time_of(3)
        upkeep.unread = list
        upkeep.shorten_log()
    assert not (table.path / "_unread").exists() and not versions.has(3)
    assert DeltaTable(table.path).version() == versions.newest()
