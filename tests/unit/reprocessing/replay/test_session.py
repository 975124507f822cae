"""What watches a replay can end it, and Spark's log file has a name of its own."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reprocessing.replay import session
from reprocessing.replay.session import missed_end
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


def test_spark_is_launched_under_the_name_of_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session launches Spark with the stream's name, which is that of the running stream's log file."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(session.spark, "launch", lambda _, **options: given.update(options))
    partial(session.launch_as, "preview-things")(cast("Any", None), name="things", pools=["things"])
    assert given == {"name": "preview-things", "pools": ["things"]}


@pytest.mark.parametrize(
    ("ended", "bounded", "how"),
    [
        (90, False, ""),
        (95, False, ""),
        (90, True, ""),
        (89, False, "before"),
        (89, True, "before"),
        (91, True, "after"),
    ],
)
def test_a_replay_ends_at_or_after_the_stream_and_a_bounded_one_exactly_at_its_end(
    ended: int, bounded: bool, how: str
) -> None:
    failure = missed_end({"things": {0: ended, 1: 0}}, {"things": {0: 90}}, exactly=bounded)
    if not how:
        assert failure is None
        return
    assert failure is not None and failure.permanent and failure.starts
    assert f"ended at {ended} of topic things, partition 0, {how} where it was to end, 90" in failure.found
    assert ("records are missing from the topic" in failure.found) == (how == "before")
