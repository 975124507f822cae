"""The supervisor: what ends a session, how its run ends then, and that nothing of it is left. Fake driver, no Spark."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import dagster as dg
import psutil
import pytest

from orchestration.bundle import job_yaml
from orchestration.bundle.job import CronSchedule
from orchestration.location import definitions
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
from tests.support.dagster_homes import prepared
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("quick")


@dataclass
class Worker:
    """Runs the job in this process, over the fake driver."""

    settings: Settings
    instance: dg.DagsterInstance

    def execute(self, **options: Any) -> dg.DagsterRun:
        return execute(definitions(self.settings, fake_command).resolve_job_def("shop"), self.instance, **options)

    def run(self, meanwhile: Callable[[int], object]) -> dg.DagsterRun:
        """A run of the job; `meanwhile` gets the driver's pid once its streams run. Nothing of it may be left."""
        pid = 0
        problems: list[BaseException] = []

        def act() -> None:
            nonlocal pid
            try:
                pid = wait_for(lambda: starts(self.settings), "the driver")[-1]["pid"]
                wait_for(lambda: (s := read_status(self.settings, "orders")) and s.pid == pid and s.batch, "a batch")
                meanwhile(pid)
                wait_for(lambda: not psutil.pid_exists(pid), "the end of the driver")
            except BaseException as error:  # noqa: BLE001
                problems.append(error)
                if pid:
                    os.kill(pid, signal.SIGKILL)  # or the job would go on for ever

        thread = threading.Thread(target=act)
        thread.start()
        self.execute()
        thread.join()
        assert not problems, problems
        assert not any(psutil.pid_exists(s["pid"]) for s in starts(self.settings))
        assert holder(self.settings, "orders") is None
        return self.newest()

    def newest(self) -> dg.DagsterRun:
        return self.instance.get_runs(limit=1)[0]

    def exit(self, code: int) -> None:
        """Have the driver end with this exit code."""
        (self.settings.home / "exit").write_text(str(code))

    def make_deaf(self) -> None:
        """Have the driver ignore SIGTERM."""
        (self.settings.home / "deaf").touch()

    @property
    def log(self) -> str:
        return (self.settings.logs / "session-shop.log").read_text()

    def texts(self, run: dg.DagsterRun) -> str:
        """Everything the run's log says."""
        parts = []
        for entry in self.instance.all_logs(run.run_id):
            data = entry.dagster_event.event_specific_data if entry.dagster_event else None
            parts += [entry.user_message or entry.message or "", repr(data)]
        return "\n".join(parts)

    def happened(self, run: dg.DagsterRun, what: str) -> list[dg.DagsterEvent]:
        """The run's events of one type."""
        events = [entry.dagster_event for entry in self.instance.all_logs(run.run_id) if entry.dagster_event]
        return [event for event in events if event.event_type is dg.DagsterEventType[what]]

    def errors(self, run: dg.DagsterRun) -> list[str]:
        """The messages that the run's page shows in red."""
        return [entry.message for entry in self.instance.all_logs(run.run_id) if entry.level >= logging.ERROR]

    def failure(self, run: dg.DagsterRun) -> str:
        """The message of the run's failure."""
        assert run.status is dg.DagsterRunStatus.FAILURE
        (event,) = self.happened(run, "RUN_FAILURE")
        return event.message or ""


@pytest.fixture
def worker(shop: Settings, instance: dg.DagsterInstance) -> Worker:
    return Worker(shop, instance)


def test_stop_ends_the_driver_at_a_batch_border_and_the_run_is_canceled(worker: Worker) -> None:
    def stop(_: int) -> None:
        worker.instance.report_run_canceling(worker.newest())
        os.kill(os.getpid(), signal.SIGINT)  # what Dagster's terminate does in a run worker

    run = worker.run(stop)
    assert run.status is dg.DagsterRunStatus.CANCELED
    status = read_status(worker.settings, "orders")
    assert status is not None
    assert (status.state, status.ended_by) == ("stopped", f"Terminate of run {run.run_id[:8]}")
    assert "stopped at a batch border" in worker.texts(run)
    assert worker.errors(run) == ["stopped on request: each stream ended at a batch border"]
    assert worker.happened(run, "STEP_FAILURE") == []


def test_a_second_stop_does_not_cut_the_first_one_short(worker: Worker) -> None:
    worker.make_deaf()
    stopped = []

    def stop_twice(pid: int) -> None:
        worker.instance.report_run_canceling(worker.newest())
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "the first stop at work")
        os.kill(os.getpid(), signal.SIGINT)
        (worker.settings.home / "deaf").unlink()
        os.kill(pid, signal.SIGTERM)
        stopped.append(pid)

    run = worker.run(stop_twice)
    assert len(stopped) == 1
    assert run.status is dg.DagsterRunStatus.CANCELED
    assert "stopped at a batch border" in worker.log


