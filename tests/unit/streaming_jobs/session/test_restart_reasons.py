"""A session beside recoveries of its streams, and beside other code: it starts a stream again, or makes way."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.runtime import session_options
from streaming_jobs.runtime.child_sessions import ChildSessions
from streaming_jobs.runtime.code_watch import DiskCode
from streaming_jobs.runtime.stream_restarts import RestartReasons
from streaming_jobs.session import Session
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import acquire, holder, take
from streaming_jobs.state.requests import READY, STAND_BY, STANDS_BY, STOP, stands_by
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryLease, MemoryLeases
from tests.support.sessions import Queries, marker, session_of
from tests.support.worlds import parity, plain


@pytest.mark.parametrize("supervised", [True, False])
def test_a_session_makes_way_after_the_recovery_of_one_of_its_streams(home: Settings, supervised: bool) -> None:
    """If it can be started again in its place: the code in this process is the code that was wrong."""
    session = session_of(home, [plain, parity], reasons=RestartReasons(home) if supervised else None)
    session.run()
    session.running[0].status.state, session.running[0].status.error = "failed", {"permanent": True}
    stop = marker(home)
    for text, ends in (
        ("by hand", False),
        (None, False),
        ("stopped for recovery plan plain-0001", False),
        (None, True),
    ):
        if text is None:
            stop.unlink()
        else:
            stop.write_text(text)
        look(session)
        assert session.superseded == (ends and supervised)
    assert not session.stop_all.is_set(), "nobody has asked it to end"
    assert session._exit_code() == (0 if supervised else 78), "what failed before is for the next session to find out"


@dataclass
class Watch:
    """Code on disk: other code for the streams among `changed`."""

    changed: set[str] = field(default_factory=set)
    same: bool = True
    closed: bool = False

    def untouched(self) -> bool:
        return self.same and not self.changed

    def newer(self, streams: Iterable[str]) -> bool:
        return not self.changed.isdisjoint(streams)

    @property
    def answers(self) -> int:
        return len(self.changed)

    def on_disk(self, stream: str) -> DiskCode | None:
        return DiskCode("abc", False, None, 1.0) if stream in self.changed else None

    def close(self) -> None:
        self.closed = True


def children_of_both() -> tuple[ChildSessions, list[ChildCommand]]:
    """The children of a session with both streams, which only seem to be started, and their commands."""
    commands: list[ChildCommand] = []

    def begin(command: ChildCommand) -> ChildProcess:
        commands.append(command)
        return cast("ChildProcess", SimpleNamespace(pid=7, exit_code=None, end=lambda *_: 0))

    return ChildSessions(["session", "--streams", "plain,parity"], 1.0, start=begin), commands


def look(session: Session) -> None:
    """One look of the session at the streams that may have to start again."""
    if session.restarts is not None:
        session.restarts.look()


def test_a_recovered_stream_starts_again_in_a_session_that_has_the_code_on_disk(home: Settings) -> None:
    """The others run on, untouched; and whoever takes the stream first keeps it."""
    watch, queries = Watch(), Queries(home)
    session = session_of(home, [plain, parity], reasons=RestartReasons(home, watch=watch), queries=queries)
    session.run()
    queries.launched.clear()
    before, other = session.running
    for running in (before, other):
        running.lease = acquire(home, running.stream.name, purpose="session")
        running.lease.record_jvm(os.getpid())
    session.detach(before)
    STOP.ask_for(home, "plain", "plain-0001")
    look(session)
    with take(home, "plain", purpose="recovery plan plain-0001"):
        STOP.clear_for(home, "plain", "plain-0001")
        look(session)
        assert not queries.launched and not session.superseded, "the recovery lets go in a moment"
    look(session)
    assert queries.launched == ["plain"]
    again = session.running[0]
    assert session.running == [again, other] and again is not before and again.stream is plain
    assert not session.superseded and not again.detached
    owner = holder(home, "plain")
    assert owner is not None and owner.pid == os.getpid(), "it is this session's again"
    look(session)
    assert len(queries.launched) == 1

    session.detach(again)
    STOP.ask_for(home, "plain", "plain-0002")
    look(session)
    STOP.clear_for(home, "plain", "plain-0002")
    watch.same = False
    look(session)
    assert session.superseded and len(queries.launched) == 1, "corrected code needs a new process"
    for running in session.running:
        running.lease.release()


class OnAFullDisk(MemoryLease):
    """A lease whose owner cannot be written."""

    def lock_again(self) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fault", ["moved away", "unwritable"])
def test_a_recovered_stream_whose_folder_is_another_one_makes_the_session_start_again(
    home: Settings, fault: str
) -> None:
    """The lock of a file that was moved away excludes nobody; and a fault of one stream ends no other one."""
    queries = Queries(home)
    session = session_of(home, [plain, parity], reasons=RestartReasons(home, watch=Watch()), queries=queries)
    session.run()
    queries.launched.clear()
    before, other = session.running
    for running in (before, other):
        running.lease = acquire(home, running.stream.name, purpose="session")
    if fault == "unwritable":
        owner = before.lease.owner
        before.lease.release()
        before.lease = OnAFullDisk("plain", owner, MemoryLeases())
    session.detach(before)
    STOP.ask_for(home, "plain", "plain-0001")
    look(session)
    STOP.clear_for(home, "plain", "plain-0001")
    if fault == "moved away":
        (home.state / "plain").rename(home.state / "before")
    look(session)
    assert session.superseded and session.running == [before, other]
    assert not queries.launched, "it is not this session's to start"
    if fault == "moved away":
        acquire(home, "plain", purpose="session", wait=0).release()
    for running in session.running:
        running.lease.release()


def test_a_stream_that_a_recovery_had_stopped_before_the_session_began_is_started_when_it_is_over(
    home: Settings,
) -> None:
    """Unless somebody else runs it by then, or wants it to stay stopped."""
    stop = marker(home)
    stop.write_text("stopped for recovery plan plain-0001")
    session = session_of(home, [parity], reasons=RestartReasons(home, ["plain"]))
    session.run()

    def makes_way() -> bool:
        look(session)
        return session.superseded

    assert not makes_way()
    stop.unlink()
    with take(home, "plain", purpose="session"):
        assert not makes_way(), "another session runs it"
    assert makes_way()
    assert session.restarts is not None
    session.restarts.superseded = False
    stop.write_text("by hand")
    assert not makes_way()
    stop.unlink()
    assert not makes_way(), "whoever stopped it starts it"


@pytest.mark.parametrize("option", ["--respect-stop", "--again"])
def test_a_session_is_told_which_of_its_streams_a_recovery_has_stopped(
    home: Settings, start: Callable[..., int], option: str
) -> None:
    made: list[list[str]] = []

    def make(settings: Settings, streams: Sequence[Stream], **options: Any) -> Session:
        made.append([s.name for s in streams])
        assert options["answers"] == {}
        return session_of(settings, streams, **options)

    def left_out() -> Sequence[str]:
        options = session_options.parse(["--streams", "plain,parity", option])
        return session_options.select(options, home, [plain, parity], STOP.requests(home)).recovering

    STOP.ask_for(home, "plain", "plain-0001")
    assert start("--streams", "plain,parity", option, make=make) == 0
    assert (made[0], left_out()) == (["parity"], ["plain"])
    STOP.clear_for(home, "plain", "plain-0001")
    STOP.ask(home, "plain", "by hand")
    assert start("--streams", "plain,parity", option, make=make) == 0
    assert (made[1], left_out()) == (["parity"], [])


@pytest.mark.parametrize(
    ("changed", "state", "makes_way"),
    [("plain", "failed", True), ("parity", "failed", False), ("plain", "stopped", False), ("plain", "running", False)],
)
def test_a_session_makes_way_for_other_code_of_a_stream_that_failed_and_of_no_other(
    home: Settings, changed: str, state: Any, makes_way: bool
) -> None:
    watch = Watch({changed})
    session = session_of(home, [plain, parity], reasons=RestartReasons(home, watch=watch))
    session.run()
    session.running[0].status.state = state
    look(session)
    assert (session.superseded, watch.closed) == (makes_way, True)


def test_a_failed_stream_that_runs_or_was_stopped_elsewhere_is_nobodys_reason_to_start_again(home: Settings) -> None:
    session = session_of(home, [plain, parity], reasons=RestartReasons(home, watch=Watch({"plain"})))
    session.run()
    session.running[0].status.state, session.running[0].detached = "failed", True
    with take(home, "plain", purpose="session"):
        look(session)
    path = marker(home)
    look(session)
    assert not session.superseded
    path.unlink()
    look(session)
    assert session.superseded


def test_a_stream_that_has_moved_to_its_own_process_is_no_failure_of_this_session(home: Settings) -> None:
    """Its earlier failure is over, and no reason to start it once more when the other process has ended."""
    children, commands = children_of_both()
    session = session_of(home, [plain, parity], reasons=RestartReasons(home, watch=Watch({"plain"})), children=children)
    session.run()
    moved, other = session.running
    for running in (moved, other):
        running.lease = acquire(home, running.stream.name, purpose="session")
    moved.status.state, other.status.state = "failed", "running"
    moved.status.error = {"permanent": True}
    assert session.restarts is not None
    now = 0.0
    session.restarts.clock = lambda: now
    look(session)
    assert not commands, "perhaps further streams come at once"
    now = 1.0
    look(session)
    assert [command.arguments[-2:] for command in commands] == [["plain", "--again"]] and moved.detached
    assert session.restarts.elsewhere == {"plain"} and not session.superseded

    with take(home, "plain", purpose="session"):  # by the other process, which a recovery stops
        STOP.ask_for(home, "plain", "plain-0001")
        look(session)
        STOP.clear_for(home, "plain", "plain-0001")
        look(session)
        assert len(commands) == 1, "it has not ended yet"
    children._children[0].process.exit_code = 0  # type: ignore[union-attr,misc]
    look(session)
    assert len(commands) == 2, "the recovery was over when it ended"

    children._children[0].process.exit_code = 0  # type: ignore[union-attr,misc]
    look(session)
    other.status.state = "stopped"
    assert session._exit_code() == 0 and len(commands) == 2 and not session.restarts.busy
    other.lease.release()
    moved.lease.release()


def test_a_session_with_other_code_starts_one_that_stands_by_for_the_end_of_a_recovery(home: Settings) -> None:
    children, commands = children_of_both()
    session = session_of(home, [plain, parity], reasons=RestartReasons(home, watch=Watch({"plain"})), children=children)
    session.run()
    running = session.running[0]
    running.lease = acquire(home, "plain", purpose="session")
    running.status.state = "running"
    assert session.restarts is not None and not session.restarts.busy
    now = [0.0]
    session.restarts.clock = lambda: now[0]
    STAND_BY.ask(home, "plain", "recovery plan plain-0001")
    look(session)
    assert not commands and session.restarts.busy, "perhaps a further stream comes at once; it must not end meanwhile"
    now[0] = 1.0
    look(session)
    look(session)
    (command,) = commands
    assert command.arguments[-4:] == ["--streams", "plain", "--again", "--standby"] and not running.detached
    assert stands_by(home, "plain") is not None, "the process that stands by answers, and its start removes it"
    children._children[0].process.exit_code = 0  # type: ignore[union-attr,misc]
    STAND_BY.clear(home, "plain", STAND_BY.request(home, "plain") or pytest.fail("it is gone"))
    look(session)
    assert len(commands) == 1 and not session.restarts.busy, "the recovery was given up: nothing has changed here"


def test_a_session_with_the_code_on_disk_answers_that_it_stands_by_and_stays(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(home, [plain], reasons=RestartReasons(home, watch=Watch()))
    session.run()
    assert session.restarts is not None
    session.spark = cast("Any", object())
    session.restarts.clock = iter(range(10)).__next__
    STAND_BY.ask(home, "plain", "recovery plan plain-0001")
    look(session)
    look(session)
    request = stands_by(home, "plain")
    assert request is not None and request.who == READY and session.restarts.busy
    session.running[0].lease = acquire(home, "plain", purpose="session")
    session._detach_ended()
    assert session.running[0].detached, "the recovery takes the lease, though the session stays"
    later_on = time.time() + STANDS_BY
    with monkeypatch.context() as later:
        later.setattr("time.time", lambda: later_on)
        assert not session.restarts.busy, "a recovery that was killed keeps no session for ever"
    session.restarts.started("plain")
    assert STAND_BY.request(home, "plain") is None


def test_a_session_that_stands_by_starts_none_of_its_streams_and_then_those_whose_recovery_is_over() -> None:
    options = session_options.parse(["--streams", "plain", "--standby", "--again"])
    selection = session_options.select(options, cast("Settings", None), [plain], {})
    assert (selection.streams, selection.recovering, selection.left_out) == ([], ["plain"], [plain])
