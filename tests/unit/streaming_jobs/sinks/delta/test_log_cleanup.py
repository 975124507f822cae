"""Clean-up of a table's log: it keeps every file that a version within the bounds, or the stream's position, needs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import TableSettings
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.log_cleanup import LogFile, expired, log_files
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


def test_without_a_checkpoint_before_the_bound_nothing_goes() -> None:
    for checkpoints in ((), (95,)):
        assert not expired(log(100, checkpoints), now=NOW, retention=timedelta(seconds=10), versions=10, needed=None)


def test_files_go_oldest_first_so_that_a_kill_leaves_no_gap() -> None:
    gone = expired(log(100, (20, 50)), now=NOW, retention=HOUR, versions=50, needed=None)
    assert [file.version for file in gone] == sorted(file.version for file in gone) != []


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
