"""Requests to stop and to start a stream: small files by which any process asks the session that runs the stream.

    <state>/<stream>/stop     its session stops it at a batch border
    <state>/<stream>/start    whoever runs it, or would, starts it once more

While `stop` exists, no supervisor starts the stream. A start by a person removes a request that is older than the
start, once preflight has passed; a newer request holds. The request of a recovery is removed by that recovery alone,
when it is over.

`start` asks for a start that is newer than the file, with the code that is on disk. A session that runs the stream
stops it at a batch border and starts it again; a session that has stopped it starts it; if none runs, the supervisor
starts a session, also after an operator's stop or after a failure that it has given up on. Then the session removes the
file. A stop request is stronger: while there is one, nobody starts the stream.

A request states what shall be, so that nothing is lost if whoever made it is killed, and making it twice has one
effect. The file holds JSON: `who` made the request, in words, and `plan` for a recovery. In plain text, written by
hand or by an earlier version, the text is `who`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streaming_jobs.platform.files import sync, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder

_RECOVERY = "stopped for recovery plan "
"""The text before the plan's id in `who`, and in a request of an earlier version."""


@dataclass(frozen=True)
class StreamRequest:
    """A request: `who` made it, in words, `since` when (seconds since 1970), and the recovery plan it is for.

    `file` is the file's inode and time: a repetition of the same request is another one.
    """

    who: str
    since: float
    file: tuple[int, int] = (0, 0)
    plan: str | None = None


@dataclass(frozen=True)
class RequestFile:
    """One kind of request; `STOP` and `START` are all there are."""

    name: Literal["stop", "start"]

    def path(self, settings: Settings, stream: str) -> Path:
        return StreamFolder.of(settings, stream).request(self.name)

    def asked(self, settings: Settings, stream: str) -> bool:
        """True if there is a request, also one that cannot be read."""
        return self.path(settings, stream).exists()

    def request(self, settings: Settings, stream: str) -> StreamRequest | None:
        """The request, if there is one. Of another user's, which may not be read, `who` is empty."""
        path = self.path(settings, stream)
        try:
            try:
                with path.open(encoding="utf-8", errors="replace") as file:
                    stat, text = os.fstat(file.fileno()), file.read().strip()
            except PermissionError:
                stat, text = path.stat(), ""
        except FileNotFoundError:
            return None
        who, plan = _parsed(text)
        return StreamRequest(who, stat.st_mtime, (stat.st_ino, stat.st_mtime_ns), plan)

    def requests(self, settings: Settings) -> dict[str, StreamRequest]:
        names = [path.parent.name for path in settings.state.glob(f"*/{self.name}")]
        return {name: pending for name in names if (pending := self.request(settings, name)) is not None}

    def ask(self, settings: Settings, stream: str, who: str) -> StreamRequest:
        """Make a request in place of an older one; the file is on disk when this returns."""
        with StreamFolder.of(settings, stream).alone():
            return self._write(settings, stream, {"who": who})

    def clear(self, settings: Settings, stream: str, only: StreamRequest) -> None:
        """Remove the request `only`, durably: it is obeyed, or void; a newer request stays."""
        with StreamFolder.of(settings, stream).alone():
            if self.request(settings, stream) == only:
                path = self.path(settings, stream)
                path.unlink()
                sync(path.parent)

    def for_recovery(self, settings: Settings, stream: str) -> bool:
        """True if the request is known to be of a recovery."""
        try:
            pending = self.request(settings, stream)
        except OSError:  # it is no file
            return False
        return pending is not None and pending.plan is not None

    def ask_for(self, settings: Settings, stream: str, plan: str) -> None:
        """Make a request for a recovery; an existing request, of anybody, stays as it is."""
        with StreamFolder.of(settings, stream).alone():
            if not self.asked(settings, stream):
                self._write(settings, stream, {"who": f"{_RECOVERY}{plan}", "plan": plan})

    def clear_for(self, settings: Settings, stream: str, plan: str) -> None:
        """Remove the request if it is of this recovery."""
        pending = self.request(settings, stream)
        if pending is not None and pending.plan == plan:
            self.clear(settings, stream, pending)

    def _write(self, settings: Settings, stream: str, value: dict[str, str]) -> StreamRequest:
        write_atomic(self.path(settings, stream), f"{json.dumps(value)}\n")
        request = self.request(settings, stream)
        assert request is not None, "the folder is locked"
        return request


STOP, START = RequestFile("stop"), RequestFile("start")


def _parsed(text: str) -> tuple[str, str | None]:
    """The text of the file as `who` and `plan`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return str(value.get("who", "")), value.get("plan")
    return text, text.removeprefix(_RECOVERY) if text.startswith(_RECOVERY) else None
