"""What watches a replay can end it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from reprocessing.replay import session
from streaming_jobs.errors import RecourseError, UsageError


def test_what_a_watcher_refuses_ends_the_session_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LOOK_EVERY", 0.001)
    begun = SimpleNamespace(pipeline=object(), status=SimpleNamespace(batch=3))
    starting = SimpleNamespace(pipeline=None, status=SimpleNamespace(batch=None))
    running: Any = SimpleNamespace(running=[starting, begun], stop_all=threading.Event())
    seen, raised = list[int | None](), list[RecourseError]()

    def watch(_: Any, batch: int | None) -> None:
        seen.append(batch)
        if len(seen) == 3:
            raise UsageError("a rule names no column", "correct it")

    session._watch(running, watch, threading.Event(), raised)
    assert (
        seen == [3, 3, 3]
        and running.stop_all.is_set()
        and [each.found for each in raised] == ["a rule names no column"]
    )
