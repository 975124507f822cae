"""Sensors, ticked on an instance in memory: keepalive, watchdog, retention, alerts, and the checks they report."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.remote_origin import RemoteJobOrigin

from orchestration.location import definitions
from orchestration.sessions.decisions import IN_PROGRESS, RunSeen
from orchestration.sessions.ownership import (
    FAILURE_TAG,
    FINGERPRINT_TAG,
    STOPPED_BY_TAG,
    WORKER_TAG,
)
from orchestration.sessions.runs import ASSET_JOB, NEWEST, runs_by_session, session_runs
from orchestration.sessions.supervisor import fingerprint
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.requests import STOP
from streaming_jobs.state.status import Status, write_status
from tests.dagster.fakes.command import fake_command
from tests.dagster.ticks import DEAD_WORKER, Ticks
from tests.support.dagster_homes import REPOSITORY, stored_instance

TABLES = ("orders", "orders_dead_letters", "customers", "customers_dead_letters")


@pytest.fixture
def ticks(shop: Settings, instance: dg.DagsterInstance) -> Ticks:
    return Ticks(shop, instance)


def test_keepalive_asks_for_the_first_session_and_not_for_a_second(ticks: Ticks) -> None:
    assert ticks.keepalive() is None
    ticks.run(dg.DagsterRunStatus.STARTING)
    assert ticks.keepalive()


def test_keepalive_sees_markers_leases_and_what_recourse_up_stopped(ticks: Ticks) -> None:
    markers = [ticks.settings.state / name / "stop" for name in ("orders", "customers")]
    for marker in markers:
        marker.parent.mkdir(parents=True)
        marker.touch()
    assert "on purpose" in str(ticks.keepalive())
    for marker in markers:
        marker.unlink()
    lease = acquire(ticks.settings, "orders", purpose="by hand")
    assert "outside this job runs: orders" in str(ticks.keepalive())
    lease.release()
    canceled = ticks.run(dg.DagsterRunStatus.CANCELED)
    assert "operator" in str(ticks.keepalive())
    ticks.instance.add_run_tags(canceled, {STOPPED_BY_TAG: "shutdown"})
    assert ticks.keepalive() is None


def permanent(ticks: Ticks) -> dict[str, str]:
    """The tags of a session that failed for good, with the code and the settings of now."""
    session = ticks.session
    mark = fingerprint(session.job, session.streams, ticks.settings, session.job.arguments())
    return {FAILURE_TAG: "permanent", FINGERPRINT_TAG: mark}


def test_keepalive_gives_up_until_code_settings_or_decisions_change(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = ticks.run(dg.DagsterRunStatus.FAILURE, **permanent(ticks))
    assert "gave up" in str(ticks.keepalive())
    monkeypatch.setenv("RECOURSE_STREAM__MAX_RESTARTS", "9")
    reason = ticks.keepalive()
    assert reason is None or f"run {run_id[:8]} ended" in reason


def failed_beside_a_cancelled_duplicate(ticks: Ticks, **tags: str) -> str:
    """A session that failed after a second launch of its job was cancelled in the queue."""
    failed = ticks.run(dg.DagsterRunStatus.STARTING, **tags)
    ticks.happened(failed, dg.DagsterEventType.RUN_START)
    duplicate = ticks.run(dg.DagsterRunStatus.QUEUED)
    ticks.instance.report_run_canceled(ticks.instance.get_run_by_id(duplicate))
    ticks.instance.report_run_failed(ticks.instance.get_run_by_id(failed))
    return failed


def test_a_cancelled_duplicate_does_not_start_again_what_was_given_up(ticks: Ticks) -> None:
    failed = failed_beside_a_cancelled_duplicate(ticks, **permanent(ticks))
    assert f"gave up: run {failed[:8]}" in str(ticks.keepalive())


def test_cancelling_queued_duplicates_does_not_switch_keepalive_off(ticks: Ticks) -> None:
    session = ticks.run(dg.DagsterRunStatus.STARTING)
    ticks.happened(session, dg.DagsterEventType.RUN_START)
    duplicates = [ticks.run(dg.DagsterRunStatus.QUEUED) for _ in range(NEWEST + 1)]
    assert f"run {session[:8]} is started" in str(ticks.keepalive())
    ticks.tick("watchdog")
    ticks.tick("watchdog")
    log = [entry.message for entry in ticks.instance.all_logs(duplicates[-1])]
    (line,) = [message for message in log if "waits in the queue" in message]
    assert f"run {session[:8]} is the session of orders, customers" in line
    for run_id in duplicates:
        ticks.instance.report_run_canceled(ticks.instance.get_run_by_id(run_id))
    reason = f"queued run {duplicates[-1][:8]} was cancelled; session {session[:8]} runs"
    assert reason in str(ticks.keepalive())
    ticks.instance.report_run_failed(ticks.instance.get_run_by_id(session))
    assert f"run {session[:8]} ended; the next try is in" in str(ticks.keepalive())


@pytest.mark.parametrize(
    ("purpose", "by_hand", "status"),
    [
        pytest.param("", False, "FAILURE", id="nothing of it lives"),
        pytest.param("session", False, "STARTED", id="its driver holds a lease"),
        pytest.param("recovery customers-0001", True, "FAILURE", id="a recovery holds a stream that left the session"),
        pytest.param("session", True, "FAILURE", id="a session started by hand holds a stream"),
    ],
)
def test_the_watchdog_fails_a_run_of_which_nothing_lives(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch, purpose: str, by_hand: bool, status: str
) -> None:
    run_id = ticks.run(dg.DagsterRunStatus.STARTED, **{WORKER_TAG: DEAD_WORKER})
    lease = acquire(ticks.settings, "customers", purpose=purpose) if purpose else None
    if by_hand:
        theirs = Status(stream="customers", pid=os.getpid(), run_id=None, started_at=1.0, heartbeat=1.0)
        write_status(ticks.settings, theirs)
    monkeypatch.setattr("orchestration.sessions.definitions.time.time", lambda: 4e9)
    ticks.tick("watchdog")
    if lease is not None:
        lease.release()
    assert ticks.status(run_id) == status


def test_keepalive_does_not_wait_for_a_stream_that_a_recovery_holds(ticks: Ticks) -> None:
    """Its session has ended meanwhile: the others are started, that one is left out."""
    STOP.ask_for(ticks.settings, "customers", "customers-0001")
    lease = acquire(ticks.settings, "customers", purpose="recovery customers-0001")
    assert ticks.keepalive() is None
    STOP.ask_for(ticks.settings, "orders", "orders-0001")
    reason = str(ticks.keepalive())
    assert "stream customers is being recovered by plan customers-0001" in reason
    assert "nobody works on it now: recourse recover resume orders-0001" in reason
    lease.release()


def test_the_watchdog_fails_a_recovery_whose_process_is_gone(ticks: Ticks) -> None:
    """Also where nothing else would: the code server, which starts a run's process, died with it."""
    job = ticks.defs.resolve_job_def("recover")
    tags = {**job.tags, WORKER_TAG: DEAD_WORKER}
    run = ticks.instance.create_run_for_job(
        job, run_config=job.run_config, status=dg.DagsterRunStatus.STARTED, tags=tags
    )
    assert run.run_id[:8] in str(ticks.tick("watchdog"))
    assert ticks.status(run.run_id) == "FAILURE"


