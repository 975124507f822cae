"""A driver whose table another one has taken over commits nothing and deletes nothing, whenever it wakes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from streaming_jobs.errors import Fenced
from streaming_jobs.settings import TableSettings
from streaming_jobs.sinks.delta import maintenance, orphan_files, writers
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.testing import MemoryLeases
from tests.support.delta_table import ROWS, TABLE, Make, rows_in
from tests.support.worlds import STREAM, append, entry


@pytest.fixture
def take_over(make: Make) -> Callable[[DeltaSink], DeltaSink]:
    """Another driver that takes the table over: the lease before has run out."""
    leases = MemoryLeases(expires=True)

    def taken(sink: DeltaSink | None = None) -> DeltaSink:
        leases.held.clear()
        sink = sink or make()
        sink.under(leases.acquire(STREAM, purpose="session", wait=0), 1)
        return sink

    return taken


Take = Callable[..., DeltaSink]


def test_a_takeover_inside_the_commit_stops_it(take_over: Take) -> None:
    paused = take_over()

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        take_over()
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    with pytest.raises(Fenced, match=f"table {TABLE} is in epoch 2"):
        paused.commit(entry(0), write)
    assert rows_in(paused) == []


def test_of_two_that_take_over_at_once_the_later_lease_wins(
    take_over: Take, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower, commit, later = make(), DeltaSink.commit_actions, list[DeltaSink]()

    def overtaken(sink: DeltaSink, *arguments: Any) -> None:
        if sink is slower and not later:
            later.append(take_over())
        commit(sink, *arguments)

    monkeypatch.setattr(DeltaSink, "commit_actions", overtaken)
    with pytest.raises(Fenced):
        take_over(slower)
    append(later[0], entry(0), ROWS)
    assert len(rows_in(slower)) == 2


def test_the_epoch_is_not_read_again_after_commits_of_this_driver(
    take_over: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, asked, read = take_over(), list[str](), DeltaTable.transaction_version
    append(sink, entry(0), ROWS)
    monkeypatch.setattr(DeltaTable, "transaction_version", lambda table, app: asked.append(app) or read(table, app))
    for batch in range(1, 5):
        append(sink, entry(batch), ROWS)
    assert not [app for app in asked if "epoch" in app]
    take_over()
    with pytest.raises(Fenced):
        append(sink, entry(5), ROWS)
    assert [app for app in asked if "epoch" in app], "a commit of somebody else is read"


def old_file(sink: DeltaSink, name: str) -> Path:
    path = sink.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"something")
    os.utime(path, (0, 0))
    return path


@pytest.mark.parametrize("task", ["remove_unlisted", "shorten_log", "compact", "forget"])
def test_upkeep_that_wakes_between_its_look_and_its_deletes_deletes_nothing(
    take_over: Take, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    sink = take_over()
    for batch in range(4):
        append(sink, entry(batch), ROWS)
    unlisted = old_file(sink, "g0001/b000000009-dead/part-0.parquet")
    DeltaTable(sink.path).create_checkpoint()
    upkeep = TableMaintenance(sink, TableSettings(log_versions=1, deleted_file_retention="0 s"), 1)  # type: ignore[arg-type]

    def paused(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            take_over()
            return found

        return run

    monkeypatch.setattr(orphan_files, "due", paused(orphan_files.due))
    monkeypatch.setattr(maintenance, "expired", paused(maintenance.expired))
    if task in ("compact", "forget"):  # these delete nothing after their commit
        take_over()
    calls = {
        "remove_unlisted": upkeep.remove_unlisted,
        "shorten_log": upkeep.shorten_log,
        "compact": upkeep.compact,
        "forget": lambda: upkeep.forget(timedelta(0)),
    }
    before = {path for path in sink.path.rglob("*") if path.is_file()}
    assert calls[task]() == 0
    assert "epoch" in next(iter(upkeep.put_off.values()))
    assert before <= {path for path in sink.path.rglob("*") if path.is_file()} and unlisted.exists()


def test_files_of_a_batch_that_the_next_driver_is_writing_are_no_leftovers(take_over: Take) -> None:
    paused = take_over()
    take_over()
    staged = old_file(paused, "g0001/b000000001-next/part-0.parquet")
    with pytest.raises(Fenced):
        writers._remove_leftovers(paused, paused.path / "g0001", "b000000001-")
    assert staged.exists()
