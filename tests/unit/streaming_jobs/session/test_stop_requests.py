"""A stop that is asked for before a session starts or meanwhile: it is obeyed, and a start with intent ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from streaming_jobs.errors import LeaseBusy, PreflightRefused, TransientError
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import holder, take
from streaming_jobs.state.requests import STOP
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryRuntime
from tests.support.sessions import Queries, marker, session_of, state
from tests.support.worlds import parity, plain


def test_a_start_that_is_refused_leaves_a_stop_on_purpose_as_it_is(home: Settings, start: Callable[..., int]) -> None:
    path = marker(home)
    with take(home, "plain", purpose="session"):
        assert start("--streams", "plain") == LeaseBusy.exit_code
    assert path.exists()
    assert start("--streams", "plain") == 0
    assert not path.exists()


@pytest.mark.parametrize("respect", [False, True])
def test_a_start_with_intent_ends_a_stop_on_purpose(home: Settings, respect: bool) -> None:
    path = marker(home)
    assert session_of(home, [plain], answers={} if respect else STOP.requests(home)).run() == 0
    assert path.exists() == respect


@pytest.mark.parametrize("before", [None, "asked by recourse streams stop"])
def test_a_stop_that_is_asked_for_while_a_session_starts_is_obeyed(home: Settings, before: str | None) -> None:
    """Be it in the same words as one that the start was made to end."""
    if before is not None:
        STOP.ask(home, "plain", before)

    def preflight(stream: Stream) -> None:
        if stream is plain:
            STOP.ask(home, "plain", "asked by recourse streams stop")

    queries = Queries(home, at_preflight=preflight)
    session = session_of(home, [plain, parity], answers=STOP.requests(home), queries=queries)
    assert session.run() == 0
    assert STOP.asked(home, "plain") and state(home, "plain") == "stopped"
    assert queries.launched == ["parity"]


@pytest.mark.parametrize(("asked_at", "obeyed"), [(None, False), (0.0, True), (9e9, False)])
def test_a_stop_of_before_the_process_and_after_its_start_was_asked_for_is_obeyed(
    home: Settings, start: Callable[..., int], asked_at: float | None, obeyed: bool
) -> None:
    STOP.ask(home, "plain", "asked by recourse streams stop")
    assert start("--streams", "plain", *([] if asked_at is None else ["--asked-at", str(asked_at)])) == 0
    assert STOP.asked(home, "plain") == obeyed


def test_a_recovery_that_asks_while_a_session_starts_gets_the_stream(home: Settings) -> None:
    runtime = MemoryRuntime()
    queries = Queries(home, at_preflight=lambda stream: STOP.ask_for(home, stream.name, "p-0001"))
    answers = STOP.requests(home)
    assert session_of(home, [plain], answers=answers, runtime=runtime, queries=queries).run() == 0
    assert STOP.for_recovery(home, "plain") and holder(home, "plain") is None
    assert not runtime.names, "there is nothing to start"


def test_a_start_that_preflight_refuses_leaves_the_marker(home: Settings) -> None:
    stop = marker(home)
    stop.write_text("by hand")

    def run(error: Exception | None = None) -> int:
        def preflight(_: Stream) -> None:
            if isinstance(error, TransientError):
                threading.Timer(0.2, session.stop_all.set).start()  # while it waits for its next try
            if error is not None:
                raise error

        queries = Queries(home, at_preflight=preflight)
        session = session_of(home, [plain], answers=STOP.requests(home), queries=queries)
        return session.run()

    assert run(PreflightRefused("fenced", "resume it")) == 78
    assert stop.exists()
    run(TransientError("away", "wait"))
    assert not stop.exists(), "what may pass is tried again"
    stop.write_text("by hand")
    assert run() == 0 and not stop.exists()
    stop.write_text("stopped for recovery plan plain-0001")
    assert run() == 0
    assert stop.exists(), "a recovery's request is ended by the recovery"
