"""Rebuilt slices, and slices that wait for their commit, as files beside the stream's state.

    <state>/<stream>/slices/waiting/<id>.json   a change that the driver commits at its next batch border
    <state>/<stream>/slices/<id>.json           the outcome; these files stay, as the history of rebuilt slices
    <state>/<stream>/slices/lock                held while a waiting one is carried out, or withdrawn
    <state>/<stream>/slices/running             held by the rebuild that runs; one per stream

A kill at any moment is harmless: the outcome is written before the waiting file is removed, and the table's log says
whether a change was committed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import structlog

from streaming_jobs.errors import LeaseBusy, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.files import private_folder, sync, write_json
from streaming_jobs.platform.locks import locked
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder

log = structlog.get_logger()

State = Literal["waiting", "committed", "outdated", "failed", "expired"]


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

    @classmethod
    def of(cls, settings: Settings, stream: str) -> SliceRequests:
        return cls(StreamFolder.of(settings, stream).slices)

    @property
    def _waiting(self) -> Path:
        return self.folder / "waiting"

    def any_waiting(self) -> bool:
        """True if a change may wait; called at every batch border."""
        try:
            with os.scandir(self._waiting) as inside:
                return any(each.name.endswith(".json") for each in inside)
        except FileNotFoundError:
            return False

    def waiting(self) -> list[SliceCommitRequest]:
        """The changes that wait, oldest first, without changes that are committed meanwhile.

        A damaged one is set aside as `<id>.unreadable`, so that it does not keep the others waiting.
        """
        found = []
        for path in sorted(self._waiting.glob("*.json")):
            try:
                found.append(_read(path))
            except FileNotFoundError:
                continue
            except PreflightRefused as error:
                with suppress(FileNotFoundError):
                    path.rename(path.with_suffix(".unreadable"))
                log.warning("waiting slice set aside", reason=error.found)
        return found

    def history(self) -> list[SliceCommitRequest]:
        """The slices with an outcome, oldest first."""
        return [_read(path) for path in sorted(self.folder.glob("*.json"))]

    def outcome(self, name: str) -> SliceCommitRequest | None:
        """The outcome of a slice; None while it waits."""
        path = self.folder / f"{name}.json"
        return _read(path) if path.exists() else None

    def ask(self, request: SliceCommitRequest) -> None:
        """Leave a change for the driver; it is on disk when this returns."""
        write_json(private_folder(self._waiting) / f"{request.id}.json", asdict(request))

    def end(self, request: SliceCommitRequest) -> None:
        """Write an outcome; the change waits no more."""
        write_json(private_folder(self.folder) / f"{request.id}.json", asdict(request))
        waiting = self._waiting / f"{request.id}.json"
        if waiting.exists():
            waiting.unlink()
            sync(waiting.parent)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock, for milliseconds: no other process commits or withdraws a change within the block."""
        with locked(private_folder(self.folder) / "lock"):
            yield

    @contextmanager
    def running(self, wait: float) -> Iterator[None]:
        """Be the stream's only rebuild; raises LeaseBusy if another one runs for longer than `wait` seconds."""
        busy = LeaseBusy(
            f"another slice of stream {self.folder.parent.name} is being rebuilt",
            "run it again when that one has ended, or name a range of days",
        )
        with locked(private_folder(self.folder) / "running", wait, lambda: busy):
            yield


def _read(path: Path) -> SliceCommitRequest:
    try:
        return SliceCommitRequest(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise PreflightRefused(f"{path} cannot be read: {error}", "move the file away: it is only a record") from error
