"""Proof that executors on other machines share the folders of tables and state with the driver.

Spark writes "successfully" to a disk that only one machine has: the driver would commit a batch without those rows, and
state would be lost with its machine. An executor that comes later is not asked; the rows in its files are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

from streaming_jobs.errors import PermanentError
from streaming_jobs.files import private_folder
from streaming_jobs.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VISIBLE = 5.0
"""Seconds that a network file system has to show one machine's file to another one."""
_ROUNDS = 5

Answer = tuple[str, str, list[tuple[str, str]]]
"""Of a task: host and working folder of its executor, and per folder the file that it wrote, or the reason for none."""
Task = Callable[[Iterable[object]], Iterator[Answer]]


class Executors(Protocol):
    """The executors of a Spark session."""

    def count(self) -> int:
        """How many are there now."""

    def run(self, task: Task) -> list[Answer]:
        """The answers of a task on each core; waits until there is an executor."""


@dataclass(frozen=True)
class SparkExecutors:
    """Those of this session."""

    spark: SparkSession

    def count(self) -> int:
        """As their block managers have registered; the driver's is one more."""
        return int(self.spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1

    def run(self, task: Task) -> list[Answer]:
        """Spark offers a job's first tasks to each free executor in turn."""
        context = self.spark.sparkContext
        tasks = max(context.defaultParallelism, self.count())
        return context.parallelize(range(tasks), tasks).mapPartitions(task).collect()


def in_this_process(master: str) -> bool:
    """True if the driver's JVM is the only executor of this Spark master."""
    return master == "local" or master.startswith("local[")


def check_shared(settings: Settings, executors: Executors, visible: float = VISIBLE) -> None:
    """Let each executor read a file of the driver in both folders, and write one beside it that the driver reads.

    Raises PermanentError for an executor that does not share a folder with the driver.
    """
    token, folders = uuid4().hex, (settings.tables, settings.state)
    asked = [private_folder(folder) / f".probe-{token}" for folder in folders]
    try:
        for file in asked:
            file.write_text(token, encoding="utf-8")
        seen: set[tuple[str, str]] = set()
        for _ in range(_ROUNDS):  # executors come one after the other, and each may be busy
            for host, place, files in executors.run(_task([str(file) for file in asked], visible)):
                seen.add((host, place))
                for folder, (written, reason) in zip(folders, files, strict=True):
                    _enforce(host, folder, reason or _difference(Path(written), token, visible))
            if len(seen) >= executors.count():
                break
    finally:
        for folder in folders:
            for file in folder.glob(f".probe-{token}*"):
                file.unlink(missing_ok=True)


def _enforce(host: str, folder: Path, reason: str) -> None:
    if reason:
        raise PermanentError(
            f"the executor on {host} does not share the folder {folder} with the driver: {reason}",
            "set tables_dir and state_dir to folders that all machines have at the same path and may write, "
            "or spark.master to local[*]",
        )


def _difference(file: Path, token: str, visible: float) -> str:
    """The reason why the file of an executor is not what the driver sees; empty if it is."""
    until = time.monotonic() + visible
    while True:
        try:
            if file.read_text(encoding="utf-8") == token:
                return ""
            reason = "the driver reads something else than the executor wrote"
        except OSError as error:
            reason = f"the driver does not see the executor's file ({error.strerror})"
        if time.monotonic() > until:
            return reason
        time.sleep(0.1)


def _task(asked: Sequence[str], visible: float) -> Task:
    """What runs on executors, on which this project need not be installed: a function within one is sent as code."""

    def read_and_write(_: Iterable[object]) -> Iterator[Answer]:
        import os
        import socket
        import time
        import uuid

        files = []
        until = time.monotonic() + visible
        for path in asked:
            written, reason = f"{path}-{uuid.uuid4().hex}", "none"
            while reason:
                try:
                    with open(path, encoding="utf-8") as file:  # noqa: PTH123 - nothing but the standard library
                        text = file.read()
                    with open(written, "w", encoding="utf-8") as file:  # noqa: PTH123
                        file.write(text)
                    reason = ""
                except OSError as error:
                    reason = f"{path}: {error.strerror}"
                    if time.monotonic() > until:
                        break
                    time.sleep(0.1)
            files.append((written, reason))
        return iter([(socket.gethostname(), os.getcwd(), files)])  # noqa: PTH109

    return read_and_write
