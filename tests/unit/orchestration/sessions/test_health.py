"""The check `health` of each table: what it says of a stream, when Dagster is told, and what is kept of it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest

from orchestration.bundle.job import Continuous, Rule
from orchestration.sessions.decisions import RunSeen, missed, should_run
from orchestration.sessions.health import (
    FRESHNESS,
    HEALTH,
    NO_ALERT,
    HealthChecks,
    broken_rules,
    freshness,
    left_behind,
    settling,
    verdict,
)
from orchestration.sessions.ownership import STOPPED_BY_TAG
from orchestration.sessions.supervisor import SessionSpec
from orchestration.sessions.verdicts import AGAIN_AFTER, OTHER_WORDS_AFTER, CheckVerdict, to_report
from streaming_jobs.state.health import Health, Reason
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.status import Status, TableAge, write_status
from streaming_jobs.stream import Stream
from tests.conftest import SettingsFactory

pytestmark = pytest.mark.slow

NOW = 1_000_000.0
KEY = dg.AssetCheckKey(dg.AssetKey("orders"), HEALTH)


def found(state: str, *reasons: Reason, notes: tuple[str, ...] = ()) -> Health:
    return Health("orders", NOW, state, reasons, notes)


WELL = CheckVerdict(True, dg.AssetCheckSeverity.ERROR, "well", "orders is running")
RED = CheckVerdict(False, dg.AssetCheckSeverity.ERROR, "red: dead", "orders is dead: its session ended")
DEAD = found("dead", Reason("dead", "its session (pid 7) ended without saying so"))


@pytest.mark.parametrize(
    ("health", "continuous", "passed", "severity", "mark"),
    [
        (found("running"), True, True, "ERROR", "well"),
        (found("idle"), True, True, "ERROR", "well"),
        (DEAD, True, False, "ERROR", "red: dead"),
        (found("running", Reason("stuck", "..."), Reason("late", "...")), True, False, "ERROR", "red: late, stuck"),
        (found("stopped", notes=("was stopped on purpose",)), True, False, "WARN", "stopped"),
        (found("stopped"), False, True, "ERROR", "stopped"),
        (found("recovering", notes=("is being recovered",)), False, False, "WARN", "recovering"),
        (found("restarting", notes=("its session ended",)), False, False, "WARN", "restarting"),
        (found("never started"), True, True, "ERROR", "never started"),
        (replace(found("running"), warnings=(Reason("disk", "..."),)), True, False, "WARN", "yellow: disk"),
        (replace(DEAD, warnings=(Reason("disk", "..."),)), True, False, "ERROR", "red: dead"),
    ],
)
def test_the_verdict(health: Health, continuous: bool, passed: bool, severity: str, mark: str) -> None:
    outcome = verdict(health, continuous=continuous)
    assert (outcome.passed, outcome.severity.value, outcome.mark) == (passed, severity, mark)
    for reason in (*health.reasons, *health.warnings):
        assert reason.text in outcome.text


def test_a_broken_job_yaml_is_a_warning_on_what_is_well_and_does_not_hide_what_is_red() -> None:
    broken = verdict(found("running"), continuous=True, broken="databricks.yml:3: no such field")
    assert (broken.passed, broken.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "databricks.yml:3" in broken.text
    assert verdict(DEAD, continuous=True, broken="databricks.yml:3: ...").mark == "red: dead"


RULES = [
    Rule("RUN_DURATION_SECONDS", 100),
    Rule("STREAMING_BACKLOG_RECORDS", 1000),
    Rule("STREAMING_BACKLOG_SECONDS", 60),
    Rule("STREAMING_BACKLOG_BYTES", 1),
]


@pytest.mark.parametrize(
    ("records", "late", "ago", "state", "continuous", "broken"),
    [
        (1000, 60.0, 100, "running", False, []),
        (1001, 61.0, 101, "running", False, ["RUN_DURATION", "BACKLOG_RECORDS", "BACKLOG_SECONDS"]),
        (1001, 0.0, 101, "running", True, ["BACKLOG_RECORDS"]),
        (1001, 61.0, 10, "stopped", False, []),
    ],
)
def test_the_health_rules_of_a_job_are_judged_by_the_figures_of_its_stream_and_run(
    records: int, late: float, ago: float, state: str, continuous: bool, broken: list[str]
) -> None:
    status = Status("orders", cast("Any", state), heartbeat=NOW, started_at=NOW, lag_records=records, lag_s=late)
    started = [replace(run("STARTED", ago=0), started=NOW - ago)]
    found = broken_rules(RULES, status, started, NOW, continuous=continuous)
    assert len(found) == len(broken)
    assert all(name in text for name, text in zip(broken, found, strict=True))
    assert broken_rules(RULES, None, [], NOW, continuous=False) == []


def run(status: str, *, ago: float, **tags: str) -> RunSeen:
    return RunSeen("r", status, created=NOW - 900, started=NOW - 800, ended=NOW - ago, updated=NOW - ago, tags=tags)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], None),
        ([run("STARTED", ago=0)], None),
        ([run("SUCCESS", ago=61)], True),
        ([run("SUCCESS", ago=59)], None),
        ([run("SUCCESS", ago=-7200)], True),
        ([run("FAILURE", ago=61)], True),
        ([run("CANCELED", ago=61)], False),
        ([run("CANCELED", ago=61, **{STOPPED_BY_TAG: "shutdown"})], True),
        ([RunSeen("q", "QUEUED", created=NOW - 61)], True),
    ],
)
def test_a_stream_should_run_when_keepalive_had_the_time_to_start_it(
    runs: list[RunSeen], expected: bool | None
) -> None:
    assert should_run(runs, NOW, patience=60, watched_since=NOW) is expected


@pytest.mark.parametrize(("ago", "expected"), [(299, None), (301, True), (-7200, None)])
def test_a_job_that_never_starts_is_red(settings: SettingsFactory, ago: float, expected: bool | None) -> None:
    job = SimpleNamespace(key="shop", streams=["orders"], trigger=Continuous(paused=False))
    session = cast("SessionSpec", SimpleNamespace(job=job, patience=0.0))
    checks = HealthChecks([], [session], settings(), loaded_at=NOW - ago)
    assert checks._should_run({"shop": []}, NOW) == {"orders": expected}


TICK = NOW - 1000
NIGHT = RunSeen("night", "SUCCESS", created=TICK + 20, started=TICK + 30, ended=TICK + 90)


@pytest.mark.parametrize(
    ("runs", "word"),
    [
        ([NIGHT], None),
        ([replace(NIGHT, status="FAILURE")], "run_failed"),
        ([replace(NIGHT, status="FAILURE", started=None), NIGHT], "run_failed"),
        ([replace(NIGHT, created=TICK - 86_400)], "overdue"),
        ([replace(NIGHT, created=TICK - 9000, status="STARTED", ended=None)], None),
        ([replace(NIGHT, created=TICK - 9000, status="CANCELED")], "overdue"),
        ([replace(NIGHT, status="CANCELED")], None),
        ([replace(NIGHT, created=TICK - 9000, status="QUEUED", started=None, ended=None)], "overdue"),
        ([], "overdue"),
    ],
)
def test_a_scheduled_job_is_red_when_its_newest_run_failed_or_its_tick_has_started_nothing(
    runs: list[RunSeen], word: str | None
) -> None:
    found = missed(runs, TICK, NOW, patience=300, watched_since=TICK - 60)
    assert (found and found.word) == word
    if not runs:
        assert missed(runs, TICK, NOW, patience=300, watched_since=TICK + 60) is None, "it was loaded after the tick"
        assert missed(runs, TICK, TICK + 299, patience=300, watched_since=0) is None


def test_green_again_only_after_the_stream_has_shown_that_it_works() -> None:
    starting = settling(WELL, RED.evaluation(KEY))
    assert (starting.passed, starting.severity, starting.mark) == (False, dg.AssetCheckSeverity.WARN, "starting")
    assert starting.text == "orders is running; before it orders is dead: its session ended"
    assert settling(WELL, starting.evaluation(KEY)) == starting, "however often it is looked at"
    assert settling(WELL, WELL.evaluation(KEY)) is WELL and settling(WELL, None) is WELL
    assert settling(RED, starting.evaluation(KEY)) is RED
    assert starting.mark in NO_ALERT, "or each try of a stream that never works is an alert, and an all-clear"


STOPPED = Status("orders", "stopped", 7, heartbeat=NOW - 200, trigger="continuous")


@pytest.mark.parametrize(
    ("status", "started", "expected"),
    [
        (STOPPED, NOW - 800, True),
        (STOPPED, NOW - 50, False),
        (replace(STOPPED, heartbeat=NOW - 50), NOW - 800, False),
        (replace(STOPPED, state="running"), NOW - 800, False),
        (replace(STOPPED, state="failed"), NOW - 800, False),
        (replace(STOPPED, trigger="available-now"), NOW - 800, False),
        (None, NOW - 800, False),
        (STOPPED, None, False),
    ],
)
def test_a_stream_that_ended_while_its_session_goes_on_is_left_behind(
    status: Status | None, started: float | None, expected: bool
) -> None:
    session = RunSeen("r", "STARTED", created=NOW - 900, started=started)
    queued = RunSeen("q", "QUEUED", created=NOW - 10)
    assert left_behind([queued, session], status, NOW, patience=100) is expected
    assert not left_behind([replace(session, status="SUCCESS")], status, NOW, patience=100), "should_run tells"


def tell(instance: dg.DagsterInstance, verdict: CheckVerdict, now: float | None = None) -> int:
    """Report what is to be told; how much it was."""
    reported = to_report(instance, {KEY: verdict}, now or time.time())
    for evaluation in reported:
        instance.report_runless_asset_event(evaluation)
    return len(reported)


def test_each_change_is_told_once_and_the_rest_now_and_then(instance: dg.DagsterInstance) -> None:
    assert tell(instance, CheckVerdict(True, dg.AssetCheckSeverity.ERROR, "never started", "orders never started")) == 0
    assert [tell(instance, v) for v in (WELL, WELL, RED, RED, RED, WELL)] == [1, 0, 1, 0, 0, 1]
    assert tell(instance, WELL, time.time() + AGAIN_AFTER + 1) == 1
    other = replace(WELL, text="orders is idle")
    assert [tell(instance, other, time.time() + age) for age in (OTHER_WORDS_AFTER - 5, OTHER_WORDS_AFTER)] == [0, 1]
    assert tell(instance, other, time.time() - 3600) == 1, "the clock was set back"


def test_what_a_person_has_executed_is_told_again_because_it_would_not_count_for_the_next_rows(
    instance: dg.DagsterInstance,
) -> None:
    tell(instance, WELL)
    event = dg.DagsterEvent(
        dg.DagsterEventType.ASSET_CHECK_EVALUATION.value, "job", event_specific_data=WELL.evaluation(KEY)
    )
    instance.report_dagster_event(event, run_id="by-hand")
    assert [tell(instance, WELL), tell(instance, WELL)] == [1, 0]


AGED = TableAge(NOW - 9999, NOW - 301, 300.0)


@pytest.mark.parametrize(
    ("table", "passed", "mark"),
    [
        (AGED, False, "stale"),
        (replace(AGED, rows_at=NOW - 300), True, "fresh"),
        (replace(AGED, rows_at=None), False, "stale"),
        (replace(AGED, fresh_within_s=None), True, "no objective yet"),
        (None, False, "never started"),
    ],
)
def test_a_table_is_fresh_by_its_objective_alone(table: TableAge | None, passed: bool, mark: str) -> None:
    status = Status("orders", state="failed", tables={} if table is None else {"orders": table})
    found = freshness("orders", status, NOW)
    assert (found.passed, found.mark) == (passed, mark)
    if mark in ("fresh", "stale"):
        assert found.figures["age_s"].value in (300.0, 301.0, 9999.0) and found.figures["objective_s"].value == 300.0
        assert found.text == freshness("orders", status, NOW - 0.5).text, "a text that ages would be an event each time"


def test_the_check_of_an_objective_is_there_beside_health_and_agrees_with_it(settings: SettingsFactory) -> None:
    sinks = {"orders": SimpleNamespace(name="orders", fresh_within="5 minutes")}
    sinks["lines"] = SimpleNamespace(name="lines", fresh_within=None)
    home, now = settings(), time.time()
    checks = HealthChecks([cast("Stream", SimpleNamespace(name="orders", sinks=sinks))], [], home)
    status = Status("orders", "idle", os.getpid(), heartbeat=now, started_at=now - 9999, committed_at=now)
    status.lag_at, status.lag_records = now, 0
    keys = {(table, check) for table in ("orders", "lines") for check in ("health",)} | {("orders", FRESHNESS)}
    lease = acquire(home, "orders", purpose="session")
    with dg.DagsterInstance.ephemeral() as instance:
        for age, seen in ((200.0, (True, True)), (400.0, (False, False))):
            write_status(home, replace(status, tables={"orders": TableAge(0.0, now - age, 300.0)}))
            verdicts = checks.verdicts(instance, now)
            assert {(key.asset_key.path[-1], key.name) for key in verdicts} == keys
            of_orders = {key.name: one.passed for key, one in verdicts.items() if key.asset_key.path[-1] == "orders"}
            assert (of_orders[HEALTH], of_orders[FRESHNESS]) == seen
    lease.release()
    (step,) = cast("Any", checks.definitions()).asset_checks
    assert (
        {(key.asset_key.path[-1], key.name) for key in step.check_keys}
        == keys
        == {(key.asset_key.path[-1], key.name) for key in checks.keys}
    )
