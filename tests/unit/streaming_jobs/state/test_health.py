"""The verdict on a stream: every way to be unwell is red with its word, and what was done on purpose is not."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from streaming_jobs.state import stop_request
from streaming_jobs.state.health import Limits, Seen, health, judge
from streaming_jobs.state.lease import Owner, acquire
from streaming_jobs.state.status import Status, write_status
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
BY_HAND = stop_request.Request("asked by recourse streams stop", NOW - 60)
RECOVERY = stop_request.Request("stopped for recovery plan p-1", NOW - 60, plan="p-1")


def seen(
    owner: Owner | None = OWNER, stop: stop_request.Request | None = None, lives: str = "driver", **changes: object
) -> Seen:
    status = replace(WELL, **changes)  # type: ignore[arg-type]
    return Seen("orders", NOW, status, owner, lives if owner else None, stop)


NEVER = Seen("orders", NOW, None)


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
        (seen(owner=None, state="stopped"), []),
        (NEVER, []),
        (seen(owner=None, stop=BY_HAND), []),
        (seen(owner=None, state="stopped", stop=BY_HAND), []),
        (seen(owner=None, state="failed", error=ERROR, stop=BY_HAND), ["failed"]),
        (seen(owner=None, state="failed", error=ERROR, stop=RECOVERY), []),
        (seen(owner=replace(OWNER, purpose="recovery p-1"), state="stopped"), []),
        (seen(owner=replace(OWNER, purpose="accept"), state="stopped"), []),
    ],
)
def test_a_stream_is_red_for_exactly_these_reasons(what: Seen, words: list[str]) -> None:
    assert [reason.word for reason in judge(what, Limits()).reasons] == words


def test_what_should_run_and_does_not_is_red_unless_it_was_stopped_on_purpose() -> None:
    idle = (seen(owner=None, state="stopped"), NEVER)
    assert [[r.word for r in judge(s, Limits(), should_run=True).reasons] for s in idle] == [["not_running"]] * 2
    assert not judge(seen(owner=None, state="stopped", stop=BY_HAND), Limits(), should_run=True).red
    assert not judge(seen(owner=None, state="stopped", stop=RECOVERY), Limits(), should_run=True).red


def test_a_stamp_of_before_the_clock_was_set_back_is_told_as_that() -> None:
    (silent,) = judge(seen(heartbeat=NOW + 3600), Limits()).reasons
    assert silent.text.endswith("; its last sign of life was before the clock was set back")
    (blind,) = judge(seen(lag_at=NOW + 3600), Limits()).reasons
    assert "was last seen before the clock was set back" in blind.text


def test_a_bound_of_zero_is_no_bound() -> None:
    assert not judge(seen(state="starting", lag_at=None, started_at=NOW - 9999), Limits(60, 0, 0)).red
    assert not judge(seen(committed_at=NOW - 9999, lag_s=9999.0), Limits(60, 0, 0)).red


def test_a_recovery_is_named_with_its_plan_and_who_has_to_go_on() -> None:
    busy = judge(seen(owner=replace(OWNER, purpose="recovery p-1"), state="stopped", stop=RECOVERY), Limits())
    assert (busy.state, busy.verdict) == ("recovering", "recovering")
    assert busy.notes[0].startswith("is being recovered by plan p-1 since 1970-01-12 12:23:20 UTC")
    left = judge(seen(owner=None, state="stopped", stop=RECOVERY), Limits())
    assert "recourse recover resume p-1, or recourse recover abort p-1" in left.notes[0]


def test_the_verdict_is_taken_from_files_alone(settings: SettingsFactory) -> None:
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
    stop_request.ask(home, "orders", "asked by recourse streams stop")
    assert health(home, "orders").verdict == "stopped"


def test_other_code_on_disk_is_a_note_of_a_stream_that_runs_and_no_reason_to_be_red() -> None:
    other = {"code_version": "aaa (1.0)", "disk_code_since": 0.0}
    for more, words in (
        ({"disk_code": "bbb"}, "runs code aaa; on disk is bbb since 1970-01-01 00:00:00 UTC: recourse deploy orders"),
        ({"disk_code_error": "SyntaxError: x"}, "cannot be loaded: SyntaxError: x"),
        ({"disk_settings": True}, "runs with other settings than those on disk"),
    ):
        verdict = judge(seen(**other, **more), Limits())
        assert not verdict.red and len(verdict.notes) == 1 and words in verdict.notes[0]
    assert not judge(seen(code_version="aaa (1.0)"), Limits()).notes
    assert not judge(seen(None, None, state="stopped", **other, disk_code="bbb"), Limits()).notes, "nothing runs"


def test_an_open_transaction_is_named_at_once() -> None:
    verdict = judge(seen(blocked={"payments": {"3": NOW - 5, "4": NOW - 2}}), Limits())
    (note,) = verdict.notes
    assert not verdict.red
    assert "a transaction is open in topic payments partition 3 since " in note and "1 more partition" in note
