"""Commits that are kept for readers, beside a log that stays short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streaming_jobs.platform.delta_log import UNREAD, read_kept_commit
from streaming_jobs.sinks.delta.log_cleanup import LogFile, log_files
from streaming_jobs.sinks.delta.unread_log import UnreadLog

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
