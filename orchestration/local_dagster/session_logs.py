"""The log of a session as the stderr of its run in Dagster's pages.

Dagster's own manager would copy a driver's output to a file without a bound. This one stores nothing: it reads the
session's bounded log on demand. Runs other than sessions have no output.

    <home>/logs/session-<job>.log      --- run <run id> of <job>
                                       ... lines of the driver
                                       --- run <next run id> of <job>

A run's part goes from the run's first line to the next run's. The parts of older runs are dropped in time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dagster._core.storage.cloud_storage_compute_log_manager import PollingComputeLogSubscriptionManager
from dagster._core.storage.compute_log_manager import CapturedLogMetadata, CapturedLogSubscription, ComputeIOType
from dagster._core.storage.noop_compute_log_manager import NoOpComputeLogManager
from dagster._serdes import ConfigurableClassData

SHOWN = 2 * 1024 * 1024
"""Bytes of a run's part that are shown at most, its end."""
_BLOCK = 1 << 20
_ID = re.compile(r"[0-9a-fA-F-]{8,64}")
_NEXT = b"\n--- run "


@dataclass
class RunLogs:
    """The logs of all sessions in one folder; remembers where runs begin."""

    folder: Path
    _begins: dict[str, tuple[Path, int]] = field(default_factory=dict)

    def path(self, run_id: str) -> Path | None:
        """The file in which the run's part is; None if no file has it."""
        found = self._find(run_id)
        return found[0] if found else None

    def read(self, run_id: str, offset: int, most: int | None = None) -> tuple[bytes | None, int]:
        """At most so many bytes of a run's part of the log, and the offset after them; None: no such part.

        Of a large part only the end is shown. A part that has become shorter, because older lines were dropped, is
        read from its beginning again.
        """
        found = self._find(run_id)
        if found is None:
            return None, offset
        path, begin = found
        with path.open("rb") as file:
            size = _end(file.fileno(), begin) - begin
            start = 0 if offset > size else offset
            if start == 0 and size > SHOWN:
                start = size - SHOWN
            length = size - start if most is None else min(size - start, most)
            data = os.pread(file.fileno(), length, begin + start)
        return data, start + len(data)

    def _find(self, run_id: str) -> tuple[Path, int] | None:
        """The file and the place of the run's first line."""
        if not _ID.fullmatch(run_id):
            return None
        wanted = f"--- run {run_id} of ".encode()
        known = self._begins.get(run_id)
        if known is not None and _is_at(known[0], known[1], wanted):
            return known
        for path in sorted(self.folder.glob("session-*.log")):
            place = _place_of(path, wanted)
            if place is not None:
                self._begins[run_id] = (path, place)
                return path, place
        return None


def _is_at(path: Path, place: int, wanted: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), len(wanted), place) == wanted
    except FileNotFoundError:
        return False


def _place_of(path: Path, wanted: bytes) -> int | None:
    """The place of the last line that begins with these bytes."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    place = data.rfind(b"\n" + wanted)
    if place >= 0:
        return place + 1
    return 0 if data.startswith(wanted) else None


def _end(descriptor: int, begin: int) -> int:
    """The end of the part that begins there: the next run's first line, or the end of the file."""
    place, before = begin, b""
    while block := os.pread(descriptor, _BLOCK, place):
        found = (before + block).find(_NEXT, 1 if place == begin else 0)
        if found >= 0:
            return place - len(before) + found + 1
        before, place = block[-len(_NEXT) :], place + len(block)
    return place


class SessionLogManager(NoOpComputeLogManager):
    """A compute log manager over the logs of sessions in the folder `logs`."""

    def __init__(self, logs: str, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__(inst_data)
        self._logs = RunLogs(Path(logs))
        self._subscriptions = PollingComputeLogSubscriptionManager(self)  # type: ignore[no-untyped-call]

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {"logs": str}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        return cls(inst_data=inst_data, **config_value)

    def is_capture_complete(self, log_key: Sequence[str]) -> bool:
        """True once the run is over, or unknown."""
        run = self._instance.get_run_by_id(log_key[0]) if self.has_instance else None
        return run is None or run.is_finished

    def get_log_data_for_type(
        self, log_key: Sequence[str], io_type: ComputeIOType, offset: int, max_bytes: int | None
    ) -> tuple[bytes | None, int]:
        """A part of the run's log as its stderr, and the offset after it."""
        if io_type is not ComputeIOType.STDERR:
            return None, 0
        return self._logs.read(log_key[0], offset, max_bytes)

    def get_log_metadata(self, log_key: Sequence[str]) -> CapturedLogMetadata:
        path = self._logs.path(log_key[0])
        return CapturedLogMetadata(stderr_location=str(path) if path else None)

    def subscribe(self, log_key: Sequence[str], cursor: str | None = None) -> CapturedLogSubscription:
        """The log as it grows, read again and again while it is viewed."""
        subscription = CapturedLogSubscription(self, log_key, cursor)
        self._subscriptions.add_subscription(subscription)
        return subscription

    def unsubscribe(self, subscription: CapturedLogSubscription) -> None:
        self._subscriptions.remove_subscription(subscription)

    def dispose(self) -> None:
        self._subscriptions.dispose()
