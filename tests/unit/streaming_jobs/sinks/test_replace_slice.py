"""The commit of a rebuilt slice: precise, once, beside batches, and never on a table that is another one by now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from deltalake import DeltaTable, write_deltalake

from streaming_jobs.catalog.snapshots import read_snapshot
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import TransientError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.runtime import slice_commits
from streaming_jobs.runtime.crash_points import SLICE_POINTS
from streaming_jobs.runtime.slice_commits import PUT_OFF, SliceCommits, carry_out
from streaming_jobs.sinks.delta.log import noted, walk
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.slice_staging import STAGED
from streaming_jobs.sinks.sliced import SliceOutdated
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.state import savepoints
from streaming_jobs.state.redrive_requests import RedriveRequests
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.testing import MemoryLeases
from tests.support import ROOT
from tests.support.days import Days, Topics, guarded, range_of
from tests.support.redrives import (
    QUARANTINE,
    asked,
    quarantined,
    record,
    with_letters,
    with_quarantine,
    with_quarantined,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def life(tmp_path: Path) -> Days:
    return Days.of(tmp_path, 5)


def replace(life: Days, name: str, day: int, n: int) -> int:
    return commit(life, life.rebuilt(name, day, n))


def commit(life: Days, request: SliceCommitRequest) -> int:
    return life.sliced().replace(request.change, request.ledger, lambda _: None)


def carry_out_all(life: Days) -> None:
    carry_out(life.requests, open_tables(life.settings, life.stream))


def commits_of(life: Days, **options: Any) -> SliceCommits:
    redrives = RedriveRequests.of(life.settings, life.stream.name)
    return SliceCommits(life.requests, redrives, open_tables(life.settings, life.stream), **options)


def ended(life: Days) -> SliceCommitRequest:
    outcome = life.requests.outcome("a")
    assert outcome is not None
    return outcome


def slices_in(life: Days) -> list[str | None]:
    commits = walk(life.sink().path)
    return [c.entry.plan for c in commits if c.entry is not None and c.entry.kind == "slice"]


@pytest.mark.parametrize("compacted", [False, True], ids=["files of its own", "a file with other rows"])
def test_only_the_rows_of_the_slice_are_other_rows_once_and_the_position_stays(life: Days, *, compacted: bool) -> None:
    if compacted:
        TableMaintenance(life.sink(), life.settings.table, 1).compact()
        assert len(life.sink().handle.file_uris()) == 1
    before, request = life.at(), life.rebuilt("a", 2, 77)
    assert len({commit(life, request) for _ in range(3)}) == 1 and slices_in(life) == ["a"]
    assert life.numbers() == {0: {0}, 1: {1}, 2: {77}, 3: {3}, 4: {4}}
    assert life.at() == before


def test_a_slice_without_rows_gets_rows_and_every_file_stays(life: Days) -> None:
    files = set(life.sink().handle.file_uris())
    replace(life, "a", 7, 77)
    assert life.numbers()[7] == {77} and files < set(life.sink().handle.file_uris())


def test_bounds_of_the_new_files_find_their_rows(life: Days) -> None:
    replace(life, "a", 2, 77)
    table = DeltaTable(life.sink().path)
    low, _ = range_of(2).bounds
    found = table.to_pyarrow_table(filters=[("at", ">=", low), ("n", "=", 77)])
    assert found.num_rows == 24


def test_preflight_and_savepoints_take_a_rebuilt_slice_for_the_streams_own(life: Days) -> None:
    replace(life, "a", 2, 77)
    assert not check_start(take_snapshot(life.settings, life.stream, Topics()))
    taken = savepoints.take(life.settings, life.stream, life.record, 4, "purpose")
    assert taken.tables[0].version == life.stored().version
    life.batch(5)
    assert life.numbers()[2] == {77} and life.numbers()[5] == {5}


def test_batches_that_came_meanwhile_stay_also_with_rows_of_the_slice(life: Days) -> None:
    request = life.rebuilt("a", 2, 77)
    life.batch(5)
    commit(life, request)
    assert life.numbers() == {0: {0}, 1: {1}, 2: {77}, 3: {3}, 4: {4}, 5: {5}}


def test_after_a_compaction_a_slice_or_a_recovery_it_has_to_be_rebuilt(life: Days) -> None:
    compacted, other, fenced = (life.rebuilt(name, day, 77) for name, day in (("a", 2), ("b", 8), ("c", 9)))
    TableMaintenance(life.sink(), life.settings.table, 1).compact()
    with pytest.raises(SliceOutdated, match="were compacted"):
        commit(life, compacted)
    replace(life, "d", 8, 78)  # a day without rows: no file tells that its rows are there by now
    with pytest.raises(SliceOutdated, match="slice"):
        commit(life, other)
    request = life.rebuilt("e", 9, 79)
    life.sink().commit(LedgerEntry("fence", "days", "days", 2, -1, plan="p"), lambda *_: None)
    with pytest.raises(SliceOutdated, match="recovery"):
        commit(life, request)
    assert slices_in(life) == ["d"] and fenced.change


def test_what_is_staged_is_in_no_reader_s_way_and_removed_by_the_next_rebuild(life: Days) -> None:
    life.rebuilt("killed", 2, 77)
    maintenance = TableMaintenance(life.sink(), life.settings.table, 1)
    assert maintenance.remove_unlisted() == 0 and life.numbers()[2] == {2}
    staged = life.sink().path / STAGED
    life.sliced().remove_staged({"killed"})
    assert [each.name for each in staged.iterdir()] == ["killed"]
    life.sliced().remove_staged(set())
    assert not list(staged.iterdir())


@pytest.mark.parametrize("point", SLICE_POINTS[2:])
def test_a_kill_at_any_point_of_the_commit_leaves_the_slice_once(life: Days, point: str) -> None:
    life.requests.ask(life.rebuilt("a", 2, 77))
    driver = [sys.executable, "-m", "tests.support.days", str(life.settings.home)]
    environment = {**os.environ, "RECOURSE_CRASH": f"days:{point}:0", "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(driver, cwd=ROOT, env=environment, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert life.numbers()[2] == ({2} if point == "slice_linked" else {77})
    carry_out_all(life)
    assert life.numbers() == {0: {0}, 1: {1}, 2: {77}, 3: {3}, 4: {4}} and slices_in(life) == ["a"]
    assert ended(life).state == "committed" and ended(life).version == life.sink().handle.version()
    assert not life.requests.waiting()


def test_a_damaged_request_is_set_aside_and_the_others_are_carried_out(life: Days) -> None:
    life.requests.ask(life.rebuilt("b", 2, 77))
    waiting = life.requests.folder / "waiting"
    (waiting / "a.json").write_text('{"id": "a"}')
    carry_out_all(life)
    assert slices_in(life) == ["b"] and life.numbers()[2] == {77}
    assert not life.requests.any_waiting() and (waiting / "a.unreadable").exists()


def test_a_batch_begins_with_the_slices_that_wait(life: Days) -> None:
    commits = commits_of(life)
    life.requests.ask(life.rebuilt("a", 2, 77))
    commits.around(lambda *_: life.batch(5))(None, 5)  # type: ignore[arg-type]
    assert [c.entry.kind for c in walk(life.sink().path) if c.entry][:2] == ["batch", "slice"]


def test_the_driver_commits_between_batches_and_never_within_one(life: Days) -> None:
    commits = commits_of(life)
    during: list[object] = []

    def batch(_: object, number: int) -> None:
        life.requests.ask(life.rebuilt("a", 2, 77))
        commits.look()
        during.append((number, life.requests.outcome("a")))

    commits.around(batch)(None, 5)  # type: ignore[arg-type]
    assert during == [(5, None)]
    commits.look()
    assert life.numbers()[2] == {77}


def test_a_request_that_nobody_waits_for_any_more_expires(life: Days) -> None:
    life.requests.ask(life.rebuilt("a", 2, 77, seconds=-1.0))
    carry_out_all(life)
    assert ended(life).state == "expired" and life.numbers()[2] == {2}
    assert not ended(life).change and ended(life).at <= time.time()


def test_a_change_is_withdrawn_unless_it_is_claimed_and_a_withdrawn_one_is_never_committed(life: Days) -> None:
    request = life.rebuilt("a", 2, 77)
    life.requests.ask(request)
    assert life.requests.claim(request)
    life.requests.withdraw(request, "not committed in time")
    assert life.requests.outcome("a") is None, "its driver may just commit it"
    carry_out_all(life)
    assert ended(life).state == "committed" and life.numbers()[2] == {77}

    late = life.rebuilt("b", 2, 78)
    life.requests.ask(late)
    (waiting,) = life.requests.waiting()
    life.requests.withdraw(late, "not committed in time")
    assert not life.requests.claim(waiting)
    carry_out_all(life)
    outcome = life.requests.outcome("b")
    assert outcome is not None and (outcome.state, outcome.reason) == ("expired", "not committed in time")
    assert life.numbers()[2] == {77} and not life.requests.any_waiting()


def test_a_withdrawal_that_was_killed_is_finished_without_a_commit(life: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    request = life.rebuilt("a", 2, 77)
    life.requests.ask(request)
    with monkeypatch.context() as patch:
        patch.setattr(SliceRequests, "end", lambda *_: None)
        life.requests.withdraw(request, "not committed in time")
    assert life.requests.outcome("a") is None
    carry_out_all(life)
    assert ended(life).state == "expired" and life.numbers()[2] == {2} and not life.requests.any_waiting()


def test_a_failure_is_the_outcome_of_the_slice_and_ends_nothing(life: Days) -> None:
    life.requests.ask(life.rebuilt("a", 2, 77))
    life.sliced().remove_staged(set())
    commits_of(life).look()
    assert ended(life).state == "outdated" and "is gone" in ended(life).reason


def test_a_savepoint_from_before_a_slice_is_taken_anew(life: Days) -> None:
    """A slice moves no batch; what an abort goes back to must have its rows all the same."""
    before = savepoints.take(life.settings, life.stream, life.record, 4, "code")
    life.requests.ask(life.rebuilt("a", 2, 77))
    carry_out_all(life)
    again = savepoints.take(life.settings, life.stream, life.record, 4, "recovery")
    assert again.id == before.id and again.tables[0].version == before.tables[0].version + 1


def test_a_failure_after_the_commit_is_no_failure_of_the_slice(life: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(point: str, **_: object) -> None:
        if point == "slice_committed":
            raise OSError("no space left on device")

    monkeypatch.setattr(slice_commits, "crash_point", full_disk)
    life.requests.ask(life.rebuilt("a", 2, 77))
    table = open_tables(life.settings, life.stream)["days"]
    done = slice_commits._carried_out(life.requests, life.requests.waiting()[0], {"days": table})
    assert (done.state, done.version) == ("committed", life.sink().handle.version())


def test_a_commit_before_a_batch_counts_as_a_part_of_it(life: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is to stop has not ended while its thread commits a slice."""
    commits = commits_of(life)
    seen: list[bool] = []

    def batch(*_: object) -> None:
        seen.append(batch.in_batch)  # type: ignore[attr-defined]

    monkeypatch.setattr(slice_commits, "carry_out", lambda *_: batch())
    life.requests.ask(life.rebuilt("a", 2, 77))
    commits.around(batch)(None, 5)  # type: ignore[arg-type]
    assert seen == [True, False]


