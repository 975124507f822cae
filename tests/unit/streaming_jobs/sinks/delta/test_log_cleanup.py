"""Clean-up of a table's log: it keeps every file that a version within the bounds, or the stream's position, needs.

Commits that readers have still to read are kept beside the log.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.delta_log import UNREAD, read_kept_commit
from streaming_jobs.settings import TableSettings
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.log_cleanup import LogFile, UnreadLog, expired, log_files
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory
from tests.unit.streaming_jobs.sinks.delta.test_maintenance import SCHEMA, age, append, logs

NOW = 1_000_000.0
HOUR = timedelta(hours=1)
UPKEEP = CommitProperties(custom_metadata={"userMetadata": LedgerEntry("upkeep", "s", "t", 1, -1).encode()})


def log(newest: int, checkpoints: Sequence[int], *, seconds_apart: float = 1.0) -> list[LogFile]:
    """A log of versions 0 to `newest`, the last one made now."""
    times = {version: NOW - (newest - version) * seconds_apart for version in range(newest + 1)}
    commits = [LogFile(Path(f"{v:020d}.json"), "commit", v, times[v]) for v in times]
    return commits + [LogFile(Path(f"{v:020d}.checkpoint.parquet"), "checkpoint", v, times[v]) for v in checkpoints]


def kept(files: list[LogFile], gone: Sequence[LogFile]) -> list[int]:
    return sorted(file.version for file in files if file.kind == "commit" and file not in gone)


@pytest.mark.parametrize(
    ("retention", "versions", "needed", "first_kept"),
    [
        (HOUR, 0, 100, 0),  # all of it is young
        (timedelta(seconds=30), 0, 100, 70),  # the checkpoint at 70 carries version 70, the oldest young one
        (timedelta(seconds=25), 0, 100, 70),
        (HOUR, 10, 100, 90),
        (HOUR, 12, 100, 80),  # version 89 has to be readable
        (timedelta(seconds=30), 60, 100, 70),  # whichever bound is reached first
        (timedelta(seconds=0), 1, 100, 100),
        (timedelta(seconds=30), 10, 64, 60),  # the stream's place outlasts both bounds
        (timedelta(seconds=30), 10, 0, 0),
        (timedelta(seconds=30), 10, None, 90),
    ],
)
def test_a_version_goes_when_a_bound_is_passed_and_a_checkpoint_carries_what_stays(
    retention: timedelta, versions: int, needed: int | None, first_kept: int
) -> None:
    files = log(100, range(10, 101, 10))
    gone = expired(files, now=NOW, retention=retention, versions=versions, needed=needed)
    assert kept(files, gone) == list(range(first_kept, 101))
    assert next(f.version for f in files if f.kind == "checkpoint" and f not in gone) == max(first_kept, 10)


def test_files_go_oldest_first_so_that_a_kill_leaves_no_gap_and_none_without_a_checkpoint_before_the_bound() -> None:
    gone = expired(log(100, (20, 50)), now=NOW, retention=HOUR, versions=50, needed=None)
    assert [file.version for file in gone] == sorted(file.version for file in gone) != []
    for checkpoints in ((), (95,)):
        assert not expired(log(100, checkpoints), now=NOW, retention=timedelta(seconds=10), versions=10, needed=None)


def test_only_names_that_are_known_are_seen(tmp_path: Path) -> None:
    version = f"{7:020d}"
    known = {
        f"{version}.json": "commit",
        f"{version}.checkpoint.parquet": "checkpoint",
        f"{version}.checkpoint.0000000001.0000000002.parquet": "beside",
        f"{version}.crc": "beside",
        f"{version}.json#1": "beside",
        f"{2:020d}.{version}.compacted.json": "beside",
    }
    others = ["_last_checkpoint", f"{version}.checkpoint.5b6f.json", "7.json", f"{version}.json.mine", "_commits"]
    for name in [*known, *others]:
        (tmp_path / name).touch()
    assert {f.path.name: f.kind for f in log_files(tmp_path)} == known
    assert {f.version for f in log_files(tmp_path)} == {7}


@pytest.fixture
def sink(settings: SettingsFactory) -> DeltaSink:
    return ensure_sink(settings({"table.checkpoint_interval": 10}), Declared("t"), "s", SCHEMA, generation=1)


def test_a_busy_table_keeps_so_many_versions_and_all_of_its_rows(sink: DeltaSink) -> None:
    upkeep = TableMaintenance(sink, TableSettings(log_versions=30), 1)
    for batch in range(150):
        append(sink, batch)
        upkeep.after_commit()
    assert 30 <= len(logs(sink)) < 30 + 10 + 50
    at = DeltaTable(sink.path).version()
    assert DeltaTable(sink.path, version=at - 29).version() == at - 29
    assert sorted(DeltaTable(sink.path).to_pyarrow_table()["n"].to_pylist()) == list(range(150))


def test_the_streams_place_stays_readable_however_old_it_is(sink: DeltaSink) -> None:
    for batch in range(12):
        append(sink, batch)
    place = sink.handle.version()
    for _ in range(25):  # nothing of the stream's, but commits all the same
        sink.commit_actions([], UPKEEP)
    age(logs(sink), hours=48)
    upkeep = TableMaintenance(sink, TableSettings(log_versions=5), 1)
    assert upkeep.shorten_log() == 9  # the commits before the checkpoint of version 9, and nothing after it
    commit, foreign = newest(sink.path, "s")
    assert commit is not None and commit.version == place and foreign == []
    assert [c.version for c in walk(sink.path)][-1] == 9


def test_a_table_without_an_entry_of_the_stream_keeps_its_log(sink: DeltaSink) -> None:
    for _ in range(25):
        sink.commit_actions([], UPKEEP)
    age(logs(sink), hours=48)
    assert TableMaintenance(sink, TableSettings(log_versions=5), 1).shorten_log() == 0


PER_CHECKPOINT = 50


def lay(table: Path, versions: range) -> None:
    """Commits that remove a file of 10 bytes each, and a checkpoint at each 50th."""
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    for v in versions:
        (log / f"{v:020d}.json").write_text(json.dumps({"remove": {"path": f"{v}.parquet", "size": 10}}) + "\n")
        if v % PER_CHECKPOINT == 0:
            (log / f"{v:020d}.checkpoint.parquet").write_text("")


def shorten(table: Path, kept: UnreadLog, start: int, first: int | None) -> None:
    """What upkeep does with the files before version `start`."""
    files = sorted(log_files(table / "_delta_log"), key=lambda file: (file.version, file.path.name))
    gone = [file for file in files if file.version < start]
    kept.keep(gone, first)
    for file in gone:
        file.path.unlink(missing_ok=True)
    kept.trim(first, start)


def names(folder: Path, kind: str) -> list[int]:
    return sorted(file.version for file in log_files(folder) if file.kind == kind)


def test_what_a_reader_needs_moves_out_of_the_log_with_the_checkpoint_below_and_not_behind_a_gap(
    tmp_path: Path,
) -> None:
    lay(tmp_path, range(301))
    kept = UnreadLog(tmp_path)
    shorten(tmp_path, kept, 250, 120)
    assert names(tmp_path / "_delta_log", "commit") == list(range(250, 301))
    assert names(kept.log, "commit") == list(range(100, 250))
    assert names(kept.log, "checkpoint") == [100]
    assert read_kept_commit(tmp_path, 120).removes[0]["path"] == "120.parquet"
    commits = UnreadLog(tmp_path).before(log_files(tmp_path / "_delta_log"))
    assert [c.version for c in commits] == list(range(300, 99, -1)), "another driver finds the same"
    removal = kept.removal(commits[-1])
    assert (removal.names, removal.size) == ({"100.parquet"}, 10)
    (kept.log / f"{200:020d}.json").unlink()
    found: list[LogFile] = UnreadLog(tmp_path).before(log_files(tmp_path / "_delta_log"))
    assert found[-1].version == 201


@pytest.mark.parametrize("first", [None, 250, 260])
def test_nothing_is_kept_once_no_reader_is_behind_the_log(tmp_path: Path, first: int | None) -> None:
    lay(tmp_path, range(301))
    kept = UnreadLog(tmp_path)
    shorten(tmp_path, kept, 200, 120)
    assert kept.log.is_dir()
    shorten(tmp_path, kept, 250, first)
    assert not (tmp_path / UNREAD).exists()
    assert kept.before(log_files(tmp_path / "_delta_log"))[-1].version == 250


def test_a_reader_that_stays_behind_keeps_no_more_than_it_needs(tmp_path: Path) -> None:
    kept = UnreadLog(tmp_path)
    for start in range(500, 4_001, 500):
        lay(tmp_path, range(start - 500, start + 1))
        shorten(tmp_path, kept, start, max(start - 700, 0))
        oldest = names(kept.log, "commit")[0]
        assert start - 700 - 1_500 <= oldest <= max(start - 700, 0)
        assert oldest in names(kept.log, "checkpoint")
        found = kept.before(log_files(tmp_path / "_delta_log"))
        assert [commit.version for commit in found] == list(range(start, oldest - 1, -1))
