"""Suites and row rules in the code location: their checks, jobs and schedules; a table that is red and put right."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from orchestration.bundle import job_yaml
from orchestration.location import location
from orchestration.quality.definitions import QualityDeclarations
from orchestration.quality.rules import RuleCount, RuledTable
from orchestration.quality.suites import due_checks, run_config, run_tags
from orchestration.sessions.definitions import session_assets
from orchestration.sessions.ownership import KIND_TAG, SESSION_TAG, job_tags
from orchestration.sessions.runs import ASSET_JOB, NEWEST, session_runs
from orchestration.sessions.supervisor import SessionSpec
from quality.suites import Suite
from quality.validation import CheckOutcome, Validation
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from tests.support.dagster_homes import stored_instance
from tests.support.receivers import webhook
from tests.support.validations import validation

SUITE = Suite("orders_rows", "orders", list, description="Every order has a customer.")
CHECK = dg.AssetCheckKey(dg.AssetKey("orders"), "orders_rows")


def null_customers(settings: Settings, suite: Suite, spark: Callable[[], Any], /) -> Validation:
    """A runner that reads the real table: rows without a customer."""
    table = DeltaTable(settings.tables / suite.table)
    rows = table.to_pyarrow_table().to_pylist()
    bad = tuple(row for row in rows if row["customer"] is None)
    outcome = CheckOutcome(
        "customer_not_null", "not_null", passed=not bad, rows=len(rows), failing=len(bad), sample=bad, number=len(bad)
    )
    return replace(validation(outcome), rows=len(rows), version=table.version(), since=None)


def named(of: Any, name: str) -> Any:
    """The sensor or the schedule of that name."""
    return next(each for each in of or [] if each.name == name)


def session_of(settings: Settings) -> SessionSpec:
    assert settings.jobs is not None
    topology = Topology.of_settings(settings)
    return SessionSpec(job_yaml.load(settings.jobs).jobs[0], (topology["orders"], topology["customers"]), settings)


def alerting(url: str) -> Settings:
    """Settings of which a webhook gets each change at once, whatever the disk says."""
    return Settings.load({"quality.webhook": url, "quality.alert_after": "0 seconds", "quality.free_disk_mb": 0})


def definitions(settings: Settings, **found: Any) -> dg.Definitions:
    """The code location of the fake streams with suites of our own."""
    values = {
        "suites": [SUITE],
        "run": partial(null_customers, settings),
        "counts": lambda *_: {},
        "ruled": [RuledTable("customers", "customers", ("id_positive",))],
        **found,
    }
    bundle = job_yaml.load(settings.jobs) if settings.jobs else None
    assert bundle is not None
    return location(bundle, Topology.of_settings(settings), settings, suites_and_rules=QualityDeclarations(**values))


def test_a_suite_is_a_check_of_its_table_with_a_job_and_a_schedule(shop: Settings) -> None:
    defs = definitions(shop)
    checks = {key.to_user_string() for key in defs.resolve_asset_graph().asset_check_keys}
    assert {"orders:orders_rows", "customers:rules", "orders:health"} <= checks
    assert "orders:rules" not in checks
    schedule = named(defs.schedules, "schedule_quality")
    assert schedule.cron_schedule == "*/5 * * * *"
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    job = defs.resolve_job_def("quality")
    assert not job.asset_layer.asset_graph.asset_check_keys, "a planned check is shown as being executed"
    assert [node.name for node in job.nodes] == ["run_suites"]
    assert run_tags(shop).items() <= job.tags.items()
    sensors = {s.name: s.default_status for s in defs.sensors or []}
    assert {"row_rules", "check_alerts"} <= sensors.keys()
    assert set(sensors.values()) == {dg.DefaultSensorStatus.RUNNING}
    spec = defs.resolve_asset_graph().get(CHECK)
    assert spec.description == "Every order has a customer."


def test_the_job_of_a_stream_has_no_checks(shop: Settings) -> None:
    assert [node.name for node in definitions(shop).resolve_job_def("shop").nodes] == ["shop_session"]


def test_every_second_run_of_suites_waits_in_the_queue(shop: Settings) -> None:
    with stored_instance(shop) as instance:
        limits = instance.get_concurrency_config().run_queue_config
    assert limits is not None
    assert limits.tag_concurrency_limits == [{"key": KIND_TAG, "value": "quality", "limit": 1}]


def test_a_job_in_the_yaml_cannot_be_named_as_the_suites_job(shop: Settings, tmp_path: Path) -> None:
    assert shop.jobs is not None
    path = tmp_path / "named.yml"
    path.write_text(shop.jobs.read_text().replace("    shop:\n", "    quality:\n"))
    with pytest.raises(ConfigurationError, match="resources.jobs.quality"):
        definitions(shop.model_copy(update={"jobs": path}))


def test_runs_of_checks_do_not_hide_a_session_that_was_launched_from_a_table_s_page(shop: Settings) -> None:
    defs = definitions(shop)
    session = session_of(shop)
    with dg.DagsterInstance.ephemeral() as instance:

        def run(status: str, selection: frozenset[dg.AssetKey] | None, **tags: str) -> str:
            job = defs.resolve_implicit_global_asset_job_def()
            if selection is None:
                job = job.get_subset(asset_check_selection={CHECK})
            return instance.create_run_for_job(
                job, status=dg.DagsterRunStatus[status], asset_selection=selection, tags=tags
            ).run_id

        tables = frozenset(session_assets(session).keys)
        ended = run("CANCELED", tables, **job_tags(shop, "continuous"), **{SESSION_TAG: "shop"})
        running = run("STARTED", tables)
        for _ in range(NEWEST + 1):
            run("SUCCESS", None, **run_tags(shop))
        assert {instance.get_run_by_id(ended).job_name} == {ASSET_JOB}  # type: ignore[union-attr]
        assert {seen.run_id for seen in session_runs(instance, session)} == {ended, running}


def test_a_session_launched_from_a_table_s_page_does_not_keep_suites_from_being_run(shop: Settings) -> None:
    defs = definitions(shop)
    tables = session_assets(session_of(shop)).keys
    job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection=tables)
    with dg.DagsterInstance.ephemeral() as instance:
        instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, asset_selection=frozenset(tables))
        planned = instance.event_log_storage.get_latest_asset_check_execution_by_key([CHECK])
        assert planned[CHECK].status.value == "PLANNED", "Dagster means to run the check when the session has ended"
        assert due_checks(instance, [CHECK], shop, time.time() + 600) == [CHECK]


def test_a_table_turns_red_and_after_it_was_put_right_green_and_both_are_told(
    shop: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestration.quality.suites.lower_priority", lambda: None)
    path = shop.tables / "orders"
    write_deltalake(path, pa.table({"id": [1, 2, 3], "customer": ["a", None, "c"]}))
    with webhook() as hook:
        settings = alerting(hook.url)
        defs = definitions(settings)
        with stored_instance(settings) as instance:
            cursor: str | None = None

            def step() -> dg.AssetCheckEvaluation:
                """A tick of the schedule, the run that it asks for, and a tick of the alerts."""
                nonlocal cursor
                schedule = named(defs.schedules, "schedule_quality")
                context = dg.build_schedule_context(instance=instance, scheduled_execution_time=None)
                request = schedule(context)
                assert isinstance(request, dg.RunRequest), request
                assert request.run_config == run_config(shop, ["orders_rows"])
                job = defs.resolve_job_def("quality")
                assert job.execute_in_process(request.run_config, instance=instance).success
                alerts = named(defs.sensors, "check_alerts")
                result = alerts(dg.build_sensor_context(instance=instance, definitions=defs, cursor=cursor))
                assert isinstance(result, dg.SensorResult)
                cursor = result.cursor
                known = instance.event_log_storage.get_latest_asset_check_execution_by_key([CHECK])
                evaluation = known[CHECK].evaluation
                assert evaluation is not None
                return evaluation

            red = step()
            assert not red.passed
            assert "customer_not_null: 1 of 3 rows" in str(red.description)
            shown = red.metadata["failing rows: customer_not_null"]
            assert isinstance(shown, dg.TableMetadataValue)
            assert [record.data for record in shown.records] == [{"id": 2, "customer": "null"}]
            assert [alert["state"] for alert in hook.alerts] == ["failed"]
            assert instance.has_run(hook.alerts[0]["run"])

            schedule = named(defs.schedules, "schedule_quality")
            again = schedule(dg.build_schedule_context(instance=instance))
            assert isinstance(again, dg.SkipReason), "it was run just now"

            DeltaTable(path).update(predicate="id = 2", updates={"customer": "'b'"})
            now = time.time
            monkeypatch.setattr("orchestration.quality.suites.time.time", lambda: now() + 300)
            assert step().passed
            assert [alert["state"] for alert in hook.alerts] == ["failed", "passed"]
            assert json.loads(cursor or "")["receivers"]["webhook"]["waiting"] == []


def test_the_rules_of_a_table_are_reported_and_alerted(shop: Settings) -> None:
    with webhook() as hook:
        settings = alerting(hook.url)
        counts = {"id_positive": RuleCount(4, time.time(), "quarantine")}
        defs = definitions(settings, counts=lambda *_: counts)
        with dg.DagsterInstance.ephemeral() as instance:
            for name in ("row_rules", "check_alerts"):
                sensor = named(defs.sensors, name)
                result = sensor(dg.build_sensor_context(instance=instance, definitions=defs))
                assert isinstance(result, dg.SensorResult)
                for event in result.asset_events:
                    instance.report_runless_asset_event(event)
        (alert,) = hook.alerts
        assert (alert["table"], alert["check"], alert["state"]) == ("customers", "rules", "warning")
        assert "in customers_quarantine" in alert["text"]


def test_the_interval_of_the_settings_is_that_of_the_schedule(shop: Settings) -> None:
    hourly = shop.model_copy(update={"quality": shop.quality.model_copy(update={"every": timedelta(hours=1)})})
    schedule = named(definitions(hourly).schedules, "schedule_quality")
    assert schedule.cron_schedule == "0 * * * *"