@pytest.mark.parametrize("report", ["report_run_canceling", "report_run_canceled", "report_run_failed"])
def test_a_run_that_only_the_storage_ended_stops_its_driver(worker: Worker, report: str) -> None:
    run = worker.run(lambda _: getattr(worker.instance, report)(worker.newest()))
    assert run.status.value == {"report_run_failed": "FAILURE"}.get(report, "CANCELED")
    assert "stopped at a batch border" in worker.log


def test_a_driver_that_is_killed_fails_the_run(worker: Worker) -> None:
    run = worker.run(lambda pid: os.kill(pid, signal.SIGKILL))
    assert worker.failure(run) == "the driver was killed (-9, perhaps out of memory)"
    assert FAILURE_TAG not in run.tags


def test_exit_code_0_is_success_and_tables_carry_figures_and_the_run_s_log_only_what_matters(worker: Worker) -> None:
    run = worker.run(lambda _: worker.exit(0))
    assert run.status is dg.DagsterRunStatus.SUCCESS
    assert not worker.happened(run, "ASSET_OBSERVATION") and not worker.happened(run, "ASSET_MATERIALIZATION")
    materialized = worker.instance.get_latest_materialization_event(dg.AssetKey("orders"))
    assert materialized is not None and materialized.asset_materialization is not None
    metadata = materialized.asset_materialization.metadata
    assert (metadata["lag_records"].value, metadata["input_rows_per_s"].value) == (7, 1.5)
    assert isinstance(metadata["watermark"], dg.TimestampMetadataValue)
    for table in ("orders", "customers", "orders_dead_letters"):
        assert worker.instance.get_latest_materialization_event(dg.AssetKey(table)) is not None
        planned = worker.instance.get_latest_planned_materialization_info(dg.AssetKey(table))
        assert planned is not None and not planned.run_id  # else the UI shows the table as being made, not its health


def test_a_permanent_failure_is_marked_with_what_it_depends_on(worker: Worker) -> None:
    run = worker.run(lambda _: worker.exit(78))
    assert run.tags[FAILURE_TAG] == "permanent" and run.tags[FINGERPRINT_TAG]
    assert "stream orders failed: REC-021 wrong table" in (log := worker.texts(run)) and "next: look" in log
    assert worker.failure(run) == "stream orders failed: REC-021 wrong table; it fails again until a person acts"


def test_a_wrong_parameter_is_named_in_one_line_and_says_nothing_of_the_defaults(worker: Worker) -> None:
    """The log is full of the session before, which ended well."""
    shop, before = worker.settings, "words of the session before"
    for _ in range(20):
        BoundedLog(shop.logs / "session-shop.log").write(before)
    run = worker.execute(run_config={"ops": {"shop_session": {"config": {"rate": "abc"}}}})
    failure = worker.failure(run)
    assert failure.startswith("REC-002 stream.max_offsets_per_trigger (flag): Input should be a valid i")
    assert failure.endswith("; it fails again with these parameters")
    assert before not in worker.texts(run)
    assert run.tags[FAILURE_TAG] == "permanent"
    (session,) = sessions(job_yaml.load(job_yaml.find(shop)), Topology.load(shop.flows), shop)
    assert run.tags[FINGERPRINT_TAG] != fingerprint(session.job, session.streams, shop, session.job.arguments())


def test_any_other_exit_code_is_told_with_the_log_s_tail(worker: Worker) -> None:
    log = worker.texts(worker.run(lambda _: worker.exit(3)))
    for text in ("exit code 3", "fake driver at work", str(worker.settings.logs / "session-shop.log")):
        assert text in log


def test_a_busy_lease_is_told_and_no_second_driver_works(worker: Worker) -> None:
    lease = acquire(worker.settings, "orders", purpose="session of somebody else")
    error = {"code": "REC-020", "found": "not of this run"}
    write_status(worker.settings, Status("orders", state="failed", run_id="theirs", error=error))
    try:
        run = worker.execute()
    finally:
        lease.release()
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert run.tags[FAILURE_TAG] == "lease_busy"
    assert "another driver holds" in (log := worker.texts(run)) and "not of this run" not in log


def impatient(worker: Worker, monkeypatch: pytest.MonkeyPatch, **dagster: Any) -> None:
    """Have the driver killed half a second after it was asked to stop."""
    monkeypatch.setattr(supervisor, "GRACE", 0.3)
    stream = worker.settings.stream.model_copy(update={"stop_deadline": timedelta(seconds=0.2)})
    changed = {"stream": stream, "dagster": worker.settings.dagster.model_copy(update=dagster)}
    worker.settings = worker.settings.model_copy(update=changed)