@pytest.fixture
def short(shop: Settings) -> Settings:
    """Ended runs are kept for no time."""
    kept = {"keep_runs": timedelta(0), "own_instance": True}
    return shop.model_copy(update={"dagster": shop.dagster.model_copy(update=kept)})


def test_old_runs_are_deleted_with_their_files_and_the_newest_stays(short: Settings) -> None:
    with stored_instance(short) as instance:
        ticks = Ticks(short, instance)
        old, newest = (ticks.run(dg.DagsterRunStatus.FAILURE) for _ in range(2))
        instance.report_engine_event("so that the run has a file", instance.get_run_by_id(old))
        file = Path(instance.root_directory) / "history" / "runs" / f"{old}.db"
        assert file.exists()
        alert = dg.AssetObservation(dg.AssetKey("orders"), metadata={"alert": "trouble"})
        for _ in range(3):
            instance.report_runless_asset_event(alert)
        assert "1 old runs deleted, and 2 old events without a run" in str(ticks.tick("retention"))
        assert len(instance.fetch_observations(dg.AssetKey("orders"), limit=9).records) == 1
        assert [run.run_id for run in instance.get_runs()] == [newest]
        assert not file.exists()


def test_the_run_that_decides_stays_and_not_a_cancelled_duplicate_of_it(short: Settings) -> None:
    with stored_instance(short) as instance:
        ticks = Ticks(short, instance)
        failed = failed_beside_a_cancelled_duplicate(ticks)
        assert "1 old runs deleted" in str(ticks.tick("retention"))
        assert [run.run_id for run in instance.get_runs()] == [failed]


