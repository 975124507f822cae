"""Rebuilt slices, and slices that wait for their commit, as objects beside the stream's state.

    <state>/<stream>/slices/waiting/<id>.json   a change that the driver commits at its next batch border
    <state>/<stream>/slices/<id>.json           the outcome; these objects stay, as the history of rebuilt slices
    <state>/<stream>/slices/running             a lock, held by the rebuild that runs; one per stream

A waiting change is either claimed, by the driver that commits it, or withdrawn: whoever replaces its object first
decides. A kill at any moment is harmless: the outcome is written before the waiting object is removed, and the table's
log says whether a change was committed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import structlog

from streaming_jobs.errors import LeaseBusy, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.state.records import json_bytes
from streaming_jobs.state.stream_folder import StreamFolder, local_folder
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locks import locked
from streaming_jobs.storage.object_files import Changed, Found, ObjectFiles, ObjectHandle
from streaming_jobs.storage.object_store import polled

log = structlog.get_logger()

State = Literal["waiting", "committing", "committed", "outdated", "failed", "expired"]


@dataclass(frozen=True)
class SliceCommitRequest:
    """One rebuilt slice. `change` is `SliceChange` as JSON; `expires` in seconds since 1970; `summary` is for people.

    `version` is that of the table after the commit; `reason` says why there is none. `at`: when the state was reached.
    """

    id: str
    stream: str
    table: str
    entry: str
    change: Mapping[str, Any]
    expires: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    state: State = "waiting"
    version: int | None = None
    reason: str = ""
    at: float = 0.0

    @property
    def ledger(self) -> LedgerEntry:
        entry = LedgerEntry.decode(self.entry)
        assert entry is not None, "it was encoded by us"
        return entry

    def ended(self, state: State, *, version: int | None = None, reason: str = "") -> SliceCommitRequest:
        """The request with its outcome, without the files of the change."""
        return replace(self, state=state, version=version, reason=reason, at=round(time.time(), 3), change={})


@dataclass(frozen=True)
class SliceRequests:
    folder: Path
    files: ObjectFiles

    @classmethod
    def of(cls, settings: Settings, stream: str) -> SliceRequests:
        of_stream = StreamFolder.of(settings, stream)
        return cls(local_folder(settings) / stream / "slices", polled(of_stream.files.below("slices")))

    def any_waiting(self) -> bool:
        """True if a change may wait; called at every batch border."""
        return bool(self._waiting())

    def waiting(self) -> list[SliceCommitRequest]:
        """The changes that wait, oldest first, without changes that are committed meanwhile.

        A damaged one is set aside as `<id>.unreadable`, so that it does not keep the others waiting.
        """
        requests = []
        for handle in self._waiting():
            if (found := handle.read()) is None:
                continue
            try:
                requests.append(_parsed(handle, found))
            except PreflightRefused as error:
                ObjectHandle(self.files, f"{handle.name.removesuffix('.json')}.unreadable").put(found.data or b"\n")
                with suppress(Changed):
                    handle.delete(found.tag)
                log.warning("waiting slice set aside", reason=error.found)
        return requests

    def history(self) -> list[SliceCommitRequest]:
        """The slices with an outcome, oldest first."""
        names = [name.removesuffix(".json") for name in self.files.names() if name.endswith(".json")]
        return [ended for name in names if "/" not in name and (ended := self.outcome(name)) is not None]

    def outcome(self, name: str) -> SliceCommitRequest | None:
        """The outcome of a slice; None while it waits."""
        handle = ObjectHandle(self.files, f"{name}.json")
        found = handle.read()
        return None if found is None else _parsed(handle, found)

    def ask(self, request: SliceCommitRequest) -> None:
        """Leave a change for the driver; it is durable when this returns."""
        self._handle(request).put(json_bytes(asdict(request)))

    def claim(self, request: SliceCommitRequest) -> bool:
        """Let nobody withdraw a change from now on; False if it is gone. The caller may write the table."""
        return self._decided(replace(request, state="committing"))

    def withdraw(self, request: SliceCommitRequest, reason: str) -> None:
        """End a change that nobody has claimed; a claimed one gets its outcome from whoever commits it."""
        expired = request.ended("expired", reason=reason)
        if self._decided(expired):
            self.end(expired)

    def end(self, request: SliceCommitRequest) -> None:
        """Write an outcome; the change waits no more."""
        self.files.put(f"{request.id}.json", json_bytes(asdict(request)))
        self._handle(request).delete()

    def _decided(self, request: SliceCommitRequest) -> bool:
        handle = self._handle(request)
        found = handle.read()
        if found is None or _parsed(handle, found).state != "waiting":
            return False
        try:
            handle.replace(json_bytes(asdict(request)), found.tag)
        except Changed:
            return False
        return True

    def _handle(self, request: SliceCommitRequest) -> ObjectHandle:
        return ObjectHandle(self.files, f"waiting/{request.id}.json")

    def _waiting(self) -> list[ObjectHandle]:
        return [ObjectHandle(self.files, name) for name in self.files.names("waiting") if name.endswith(".json")]

    @contextmanager
    def running(self, wait: float) -> Iterator[None]:
        """Be the stream's only rebuild; raises LeaseBusy if another one runs for longer than `wait` seconds."""
        busy = LeaseBusy(
            f"another slice of stream {self.folder.parent.name} is being rebuilt",
            "run it again when that one has ended, or name a range of days",
        )
        with locked(private_folder(self.folder) / "running", wait, lambda: busy):
            yield


def _parsed(handle: ObjectHandle, found: Found) -> SliceCommitRequest:
    try:
        return SliceCommitRequest(**json.loads(found.data))
    except (ValueError, TypeError) as error:
        raise PreflightRefused(f"{handle} cannot be read: {error}", "move it away: it is only a record") from error