def test_a_driver_that_does_not_stop_is_killed_with_its_group(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(worker, monkeypatch)
    worker.make_deaf()
    run = worker.run(lambda _: worker.instance.report_run_canceling(worker.newest()))
    assert run.status is dg.DagsterRunStatus.CANCELED
    assert "driver ended with exit code -9" in worker.texts(run)


def test_a_driver_that_hangs_is_ended_and_its_run_fails(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(worker, monkeypatch, stale_after=timedelta(seconds=2))
    run = worker.run(lambda pid: os.kill(pid, signal.SIGSTOP))
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert "the driver hangs: process" in worker.texts(run)


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
    schedule = CronSchedule("0 0 4 * * ?", "0 4 * * *", "UTC", paused=False)
    session = SessionSpec(replace(job, trigger=schedule, timeout_seconds=timeout), (), shop)
    watch = supervisor._SessionWatch(session, None, None)  # type: ignore[arg-type]
    watch._check_age()
    watch.begun -= shop.dagster.max_session.total_seconds() + 1
    with pytest.raises(child_run.Gone, match="has no time limit") if not timeout else nullcontext():
        watch._check_age()


def test_a_session_does_not_outlive_recourse_up(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as up:
        monkeypatch.setenv(PARENT_VARIABLE, identity(up.pid))
        run = worker.run(lambda _: (up.kill(), up.wait()))
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert "recourse up, which this run belonged to, is gone" in worker.texts(run)


def test_a_session_that_has_lasted_long_enough_ends_well(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    day_later = threading.Event()
    check = supervisor._SessionWatch._check_age

    def aged(watch: supervisor._SessionWatch) -> None:
        if day_later.is_set():
            watch.begun -= worker.settings.dagster.max_session.total_seconds()
        check(watch)

    monkeypatch.setattr(supervisor._SessionWatch, "_check_age", aged)
    run = worker.run(lambda _: day_later.set())
    assert run.status is dg.DagsterRunStatus.SUCCESS
    assert "stopped at a batch border" in worker.log


def test_one_failed_stream_is_told_once_and_the_session_goes_on(worker: Worker) -> None:
    def status(stream: str) -> Status:
        found = read_status(worker.settings, stream)
        assert found is not None
        return found

    def fail_one(_: int) -> None:
        (worker.settings.home / "one_fails").touch()
        wait_for(lambda: status("orders").state == "failed", "the failure")
        seen = status("customers").batch or 0
        wait_for(lambda: (status("customers").batch or 0) > seen + 10, "ten batches")
        worker.exit(0)

    run = worker.run(fail_one)
    assert len([message for message in worker.errors(run) if "orders failed" in message]) == 1


def test_parameters_of_the_run_reach_the_driver_and_a_sensor_s_run_respects_a_stop(worker: Worker) -> None:
    worker.exit(0)
    before = time.time()
    assert worker.execute(run_config={"ops": {"shop_session": {"config": {"rate": 7}}}}).is_success
    assert worker.execute(tags={"dagster/sensor_name": "keepalive_shop"}).is_success
    by_person, by_sensor = (s["arguments"] for s in starts(worker.settings))
    asked_at = float(by_person[by_person.index("--asked-at") + 1])
    assert before <= asked_at < time.time() + 1 and "--asked-at" not in by_sensor
    assert "stream.max_offsets_per_trigger=7" in by_person and "--respect-stop" not in by_person
    assert "stream.max_offsets_per_trigger=100" in by_sensor and "--respect-stop" in by_sensor


def kill_over_a_worker(shop: Settings, *command: str) -> None:
    """Start a run worker by a command, and kill -9 the command's process once the streams run."""
    environment = {**os.environ, "DAGSTER_HOME": str(prepared(shop)), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, *command, "tests.dagster.fakes.worker"], env=environment)
    try:
        wait_for(lambda: (s := read_status(shop, "orders")) and s.batch, "a batch")
    finally:
        process.kill()
        process.wait()


def test_kill_9_of_the_run_worker_leaves_no_driver(shop: Settings, stored: dg.DagsterInstance) -> None:
    kill_over_a_worker(shop, "-m")
    pid = starts(shop)[-1]["pid"]
    wait_for(lambda: not psutil.pid_exists(pid), "the end of the driver")
    status = read_status(shop, "orders")
    assert status is not None and status.state == "stopped"
    assert is_running(Worker(shop, stored).newest().tags[WORKER_TAG]) is False


def test_a_worker_whose_code_server_is_killed_stops_its_driver_and_fails(
    shop: Settings, stored: dg.DagsterInstance
) -> None:
    server = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', sys.argv[1]]); p.wait()"
    kill_over_a_worker(shop, "-c", server)
    worker = Worker(shop, stored)
    wait_for(lambda: worker.newest().is_finished, "the end of the run")
    assert worker.newest().status is dg.DagsterRunStatus.FAILURE
    assert "the code server that this run belonged to is gone" in worker.texts(worker.newest())
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