def test_a_session_launched_from_an_asset_s_page_is_seen_too(ticks: Ticks) -> None:
    ticks.instance.create_run_for_job(
        ticks.defs.resolve_implicit_global_asset_job_def(),
        status=dg.DagsterRunStatus.STARTED,
        asset_selection=frozenset(dg.AssetKey(table) for table in TABLES),
    )
    (seen,) = session_runs(ticks.instance, ticks.session)
    assert seen.status in IN_PROGRESS


@pytest.mark.parametrize("status", ["STARTED", "CANCELING"])
def test_materialize_all_beside_a_running_session_is_ended_with_the_reason(ticks: Ticks, status: str) -> None:
    session = ticks.run(dg.DagsterRunStatus[status])
    queued = ticks.instance.create_run_for_job(
        ticks.defs.resolve_implicit_global_asset_job_def(),
        status=dg.DagsterRunStatus.QUEUED,
        asset_selection=frozenset(dg.AssetKey(table) for table in TABLES),
        remote_job_origin=RemoteJobOrigin(REPOSITORY, ASSET_JOB),
    ).run_id
    of_the_job = ticks.run(dg.DagsterRunStatus.QUEUED)
    ticks.tick("watchdog")
    states = [ticks.status(run_id) for run_id in (session, queued, of_the_job)]
    assert states == [status, "CANCELED" if status == "STARTED" else "QUEUED", "QUEUED"]
    if status == "STARTED":
        log = [entry.message for entry in ticks.instance.all_logs(queued)]
        assert any(f"run {session[:8]} is the session of orders, customers" in message for message in log)
        assert session[:8] in str(ticks.keepalive()), "that was no stop of the session"


def test_a_failed_session_is_alerted_on_every_table(ticks: Ticks) -> None:
    (ticks.settings.home / "exit").write_text("78")
    job = definitions(ticks.settings, fake_command).resolve_job_def("shop")
    done = job.execute_in_process(instance=ticks.instance, raise_on_error=False)
    event = next(e for e in done.all_events if e.event_type is dg.DagsterEventType.RUN_FAILURE)
    context = dg.build_run_status_sensor_context("session_failure", event, ticks.instance, done.dagster_run)
    sensor = next(s for s in ticks.defs.sensors or [] if s.name == "session_failure")
    sensor(context.for_run_failure())
    for table in ("orders", "customers"):
        newest = ticks.instance.fetch_observations(dg.AssetKey(table), limit=1).records[0].asset_observation
        assert newest is not None
        assert str(newest.metadata["alert"].value).startswith("stream orders failed: REC-021 wrong table")


def test_a_dead_stream_is_red_on_its_table_and_green_when_a_driver_is_at_work_again(ticks: Ticks) -> None:
    assert ticks.look() == {}
    now = time.time()
    write_status(ticks.settings, Status("orders", "running", os.getpid(), started_at=now, heartbeat=now))
    ticks.run(dg.DagsterRunStatus.QUEUED)  # the next session plans to materialise the table: that must not hide it
    assert ticks.look() == {"orders": (False, "red: dead")}
    planned = ticks.instance.get_latest_planned_materialization_info(dg.AssetKey("orders"))
    assert planned is not None and planned.run_id == ""
    assert ticks.look() == {}
    lease = acquire(ticks.settings, "orders", purpose="session")
    assert ticks.look() == {"orders": (False, "starting")}, "it has committed nothing since its start"
    at_work = Status("orders", "running", os.getpid(), started_at=now, heartbeat=now, committed_at=time.time(), batch=7)
    write_status(ticks.settings, replace(at_work, lag_records=3))
    (green,) = (
        event for event in ticks.result("stream_health").asset_events if isinstance(event, dg.AssetCheckEvaluation)
    )
    assert green.passed and green.metadata["verdict"].value == "well"
    assert green.metadata["lag_records"].value == 3 and green.metadata["last_committed_batch"].value == "7"
    ticks.instance.report_runless_asset_event(green)
    lease.release()
    STOP.ask(ticks.settings, "orders", "asked by an operator")
    assert ticks.look() == {"orders": (False, "stopped")}


