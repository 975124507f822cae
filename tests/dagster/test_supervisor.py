"""The supervisor: what ends a session, how its run ends then, and that nothing of it is left. Fake driver, no Spark."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import dagster as dg
import psutil
import pytest

from orchestration.bundle import job_yaml
from orchestration.bundle.job import Schedule
from orchestration.definitions import definitions
from orchestration.local_dagster.dagster_home import prepare
from orchestration.sessions import child_run, supervisor
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.definitions import sessions
from orchestration.sessions.ownership import (
    FAILURE_TAG,
    FINGERPRINT_TAG,
    PARENT_VARIABLE,
    WORKER_TAG,
    identity,
    is_running,
)
from orchestration.sessions.supervisor import SessionSpec, fingerprint
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.platform.processes.child import ChildCommand
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import acquire, holder
from streaming_jobs.state.status import Status, read_status, write_status
from tests.dagster.conftest import starts
from tests.dagster.fakes.command import fake_command
from tests.dagster.fakes.execute import execute
from tests.support import ROOT
from tests.support.waiting import wait_for


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def stored(shop: Settings) -> Iterator[dg.DagsterInstance]:
    """An instance that another process can use too."""
    with dg.DagsterInstance.from_config(str(prepare(shop))) as instance:
        yield instance


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_run, "POLL", 0.1)
    monkeypatch.setattr(child_run, "LOOK_AT_RUN_EVERY", 0.2)
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)


def run_job(
    settings: Settings,
    instance: dg.DagsterInstance,
    meanwhile: Callable[[int], object],
    tags: dict[str, str] | None = None,
) -> dg.DagsterRun:
    """Run the job here; `meanwhile` gets the driver's pid once its streams run. Nothing of it may be left."""
    before = len(starts(settings))
    pid = 0
    problems: list[BaseException] = []

    def act() -> None:
        nonlocal pid
        try:
            wait_for(lambda: len(starts(settings)) > before, "the driver")
            pid = starts(settings)[-1]["pid"]
            wait_for(lambda: (s := read_status(settings, "orders")) and s.pid == pid and s.batch, "a batch")
            meanwhile(pid)
            wait_for(lambda: not psutil.pid_exists(pid), "the end of the driver")
        except BaseException as error:  # noqa: BLE001
            problems.append(error)
            if pid:
                os.kill(pid, signal.SIGKILL)  # or the job would go on for ever

    thread = threading.Thread(target=act)
    thread.start()
    job = definitions(settings, fake_command).resolve_job_def("shop")
    execute(job, instance, tags=tags)
    thread.join()
    assert not problems, problems
    run = instance.get_runs(limit=1)[0]
    assert not any(psutil.pid_exists(s["pid"]) for s in starts(settings))
    assert holder(settings, "orders") is None
    return run


