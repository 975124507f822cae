"""The folders of a preview, and its lock.

    <state>/_previews/<stream>/lease           one preview per stream; free when its process and its JVM have ended
    <state>/_previews/<stream>/reports/        the reports of the newest previews
    <state>/_previews/<stream>/replay/         the state of the replay
    <tables>/_previews/<stream>/rebuilt/       its tables; beside the stream's own, so that hard links are possible
    <tables>/_previews/<stream>/published/     the stream's tables as they were when the preview began
    <tables>/_previews/<stream>/differing_*/   of both, the files that only one of them has

A preview removes all but the reports at its end. A killed one leaves them to the stream's next preview. No stream and
no table can have a name that begins with an underscore.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streaming_jobs.declare.names import checked_name
from streaming_jobs.errors import LeaseBusy, TransientError, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.state import lease
from streaming_jobs.state.stream_folder import StreamFolder, local_folder
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locations import Location, remove_tree

REPORTS = 20
"""Reports that are kept per stream, the newest ones."""

_NAME = "_previews"
_JVM_ENDS = 20.0
"""Seconds to wait for the JVM of a preview that was killed."""
_ATTEMPTS = 3


@dataclass(frozen=True)
class Folders:
    settings: Settings
    stream: str

    @property
    def state(self) -> Location:
        """The state of the replay, and, in a folder, the lock and the reports."""
        return self.settings.state / _NAME / checked_name("stream", self.stream)

    @property
    def tables(self) -> Location:
        return self.settings.tables / _NAME / checked_name("stream", self.stream)

    @property
    def reports(self) -> Path:
        """One folder for each report that is kept."""
        return local_folder(self.settings) / _NAME / checked_name("stream", self.stream) / "reports"

    def replay_settings(self) -> Settings:
        """The settings of the replay: its folders, one core, no savepoints and no maintenance."""
        spark, table = self.settings.spark, self.settings.table
        target = self.settings.for_replay(self.stream, self.state / "replay", self.tables / "rebuilt", max_restarts=1)
        return target.model_copy(
            update={
                "spark": spark.model_copy(update={"master": one_core(spark.master)}),
                "table": table.model_copy(update={"compact_after_files": 0}),
            }
        )

    def with_tables(self, name: str) -> Settings:
        return self.settings.with_tables(self.tables / name)

    def clear(self) -> None:
        """Remove the folders, also those that a killed preview has left; raises TransientError if that fails.

        The JVM of a killed preview writes on for seconds: this waits for its end.
        """
        target = self.replay_settings()
        if StreamFolder.of(target, self.stream).path.is_dir():
            with lease.take(target, self.stream, purpose="clean-up", wait=_JVM_ENDS):
                pass
        for folder in (target.state, self.tables):
            for _ in range(_ATTEMPTS):
                if folder.is_dir():
                    remove_tree(folder)
            if folder.is_dir():
                raise TransientError(f"{folder} of an earlier preview cannot be removed", "remove it, and try again")

    def new_report(self) -> Path:
        """A new folder for a report; the oldest ones are removed."""
        taken = sorted(int(place.name) for place in self.reports.glob("[0-9]*") if place.name.isdigit())
        for number in taken[: max(len(taken) - REPORTS + 1, 0)]:
            shutil.rmtree(self.reports / f"{number:06d}", ignore_errors=True)
        return private_folder(self.reports / f"{(taken[-1] if taken else 0) + 1:06d}")


@contextmanager
def hold_previews(folders: Folders) -> Iterator[None]:
    """Hold the lock of the stream's previews; raises UsageError while another preview of the stream runs."""
    holding = folders.settings.model_copy(update={"state_dir": local_folder(folders.settings) / _NAME})
    try:
        held = lease.acquire(holding, folders.stream, purpose="preview", wait=0.0)
    except LeaseBusy as error:
        owner = lease.holder(holding, folders.stream)
        who = f" (process {owner.pid})" if owner is not None else ""
        raise UsageError(
            f"another preview of stream {folders.stream} is running{who}", "wait for its end, or end it with Ctrl-C"
        ) from error
    try:
        yield
    finally:
        held.release()


def one_core(master: str) -> str:
    """A Spark master with one core, if it is local; any other as it is."""
    return "local[1]" if master.startswith("local") and "cluster" not in master else master
