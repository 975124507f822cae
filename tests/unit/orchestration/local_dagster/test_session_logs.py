"""The log of a session as the stderr of its run: the run's own part, bounded, and read through Dagster's instance."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from orchestration.local_dagster import session_logs
from orchestration.local_dagster.dagster_home import prepare
from orchestration.local_dagster.session_logs import RunLogs
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.supervisor import mark
from streaming_jobs.settings import Settings

ONE, TWO = "11111111-aaaa-bbbb-cccc-000000000001", "22222222-aaaa-bbbb-cccc-000000000002"


@pytest.fixture
def log(tmp_path: Path) -> BoundedLog:
    return BoundedLog(tmp_path / "session-shop.log")


def filled(log: BoundedLog) -> RunLogs:
    log.write(f"{mark(ONE, 'shop')}\nfirst line\nsecond line")
    log.write(f"{mark(TWO, 'shop')}\nof the other run")
    return RunLogs(log.path.parent)


def test_a_run_has_its_own_part_and_no_line_of_another_one(log: BoundedLog) -> None:
    logs = filled(log)
    data, offset = logs.read(ONE, 0)
    assert data == f"--- run {ONE} of shop\nfirst line\nsecond line\n".encode() and offset == len(data)
    assert logs.read(TWO, 0)[0] == f"--- run {TWO} of shop\nof the other run\n".encode()
    assert logs.path(ONE) == log.path
    assert logs.read("33333333-aaaa", 0) == (None, 0) and logs.read("../../etc", 0) == (None, 0)


def test_reading_goes_on_at_an_offset_while_the_log_grows(log: BoundedLog) -> None:
    logs = filled(log)
    data, offset = logs.read(TWO, 0, 10)
    assert data is not None and len(data) == offset == 10
    rest, end = logs.read(TWO, offset)
    log.write("one more")
    assert logs.read(TWO, end) == (b"one more\n", end + 9)
    assert data + (rest or b"") == f"--- run {TWO} of shop\nof the other run\n".encode()


def test_of_a_large_part_the_end_is_shown(log: BoundedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_logs, "SHOWN", 100)
    monkeypatch.setattr(session_logs, "_BLOCK", 64)
    logs = filled(log)
    log.write("x" * 500)
    data, offset = logs.read(TWO, 0)
    assert data == b"x" * 99 + b"\n" and offset > 500
    assert logs.read(ONE, 0)[0] == f"--- run {ONE} of shop\nfirst line\nsecond line\n".encode()


def test_after_older_lines_were_dropped_the_run_is_still_found(log: BoundedLog) -> None:
    logs = filled(log)
    small = BoundedLog(log.path, limit=400)
    _, offset = logs.read(TWO, 0)
    for number in range(40):
        small.write(f"line {number} of the second run")
    small.trim(mark(TWO, "shop"))
    data, _ = logs.read(TWO, offset + 2_000)
    assert data is not None and data.startswith(f"--- run {TWO} of shop\n(older lines dropped)\nline ".encode())
    assert data.endswith(b"line 39 of the second run\n")
    assert logs.read(ONE, 0)[0] is None
    assert small.path.stat().st_size < 400
    assert small.tail_from(mark(TWO, "shop")).startswith("(older lines dropped)")


def test_dagster_reads_the_log_as_the_runs_stderr(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    home = prepare(settings)
    BoundedLog(settings.logs / "session-shop.log").write(f"{mark(ONE, 'shop')}\nbatch 1")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        manager = instance.compute_log_manager
        key = manager.build_log_key_for_run(ONE, "step")
        captured = manager.get_log_data(key)
        assert captured.stdout is None
        assert captured.stderr == f"--- run {ONE} of shop\nbatch 1\n".encode()
        assert manager.get_log_metadata(key).stderr_location == str(settings.logs / "session-shop.log")
        assert manager.is_capture_complete(key)
        seen: list[bytes | None] = []
        subscription = manager.subscribe(key)
        subscription(lambda data: seen.append(data.stderr))
        assert seen == [captured.stderr]
        subscription.dispose()
        nothing = manager.get_log_data(manager.build_log_key_for_run(TWO, "step"))
        assert (nothing.stdout, nothing.stderr) == (None, None)