def texts(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """Everything the run's log says."""
    entries = instance.all_logs(run.run_id)
    parts = []
    for entry in entries:
        parts.append(entry.user_message or entry.message or "")
        data = entry.dagster_event.event_specific_data if entry.dagster_event else None
        parts.append(repr(data))
    return "\n".join(parts)


def exits_with(settings: Settings, code: int) -> Callable[[int], object]:
    return lambda _: (settings.home / "exit").write_text(str(code))


def test_stop_ends_the_driver_at_a_batch_border_and_the_run_is_canceled(
    shop: Settings, instance: dg.DagsterInstance
) -> None:
    def stop(_: int) -> None:
        instance.report_run_canceling(instance.get_runs(limit=1)[0])
        os.kill(os.getpid(), signal.SIGINT)  # what Dagster's terminate does in a run worker

    run = run_job(shop, instance, stop)
    assert run.status is dg.DagsterRunStatus.CANCELED
    status = read_status(shop, "orders")
    assert status is not None
    assert (status.state, status.ended_by) == ("stopped", f"Terminate of run {run.run_id[:8]}")
    assert "stopped at a batch border" in texts(instance, run)
    assert errors(instance, run) == ["stopped on request: each stream ended at a batch border"]
    assert happened(instance, run, dg.DagsterEventType.STEP_FAILURE) == []


def happened(instance: dg.DagsterInstance, run: dg.DagsterRun, what: dg.DagsterEventType) -> list[dg.DagsterEvent]:
    """The run's events of one type."""
    return [
        entry.dagster_event
        for entry in instance.all_logs(run.run_id)
        if entry.dagster_event and entry.dagster_event.event_type is what
    ]


def errors(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[str]:
    """The messages that the run's page shows in red."""
    return [entry.message for entry in instance.all_logs(run.run_id) if entry.level >= logging.ERROR]


def test_a_second_stop_does_not_cut_the_first_one_short(shop: Settings, instance: dg.DagsterInstance) -> None:
    (shop.home / "deaf").touch()
    monkey = {"count": 0}

    def stop_twice(pid: int) -> None:
        instance.report_run_canceling(instance.get_runs(limit=1)[0])
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "the first stop at work")
        os.kill(os.getpid(), signal.SIGINT)
        (shop.home / "deaf").unlink()
        os.kill(pid, signal.SIGTERM)
        monkey["count"] += 1

    run = run_job(shop, instance, stop_twice)
    assert monkey["count"] == 1
    assert run.status is dg.DagsterRunStatus.CANCELED
    assert "stopped at a batch border" in shop_log(shop)


def shop_log(settings: Settings) -> str:
    return (settings.logs / "session-shop.log").read_text()


@pytest.mark.parametrize("report", ["report_run_canceling", "report_run_canceled", "report_run_failed"])
def test_a_run_that_only_the_storage_ended_stops_its_driver(
    shop: Settings, instance: dg.DagsterInstance, report: str
) -> None:
    run = run_job(shop, instance, lambda _: getattr(instance, report)(instance.get_runs(limit=1)[0]))
    assert run.status.value == {"report_run_failed": "FAILURE"}.get(report, "CANCELED")
    assert "stopped at a batch border" in shop_log(shop)


def test_a_driver_that_is_killed_fails_the_run(shop: Settings, instance: dg.DagsterInstance) -> None:
    run = run_job(shop, instance, lambda pid: os.kill(pid, signal.SIGKILL))
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert failure(instance, run) == "the driver was killed (-9, perhaps out of memory)"
    assert FAILURE_TAG not in run.tags


def failure(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """The message of the run's failure."""
    (event,) = happened(instance, run, dg.DagsterEventType.RUN_FAILURE)
    return event.message or ""


def test_exit_code_0_is_success(shop: Settings, instance: dg.DagsterInstance) -> None:
    assert run_job(shop, instance, exits_with(shop, 0)).status is dg.DagsterRunStatus.SUCCESS


def test_a_permanent_failure_is_marked_with_what_it_depends_on(shop: Settings, instance: dg.DagsterInstance) -> None:
    run = run_job(shop, instance, exits_with(shop, 78))
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert run.tags[FAILURE_TAG] == "permanent"
    assert run.tags[FINGERPRINT_TAG]
    log = texts(instance, run)
    assert "stream orders failed: REC-021 wrong table" in log
    assert "next: look" in log
    assert failure(instance, run) == "stream orders failed: REC-021 wrong table; it fails again until a person acts"


def test_a_wrong_parameter_is_named_in_one_line_and_says_nothing_of_the_defaults(
    shop: Settings, instance: dg.DagsterInstance
) -> None:
    """The log is full of the session before, which ended well."""
    before = logging_session(shop)
    job = definitions(shop, fake_command).resolve_job_def("shop")
    run = execute(job, instance, run_config={"ops": {"shop_session": {"config": {"rate": "abc"}}}})
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert failure(instance, run).startswith("REC-002 stream.max_offsets_per_trigger (flag): Input should be a valid i")
    assert failure(instance, run).endswith("; it fails again with these parameters")
    assert before not in texts(instance, run)
    assert run.tags[FAILURE_TAG] == "permanent"
    (session,) = sessions(job_yaml.load(job_yaml.find(shop)), Topology.load(shop.flows), shop)
    assert run.tags[FINGERPRINT_TAG] != fingerprint(session.job, session.streams, shop, session.job.arguments())


def logging_session(settings: Settings) -> str:
    """A session's log of before, and a line of it."""
    log = BoundedLog(settings.logs / "session-shop.log")
    line = "words of the session before"
    for _ in range(20):
        log.write(line)
    return line


def test_any_other_exit_code_is_told_with_the_log_s_tail(shop: Settings, instance: dg.DagsterInstance) -> None:
    run = run_job(shop, instance, exits_with(shop, 3))
    log = texts(instance, run)
    assert "exit code 3" in log
    assert "fake driver at work" in log
    assert str(shop.logs / "session-shop.log") in log


def test_a_busy_lease_is_told_and_no_second_driver_works(shop: Settings, instance: dg.DagsterInstance) -> None:
    lease = acquire(shop, "orders", purpose="session of somebody else")
    theirs = Status("orders", state="failed", run_id="theirs", error={"code": "REC-020", "found": "not of this run"})
    write_status(shop, theirs)
    try:
        job = definitions(shop, fake_command).resolve_job_def("shop")
        execute(job, instance)
    finally:
        lease.release()
    run = instance.get_runs(limit=1)[0]
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert run.tags[FAILURE_TAG] == "lease_busy"
    log = texts(instance, run)
    assert "another driver holds" in log
    assert "not of this run" not in log


def test_a_driver_that_does_not_stop_is_killed_with_its_group(
    shop: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE", 0.3)
    settings = shop.model_copy(
        update={"stream": shop.stream.model_copy(update={"stop_deadline": shop.dagster.stale_after / 50})}
    )
    (shop.home / "deaf").touch()
    run = run_job(settings, instance, lambda _: instance.report_run_canceling(instance.get_runs(limit=1)[0]))
    assert run.status is dg.DagsterRunStatus.CANCELED
    assert "driver ended with exit code -9" in texts(instance, run)


def test_a_driver_that_hangs_is_ended_and_its_run_fails(
    shop: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE", 0.3)
    settings = shop.model_copy(
        update={
            "stream": shop.stream.model_copy(update={"stop_deadline": timedelta(seconds=0.2)}),
            "dagster": shop.dagster.model_copy(update={"stale_after": timedelta(seconds=2)}),
        }
    )
    run = run_job(settings, instance, lambda pid: os.kill(pid, signal.SIGSTOP))
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert "the driver hangs: process" in texts(instance, run)


def test_a_disk_on_which_no_status_can_be_written_is_no_hang(shop: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    shop.state.mkdir(parents=True)
    assert supervisor._writable(shop)
    monkeypatch.setattr("orchestration.sessions.supervisor.tempfile.TemporaryFile", full)
    assert not supervisor._writable(shop)


@pytest.mark.parametrize("timeout", [0, 3600])
def test_a_scheduled_session_without_a_time_limit_is_ended_after_max_session(shop: Settings, timeout: int) -> None:
    assert shop.jobs is not None
    job = job_yaml.load(shop.jobs).jobs[0]
    schedule = Schedule("0 0 4 * * ?", "0 4 * * *", "UTC", paused=False)
    session = SessionSpec(replace(job, trigger=schedule, timeout_seconds=timeout), (), shop)
    watch = supervisor._SessionWatch(session, None, None)  # type: ignore[arg-type]
    watch._check_age()
    watch.begun -= shop.dagster.max_session.total_seconds() + 1
    with pytest.raises(child_run.Gone, match="has no time limit") if not timeout else nullcontext():
        watch._check_age()


def test_a_session_does_not_outlive_recourse_up(
    shop: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as up:
        monkeypatch.setenv(PARENT_VARIABLE, identity(up.pid))
        run = run_job(shop, instance, lambda _: (up.kill(), up.wait()))
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert "recourse up, which this run belonged to, is gone" in texts(instance, run)


def test_a_session_that_has_lasted_long_enough_ends_well(
    shop: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    day_later = threading.Event()
    check = supervisor._SessionWatch._check_age

    def aged(watch: supervisor._SessionWatch) -> None:
        if day_later.is_set():
            watch.begun -= shop.dagster.max_session.total_seconds()
        check(watch)

    monkeypatch.setattr(supervisor._SessionWatch, "_check_age", aged)
    run = run_job(shop, instance, lambda _: day_later.set())
    assert run.status is dg.DagsterRunStatus.SUCCESS
    assert "stopped at a batch border" in shop_log(shop)


def test_one_failed_stream_is_told_once_and_the_session_goes_on(shop: Settings, instance: dg.DagsterInstance) -> None:
    def fail_one(_: int) -> None:
        (shop.home / "one_fails").touch()
        wait_for(lambda: (s := read_status(shop, "orders")) and s.state == "failed", "the failure")
        seen = read_status(shop, "customers")
        assert seen is not None
        wait_for(lambda: (s := read_status(shop, "customers")) and s.batch > (seen.batch or 0) + 10, "ten batches")
        exits_with(shop, 0)(0)

    run = run_job(shop, instance, fail_one)
    errors = [e for e in instance.all_logs(run.run_id) if e.level >= 40 and "orders failed" in (e.user_message or "")]
    assert len(errors) == 1


def test_tables_carry_figures_and_the_run_s_log_only_what_matters(shop: Settings, instance: dg.DagsterInstance) -> None:
    run = run_job(shop, instance, exits_with(shop, 0))
    for kind in (dg.DagsterEventType.ASSET_OBSERVATION, dg.DagsterEventType.ASSET_MATERIALIZATION):
        assert happened(instance, run, kind) == []
    materialized = instance.get_latest_materialization_event(dg.AssetKey("orders"))
    assert materialized is not None and materialized.asset_materialization is not None
    metadata = materialized.asset_materialization.metadata
    assert metadata["lag_records"].value == 7
    assert metadata["input_rows_per_s"].value == 1.5
    assert isinstance(metadata["watermark"], dg.TimestampMetadataValue)
    for table in ("orders", "customers", "orders_dead_letters"):
        assert instance.get_latest_materialization_event(dg.AssetKey(table)) is not None
        planned = instance.get_latest_planned_materialization_info(dg.AssetKey(table))
        assert planned is not None and not planned.run_id  # else the UI shows the table as being made, not its health


def test_parameters_of_the_run_reach_the_driver_and_a_sensor_s_run_respects_a_stop(
    shop: Settings, instance: dg.DagsterInstance
) -> None:
    job = definitions(shop, fake_command).resolve_job_def("shop")
    (shop.home / "exit").write_text("0")
    config = {"ops": {"shop_session": {"config": {"rate": 7}}}}
    before = time.time()
    assert execute(job, instance, run_config=config).is_success
    assert execute(job, instance, tags={"dagster/sensor_name": "keepalive_shop"}).is_success
    by_person, by_sensor = (s["arguments"] for s in starts(shop))
    asked_at = float(by_person[by_person.index("--asked-at") + 1])
    assert before <= asked_at < time.time() + 1 and "--asked-at" not in by_sensor
    assert "stream.max_offsets_per_trigger=7" in by_person
    assert "--respect-stop" not in by_person
    assert "stream.max_offsets_per_trigger=100" in by_sensor
    assert "--respect-stop" in by_sensor


def worker_environment(shop: Settings) -> dict[str, str]:
    return {**os.environ, "DAGSTER_HOME": str(prepare(shop)), "PYTHONPATH": str(ROOT)}


def test_kill_9_of_the_run_worker_leaves_no_driver(shop: Settings, stored: dg.DagsterInstance) -> None:
    worker = subprocess.Popen([sys.executable, "-m", "tests.dagster.fakes.worker"], env=worker_environment(shop))
    try:
        wait_for(lambda: (s := read_status(shop, "orders")) and s.batch, "a batch", 60)
    finally:
        worker.kill()
        worker.wait()
    pid = starts(shop)[-1]["pid"]
    wait_for(lambda: not psutil.pid_exists(pid), "the end of the driver")
    status = read_status(shop, "orders")
    assert status is not None
    assert status.state == "stopped"
    run = stored.get_runs(limit=1)[0]
    assert is_running(run.tags[WORKER_TAG]) is False


def test_a_worker_whose_code_server_is_killed_stops_its_driver_and_fails(
    shop: Settings, stored: dg.DagsterInstance
) -> None:
    script = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', sys.argv[1]]); p.wait()"
    server = subprocess.Popen(
        [sys.executable, "-c", script, "tests.dagster.fakes.worker"], env=worker_environment(shop)
    )
    try:
        wait_for(lambda: (s := read_status(shop, "orders")) and s.batch, "a batch", 60)
    finally:
        server.kill()
        server.wait()
    run_id = stored.get_runs(limit=1)[0].run_id

    def ended() -> bool:
        run = stored.get_run_by_id(run_id)
        return run is not None and run.is_finished

    wait_for(ended, "the end of the run")
    run = stored.get_runs(limit=1)[0]
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert "the code server that this run belonged to is gone" in texts(stored, run)
    assert not psutil.pid_exists(starts(shop)[-1]["pid"])


def test_a_group_member_that_outlives_the_driver_is_killed(shop: Settings) -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    log = BoundedLog(shop.logs / "x.log")
    with log.open() as output:
        driver = ChildCommand([sys.executable, "-c", script], os.environ, stdin=subprocess.PIPE).start(output)
    left = int(wait_for(log.tail, "the pid"))
    wait_for(lambda: driver.exit_code is not None, "the driver's own end")
    assert driver.end(5.0, 0.2) == 0
    wait_for(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == "zombie", "its end")
