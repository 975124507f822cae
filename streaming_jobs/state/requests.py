"""Requests to stop and to start a stream: small objects by which any process asks the session that runs the stream.

    <state>/<stream>/stop       its session stops it at a batch border
    <state>/<stream>/start      whoever runs it, or would, starts it once more
    <state>/<stream>/stand_by   its session has Spark ready for the next start, with the code on disk

While `stop` exists, no supervisor starts the stream. A start by a person removes a request that is older than the
start, once preflight has passed; a newer request holds. The request of a recovery is removed by that recovery alone,
when it is over.

`start` asks for a start that is newer than the file, with the code that is on disk. A session that runs the stream
stops it at a batch border and starts it again; a session that has stopped it starts it; if none runs, the supervisor
starts a session, also after an operator's stop or after a failure that it has given up on. Then the session removes the
file. A stop request is stronger: while there is one, nobody starts the stream.

`stand_by` is a recovery's, which will stop the stream for seconds: a session that has other code than that on disk
starts another process, which loads it, starts Spark, answers by `READY` in place of `who`, and starts the stream once
the stop request is gone. A session that has the code answers itself, and stays. The start removes the request; one
that is older than `STANDS_BY` counts no longer.

A request states what shall be, so that nothing is lost if whoever made it is killed, and making it twice has one
effect. The file holds JSON: `who` made the request, in words, `plan` for a recovery, and an `id`, so that a repetition
differs. In plain text, written by hand or by an earlier version, the text is `who`.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder, stream_names
from streaming_jobs.storage.object_files import AlreadyThere, Changed, ObjectHandle, Unreadable

_RECOVERY = "stopped for recovery plan "
"""The text before the plan's id in `who`, and in a request of an earlier version."""


@dataclass(frozen=True)
class StreamRequest:
    """A request: `who` made it, in words, `since` when (seconds since 1970), and the recovery plan it is for.

    `tag` is that of the object: a repetition of the same request is another one.
    """

    who: str
    since: float
    tag: str = ""
    plan: str | None = None


@dataclass(frozen=True)
class RequestFile:
    """One kind of request; `STOP`, `START` and `STAND_BY` are all there are."""

    name: Literal["stop", "start", "stand_by"]

    def handle(self, settings: Settings, stream: str) -> ObjectHandle:
        return StreamFolder.of(settings, stream).request(self.name)

    def asked(self, settings: Settings, stream: str) -> bool:
        """True if there is a request, also one that cannot be read."""
        try:
            return self.handle(settings, stream).exists()
        except OSError:
            return True

    def request(self, settings: Settings, stream: str) -> StreamRequest | None:
        """The request, if there is one. Of another user's, which may not be read, `who` is empty."""
        try:
            found = self.handle(settings, stream).read()
        except Unreadable as error:
            return StreamRequest("", error.at, error.tag)
        if found is None:
            return None
        who, plan, at = _parsed(found.data.decode(errors="replace").strip())
        return StreamRequest(who, at or found.at, found.tag, plan)

    def requests(self, settings: Settings) -> dict[str, StreamRequest]:
        names = stream_names(settings)
        return {name: pending for name in names if (pending := self.request(settings, name)) is not None}

    def ask(self, settings: Settings, stream: str, who: str) -> StreamRequest:
        """Make a request in place of an older one; it is durable when this returns."""
        at = time.time()
        return StreamRequest(who, at, self.handle(settings, stream).put(_content(who, at)))

    def clear(self, settings: Settings, stream: str, only: StreamRequest) -> None:
        """Remove the request `only`, durably: it is obeyed, or void; a newer request stays."""
        with suppress(Changed):
            self.handle(settings, stream).delete(only.tag)

    def for_recovery(self, settings: Settings, stream: str) -> bool:
        """True if the request is known to be of a recovery."""
        try:
            pending = self.request(settings, stream)
        except OSError:  # it is no file
            return False
        return pending is not None and pending.plan is not None

    def ask_for(self, settings: Settings, stream: str, plan: str) -> None:
        """Make a request for a recovery; an existing request, of anybody, stays as it is."""
        with suppress(AlreadyThere):
            self.handle(settings, stream).create(_content(f"{_RECOVERY}{plan}", time.time(), plan=plan))

    def clear_for(self, settings: Settings, stream: str, plan: str) -> None:
        """Remove the request if it is of this recovery."""
        pending = self.request(settings, stream)
        if pending is not None and pending.plan == plan:
            self.clear(settings, stream, pending)


STOP, START, STAND_BY = RequestFile("stop"), RequestFile("start"), RequestFile("stand_by")
STANDS_BY = 1800.0
"""Seconds for which a session stands by: a recovery that was killed does not keep one for ever."""
READY = "ready"


def stands_by(settings: Settings, stream: str) -> StreamRequest | None:
    """The request to stand by that holds now."""
    request = STAND_BY.request(settings, stream)
    return request if request is not None and 0 <= time.time() - request.since < STANDS_BY else None


def _content(who: str, at: float, **plan: str) -> bytes:
    # The writer's clock: a store's has whole seconds, and may be another one.
    return f"{json.dumps({'who': who, **plan, 'at': at, 'id': uuid.uuid4().hex})}\n".encode()


def _parsed(text: str) -> tuple[str, str | None, float | None]:
    """The text of the file as `who`, `plan` and the time."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return str(value.get("who", "")), value.get("plan"), value.get("at")
    return text, text.removeprefix(_RECOVERY) if text.startswith(_RECOVERY) else None, None
