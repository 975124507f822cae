"""The timeline: every batch is in one group, every mark is in its place, and a long ledger is read quickly."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from reprocessing.plan import plan_file
from reprocessing.timeline.marks import Mark, marks_of
from reprocessing.timeline.timeline import BatchGroup, Timeline, item_json, of_days, read_batches, timeline_of
from streaming_jobs.settings import Settings
from streaming_jobs.state import savepoints, stream_history, stream_record
from streaming_jobs.state.ledger_file import lines_of
from streaming_jobs.state.status import Status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import CodeSince
from tests.support.objects import path_of
from tests.support.reports import plan_of
from tests.support.timelines import MONDAY, NEW, OLD, lay_deploys, lay_ledger, lay_lines, lay_sessions, ledger_line
from tests.support.worlds import PRIMARY, STREAM, Disk, record

pytestmark = pytest.mark.slow

DAY = 86_400.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


def the_day(settings: Settings) -> Timeline:
    return timeline_of(settings, STREAM, since=MONDAY, until=MONDAY + DAY)


def groups(timeline: Timeline) -> list[BatchGroup]:
    return [item for item in timeline.items() if isinstance(item, BatchGroup)]


def texts(timeline: Timeline) -> list[str]:
    return [item.text for item in timeline.items() if isinstance(item, Mark)]


def test_every_batch_of_a_day_is_in_one_group_and_a_day_fits_on_a_screen(settings: Settings) -> None:
    lay_ledger(settings, (ledger_line(n, MONDAY + 5 + n * 10) for n in range(8_640)))
    timeline = the_day(settings)
    assert len(groups(timeline)) == 24
    assert sum(each.batches for each in groups(timeline)) == 8_640
    assert [each.first for each in groups(timeline)[1:]] == [each.last + 1 for each in groups(timeline)[:-1]]
    first = groups(timeline)[0]
    assert (first.batches, first.records, first.rows, first.versions) == (360, 5_400, 5_400, (1, 360))
    assert first.seconds == pytest.approx(0.25) and first.slowest == 0.25
    assert first.rows_per_minute == pytest.approx(90, rel=0.01)


def test_a_group_ends_with_its_code_and_its_generation(settings: Settings) -> None:
    lines = [ledger_line(n, MONDAY + n, code=OLD if n < 3 else NEW, generation=1 if n < 6 else 2) for n in range(9)]
    lay_ledger(settings, lines)
    assert [(g.first, g.last, g.code, g.generation) for g in groups(the_day(settings))] == [
        (0, 2, OLD, 1),
        (3, 5, NEW, 1),
        (6, 8, NEW, 2),
    ]


def test_batches_of_a_replay_are_apart_and_have_no_version(settings: Settings) -> None:
    replayed = [ledger_line(n, MONDAY + 10 + n, generation=2, versions={}) for n in range(2)]
    lay_ledger(settings, [ledger_line(0, MONDAY + 1), *replayed, ledger_line(2, MONDAY + 13, generation=2)])
    assert [(g.replay, g.batches, g.versions) for g in groups(the_day(settings))] == [
        (False, 1, (1, 1)),
        (True, 2, None),
        (False, 1, (3, 3)),
    ]


def test_a_repeated_batch_counts_once_and_lines_cut_off_are_left_out() -> None:
    lines = [ledger_line(0, MONDAY, rows=1), ledger_line(0, MONDAY + 1, rows=2), ledger_line(1, MONDAY + 2)]
    read = of_days([lines_of(STREAM, io.BytesIO("\n".join([*lines, lines[0][:40], ""]).encode()))], MONDAY)
    assert [(each.batch, each.rows) for each in read.batches] == [(0, 2), (1, 15)]


def test_the_newest_batches_and_days_before_them(settings: Settings) -> None:
    lay_ledger(settings, (ledger_line(n, MONDAY - DAY + n * 3_600) for n in range(48)))
    assert [each.batch for each in read_batches(settings, STREAM, MONDAY + 3_600).batches] == list(range(25, 48))
    assert [each.batch for each in read_batches(settings, STREAM, 0.0, last=30).batches] == list(range(18, 48))
    assert read_batches(settings, STREAM, MONDAY + 10 * DAY).newest == MONDAY + 23 * 3_600
    newest = timeline_of(settings, STREAM, since=0.0, until=MONDAY + DAY, last=2)
    assert newest.since == MONDAY + 22 * 3_600 - 0.25


def test_a_hundred_thousand_batches_are_read_and_grouped(settings: Settings) -> None:
    lay_ledger(settings, (ledger_line(n, MONDAY + n * 0.8) for n in range(100_000)))
    assert sum(each.batches for each in groups(the_day(settings))) == 100_000


def test_deploys_and_changes_of_code_are_marks_and_a_deployed_version_is_one_mark(settings: Settings) -> None:
    code = [(OLD, 0, 0.0), (NEW, 40, 100.0), ("77c0ffee1234", 70, 200.0)]
    made = tuple(CodeSince(name, "0.1.0", 1, batch, MONDAY + at) for name, batch, at in code)
    stream_record.save(settings, record(code=made))
    lay_deploys(settings, (MONDAY + 90, OLD, f"{NEW} (0.1.0)"))
    assert texts(the_day(settings)) == [
        "code fd2f87f7, the first, from g0001 batch 0 on",
        "deploy fd2f87f7 -> 0a1b2c3d by anna",
        "code 0a1b2c3d -> 77c0ffee, from g0001 batch 70 on; no deploy command",
    ]


def test_a_file_of_deploys_that_is_cut_off_or_wrong_gives_the_other_ones(settings: Settings) -> None:
    path = path_of(StreamFolder.of(settings, STREAM).make().deploys)
    whole = json.dumps({"at": MONDAY, "from": None, "to": NEW})
    path.write_text(f'[1]\n{{"at": "x", "to": "y"}}\n{whole}\n{whole[:9]}')
    assert [mark.text for mark in marks_of(settings, STREAM)] == ["deploy 0a1b2c3d"]


def test_a_version_in_a_deploy_may_be_text_a_pair_or_an_object(settings: Settings) -> None:
    values = [f"{NEW} (0.1.0)", [NEW, "0.1.0"], {"hash": NEW, "package": "0.1.0"}, NEW[:8]]
    stream_record.save(settings, record(code=(CodeSince(NEW, "0.1.0", 1, 40, MONDAY + 9),)))
    for to in values:
        lay_lines(
            path_of(StreamFolder.of(settings, STREAM).deploys), [{"at": MONDAY, "from": None, "to": to, "by": "anna"}]
        )
        assert texts(the_day(settings)) == ["deploy 0a1b2c3d by anna"]


def test_starts_and_ends_of_sessions_part_the_batches_and_a_kill_is_named(settings: Settings) -> None:
    lay_ledger(settings, (ledger_line(n, MONDAY + 100 * n) for n in range(6)))
    lay_sessions(settings, (MONDAY + 150, "stopped"), (MONDAY + 250, "started"), (MONDAY + 350, "started"))
    assert texts(the_day(settings)) == [
        "stopped",
        "session started, process 4712",
        "session started, process 4713; process 4712, before it, ended without a word",
    ]
    assert [(g.first, g.last) for g in groups(the_day(settings))] == [(0, 1), (2, 2), (3, 3), (4, 5)]


def test_a_stream_that_fails_again_and_again_is_a_line_per_period(settings: Settings) -> None:
    lay_ledger(settings, [ledger_line(0, MONDAY), ledger_line(1, MONDAY + 9_000)])
    lay_sessions(settings, *((MONDAY + 60 + 10 * n, "restarted") for n in range(400)))
    items = the_day(settings).items()
    assert len(items) <= 5
    counted = sum(item.session_events for item in items if isinstance(item, BatchGroup))
    left = [item.text for item in items if isinstance(item, Mark)]
    assert left == ["restarted after an error (and 45 more before it)"]
    assert counted + 46 == 400


def test_without_a_file_of_sessions_the_newest_start_is_known(settings: Settings) -> None:
    from streaming_jobs.state.status import write_status

    write_status(settings, Status(STREAM, pid=12, started_at=MONDAY + 5))
    assert texts(the_day(settings)) == ["session started, process 12"]
    stream_history.note_session_event(settings, Status(STREAM, pid=13), "stopped")
    assert [mark.what for mark in marks_of(settings, STREAM)] == ["stopped"]


def test_savepoints_by_the_clock_are_counted_and_others_are_marks(tmp_path: Path) -> None:
    disk = Disk(Settings(home=tmp_path)).open().run(0, 1)
    savepoints.take(disk.settings, disk.stream, disk.record, 1, "time")
    disk.run(2)
    savepoints.take(disk.settings, disk.stream, disk.record, 2, "purpose", "before the prices")
    now = time.time()
    timeline = timeline_of(disk.settings, STREAM, since=now - 60, until=now + 60)
    assert texts(timeline)[-1] == "savepoint g0001-b000000002 (purpose): before the prices"
    assert sum(each.savepoints for each in groups(timeline)) == 1
    assert timeline.batches[-1].version == disk.sinks[PRIMARY].handle.version()
    assert timeline.batches[1].offsets == {"things": {"start": {"0": 10, "1": 5}, "end": {"0": 20, "1": 10}}}


def test_a_recovery_is_planned_begun_published_and_finished(settings: Settings) -> None:
    plan = plan_of()
    one = replace(plan.streams[0], stream=STREAM, id="parity-0001", staging="parity-0001")
    plan = plan_file.sealed(replace(plan, id="parity-0001", streams=(one,), made_at=MONDAY + 1))
    plan_file.save(settings, plan)
    steps = [
        ("take_savepoint", "begun"),
        ("take_savepoint", "done"),
        ("confirm", "failed"),
        ("publish", "done"),
        ("clean_up", "done"),
    ]
    found = {"error": "the plan is not confirmed"}
    lines = [
        {"stage": stage, "state": state, "at": MONDAY + 10 * n + 10, "found": found if state == "failed" else {}}
        for n, (stage, state) in enumerate(steps)
    ]
    lay_lines(plan_file.folder(settings, plan.id) / "journal.jsonl", lines)
    marks = the_day(settings).marks
    assert [mark.what for mark in marks] == ["planned", "begun", "waiting", "published", "finished"]
    assert {mark.plan for mark in marks} == {"parity-0001"}
    assert item_json(marks[0])["text"] == "recovery parity-0001 planned: before the first bad row: quantity < 0"
    undo = plan_file.sealed(replace(plan, id="parity-0002", undoes="parity-0001", made_at=MONDAY + 100))
    plan_file.save(settings, undo)
    done = [{"stage": "publish", "state": "done", "at": MONDAY + 200, "found": {}, "stream": STREAM}]
    lay_lines(plan_file.folder(settings, undo.id) / "journal.jsonl", done)
    assert [mark.what for mark in the_day(settings).marks][-3:] == ["planned", "begun", "undone"]


def test_a_plan_that_was_changed_by_hand_is_a_mark_that_says_so(settings: Settings) -> None:
    plan = plan_of()
    one = replace(plan.streams[0], stream=STREAM)
    path = path_of(plan_file.save(settings, plan_file.sealed(replace(plan, id="parity-0001", streams=(one,)))))
    path.write_text(path.read_text().replace("inventory", "other", 1))
    (mark,) = marks_of(settings, STREAM)
    assert mark.what == "unreadable" and "parity-0001" in mark.text
