"""Changes of tables that wait for their commit, and their outcomes, as objects beside the stream's state.

    <state>/<stream>/<kind>/waiting/<id>.json   a change that the driver commits at its next batch border
    <state>/<stream>/<kind>/<id>.json           the outcome; these objects stay, as a history
    <state>/<stream>/<kind>/running             a lock, held by the process that makes a change; one per stream

A waiting change is either claimed, by the driver that commits it, or withdrawn: whoever replaces its object first
decides. A kill at any moment is harmless: the outcome is written before the waiting object is removed, and the table's
log says whether a change was committed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import structlog

from streaming_jobs.errors import LeaseBusy, PreflightRefused
from streaming_jobs.settings import Settings
from streaming_jobs.state.records import json_bytes
from streaming_jobs.state.stream_folder import StreamFolder, local_folder
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locks import locked
from streaming_jobs.storage.object_files import Changed, Found, ObjectFiles, ObjectHandle
from streaming_jobs.storage.object_store import polled

log = structlog.get_logger()

State = Literal["waiting", "committing", "committed", "unchanged", "outdated", "failed", "expired"]


@dataclass(frozen=True)
class ChangeRequest:
    """One change of a stream's tables. `reason` says why it was not committed; `at`: when the state was reached."""

    id: str
    stream: str
    state: State = field(default="waiting", kw_only=True)
    reason: str = field(default="", kw_only=True)
    at: float = field(default=0.0, kw_only=True)

    def ended(self, state: State, *, reason: str = "") -> Self:
        """The request with its outcome."""
        return self._ended(state, reason)

    def _ended(self, state: State, reason: str, **values: Any) -> Self:
        return replace(self, state=state, reason=reason, at=round(time.time(), 3), **values)


Request = TypeVar("Request", bound=ChangeRequest)


@dataclass(frozen=True)
class ChangeRequests(Generic[Request]):
    """The changes of one kind; `kind` names their folder, `build` makes a request of its values."""

    folder: Path
    files: ObjectFiles
    kind: ClassVar[str]
    build: ClassVar[Any]
    busy: ClassVar[tuple[str, str]]
    """What the error says if another process makes a change of the kind, and the next step."""

    @classmethod
    def of(cls, settings: Settings, stream: str) -> Self:
        of_stream = StreamFolder.of(settings, stream)
        return cls(local_folder(settings) / stream / cls.kind, polled(of_stream.files.below(cls.kind)))

    def any_waiting(self) -> bool:
        """True if a change may wait; called at every batch border."""
        return bool(self._waiting())

    def waiting(self) -> list[Request]:
        """The changes that wait, oldest first, without changes that are committed meanwhile.

        A damaged one is set aside as `<id>.unreadable`, so that it does not keep the others waiting.
        """
        requests = []
        for handle in self._waiting():
            if (found := handle.read()) is None:
                continue
            try:
                requests.append(self._parsed(handle, found))
            except PreflightRefused as error:
                ObjectHandle(self.files, f"{handle.name.removesuffix('.json')}.unreadable").put(found.data or b"\n")
                with suppress(Changed):
                    handle.delete(found.tag)
                log.warning("waiting change set aside", kind=self.kind, reason=error.found)
        return requests

    def names_waiting(self) -> set[str]:
        """The names of the changes that wait."""
        return {Path(handle.name).stem for handle in self._waiting()}

    def history(self) -> list[Request]:
        """The changes with an outcome, oldest first."""
        names = [name.removesuffix(".json") for name in self.files.names() if name.endswith(".json")]
        return [ended for name in names if "/" not in name and (ended := self.outcome(name)) is not None]

    def outcome(self, name: str) -> Request | None:
        """The outcome of a change; None while it waits."""
        handle = ObjectHandle(self.files, f"{name}.json")
        found = handle.read()
        return None if found is None else self._parsed(handle, found)

    def ask(self, request: Request) -> None:
        """Leave a change for the driver; it is durable when this returns."""
        self._handle(request).put(json_bytes(asdict(request)))

    def claim(self, request: Request) -> bool:
        """Let nobody withdraw a change from now on; False if it is gone. The caller may write the table."""
        return self._decided(replace(request, state="committing"))

    def withdraw(self, request: Request, reason: str) -> None:
        """End a change that nobody has claimed; a claimed one gets its outcome from whoever commits it."""
        expired = request.ended("expired", reason=reason)
        if self._decided(expired):
            self.end(expired)

    def end(self, request: Request) -> None:
        """Write an outcome; the change waits no more."""
        self.files.put(f"{request.id}.json", json_bytes(asdict(request)))
        self._handle(request).delete()

    def _decided(self, request: Request) -> bool:
        handle = self._handle(request)
        found = handle.read()
        if found is None or self._parsed(handle, found).state != "waiting":
            return False
        try:
            handle.replace(json_bytes(asdict(request)), found.tag)
        except Changed:
            return False
        return True

    def _handle(self, request: Request) -> ObjectHandle:
        return ObjectHandle(self.files, f"waiting/{request.id}.json")

    def _waiting(self) -> list[ObjectHandle]:
        return [ObjectHandle(self.files, name) for name in self.files.names("waiting") if name.endswith(".json")]

    @contextmanager
    def running(self, wait: float) -> Iterator[None]:
        """Be the only process that makes one; raises LeaseBusy if another one does for longer than `wait` seconds."""
        found, next_step = self.busy
        busy = LeaseBusy(found.format(self.folder.parent.name), next_step)
        with locked(private_folder(self.folder) / "running", wait, lambda: busy):
            yield

    def _parsed(self, handle: ObjectHandle, found: Found) -> Request:
        try:
            request: Request = self.build(**json.loads(found.data))
        except (ValueError, TypeError, KeyError) as error:
            raise PreflightRefused(f"{handle} cannot be read: {error}", "move it away: it is only a record") from error
        return request
