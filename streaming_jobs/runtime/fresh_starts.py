"""Starts of single streams within a running session: after a stop, after a recovery, with corrected code, on request.

| the stream starts again when | and has |
|---|---|
| its recovery is over | stopped for it, here or before the session began |
| somebody asks for it (`start_request`) | stopped, failed, or runs: then it stops at a batch border first |
| other code for it is on disk | failed, or is tried every ten minutes |

It starts in this process if the code and the settings on disk are those of this process, else in a process of its own
(`split_sessions.py`); the other streams run on either way. If no other stream runs, the session restarts itself with
the newest code (`restart_in_place.py`), which needs no second process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from streaming_jobs.errors import LeaseBusy
from streaming_jobs.runtime.handover import Handover
from streaming_jobs.runtime.split_sessions import SplitSessions
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.settings import Settings
from streaming_jobs.state import start_request, stop_request

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
        """True if somebody holds the lease of a stream that is not this session's now."""

    def declared(self, stream: str) -> bool:
        """True if the session could run the stream: it was started with it, stopped or not."""

    def take_back(self, stream: str) -> bool:
        """Start a stream that has ended or was left out; False if another process took its lease.

        Raises LeaseBusy and OSError.
        """


@dataclass
class FreshStarts:
    """Decides which streams start again, and where. `superseded`: the session has to end for one with newer code."""

    settings: Settings
    streams: Streams
    handover: Handover
    split: SplitSessions | None = None
    clock: Callable[[], float] = time.monotonic
    superseded: bool = field(default=False, init=False)
    pending: frozenset[str] = field(default=frozenset(), init=False)
    """The streams that will start again here or beside it, once they have stopped: the session must not end before."""
    _as_of: dict[str, float] = field(default_factory=dict, init=False)
    _seen: tuple[frozenset[str], float] = field(default=(frozenset(), 0.0), init=False)

    @property
    def elsewhere(self) -> frozenset[str]:
        """The streams in processes of their own."""
        return self.split.streams if self.split is not None else frozenset()

    def started(self, stream: str) -> None:
        """Take note that a stream has started: requests from before its code was read are done."""
        start_request.clear(self.settings, stream, self._since(stream))

    @property
    def busy(self) -> bool:
        """True while the session must not end, even if none of its streams runs."""
        return bool(self.pending) or (self.split is not None and self.split.alive)

    @property
    def failed_elsewhere(self) -> bool:
        """True if streams have failed for good in processes of their own."""
        return self.split is not None and bool(self.split.failed)

    def look(self, *, stopping: bool = False) -> None:
        """Stop those that are to start again, and start those that have stopped; `stopping`: only end."""
        if self.split is not None:
            if stopping or self.superseded:
                self.split.ask_to_stop()
            self._hurry(self.split)
            self.split.look()
        if stopping or self.superseded:
            self.pending = frozenset()
            return
        if self.elsewhere and self._all_asked():
            log.info("the session restarts with the code on disk, in one process", streams=",".join(self.elsewhere))
            self._supersede()
            return
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

    def close(self) -> None:
        """End the processes of streams that run elsewhere, and stop watching the code."""
        try:
            if self.split is not None:
                self.split.close()
        finally:
            self.handover.close()

    def _start(self, names: Sequence[str], by_name: Mapping[str, StreamRunner]) -> None:
        now = time.time()
        here = [name for name in names if name in by_name]
        if all(map(self.streams.declared, names)) and self.streams.can_start and self.handover.same_code():
            for name in names:
                self._as_of[name] = now
                self._take_back(name)
            return
        others = {r.stream.name for r in by_name.values() if not r.ended} - set(names)
        if self.split is None or not (others or self.elsewhere):
            log.info("the session restarts with the code on disk", streams=",".join(names))
            self._supersede()
            return
        if self._still_changing(names):
            return
        for name in here:
            if not by_name[name].detached:
                self.streams.detach(by_name[name])
        if all(by_name[name].detached for name in here):
            self.split.start(names)
            for name in names:  # this start answers their requests, also if it fails before its process can say so
                self._as_of[name] = now
            for name in here:  # whatever it failed with is over; from now on the other process answers for it
                by_name[name].status.state, by_name[name].status.error = "stopped", None
            self._done(names)

    def _hurry(self, split: SplitSessions) -> None:
        """Start what waits for its next try at once, if somebody asks for it."""
        if asked := self._asked(split.waiting):
            split.hurry(asked)
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
            self.pending -= {name}  # one that was left out runs elsewhere
        except OSError as error:  # a new session starts it from the beginning
            log.warning("stream not restarted in place", stream=name, reason=str(error))
            self._supersede()

    def _supersede(self) -> None:
        self.superseded, self.pending = True, frozenset()

    def _done(self, names: Collection[str]) -> None:
        self.pending -= frozenset(names)
        for name in names:
            self.handover.forget(name)

    def _still_changing(self, names: Sequence[str]) -> bool:
        """True until no further stream has come for a moment: those of one deploy share one process."""
        now = self.clock()
        if self._seen[0] != frozenset(names):
            self._seen = frozenset(names), now
        return now - self._seen[1] < TOGETHER

    def _due(self) -> list[str]:
        names = {running.stream.name for running in self.streams.runners} | set(self.handover.left_out)
        # Those of streams in other processes too: a process that a recovery has stopped may end only after it.
        due = set(self.handover.recovered(names)) - self.elsewhere
        names -= self.elsewhere
        due |= self._asked(names)
        due |= {name for name in self._failed() if not stop_request.asked(self.settings, name)}
        return sorted(due)

    def _asked(self, names: Collection[str]) -> set[str]:
        """Those of the streams for which a start is requested that is not done."""
        return {
            name
            for name in names
            if start_request.pending(self.settings, name, self._since(name))
            and not stop_request.asked(self.settings, name)
        }

    def _all_asked(self) -> bool:
        """True if every stream that runs, here or elsewhere, is to start again."""
        here = {running.stream.name for running in self.streams.runners if not running.ended}
        return not (here | self.elsewhere) - self._asked(here | self.elsewhere)

    def _failed(self) -> list[str]:
        """The streams that have failed, and would run other code if they were started now."""
        away = self.split.failed if self.split is not None else {}
        failed = [
            running.stream.name
            for running in self.streams.runners
            if running.stream.name not in self.elsewhere
            and running.stream.name not in away
            and (running.status.state == "failed" or (running.gave_up and not running.ended))
        ]
        here = [name for name in failed if self.handover.other_code([name])]
        return [*here, *(name for name in away if self.handover.changed_since_failure(name))]

    def _since(self, stream: str) -> float:
        return self._as_of.get(stream, self.handover.began)
