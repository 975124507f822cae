"""The home of a run of the kill loop: its settings, and the environment that passes them to child processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streaming_jobs
from streaming_jobs.settings import Settings, nested
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.status import read_status
from streaming_jobs.verification.chaos.version_reader import WatchedStream
from streaming_jobs.verification.delta_log import Entry, read_commit, versions

_VALUES: Mapping[str, Any] = {
    "stream.min_commit_interval": "200 ms",
    "stream.max_pause": "0 seconds",  # so that a kill interrupts a batch
    "table.log_retention": "30 days",  # the proof reads every entry of the run
    "table.log_versions": 0,
    "spark.driver_memory_mb": 1024,
    # A JVM that lives for seconds is quicker without its optimising compiler.
    "spark.extra": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"},
}


def on_cluster(base: Settings, master: str) -> dict[str, Any]:
    """Settings of sessions whose executors write appends; how executors are reached is the user's setting."""
    spark = base.spark
    return {
        "spark.master": master,
        "spark.driver_host": spark.driver_host or "127.0.0.1",
        "spark.executor_python": spark.executor_python,
        "spark.extra": {"spark.executor.memory": "512m", **_VALUES["spark.extra"], **spark.extra},
        "stream.path": "executor",
        "stream.min_commit_interval": "1 second",  # a batch is a second of each core, and all streams get their turn
    }


def on_store(base: Settings, url: str, *, state: bool) -> dict[str, Any]:
    """Settings of sessions whose tables, and state, are on an object store; how it is reached is the user's setting."""
    storage = base.storage.model_dump(mode="json", exclude_defaults=True)
    places = {"tables_dir": f"{url}/tables", **({"state_dir": f"{url}/state"} if state else {})}
    return {**places, **{f"storage.{name}": value for name, value in storage.items()}}


@dataclass(frozen=True)
class Home:
    """Settings of one run, and the same as environment for its drivers; `fed` is the topic that the feeder writes."""

    settings: Settings
    values: Mapping[str, Any]
    subjects: tuple[WatchedStream, ...]
    fed: str

    @classmethod
    def of(
        cls,
        folder: Path,
        base: Settings,
        *,
        max_offsets: int,
        subjects: tuple[WatchedStream, ...],
        fed: str,
        changes: Mapping[str, Any],
    ) -> Home:
        """A home in `folder`, which takes only jars and Java from the user's settings."""
        values = {
            **_VALUES,
            **changes,
            "home": str(folder.absolute()),
            "maven_repository": base.maven_repository.get_secret_value(),
            "stream.max_offsets_per_trigger": max_offsets,
        }
        if base.jars_dir is not None:
            values["jars_dir"] = str(base.jars_dir)
        if base.java_home is not None:
            values["java_home"] = str(base.java_home)
        return cls(Settings(**nested(values)), values, subjects, fed)

    @property
    def folder(self) -> Path:
        return self.settings.home

    def subject(self, stream: str) -> WatchedStream:
        return next(subject for subject in self.subjects if subject.stream == stream)

    def environment(self, **changes: str) -> dict[str, str]:
        """The environment of a child process: no inherited settings, only these and `changes`."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("RECOURSE_")}
        ours = {
            f"RECOURSE_{key.upper().replace('.', '__')}": value if isinstance(value, str) else json.dumps(value)
            for key, value in self.values.items()
        }
        root = str(Path(streaming_jobs.__file__).resolve().parent.parent)
        path = os.pathsep.join(part for part in (root, inherited.get("PYTHONPATH")) if part)
        return {**inherited, **ours, "PYTHONPATH": path, **changes}

    def checkpoint(self, stream: str, generation: int = 1) -> Checkpoint:
        """The stream's checkpoint, which only the tally reads, never the verifier."""
        return Checkpoint(self.settings.state / stream / f"g{generation:04d}")

    def newest_version(self, table: str) -> int:
        """The table's newest version; -1 when there is none."""
        return max(versions(self.settings.tables / table), default=-1)

    def newest_batch(self, table: str) -> Entry | None:
        path = self.settings.tables / table
        for version in reversed(versions(path)):
            entry = read_commit(path, version).entry
            if entry is not None and entry.kind == "batch":
                return entry
        return None

    def position(self, table: str) -> int:
        """Records that the batches up to the table's newest version have read, all partitions together."""
        newest = self.newest_batch(table)
        return sum(sum(r.end.values()) for r in newest.ranges) if newest is not None else 0

    def restarts(self, streams: Sequence[str]) -> int:
        """Restarts of these streams by their present session, as their status files report them."""
        found = [read_status(self.settings, stream) for stream in streams]
        return sum(status.restarts for status in found if status is not None)

    def commits(self, streams: Sequence[str]) -> int:
        """Versions of the primary tables of these streams together, a number that only rises."""
        return sum(self.newest_version(subject.table) + 1 for subject in self.subjects if subject.stream in streams)
