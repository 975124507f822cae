"""No space left on the disk of the tables, or of the state: the stream says so, and goes on once there is space."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.status import read_status
from tests.broker.small_disk import SmallDisk, small_disk
from tests.conftest import SettingsFactory
from tests.support.driver import assert_chained, driver, finished, ledger, produce, rows
from tests.support.things import expected_totals, thing
from tests.support.waiting import wait_for

FIRST, ALL = 1000, 3000
STREAMS = "plain,totals"
Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 24) as made:
        yield made


@pytest.fixture
def things(settings: SettingsFactory, broker: Broker) -> tuple[Settings, str]:
    """The topic `things` with 1,000 records."""
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics = Topics.of(made.kafka, bootstrap)
    if topics.describe("things"):
        topics.delete("things")
    topics.create("things", 2)
    produce(bootstrap, "things", map(thing, range(FIRST)))
    return made, bootstrap


@pytest.fixture
def run(things: tuple[Settings, str], disk: SmallDisk) -> Iterator[Run]:
    """Starts drivers with one folder on the small disk; those that still live are killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: str, *arguments: str) -> subprocess.Popen[str]:
        on_disk = {f"RECOURSE_{folder.upper()}_DIR": str(disk.inside / folder)}
        process = driver(
            *things,
            *("--streams", STREAMS, "--set", "stream.max_offsets_per_trigger=500", *arguments),
            environment=on_disk,
            prefix=disk.prefix,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def copied(settings: Settings, disk: SmallDisk, folder: str, to: Path) -> Settings:
    """The settings on a copy of the small disk's folder, which any library can read."""
    shutil.copytree(disk.outside / folder, to)
    return settings.model_copy(update={f"{folder}_dir": to})


def assert_exactly_once(settings: Settings) -> None:
    assert sorted(row["n"] for row in rows(settings, "plain")) == list(range(ALL))
    assert {row["k"]: (row["c"], row["s"]) for row in rows(settings, "totals")} == expected_totals(range(ALL))
    for table in ("plain", "totals"):
        assert_chained(entries := ledger(settings, table))
        assert sum(r.records for entry in entries for r in entry.offsets) == ALL


def batch(settings: Settings, stream: str) -> int:
    status = read_status(settings, stream)
    return -1 if status is None or status.batch is None else status.batch


@pytest.mark.long
def test_a_full_disk_of_the_tables_stops_the_streams_loudly_and_a_start_with_space_goes_on(
    things: tuple[Settings, str], disk: SmallDisk, run: Run, tmp_path: Path
) -> None:
    settings, bootstrap = things
    first = run("tables", "--set", "stream.max_restarts=1")
    wait_for(lambda: min(batch(settings, s) for s in STREAMS.split(",")) >= 0, "the first batch of both")
    disk.fill()
    produce(bootstrap, "things", map(thing, range(FIRST, ALL)))
    code, output = finished(first, 120)
    assert code == 1, output[-3000:]
    for stream in STREAMS.split(","):
        status = read_status(settings, stream)
        assert status is not None and status.state == "failed" and status.error is not None
        assert "no space is left on the device" in status.error["found"], status.error
        assert "free space there" in status.error["next"]
    disk.free()
    code, output = finished(run("tables", "--trigger", "available-now"), 120)
    assert code == 0, output[-3000:]
    assert_exactly_once(copied(settings, disk, "tables", tmp_path / "copy"))


@pytest.mark.long
def test_a_full_disk_of_the_state_is_waited_for_and_the_same_session_goes_on(
    things: tuple[Settings, str], disk: SmallDisk, run: Run
) -> None:
    settings, bootstrap = things
    process = run("state", "--set", "stream.max_restarts=20")
    wait_for(lambda: min(len(rows_if_any(settings, t)) for t in STREAMS.split(",")) > 0, "the first batch of both")
    disk.fill()
    produce(bootstrap, "things", map(thing, range(FIRST, ALL)))
    line = waited_for(process, "no space is left on the device")
    assert "will try again" in line
    disk.free()
    wait_for(lambda: len(rows(settings, "plain")) == ALL, "the rows of all records")
    wait_for(lambda: sum(row["c"] for row in rows(settings, "totals")) == ALL, "the totals of all records")
    process.terminate()
    code, output = finished(process, 60)
    assert code == 0, output[-3000:]
    assert_exactly_once(settings)


def rows_if_any(settings: Settings, table: str) -> list[dict[str, object]]:
    return rows(settings, table) if (settings.tables / table / "_delta_log").is_dir() else []


def waited_for(process: subprocess.Popen[str], text: str) -> str:
    """Read the driver's output until a line has the text, and return that line."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"the driver ended without '{text}':\n{''.join(seen)[-3000:]}")
