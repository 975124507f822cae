"""Crash points: a test can kill a driver at one of them."""

from __future__ import annotations

import signal

import pytest

from streaming_jobs.runtime import crash_points


def test_a_test_can_kill_at_one_point_of_one_batch_and_nothing_else_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(crash_points.os, "kill", lambda pid, number: killed.append(number))
    crash_points.crash_point("staged", "s", 3)
    monkeypatch.setenv("RECOURSE_CRASH", "s:staged:3")
    for name, stream, number in (
        ("staged", "s", 2),
        ("staged", "s", 33),
        ("staged", "other", 3),
        ("primary_committed", "s", 3),
        ("staged", "s", 3),
    ):
        crash_points.crash_point(name, stream, number)
    assert killed == [9]


@pytest.mark.parametrize(("batch", "kills"), [(2, 0), (3, 1), (12, 1)])
def test_a_point_may_be_that_of_a_later_batch(monkeypatch: pytest.MonkeyPatch, batch: int, kills: int) -> None:
    killed: list[int] = []
    monkeypatch.setattr(crash_points.os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setenv("RECOURSE_CRASH", "s:transaction_open:3+")
    crash_points.crash_point("staged", "s", batch)
    crash_points.crash_point("transaction_open", "s", batch)
    assert len(killed) == kills


def test_a_test_can_stop_at_a_point_once_and_the_batch_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(crash_points.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(crash_points.time, "sleep", lambda _: None)
    for wanted, batches in (("s:transaction_open:3:stop", (2, 3, 3)), ("s:transaction_open:3+:stop", (2, 5, 6))):
        sent.clear()
        monkeypatch.setenv("RECOURSE_CRASH", wanted)
        for batch in batches:
            crash_points.crash_point("transaction_open", "s", batch)
        assert sent == [signal.SIGSTOP]
