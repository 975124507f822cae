"""A process is known again although the clock was set, and no other process is taken for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import psutil
import pytest

from orchestration.sessions import ownership
from streaming_jobs.platform import broker
from streaming_jobs.platform.processes import identity
from streaming_jobs.platform.processes.identity import is_alive, mark
from streaming_jobs.state.lease import holder, take
from streaming_jobs.storage.files import private_folder, write_json
from tests.conftest import SettingsFactory


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which ends when it is killed."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(10)


@pytest.fixture
def clock_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is set two seconds ahead: Linux moves the boot time, from which psutil derives start times."""
    boot, started = psutil.boot_time(), psutil.Process().create_time()
    monkeypatch.setattr(sys.modules["psutil._pslinux"], "boot_time", lambda: boot + 2)
    assert psutil.Process().create_time() == pytest.approx(started + 2, abs=0.1), "psutil derives it otherwise now"


def test_a_session_outlives_a_clock_that_is_set(request: pytest.FixtureRequest) -> None:
    worker = ownership.identity()
    assert ownership.is_running(worker) is True
    request.getfixturevalue("clock_set")
    assert ownership.is_running(worker) is True
    assert ownership.parent_lives(worker)


def test_a_process_of_another_container_with_the_same_name_of_the_host_cannot_be_known() -> None:
    host, pid, mark_ = ownership.identity().rsplit(":", 2)
    name, _, _ = host.partition("/")
    assert ownership.is_running(f"{name}/1:{pid}:{mark_}") is None
    assert ownership.is_running(f"elsewhere:{pid}:{mark_}") is None


def test_a_running_broker_is_found_after_the_clock_was_set(
    settings: SettingsFactory, other: subprocess.Popen[bytes], request: pytest.FixtureRequest
) -> None:
    home = settings()
    private_folder(home.broker_dir)
    started = broker.Running(other.pid, mark(other.pid), "127.0.0.1:9092", time.time())
    write_json(home.broker_dir / "broker.json", asdict(started), durable=False)
    request.getfixturevalue("clock_set")
    assert broker.running(home) == started


def test_the_jvm_of_a_killed_driver_is_waited_for_after_the_clock_was_set(
    settings: SettingsFactory, other: subprocess.Popen[bytes], request: pytest.FixtureRequest
) -> None:
    home = settings()
    with take(home, "orders", purpose="session") as lease:
        lease.record_jvm(other.pid)
        owner = lease.owner
    request.getfixturevalue("clock_set")
    assert owner.alive() == "driver"
    other_only = type(owner)(2**22 - 7, "gone/1", owner.jvm, owner.jvm_started, owner.since, owner.purpose)
    assert other_only.alive() == "jvm"
    assert holder(home, "orders") == owner, "a query in the JVM may still write"


def test_a_mark_is_of_one_process_only(other: subprocess.Popen[bytes]) -> None:
    started = mark(other.pid)
    assert is_alive(other.pid, started)
    assert not is_alive(os.getpid(), started)
    boot, _, ticks = started.partition("/")
    assert not is_alive(other.pid, f"{boot}/{int(ticks) + 1}")
    assert not is_alive(other.pid, f"another-boot/{ticks}")
    with pytest.raises(psutil.NoSuchProcess):
        mark(2**22 - 7)


def test_a_process_that_has_ended_and_is_not_collected_does_not_live() -> None:
    process = subprocess.Popen(["true"])
    started = mark(process.pid)
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    assert not is_alive(process.pid, started)
    process.wait(10)
    assert not is_alive(process.pid, started)


def test_a_command_with_brackets_and_blanks_hides_nothing(tmp_path: os.PathLike[str]) -> None:
    odd = os.path.join(tmp_path, "a) S 1 (b")  # noqa: PTH118
    os.symlink("/bin/sleep", odd)  # noqa: PTH211
    process = subprocess.Popen([odd, "60"])
    try:
        assert is_alive(process.pid, mark(process.pid))
        assert mark(process.pid).partition("/")[2].isdigit()
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("apart", [0.0, 3.0, -3.0])
def test_a_start_time_in_seconds_of_an_earlier_version_is_still_read(
    other: subprocess.Popen[bytes], apart: float
) -> None:
    seconds = psutil.Process(other.pid).create_time() + apart
    assert is_alive(other.pid, seconds) and is_alive(other.pid, f"{seconds:.2f}")
    assert not is_alive(other.pid, seconds - 3600)
    assert not is_alive(other.pid, "no number")


def test_a_broker_file_of_an_earlier_version_is_still_read(
    settings: SettingsFactory, other: subprocess.Popen[bytes]
) -> None:
    home = settings()
    private_folder(home.broker_dir)
    started = psutil.Process(other.pid).create_time()
    text = {"pid": other.pid, "create_time": started, "bootstrap_servers": "127.0.0.1:9092", "started_at": started}
    write_json(home.broker_dir / "broker.json", text, durable=False)
    read = broker.running(home)
    assert read is not None and read.port == 9092


def test_without_proc_the_start_time_in_seconds_is_the_mark(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_stat", lambda _: [])
    assert float(mark(other.pid)) == pytest.approx(psutil.Process(other.pid).create_time(), abs=0.01)
    assert is_alive(other.pid, mark(other.pid))