def test_requests_that_cannot_be_carried_out_are_looked_at_again_after_a_while(
    life: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tries = 0.0, 0

    def refused(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise PermissionError("of another user")

    monkeypatch.setattr(slice_commits, "carry_out", refused)
    commits = commits_of(life, clock=lambda: now)
    life.requests.ask(life.rebuilt("a", 2, 77))
    for _ in range(9):
        commits.look()
    assert tries == 1
    now = slice_commits.PUT_OFF + 1
    commits.look()
    assert tries == 2


def test_a_slice_that_another_process_commits_does_not_fence_the_running_driver(life: Days) -> None:
    running = life.sink()
    running.under(MemoryLeases(expires=True).acquire("days", purpose="session", wait=0), 1)
    replace(life, "a", 2, 77)
    assert life.sink().epoch == running.epoch == 1 and not running.holds(life.entry(5))
    assert running.mark(life.entry(5)) is not None


# A slice with what the quarantine of its table has of it: one change, the quarantine's commit first.


@pytest.fixture
def both(tmp_path: Path) -> Days:
    """Day 2 has quarantined rows of hours 50 and 51, and day 3 one of hour 80."""
    return with_quarantined(Days.of(tmp_path, 5, guarded()), 50, 51, 80)


def ask_both(life: Days, name: str = "a") -> None:
    """Day 2 has the number 77, and hours 51 and 52 are set aside."""
    life.requests.ask(with_quarantine(life.rebuilt(name, 2, 77), life, 2, 51, 52))


AFTER = {0: {0}, 1: {1}, 2: {77}, 3: {3}, 4: {4}}


@pytest.mark.parametrize(
    ("point", "aside", "table"),
    [
        ("slice_linked:0", [50, 51, 80], 2),
        ("slice_committed:0", [51, 52, 80], 2),
        ("slice_linked:1", [51, 52, 80], 2),
        ("slice_committed:1", [51, 52, 80], 77),
        ("slice_ended:0", [51, 52, 80], 77),
    ],
)
def test_a_kill_between_the_quarantine_and_the_table_is_carried_on(
    both: Days, point: str, aside: list[int], table: int
) -> None:
    ask_both(both)
    driver = [sys.executable, "-m", "tests.support.days", str(both.settings.home), "guarded"]
    environment = {**os.environ, "RECOURSE_CRASH": f"days:{point}", "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(driver, cwd=ROOT, env=environment, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (quarantined(both), both.numbers()[2]) == (aside, {table})
    carry_out_all(both)
    assert quarantined(both) == [51, 52, 80] and both.numbers() == AFTER and slices_in(both) == ["a"]
    assert not both.requests.waiting()
    ended = {each.table: each for each in both.requests.history()}
    assert {(each.state, each.version) for each in ended.values()} == {
        ("committed", both.stored(name).version) for name in ("days", QUARANTINE)
    }
    assert not any(each.quarantine or each.change for each in ended.values())
    assert not check_start(take_snapshot(both.settings, both.stream, Topics()))


@pytest.mark.parametrize("outdated", ["days", QUARANTINE, "staged"])
def test_a_slice_that_one_of_both_cannot_take_is_in_neither(both: Days, outdated: str) -> None:
    ask_both(both)
    if outdated == "staged":
        both.sliced().remove_staged(set())
    else:
        rewrite(both, outdated, "upkeep" if outdated == "days" else "redrive")
    carry_out_all(both)
    assert ended(both).state == "outdated" and quarantined(both) == [50, 51, 80] and both.numbers()[2] == {2}


def rewrite(life: Days, table: str, kind: Literal["upkeep", "redrive"]) -> None:
    """All rows of a table in other files, by a commit of that kind."""
    folder, entry = life.settings.tables / table, LedgerEntry(kind, "days", table, 1, -1, plan="x")
    write_deltalake(folder, DeltaTable(folder).to_pyarrow_table(), mode="overwrite", commit_properties=noted(entry))


def begun_with(both: Days, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slice is in the quarantine, and not in the table."""
    ask_both(both, name)

    def killed(point: str, *, batch: int, **_: object) -> None:
        if (point, batch) == ("slice_committed", 0):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(slice_commits, "crash_point", killed)
        carry_out_all(both)
    assert quarantined(both) == [51, 52, 80] and both.numbers()[2] == {2}


def test_a_slice_that_was_begun_goes_before_a_redrive(both: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_with(both, "a", monkeypatch)
    with_letters(both, 100)
    asked(both, "r", [record(100)])
    commits_of(both).look()
    there = set(both.stored().readable().to_pyarrow_table()["n"].to_pylist())
    assert ended(both).state == "committed" and there == {0, 1, 77, 3, 4, 100}


def test_a_slice_whose_table_has_changed_after_its_quarantine_is_rebuilt_and_snapshots_go_on(
    both: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "days-20260101T000000000000"
    begun_with(both, name, monkeypatch)
    topology = Topology({"days": both.stream})
    before = {name: each.version for name, each in read_snapshot(both.settings, topology).items()}
    assert before[QUARANTINE] == both.stored(QUARANTINE).version - 1, "the slice is in both, or in none"
    rewrite(both, "days", "upkeep")
    carry_out_all(both)
    outcomes = {each.table: each.state for each in both.requests.history()}
    assert outcomes == {"days": "outdated", QUARANTINE: "committed"}, "as verify counts the rows"
    after = {name: each.version for name, each in read_snapshot(both.settings, topology).items()}
    assert after == {each: both.stored(each).version for each in after}


def test_while_the_table_lacks_a_slice_that_its_quarantine_has_no_batch_begins(
    both: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_both(both)
    commits, batches = commits_of(both, clock=lambda: 0.0), list[int]()

    def full_disk(point: str, stream: str, batch: int) -> None:
        if (point, batch) == ("slice_linked", 1):
            raise OSError("no space left on device")

    def batch(_: object, number: int) -> None:
        batches.append(number)

    with monkeypatch.context() as patched:
        patched.setattr(slice_commits, "crash_point", full_disk)
        with pytest.raises(TransientError, match="not in the table and its quarantine"):
            commits.around(batch)(None, 5)  # type: ignore[arg-type]
    assert not batches and quarantined(both) == [51, 52, 80] and both.numbers()[2] == {2}
    commits.clock = lambda: PUT_OFF + 1.0
    much_later = time.time() + 3600
    monkeypatch.setattr(slice_commits.time, "time", lambda: much_later)  # a change that was begun does not expire
    commits.around(batch)(None, 5)  # type: ignore[arg-type]
    assert batches == [5] and both.numbers() == AFTER and ended(both).state == "committed"
