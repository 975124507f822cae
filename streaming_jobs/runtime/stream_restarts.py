"""The reasons of a supervised session to start a stream again: a recovery that is over, other code on disk.

`StreamRestarts` acts: in the running session if its code and settings are still those on disk, else in another
process, because corrected code needs a new one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from streaming_jobs.errors import LeaseBusy, TransientError
from streaming_jobs.runtime.child_sessions import STANDBY, ChildSessions
from streaming_jobs.runtime.code_watch import CodeWatch, DiskCode
from streaming_jobs.runtime.session_options import Selection
from streaming_jobs.runtime.stream_runner import LINGERING, StreamRunner
from streaming_jobs.settings import Settings, configuration
from streaming_jobs.state.requests import READY, STAND_BY, START, STOP, StreamRequest, stands_by
from streaming_jobs.state.status import Status
from streaming_jobs.stream import Stream


class Watch(Protocol):
    """The code and the settings on disk against those of this process; `code_watch.py` has the real one."""

    def untouched(self) -> bool:
        """True if no file has changed since the session began."""

    @property
    def answers(self) -> int:
        """How often other files were found and could be loaded."""

    def newer(self, streams: Iterable[str]) -> bool:
        """True if a session started now would run these streams with other code or settings."""

    def on_disk(self, stream: str) -> DiskCode | None:
        """The code and settings that a session started now would run the stream with; None if they are the same."""

    def close(self) -> None:
        """Stop watching."""


class RestartReasons:
    """The reasons to start streams again; a recovery had stopped those `recovering` before it began."""

    def __init__(
        self,
        settings: Settings,
        recovering: Iterable[str] = (),
        watch: Watch | None = None,
        *,
        left_out: Iterable[str] = (),
        began: float | None = None,
    ) -> None:
        """`left_out`: streams that had been stopped before the session began.

        `began`: the moment before this process loaded its code, in seconds since 1970; None: now.

        Without a `watch`, every start needs a new process, and changed code never is a reason.
        """
        self.left_out = frozenset([*recovering, *left_out])
        self.began = time.time() if began is None else began
        self._settings = settings
        self._watch = watch
        self._recovering = set(recovering)
        self._failures: dict[str, int] = {}

    def recovered(self, streams: Iterable[str]) -> Iterator[str]:
        """Yields the streams, of these and of those left out, whose recovery is over; each until `forget`."""
        for name in sorted(self._recovering.union(streams)):
            if STOP.for_recovery(self._settings, name):
                self._recovering.add(name)
            elif name in self._recovering:
                if STOP.asked(self._settings, name):  # somebody wants it to stay stopped
                    self._recovering.discard(name)
                else:
                    yield name

    def forget(self, stream: str) -> None:
        """Forget the stream's recovery, and its failure: it runs again."""
        self._recovering.discard(stream)
        self._failures.pop(stream, None)

    def same_code(self) -> bool:
        """True if this process has the code and the settings that are on disk."""
        return self._watch is not None and self._watch.untouched()

    def other_code(self, streams: Iterable[str]) -> bool:
        """True if these streams would run other code, or with other settings, in a session started now."""
        return self._watch is not None and self._watch.newer(streams)

    def changed_since_failure(self, stream: str) -> bool:
        """True if other code was loaded since the first call for this stream: it has failed in another process."""
        if self._watch is None:
            return False
        self._watch.newer([])
        return self._failures.setdefault(stream, self._watch.answers) != self._watch.answers

    def note_disk(self, statuses: Iterable[Status]) -> None:
        """Note in the statuses whether the code on disk is the code that runs."""
        if self._watch is None:
            return
        for status in statuses:
            disk = self._watch.on_disk(status.stream)
            status.disk_code = disk.code if disk is not None else None
            status.disk_code_since = disk.since if disk is not None else None
            status.disk_code_error = disk.error if disk is not None else None
            status.disk_settings = disk is not None and disk.settings

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


# Starts of single streams within a running session.
#
# | the stream starts again when | and has |
# |---|---|
# | its recovery is over | stopped for it, here or before the session began |
# | a start is requested (`START`) | stopped, failed, or runs: then it stops at a batch border first |
# | other code for it is on disk | failed, or is tried every ten minutes |
#
# It starts in this process if the code and the settings on disk are those of this process, else in a process of its
# own; the other streams run on either way. If no other stream runs, the session restarts itself with the newest code,
# which needs no second process (both `child_sessions.py`).

log = structlog.get_logger()

TOGETHER = 0.5
"""Seconds without a further stream to start, before a second process is started for all of them."""


