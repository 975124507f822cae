"""Crash points: a test can kill a driver at one of them."""

from __future__ import annotations

import signal

import pytest

from streaming_jobs.runtime import crash_points


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that this process would have got."""
    signals: list[int] = []
    monkeypatch.setattr(crash_points.os, "kill", lambda pid, number: signals.append(number))
    monkeypatch.setattr(crash_points.time, "sleep", lambda _: None)
    return signals


@pytest.mark.parametrize(
    ("wanted", "met", "signals"),
    [
        (None, [("staged", "s", 3)], []),
        ("s:staged:3", [("staged", "s", 2), ("staged", "s", 33), ("staged", "other", 3)], []),
        ("s:staged:3", [("primary_committed", "s", 3)], []),
        ("s:staged:3", [("staged", "s", 3)], [signal.SIGKILL]),
        ("s:transaction_open:3+", [("staged", "s", 3), ("transaction_open", "s", 2)], []),
        ("s:transaction_open:3+", [("transaction_open", "s", 3)], [signal.SIGKILL]),
        ("s:transaction_open:3+", [("transaction_open", "s", 12)], [signal.SIGKILL]),
        ("s:transaction_open:3:stop", [("transaction_open", "s", n) for n in (2, 3, 3)], [signal.SIGSTOP]),
        ("s:transaction_open:3+:stop", [("transaction_open", "s", n) for n in (2, 5, 6)], [signal.SIGSTOP]),
    ],
    ids=[
        "nothing dies unasked",
        "at no other batch or stream",
        "at no other point",
        "at one point of one batch",
        "not before a later batch",
        "at a batch",
        "or at a later one",
        "stopped once, and the batch goes on later",
        "stopped once at a later one",
    ],
)
def test_a_test_can_kill_or_stop_a_driver_at_one_point_and_nothing_else_dies(
    monkeypatch: pytest.MonkeyPatch,
    sent: list[int],
    wanted: str | None,
    met: list[tuple[str, str, int]],
    signals: list[int],
) -> None:
    if wanted is not None:
        monkeypatch.setenv("RECOURSE_CRASH", wanted)
    for place in met:
        crash_points.crash_point(*place)
    assert sent == signals
