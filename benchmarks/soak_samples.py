"""What `benchmarks.soak` looks at and what it feeds: memory by process, files by kind, flights year after year."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from confluent_kafka import Producer

from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.content import TOPIC

_ROLES = (
    ("kafka.Kafka", "broker"),
    ("org.apache.spark.deploy", "Spark's JVM"),
    ("streaming_jobs.session", "driver"),
    ("dagster._daemon", "Dagster daemon"),
    ("dagster_webserver", "Dagster webserver"),
    ("execute_run", "Dagster run"),
    ("code-server", "Dagster code server"),
    ("dagster api", "Dagster code server"),
    ("orchestration.cli", "recourse up"),
    ("pyspark", "Spark's Python workers"),
)
BOUNDED = (
    "data files no version lists",
    "table logs",
    "Spark checkpoint",
    "state",
    "Spark scratch",
    "logs",
)
"""Kinds whose bound is reached within minutes; the others grow with the records or are bounded by days."""


@dataclass
class Census:
    """How many files of a kind, and their size in MB."""

    number: int = 0
    megabytes: float = 0.0

    def add(self, size: int) -> None:
        """One more."""
        self.number += 1
        self.megabytes += size / 2**20


def role_of(command: str) -> str:
    """The role of a process of `recourse up`, by its command line."""
    return next((role for part, role in _ROLES if part in command), "others")


def memory_by_role(home: Path) -> dict[str, float]:
    """Resident memory, MB, of every process that belongs to this home, by what it is."""
    found: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("RECOURSE_HOME") != str(home):
                continue
            command, size = " ".join(process.cmdline()), process.memory_info().rss / 2**20
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        role = role_of(command)
        found[role] = found.get(role, 0.0) + size
    return dict(sorted(found.items()))


def files_by_kind(home: Path) -> dict[str, Census]:
    """Every file below the home."""
    found = {kind: Census() for kind in _KINDS}
    for folder, _, names in os.walk(home):
        where = Path(folder).relative_to(home).parts
        kind = next((kind for kind, holds in _KINDS.items() if holds(where)), "others")
        for name in names:
            try:
                found[kind].add((Path(folder) / name).stat().st_size)
            except FileNotFoundError:
                continue
    _divide_data_files(home, found)
    return found


def _divide_data_files(home: Path, found: dict[str, Census]) -> None:
    """Those that the tables list now are apart: they grow with the rows."""
    from deltalake import DeltaTable

    listed = Census()
    tables = home / "tables"
    for path in tables.iterdir() if tables.is_dir() else ():
        if (path / "_delta_log").is_dir():
            for size in DeltaTable(path).get_add_actions(flatten=True)["size_bytes"].to_pylist():
                listed.add(size)
    every = found["data files no version lists"]
    found["data files"] = listed
    found["data files no version lists"] = Census(
        max(every.number - listed.number, 0), max(every.megabytes - listed.megabytes, 0.0)
    )


def _in_table_log(where: tuple[str, ...]) -> bool:
    return where[:1] == ("tables",) and "_delta_log" in where


def _in_generation(where: tuple[str, ...], *names: str) -> bool:
    inside = where[3:4] or ("",)
    return where[:1] == ("state",) and len(where) > 2 and where[2].startswith("g") and inside[0] in names


_KINDS: dict[str, Callable[[tuple[str, ...]], bool]] = {
    "data files": lambda _: False,
    "table logs": _in_table_log,
    "data files no version lists": lambda where: where[:1] == ("tables",),
    "state": lambda where: _in_generation(where, "state"),
    "Spark checkpoint": lambda where: _in_generation(where, "", "offsets", "commits", "sources"),
    "ledger files": lambda where: where[:1] == ("state",) and where[2:3] == ("ledger",),
    "status, lease, record": lambda where: where[:1] == ("state",),
    "Spark scratch": lambda where: where[:1] == ("scratch",),
    "logs": lambda where: where[:1] == ("logs",),
    "Dagster's storage": lambda where: where[:1] == ("dagster",),
    "broker": lambda where: where[:1] == ("broker",),
    "others": lambda _: True,
}


class YearByYear:
    """A thread that sends the flights of 2013, then the same of 2014 and so on, at a steady rate."""

    def __init__(self, bootstrap: str, rate: float) -> None:
        self.sent = 0
        self._rate, self._more = rate, 0
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
            }
        )
        self._records = dataset.records()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong."""
        if self._failure is not None:
            raise self._failure

    def burst(self, records: int) -> None:
        """Send this many records more, at once."""
        self._more += records

    def stop(self) -> None:
        """Send no more; returns when all is acknowledged, or after ten seconds."""
        self._ended.set()
        self._thread.join(10)
        self._producer.flush(10)

    def _run(self) -> None:
        try:
            began = time.monotonic()
            while not self._ended.wait(0.05):
                due = int((time.monotonic() - began) * self._rate) + self._more
                while self.sent < due:
                    self._send(*divmod(self.sent, len(self._records)))
                    self.sent += 1
                self._producer.poll(0)
        except Exception as error:  # noqa: BLE001 - raised by `check`, in the thread that wants the records
            self._failure = error

    def _send(self, year: int, position: int) -> None:
        value = self._records.values[position]
        if year:  # the last departures of 2013 are in 2014 already
            for old, new in ((b'"2014-', b'"%d-'), (b'"2013-', b'"%d-'), (b'"year":2013', b'"year":%d')):
                value = value.replace(old, new % (year + (2014 if b"2014" in old else 2013)))
        try:
            self._producer.produce(TOPIC, value=value, key=self._records.keys[position])
        except BufferError:
            self._producer.poll(0.1)
            self._producer.produce(TOPIC, value=value, key=self._records.keys[position])