class Streams(Protocol):
    """The streams of a session, as far as this module needs them."""

    @property
    def can_start(self) -> bool:
        """True if this session has Spark."""

    @property
    def runners(self) -> Sequence[StreamRunner]:
        """The runners, also of streams that have ended."""

    def detach(self, running: StreamRunner) -> None:
        """Release the lease of a stream that has ended; without effect if its status cannot be written."""

    def held_elsewhere(self, stream: str) -> bool:
        """True if another process holds the lease of a stream that is not this session's now."""

    def declared(self, stream: str) -> bool:
        """True if the session could run the stream: it was started with it, stopped or not."""

    def take_back(self, stream: str) -> bool:
        """Start a stream that has ended or was left out; False if another process took its lease.

        Raises LeaseBusy and OSError.
        """


@dataclass
class StreamRestarts:
    """Decides which streams start again, and where. `superseded`: the session has to end for one with newer code."""

    settings: Settings
    streams: Streams
    reasons: RestartReasons
    children: ChildSessions | None = None
    clock: Callable[[], float] = time.monotonic
    superseded: bool = field(default=False, init=False)
    pending: frozenset[str] = field(default=frozenset(), init=False)
    """The streams that will start again here or beside it, once they have stopped: the session must not end before."""
    _as_of: dict[str, float] = field(default_factory=dict, init=False)
    _seen: dict[str, tuple[frozenset[str], float]] = field(default_factory=dict, init=False)

    @property
    def elsewhere(self) -> frozenset[str]:
        return self.children.streams if self.children is not None else frozenset()

    def started(self, stream: str) -> None:
        """Take note that a stream has started: requests from before its code was read are done."""
        request = START.request(self.settings, stream)
        if request is not None and request.since <= self._since(stream):
            START.clear(self.settings, stream, request)
        if (standing := STAND_BY.request(self.settings, stream)) is not None:
            STAND_BY.clear(self.settings, stream, standing)

    @property
    def busy(self) -> bool:
        """True while the session must not end, even if none of its streams runs."""
        return bool(self.pending or self.standing_by()) or (self.children is not None and self.children.alive)

    @property
    def failed_elsewhere(self) -> bool:
        """True if streams have failed for good in processes of their own."""
        return self.children is not None and bool(self.children.failed)

    def look(self, *, stopping: bool = False) -> None:
        """Stop the streams that have to restart, and start them once they have stopped; `stopping`: only stop."""
        if self.children is not None:
            if stopping or self.superseded:
                self.children.ask_to_stop()
            self._hurry(self.children)
            self.children.look()
        if stopping or self.superseded:
            self.pending = frozenset()
            return
        if self.elsewhere and self._all_asked():
            log.info("the session restarts with the code on disk, in one process", streams=",".join(self.elsewhere))
            self._supersede()
            return
        self._stand_by()
        due = self._due()
        by_name = {running.stream.name: running for running in self.streams.runners}
        ready, waiting = [], []
        for name in due:
            running = by_name.get(name)
            if running is None or running.detached:
                if not self.streams.held_elsewhere(name):
                    ready.append(name)
            elif running.ended and not running.in_batch:
                ready.append(name)
            else:
                running.request_stop()
                waiting.append(name)
        self.pending = frozenset([*ready, *waiting])
        if ready and not waiting:
            self._start(ready, by_name)

    def standing_by(self) -> dict[str, StreamRequest]:
        """The requests to stand by, of streams that do not run elsewhere."""
        names = {running.stream.name for running in self.streams.runners} | self.reasons.left_out
        found = {name: stands_by(self.settings, name) for name in sorted(names - self.elsewhere)}
        return {name: request for name, request in found.items() if request is not None}

    def _stand_by(self) -> None:
        """Have Spark ready for streams that a recovery will stop: here, if this session has the code on disk."""
        names = [name for name, request in self.standing_by().items() if request.who != READY]
        if not names or self._still_changing(names, STANDBY):
            return
        if self.streams.can_start and self.reasons.same_code():
            log.info("the session stands by for the end of a recovery", streams=",".join(names))
            for name in names:
                STAND_BY.ask(self.settings, name, READY)
        elif self.children is not None:
            self.children.start(names, STANDBY)

    def close(self) -> None:
        """End the processes of streams that run elsewhere, and stop watching the code."""
        try:
            if self.children is not None:
                self.children.close()
        finally:
            self.reasons.close()

    def _start(self, names: Sequence[str], by_name: Mapping[str, StreamRunner]) -> None:
        now = time.time()
        here = [name for name in names if name in by_name]
        if all(map(self.streams.declared, names)) and self.streams.can_start and self.reasons.same_code():
            for name in names:
                self._as_of[name] = now
                self._take_back(name)
            return
        others = {r.stream.name for r in by_name.values() if not r.ended} - set(names)
        if self.children is None or not (others or self.elsewhere):
            log.info("the session restarts with the code on disk", streams=",".join(names))
            self._supersede()
            return
        if self._still_changing(names, START.name):
            return
        for name in here:
            if not by_name[name].detached:
                self.streams.detach(by_name[name])
        if all(by_name[name].detached for name in here):
            self.children.start(names)
            for name in names:  # this start answers their requests, also if it fails before its process can say so
                self._as_of[name] = now
            for name in here:  # whatever it failed with is over; from now on the other process answers for it
                by_name[name].status.state, by_name[name].status.error = "stopped", None
            self._done(names)

    def _hurry(self, children: ChildSessions) -> None:
        """On request, start a stream at once that waits for its next retry."""
        if asked := self._asked(children.waiting):
            children.hurry(asked)
            now = time.time()
            self._as_of.update(dict.fromkeys(asked, now))

    def _take_back(self, name: str) -> None:
        try:
            if self.streams.take_back(name):
                self._done([name])
                self.started(name)
            self.pending -= {name}
        except LeaseBusy as error:
            log.warning("stream not started", stream=name, reason=str(error))
            if any(running.stream.name == name for running in self.streams.runners):
                self._supersede()
            self.pending -= {name}  # a stream that was left out runs elsewhere
        except (OSError, TransientError) as error:  # a new session starts it from the beginning
            log.warning("stream not restarted in place", stream=name, reason=str(error))
            self._supersede()

    def _supersede(self) -> None:
        self.superseded, self.pending = True, frozenset()

    def _done(self, names: Collection[str]) -> None:
        self.pending -= frozenset(names)
        for name in names:
            self.reasons.forget(name)

    def _still_changing(self, names: Sequence[str], request: str) -> bool:
        """True until no further stream was added for a moment: the streams of one deploy share one process."""
        seen = self._seen.get(request)
        if seen is None or seen[0] != frozenset(names):
            seen = self._seen[request] = frozenset(names), self.clock()
        return self.clock() - seen[1] < TOGETHER

    def _due(self) -> list[str]:
        names = {running.stream.name for running in self.streams.runners} | set(self.reasons.left_out)
        # Those of streams in other processes too: a process that a recovery has stopped may end only after it.
        due = set(self.reasons.recovered(names)) - self.elsewhere
        names -= self.elsewhere
        due |= self._asked(names)
        due |= {name for name in self._failed() if not STOP.asked(self.settings, name)}
        return sorted(due)

    def _asked(self, names: Collection[str]) -> set[str]:
        """Those of the streams for which a start is requested that is not done."""
        return {
            name
            for name in names
            if (request := START.request(self.settings, name)) is not None
            and request.since > self._since(name)
            and not STOP.asked(self.settings, name)
        }

    def _all_asked(self) -> bool:
        """True if every stream that runs, here or elsewhere, is to start again."""
        here = {running.stream.name for running in self.streams.runners if not running.ended}
        return not (here | self.elsewhere) - self._asked(here | self.elsewhere)

    def _failed(self) -> list[str]:
        """The streams that have failed, and would run other code if they were started now."""
        away = self.children.failed if self.children is not None else {}
        failed = [
            running.stream.name
            for running in self.streams.runners
            if running.stream.name not in self.elsewhere
            and running.stream.name not in away
            and (running.status.state == "failed" or (running.gave_up and not running.ended))
        ]
        here = [name for name in failed if self.reasons.other_code([name])]
        return [*here, *(name for name in away if self.reasons.changed_since_failure(name))]

    def _since(self, stream: str) -> float:
        return self._as_of.get(stream, self.reasons.began)


# What a supervised session has beside its streams: the watch over its code, and the means to start streams again.


def supervision(
    options: argparse.Namespace,
    settings: Settings,
    streams: Sequence[Stream],
    selection: Selection,
    began: float,
    *,
    in_process: bool,
) -> tuple[RestartReasons | None, ChildSessions | None]:
    """A session's restarts; none without `--supervised`. `began` is from before the code was loaded.

    `in_process`: the command line of this process is that of the session, so that it can be started once more.
    """
    if not options.supervised:
        return None, None
    watch: CodeWatch | None = None
    children: ChildSessions | None = None
    if in_process:
        config = configuration(options.config)
        watch = CodeWatch([*sys.orig_argv, "--print-versions"], settings, streams, config)
        if settings.spark.split_sessions:
            longest = max(settings.for_stream(s.name).stop_deadline.total_seconds() for s in streams)
            children = ChildSessions(sys.orig_argv, longest + LINGERING)
    names = [stream.name for stream in selection.left_out]
    return RestartReasons(settings, selection.recovering, watch, left_out=names, began=began), children
