"""The verdict on a stream: every way to be unwell is red with its word, and what was done on purpose is not."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from streaming_jobs.state.health import Due, HealthFacts, HealthLimits, Space, health, judge, look, recovery_words
from streaming_jobs.state.lease import Owner, acquire
from streaming_jobs.state.requests import START, STOP, StreamRequest
from streaming_jobs.state.status import Status, TableAge, write_status
from streaming_jobs.state.stream_record import Generation, StreamRecord, save
from streaming_jobs.state.supervisors import Note
from tests.conftest import SettingsFactory

NOW = 1_000_000.0
OWNER = Owner(17, 0.0, None, None, NOW - 5000, "session")
WELL = Status(
    "orders",
    "running",
    17,
    generation=1,
    batch=7,
    heartbeat=NOW - 1,
    started_at=NOW - 4000,
    committed_at=NOW - 2,
    lag_at=NOW - 2,
    lag_records=10,
    lag_s=1.5,
)
ERROR = {"code": "REC-020", "found": "a bug in the function", "next": "", "permanent": False}
BY_HAND = StreamRequest("asked by recourse streams stop", NOW - 60)
RECOVERY = StreamRequest("stopped for recovery plan p-1", NOW - 60, plan="p-1")


def aged(seconds: float, fresh_within_s: float | None = 300.0) -> dict[str, TableAge]:
    return {"orders": TableAge(0.0, NOW - seconds, fresh_within_s), "others": TableAge(0.0, NOW - 9999)}


def seen(
    owner: Owner | None = OWNER, stop: StreamRequest | None = None, lives: str = "driver", **changes: object
) -> HealthFacts:
    status = replace(WELL, **changes)  # type: ignore[arg-type]
    return HealthFacts("orders", NOW, status, owner, lives if owner else None, stop)


NEVER = HealthFacts("orders", NOW, None)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (seen(), []),
        (seen(state="idle", lag_records=0, lag_s=0.0, committed_at=NOW - 80_000), []),
        (seen(owner=None), ["dead"]),
        (seen(owner=None, state="idle"), ["dead"]),
        (seen(lives="jvm"), ["dead"]),
        (seen(heartbeat=NOW - 61), ["silent"]),
        (seen(owner=replace(OWNER, pid=18)), ["silent"]),
        (seen(owner=replace(OWNER, pid=18, since=NOW - 5)), []),
        (seen(state="failed", error=ERROR), ["failed"]),
        (seen(owner=None, state="failed", error=ERROR), ["failed"]),
        (seen(error=ERROR), ["failing"]),
        (seen(failures=2), ["failing"]),
        (seen(failures=1), []),
        (seen(committed_at=NOW - 301), ["stuck"]),
        (seen(committed_at=None, started_at=NOW - 301), ["stuck"]),
        (seen(committed_at=NOW - 301, lag_records=0), []),
        (seen(committed_at=NOW - 301, batch_every_s=3600.0), []),
        (seen(lag_s=601.0), ["late"]),
        (seen(lag_s=601.0, lag_records=0), []),
        (seen(lag_s=601.0, batch_every_s=3600.0), []),
        (seen(lag_s=601.0, trigger="available-now"), []),
        (seen(committed_at=NOW - 301, trigger="available-now"), ["stuck"]),
        (seen(state="starting", lag_at=None, started_at=NOW - 299), []),
        (seen(state="starting", lag_at=None, started_at=NOW - 301), ["stuck"]),
        (seen(state="starting", lag_at=None, started_at=NOW - 301, begun_at=NOW - 299), []),
        (seen(state="starting", lag_at=None, started_at=NOW - 301, batch_every_s=3600.0), []),
        (seen(state="starting", committed_at=None, started_at=NOW - 301, lag_records=0), ["stuck"]),
        (seen(state="starting", committed_at=None, started_at=NOW - 301), ["stuck"]),
        (seen(blocked={"t": {"0": NOW - 599}}, committed_at=NOW - 599), []),
        (seen(blocked={"t": {"0": NOW - 601}}, committed_at=NOW - 601), ["blocked"]),
        (seen(blocked={"t": {"0": NOW - 601}}, trigger="available-now"), ["blocked"]),
        (seen(lag_at=NOW - 61), ["blind"]),
        (seen(lag_at=NOW - 80_000, started_at=NOW - 3), []),
        (seen(lag_at=NOW - 80_000, started_at=NOW - 61), ["blind"]),
        (seen(lag_at=NOW + 3600), ["blind"]),
        (seen(heartbeat=NOW + 3600), ["silent"]),
        (seen(heartbeat=NOW + 2, lag_at=NOW + 2), []),
        (seen(owner=replace(OWNER, pid=18, since=NOW + 3600)), ["silent"]),
        (seen(lag_at=None, lag_records=None), []),
        (seen(tables=aged(301)), ["stale"]),
        (seen(tables=aged(299)), []),
        (seen(tables=aged(301, fresh_within_s=None)), []),
        (seen(tables={"orders": TableAge(NOW - 301, None, 300.0)}), ["stale"]),
        (seen(tables=aged(301), lag_records=0), []),
        (seen(tables=aged(301), started_at=NOW - 1), []),
        (seen(tables=aged(700), lag_s=601.0), ["late"]),
        (seen(owner=None, tables=aged(301)), ["dead"]),
        (seen(owner=None, tables=aged(301), stop=BY_HAND), []),
        (seen(owner=None, state="stopped", trigger="available-now", tables=aged(301)), ["stale"]),
        (seen(owner=None, state="stopped"), []),
        (seen(owner=None, state="stopped", heartbeat=NOW - 61), ["not_running"]),
        (seen(owner=None, state="stopped", heartbeat=NOW + 3600), ["not_running"]),
        (seen(owner=None, state="stopped", heartbeat=NOW - 61, ended_by="Terminate of run 1"), []),
        (seen(owner=None, state="stopped", heartbeat=NOW - 61, trigger="available-now"), []),
        (NEVER, []),
        (seen(owner=None, stop=BY_HAND), []),
        (seen(owner=None, state="stopped", stop=BY_HAND), []),
        (seen(owner=None, state="failed", error=ERROR, stop=BY_HAND), ["failed"]),
        (seen(owner=None, state="failed", error=ERROR, stop=RECOVERY), []),
        (seen(owner=replace(OWNER, purpose="recovery p-1"), state="stopped"), []),
        (seen(owner=replace(OWNER, purpose="accept"), state="stopped"), []),
    ],
)
def test_a_stream_is_red_for_exactly_these_reasons(what: HealthFacts, words: list[str]) -> None:
    assert [reason.word for reason in judge(what, HealthLimits()).reasons] == words


def test_a_table_without_new_rows_because_its_topics_bring_none_is_yellow_and_says_so() -> None:
    quiet = judge(seen(tables=aged(301), lag_records=0), HealthLimits())
    assert (quiet.verdict, [reason.word for reason in quiet.warnings]) == ("yellow", ["stale"])
    assert quiet.warnings[0].text == (
        "the newest rows of table orders are 5 minutes 1 second old, its objective is 5 minutes; nothing is unread: "
        "the topics have brought no rows"
    )


def test_a_stream_that_nobody_asked_to_stop_is_restarting_and_then_red_with_what_its_supervisor_does() -> None:
    ended = seen(owner=None, state="stopped", heartbeat=NOW - 20)
    assert (judge(ended, HealthLimits()).verdict, judge(ended, HealthLimits()).state) == ("restarting", "restarting")
    assert judge(ended, HealthLimits(), should_run=False).verdict == "stopped", "an operator stopped its session"
    note = Note("shop", ("orders",), "run 1 ended; the next try is in 4 s", NOW, starts=True)
    gone = seen(owner=None, state="stopped", heartbeat=NOW - 120)
    (red,) = judge(replace(gone, supervisor=note), HealthLimits()).reasons
    assert "nobody asked for that" in red.text and "Dagster's job shop: run 1 ended" in red.text
    assert "recourse up" in judge(gone, HealthLimits()).reasons[0].text


def test_a_dead_or_failed_stream_that_is_started_again_was_not_given_up_and_says_who_starts_it() -> None:
    dead = seen(owner=None, heartbeat=NOW - 20)
    (red,) = judge(dead, HealthLimits()).reasons
    assert red.word == "dead" and "a `recourse up` or Dagster that runs starts it again" in red.text
    note = Note("shop", ("orders",), "starts a session", NOW, starts=True)
    assert judge(replace(dead, supervisor=note), HealthLimits()).reasons[0].text.endswith("job shop: starts a session")
    killed = seen(owner=None, state="failed", error=ERROR)
    note = Note("shop", ("orders",), "run 1 ended; the next try is in 4 s", NOW, starts=True)
    assert "it failed and is restarting" in judge(replace(killed, supervisor=note), HealthLimits()).reasons[0].text
    for supervisor in (None, replace(note, starts=False)):
        assert "was given up" in judge(replace(killed, supervisor=supervisor), HealthLimits()).reasons[0].text


def test_between_the_publish_of_a_plan_and_the_restart_a_stream_is_restarting_for_a_while() -> None:
    ended = seen(owner=None, state="stopped", heartbeat=NOW - 9000)
    due = replace(ended, start=Due("recovery orders-0001", NOW - 30))
    assert judge(due, HealthLimits(), should_run=True).verdict == "restarting"
    assert judge(due, HealthLimits()).notes[0].startswith("it is restarting after recovery orders-0001, since ")
    late = replace(ended, start=Due("recovery orders-0001", NOW - 301))
    assert [r.word for r in judge(late, HealthLimits(), should_run=True).reasons] == ["not_running"]
    failed = replace(due, status=replace(WELL, state="failed", error=ERROR))
    assert judge(failed, HealthLimits()).verdict == "restarting"


@pytest.mark.parametrize(
    ("what", "settled"),
    [
        (seen(), True),
        (seen(started_at=NOW - 1), False),
        (seen(begun_at=NOW - 1), False),
        (seen(started_at=NOW - 3, lag_at=NOW - 2, lag_records=0, committed_at=None), True),
        (seen(started_at=NOW - 1, lag_at=NOW - 2, lag_records=0), False),
        (seen(committed_at=None), False),
        (HealthFacts("orders", NOW, None, OWNER, "driver"), False),
        (seen(owner=None, state="stopped"), True),
    ],
)
def test_a_stream_has_settled_when_it_has_committed_or_read_everything_since_its_start(
    what: HealthFacts, settled: bool
) -> None:
    assert judge(what, HealthLimits()).settled is settled


def test_a_generation_that_no_session_has_run_is_due(settings: SettingsFactory) -> None:
    home = settings()
    write_status(home, replace(WELL, state="stopped", generation=1))
    record = StreamRecord("orders", (Generation(1, 0.0, "first start"), Generation(2, 0.0, "plan orders-0001")))
    save(home, record)
    due = look(home, "orders").start
    assert due is not None and due.after == "plan orders-0001" and due.since > time.time() - 60
    START.ask(home, "orders", "asked by recourse streams start")
    assert "asked by recourse streams start" in str(look(home, "orders").start)


def test_what_should_run_and_does_not_is_red_unless_it_was_stopped_on_purpose_and_a_bound_of_zero_is_none() -> None:
    idle = (seen(owner=None, state="stopped"), NEVER)
    assert [[r.word for r in judge(s, HealthLimits(), should_run=True).reasons] for s in idle] == [["not_running"]] * 2
    assert not judge(seen(owner=None, state="stopped", stop=BY_HAND), HealthLimits(), should_run=True).red
    assert not judge(seen(owner=None, state="stopped", stop=RECOVERY), HealthLimits(), should_run=True).red
    assert not judge(seen(state="starting", lag_at=None, started_at=NOW - 9999), HealthLimits(60, 0, 0)).red
    assert not judge(seen(committed_at=NOW - 9999, lag_s=9999.0), HealthLimits(60, 0, 0)).red


def test_a_stamp_of_before_the_clock_was_set_back_is_told_as_that() -> None:
    (silent,) = judge(seen(heartbeat=NOW + 3600), HealthLimits()).reasons
    assert silent.text.endswith("; its last sign of life was before the clock was set back")
    (blind,) = judge(seen(lag_at=NOW + 3600), HealthLimits()).reasons
    assert "was last seen before the clock was set back" in blind.text


def test_a_recovery_is_named_with_its_plan_and_who_has_to_go_on() -> None:
    busy = judge(seen(owner=replace(OWNER, purpose="recovery p-1"), state="stopped", stop=RECOVERY), HealthLimits())
    assert (busy.state, busy.verdict) == ("recovering", "recovering")
    assert busy.notes[0].startswith("is being recovered by plan p-1 since 1970-01-12 12:23:20 UTC")
    stopping = recovery_words(seen(stop=RECOVERY))
    assert stopping == "is being recovered by plan p-1 since 1970-01-12 13:45:40 UTC", "not since the session began"
    left = judge(seen(owner=None, state="stopped", stop=RECOVERY), HealthLimits())
    assert "recourse recover resume p-1, or recourse recover abort p-1" in left.notes[0]


def test_the_verdict_is_taken_from_files_and_from_the_free_space(settings: SettingsFactory) -> None:
    home = settings()
    assert health(home, "orders").verdict == "never started"
    lease = acquire(home, "orders", purpose="session", wait=1.0)
    try:
        beat = replace(WELL, pid=os.getpid(), heartbeat=time.time(), lag_at=None)
        write_status(home, beat)
        assert health(home, "orders").verdict == "well"
    finally:
        lease.release()
    assert [r.word for r in health(home, "orders").reasons] == ["dead"]
    STOP.ask(home, "orders", "asked by recourse streams stop")
    assert health(home, "orders").verdict == "stopped"
    disk = look(settings({"quality.free_disk_mb": 2**40}), "orders").disk
    assert disk is not None and disk.colour == "red" and "MB are free on the disk of" in disk.text


def test_notes_are_made_of_other_code_on_disk_and_of_an_open_transaction_and_are_no_reason_to_be_red() -> None:
    other = {"code_version": "aaa (1.0)", "disk_code_since": 0.0}
    for more, words in (
        ({"disk_code": "bbb"}, "runs code aaa; on disk is bbb since 1970-01-01 00:00:00 UTC: recourse deploy orders"),
        ({"disk_code_error": "SyntaxError: x"}, "cannot be loaded: SyntaxError: x"),
        ({"disk_settings": True}, "runs with other settings than those on disk"),
    ):
        verdict = judge(seen(**other, **more), HealthLimits())
        assert not verdict.red and len(verdict.notes) == 1 and words in verdict.notes[0]
    assert not judge(seen(code_version="aaa (1.0)"), HealthLimits()).notes
    nothing_runs = seen(None, None, state="stopped", **other, disk_code="bbb", trigger="available-now")
    assert not judge(nothing_runs, HealthLimits()).notes
    verdict = judge(seen(blocked={"payments": {"3": NOW - 5, "4": NOW - 2}}), HealthLimits())
    (note,) = verdict.notes
    assert not verdict.red
    assert "a transaction is open in topic payments partition 3 since " in note and "1 more partition" in note


FULL, FILLING, FREE = (Space(colour, f"{colour} disk of /data") for colour in ("red", "yellow", "green"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "disk", "verdict", "words"),
    [
        (seen(), FREE, "well", []),
        (seen(), FILLING, "yellow", []),
        (seen(), FULL, "red", ["disk"]),
        (seen(owner=None), FILLING, "red", ["dead"]),
        (seen(owner=None), FULL, "red", ["dead", "disk"]),
        (seen(owner=None, state="stopped", ended_by="anna"), FULL, "stopped", []),
        (seen(owner=None, state="stopped", stop=BY_HAND), FULL, "stopped", []),
        (seen(owner=None, stop=RECOVERY), FULL, "recovering", []),
        (NEVER, FULL, "never started", []),
    ],
)
def test_a_disk_that_fills_up_is_a_reason_while_the_stream_should_run(
    what: HealthFacts, disk: Space, verdict: str, words: list[str]
) -> None:
    found = judge(replace(what, disk=disk), HealthLimits())
    assert (found.verdict, [reason.word for reason in found.reasons]) == (verdict, words)
    assert all(each.text == "yellow disk of /data" for each in found.warnings)
