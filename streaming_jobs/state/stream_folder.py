"""The folder `<state>/<stream>` of a stream's state beside its tables, and the names of all files in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from streaming_jobs.declare.names import checked_name, is_name
from streaming_jobs.settings import Settings
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locations import Location, StorePath, made_folder
from streaming_jobs.storage.object_files import LocalFiles, ObjectFiles, ObjectHandle
from streaming_jobs.storage.object_store import StoreFiles, open_store, polled


def state_files(settings: Settings) -> ObjectFiles:
    """All objects of the streams' state."""
    return files_at(settings.state)


def files_at(location: Location) -> ObjectFiles:
    """The objects below a location."""
    return LocalFiles(location) if isinstance(location, Path) else _store_files(location)


@cache
def _store_files(location: StorePath) -> StoreFiles:
    """One client per process: it keeps its connections."""
    return open_store(location.url, dict(location.options))


def local_folder(settings: Settings) -> Path:
    """The folder of this machine for locks and for what is no state: that of state, unless state is on a store."""
    return settings.state if isinstance(settings.state, Path) else settings.home / "local"


def stream_names(settings: Settings) -> list[str]:
    """The names of all streams that may have state here, and of folders beside theirs."""
    return [name for name in state_files(settings).folders() if is_name(name)]


def attempt_file(settings: Settings, stream: str) -> Path:
    """The last batch of a stream that took the driver path (`runtime/batch_hooks.py`), for this machine to know."""
    return private_folder(local_folder(settings) / checked_name("stream", stream)) / "attempt"


@dataclass(frozen=True)
class StreamFolder:
    """The objects of one stream, and the locations of what is no object; only `make` creates anything."""

    path: Location
    files: ObjectFiles

    @classmethod
    def of(cls, settings: Settings, stream: str) -> StreamFolder:
        """The folder of a stream; raises UsageError for a name that no stream may have."""
        return cls.below(settings, checked_name("stream", stream))

    @classmethod
    def below(cls, settings: Settings, folder: str) -> StreamFolder:
        """A folder of the state, such as that of a replay."""
        return cls(settings.state / folder, state_files(settings).below(folder))

    def make(self) -> StreamFolder:
        """The folder, made for this user alone if it was not there."""
        made_folder(self.path)
        return self

    def checkpoint(self, generation: int) -> Checkpoint:
        return Checkpoint(self.path / f"g{generation:04d}")

    @property
    def record(self) -> ObjectHandle:
        """The record: topics and tables that the stream is bound to, and its generations (`stream_record.py`)."""
        return ObjectHandle(self.files, "stream.json")

    @property
    def status(self) -> ObjectHandle:
        """The report of the running stream (`status.py`)."""
        return ObjectHandle(self.files, "status.json")

    @property
    def sessions(self) -> ObjectHandle:
        """Starts and ends of the stream in its sessions (`stream_history.py`)."""
        return ObjectHandle(self.files, "sessions.jsonl")

    @property
    def deploys(self) -> ObjectHandle:
        """The deploys of other code (`stream_history.py`)."""
        return ObjectHandle(self.files, "deploys.jsonl")

    def request(self, name: Literal["stop", "start", "stand_by"]) -> ObjectHandle:
        """One kind of request to the session that runs the stream (`requests.py`)."""
        return ObjectHandle(polled(self.files), name)

    @property
    def declaration(self) -> ObjectHandle:
        """The parts of the code and the settings that the running session has (`runtime/declaration.py`)."""
        return ObjectHandle(self.files, "declaration.json")

    @property
    def lease(self) -> Path:
        """The lock and the name of the driver that runs the stream (`lease.py`); in a folder only."""
        assert isinstance(self.path, Path)
        return self.path / "lease"

    @property
    def ledger(self) -> Location:
        """The folder of the ledger's files (`ledger_file.py`)."""
        return self.path / "ledger"

    @property
    def savepoints(self) -> Location:
        """The folder of the savepoints (`savepoints.py`)."""
        return self.path / "savepoints"

    def savepoint(self, name: str) -> ObjectHandle:
        """What makes a folder a savepoint."""
        return ObjectHandle(self.files, f"savepoints/{name}/savepoint.json")

    @property
    def set_aside(self) -> ObjectHandle:
        """The records of the newest batch that the function raises on, and an error budget's count (`set_aside.py`)."""
        return ObjectHandle(self.files, "set_aside.json")

    @property
    def lookups(self) -> ObjectHandle:
        """The versions of the tables that the newest batch looks up (`table_sources/lookups.py`)."""
        return ObjectHandle(self.files, "lookups.json")

    @property
    def output_plans(self) -> ObjectHandle:
        """The output plans of each code version (`runtime/output_plans.py`)."""
        return ObjectHandle(self.files, "outputs.json")
