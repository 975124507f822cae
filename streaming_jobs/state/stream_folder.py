"""The folder `<state>/<stream>` of a stream's state beside its tables, and the names of all files in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streaming_jobs.declare.names import checked_name
from streaming_jobs.platform.files import private_folder
from streaming_jobs.platform.locks import locked
from streaming_jobs.settings import Settings
from streaming_jobs.state.checkpoint import Checkpoint


@dataclass(frozen=True)
class StreamFolder:
    """The paths below one stream's folder; only `make` creates anything."""

    path: Path

    @classmethod
    def of(cls, settings: Settings, stream: str) -> StreamFolder:
        """The folder of a stream; raises UsageError for a name that no stream may have."""
        return cls(settings.state / checked_name("stream", stream))

    def make(self) -> StreamFolder:
        """The folder, made for this user alone if it was not there."""
        private_folder(self.path)
        return self

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder's lock, for milliseconds: no other process writes or removes a request within the block.

        The folder is made if it was not there.
        """
        with locked(private_folder(self.path)):
            yield

    def checkpoint(self, generation: int) -> Checkpoint:
        return Checkpoint(self.path / f"g{generation:04d}")

    @property
    def record(self) -> Path:
        """The record: topics and tables that the stream is bound to, and its generations (`stream_record.py`)."""
        return self.path / "stream.json"

    @property
    def status(self) -> Path:
        """The report of the running stream (`status.py`)."""
        return self.path / "status.json"

    @property
    def sessions(self) -> Path:
        """Starts and ends of the stream in its sessions (`stream_history.py`)."""
        return self.path / "sessions.jsonl"

    @property
    def deploys(self) -> Path:
        """The deploys of other code (`stream_history.py`)."""
        return self.path / "deploys.jsonl"

    def request(self, name: Literal["stop", "start"]) -> Path:
        """The request to stop, or to start, also once more (`requests.py`)."""
        return self.path / name

    @property
    def declaration(self) -> Path:
        """The parts of the code and the settings that the running session has (`runtime/declaration.py`)."""
        return self.path / "declaration.json"

    @property
    def lease(self) -> Path:
        """The lock and the name of the driver that runs the stream (`lease.py`)."""
        return self.path / "lease"

    @property
    def ledger(self) -> Path:
        """The folder of the ledger's files (`ledger_file.py`)."""
        return self.path / "ledger"

    @property
    def savepoints(self) -> Path:
        """The folder of the savepoints (`savepoints.py`)."""
        return self.path / "savepoints"

    @property
    def attempt(self) -> Path:
        """The last batch that took the driver path (`runtime/batch_hooks.py`)."""
        return self.path / "attempt"

    @property
    def output_plans(self) -> Path:
        """The output plans of each code version (`runtime/output_plans.py`)."""
        return self.path / "outputs.json"

    @property
    def slices(self) -> Path:
        """The folder of rebuilt slices (`slice_requests.py`)."""
        return self.path / "slices"