def test_a_stream_that_ended_while_its_session_goes_on_is_red(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    long_ago = time.time() - 2000
    session = RunSeen("r", "STARTED", created=long_ago, started=long_ago)
    monkeypatch.setattr("orchestration.sessions.health.runs_by_session", lambda *_: {"shop": [session]})
    write_status(ticks.settings, Status("orders", "stopped", 7, heartbeat=long_ago, trigger="continuous"))
    assert ticks.look() == {"orders": (False, "red: not_running")}
    STOP.ask(ticks.settings, "orders", "asked by an operator")
    assert ticks.look() == {"orders": (False, "stopped")}


def test_a_check_can_be_executed_by_hand_and_a_session_does_not_wait_for_it(ticks: Ticks) -> None:
    checks = ticks.defs.resolve_asset_graph().asset_check_keys
    assert {key.asset_key.to_user_string() for key in checks} == {"orders", "customers", "idle"}
    now = time.time()
    write_status(ticks.settings, Status("orders", "running", os.getpid(), started_at=now, heartbeat=now))
    job = dg.define_asset_job("look", selection=dg.AssetSelection.checks_for_assets(dg.AssetKey("orders")))
    resolved = dg.Definitions.merge(ticks.defs, dg.Definitions(jobs=[job])).resolve_job_def("look")
    (done,) = resolved.execute_in_process(instance=ticks.instance).get_asset_check_evaluations()
    assert (done.passed, done.metadata["verdict"].value) == (False, "red: dead")
    assert not ticks.defs.resolve_job_def("shop").asset_layer.asset_graph.asset_check_keys


def test_a_stream_that_fails_in_a_session_is_alerted_once(ticks: Ticks) -> None:
    error = {"code": "REC-021", "found": "wrong table"}
    status = Status("orders", state="failed", started_at=5.0, heartbeat=5.0, error=error)
    write_status(ticks.settings, status)
    first = ticks.result("stream_failure")
    (event,) = first.asset_events
    assert event.asset_key == dg.AssetKey("orders")
    assert "REC-021 wrong table" in str(event.metadata["alert"].value)
    assert not ticks.result("stream_failure", first.cursor).asset_events


@pytest.mark.parametrize(
    ("purpose", "pid", "alerted"),
    [
        pytest.param("session", os.getpid(), True, id="a session"),
        pytest.param("recovery orders-0001", os.getpid(), False, id="a recovery"),
        pytest.param("savepoint", os.getpid(), False, id="a savepoint"),
        pytest.param("session", 1, False, id="a session that has just begun, after another one"),
    ],
)
def test_only_a_session_that_says_nothing_is_silent_not_who_recovers_a_killed_one(
    ticks: Ticks, purpose: str, pid: int, alerted: bool
) -> None:
    long_ago = time.time() - 300  # longer than `dagster.stale_after`
    write_status(ticks.settings, Status("orders", "running", pid, started_at=long_ago, heartbeat=long_ago))
    lease = acquire(ticks.settings, "orders", purpose=purpose)
    result = ticks.result("stream_failure")
    lease.release()
    assert bool(result.asset_events) is alerted


def test_the_sensors_of_all_sessions_ask_once_for_the_runs_in_progress(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks.run(dg.DagsterRunStatus.STARTED)
    asked: list[dg.RunsFilter] = []
    records = ticks.instance.get_run_records

    def counted(filters: dg.RunsFilter, limit: int | None = None) -> object:
        asked.append(filters)
        return records(filters, limit)

    monkeypatch.setattr(ticks.instance, "get_run_records", counted)
    session = ticks.session
    jobs = [replace(session, job=replace(session.job, key=key)) for key in ("a", "b", "c")]
    assert [len(runs) for runs in runs_by_session(ticks.instance, [session]).values()] == [1]
    assert len(asked) == 2, "of runs of this location, and of those launched from a table's page"
    asked.clear()
    assert not any(runs_by_session(ticks.instance, jobs).values())
    assert len(asked) == 2 + len(jobs), "and once more of each that does not run"
