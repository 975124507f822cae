"""The definitions that Dagster loads: assets, lineage, jobs, sensors, schedules; and the limits of loading them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from orchestration.location import definitions
from orchestration.sessions.assets import postgres_assets, table_assets, topic_assets
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.formats import Json
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.status import Status, write_status
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from tests.conftest import SettingsFactory
from tests.dagster.fakes.flows import ORDER
from tests.dagster.ticks import Ticks
from tests.support import ROOT
from tests.support.dagster_homes import stored_instance
from tests.support.two_steps import CLEAN


@pytest.fixture
def defs(shop: Settings) -> dg.Definitions:
    return definitions(shop)


def test_every_table_is_an_asset_with_what_a_reader_needs(shop: Settings, defs: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(defs)
    spec = {s.key: s for s in defs.resolve_all_asset_specs()}
    assert {k.to_user_string() for k in spec} == {
        "kafka/shop.orders-v1",
        *("orders", "orders_dead_letters", "customers", "customers_dead_letters", "idle", "idle_dead_letters"),
    }
    orders = spec[dg.AssetKey("orders")]
    assert orders.group_name == "shop"
    assert spec[dg.AssetKey("orders_dead_letters")].group_name == "shop_dead_letters"
    assert orders.kinds == {"spark", "deltalake"}
    assert list(orders.owners) == ["a@b.example"]
    assert orders.description == "Every order, by its number."
    assert orders.tags["recourse/stream"] == "orders"
    assert orders.metadata["dagster/table_name"] == "orders"
    assert orders.metadata["dagster/uri"] == (shop.tables / "orders").as_uri()
    columns = orders.metadata["dagster/column_schema"].columns
    assert [(c.name, c.type, c.description, c.constraints.nullable) for c in columns] == [
        ("id", "bigint", "number of the order", False),
        ("customer", "string", None, True),
    ]


def test_topics_are_external_and_every_table_comes_from_them(defs: dg.Definitions) -> None:
    graph = defs.resolve_asset_graph()
    topic = dg.AssetKey(["kafka", "shop.orders-v1"])
    assert graph.get(topic).is_external
    assert graph.get(topic).kinds == {"kafka"}
    assert list(graph.get(topic).owners) == ["team:shop"]
    for table in ("orders", "customers_dead_letters", "idle"):
        assert graph.get(dg.AssetKey(table)).parent_keys == {topic}


def test_a_topic_that_a_stream_writes_comes_from_what_the_stream_reads() -> None:
    raw, clean = KafkaTopic("raw", value=Json(ORDER)), KafkaTopic("clean", value=Json(ORDER))
    first = Stream("first", lambda raw: raw, {"raw": raw}, {"clean": KafkaSink(clean, key="customer")})
    second = Stream("second", lambda clean: clean, {"clean": clean}, {"second": DeltaTable("second")})
    specs = {spec.key: spec for spec in topic_assets(Topology.of([first, second]), Settings.load())}
    assert [dep.asset_key for dep in specs[dg.AssetKey(["kafka", "clean"])].deps] == [dg.AssetKey(["kafka", "raw"])]
    assert specs[dg.AssetKey(["kafka", "clean"])].tags["recourse/stream"] == "first"
    assert not list(specs[dg.AssetKey(["kafka", "raw"])].deps)
    (batches, _) = table_assets(first, Settings.load(), "shop")
    assert batches.key == dg.AssetKey("first_batches")


def test_a_table_of_postgresql_is_an_asset_that_comes_from_what_the_stream_reads() -> None:
    table = PostgresTable("orders", keys=["customer"], schema={"customer": "string"}, owners=["team:shop"])
    flow = Stream("flow", lambda raw: raw, {"raw": KafkaTopic("raw", value=Json(ORDER))}, {"orders": table})
    (spec,) = postgres_assets(Topology.of([flow]), Settings.load())
    assert (spec.key, spec.kinds) == (dg.AssetKey(["postgres", "orders"]), {"postgres"})
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey(["kafka", "raw"])]
    assert (spec.tags["recourse/stream"], spec.tags["recourse/mode"]) == ("flow", "upsert")
    assert list(spec.owners) == ["team:shop"]
    assert [column.name for column in spec.metadata["dagster/column_schema"].columns] == ["customer"]


def test_tables_without_a_job_are_shown_and_cannot_be_started(defs: dg.Definitions) -> None:
    graph = defs.resolve_asset_graph()
    assert graph.get(dg.AssetKey("idle")).is_external
    assert graph.get(dg.AssetKey("idle")).group_name == "without_a_job"
    assert graph.get(dg.AssetKey("orders")).is_executable


def test_a_job_is_one_session_in_one_process_and_one_at_a_time(defs: dg.Definitions) -> None:
    job = defs.resolve_job_def("shop")
    (node,) = job.nodes
    assert node.definition.pool == "session_shop"
    assert job.executor_def.name == "session"
    assert job.tags["dagster/max_retries"] == "0"
    assert job.run_config == {"ops": {"shop_session": {"config": {"rate": 100}}}}


def test_every_sensor_is_on_by_default_and_keepalive_can_be_set_off(shop: Settings, defs: dg.Definitions) -> None:
    sensors = {s.name: s.default_status for s in defs.sensors or []}
    others = {
        "watchdog",
        "session_failure",
        "stream_failure",
        "stream_health",
        "job_yaml",
        "retention",
        "check_alerts",
        "topics",
        "event_table",
    }
    assert sensors.keys() == {"keepalive_shop", *others}
    assert set(sensors.values()) == {dg.DefaultSensorStatus.RUNNING}
    off = shop.model_copy(update={"dagster": shop.dagster.model_copy(update={"keepalive": False})})
    quiet = {s.name: s.default_status for s in definitions(off).sensors or []}
    assert quiet["keepalive_shop"] is dg.DefaultSensorStatus.STOPPED


def test_a_schedule_of_the_job_yaml_is_a_schedule(shop: Settings, tmp_path: Path) -> None:
    assert shop.jobs is not None
    text = shop.jobs.read_text().replace(
        "continuous:\n        pause_status: UNPAUSED",
        "schedule: {quartz_cron_expression: '0 0 4 ? * SUN', timezone_id: UTC}",
    )
    path = tmp_path / "scheduled.yml"
    path.write_text(text)
    defs = definitions(shop.model_copy(update={"jobs": path}))
    (schedule,) = (each for each in defs.schedules or () if getattr(each, "name", "") != "redrive")
    with stored_instance(shop) as instance:
        context = dg.build_schedule_context(instance=instance)
        assert isinstance(schedule(context), dg.RunRequest)  # type: ignore[operator]
        job = defs.resolve_job_def("shop")
        run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=job.tags)
        skipped = schedule(context)  # type: ignore[operator]
        assert isinstance(skipped, dg.SkipReason) and run.run_id[:8] in str(skipped)
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("0 4 * * 0", "UTC")  # type: ignore[union-attr]
    assert "keepalive_shop" not in {s.name for s in defs.sensors or []}


def test_tasks_beside_the_session_are_steps_of_its_job_in_their_order(shop: Settings, tmp_path: Path) -> None:
    assert shop.jobs is not None
    quality = "python_wheel_task: {package_name: recourse-streams, entry_point: recourse, parameters: [quality, run]}"
    text = shop.jobs.read_text().replace("continuous:\n        pause_status: UNPAUSED", "queue: {enabled: true}")
    text += f"        - {{task_key: check, depends_on: [{{task_key: session}}], {quality}}}\n"
    text += "    alone:\n      trigger: {periodic: {interval: 5, unit: HOURS}}\n"
    text += f"      tasks: [{{task_key: a, {quality}}}]\n"
    path = tmp_path / "tasks.yml"
    path.write_text(text)
    defs = definitions(shop.model_copy(update={"jobs": path}))
    job = defs.resolve_job_def("shop")
    assert [node.name for node in job.nodes_in_topological_order] == ["shop_session", "task_shop_check"]
    keys = {key.to_user_string() for key in job.asset_layer.executable_asset_keys}
    assert "tasks/shop/check" in keys and "orders" in keys
    alone = defs.resolve_job_def("alone")
    assert [node.name for node in alone.nodes] == ["task_alone_a"]
    (schedule,) = (each for each in defs.schedules or () if getattr(each, "name", "") != "redrive")
    with stored_instance(shop) as instance:
        due = datetime(2026, 11, 26, 14, tzinfo=UTC)
        at = partial(dg.build_schedule_context, instance=instance)
        assert isinstance(schedule(at(scheduled_execution_time=due)), dg.RunRequest)  # type: ignore[operator]
        not_due = schedule(at(scheduled_execution_time=due.replace(hour=15)))  # type: ignore[operator]
        assert "not now: each 5 hours" in str(not_due)
        instance.create_run_for_job(alone, status=dg.DagsterRunStatus.STARTED, tags=alone.tags)
        busy = schedule(at(scheduled_execution_time=due))  # type: ignore[operator]
        assert "a job has one run at a time" in str(busy)


def test_loading_starts_no_jvm_and_does_not_import_what_takes_seconds(shop: Settings) -> None:
    code = (
        "import sys, orchestration.definitions\n"
        "from pyspark import SparkContext\n"
        "assert SparkContext._active_spark_context is None and SparkContext._gateway is None\n"
        "print(sorted({'great_expectations', 'confluent_kafka', 'pandas', 'dagster_pyspark'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_stream_of_two_jobs_and_an_unknown_stream_are_refused(shop: Settings, tmp_path: Path) -> None:
    assert shop.jobs is not None
    text = shop.jobs.read_text()
    path = tmp_path / "bad.yml"
    path.write_text(text.replace("orders,customers", "orders,oders"))
    with pytest.raises(ConfigurationError, match="no stream is named 'oders'"):
        definitions(shop.model_copy(update={"jobs": path}))
    job = text[text.index("    shop:") :]
    path.write_text(text + job.replace("    shop:", "    shop2:"))
    with pytest.raises(ConfigurationError, match="stream orders is run by job shop too"):
        definitions(shop.model_copy(update={"jobs": path}))


def test_a_broken_job_yaml_keeps_the_last_good_definitions_and_says_file_and_line(
    shop: Settings, tmp_path: Path
) -> None:
    """The location is loaded anew, as by a reload in the UI."""
    assert shop.jobs is not None
    good = shop.jobs.read_text()
    settings = shop.model_copy(update={"jobs": tmp_path / "own.yml"})
    assert settings.jobs is not None
    settings.jobs.write_text(good.replace("default: 100", "default: 55"))
    definitions(settings)
    settings.jobs.write_text(good.replace("pause_status: UNPAUSED", "pause: no"))
    line = next(n for n, text in enumerate(settings.jobs.read_text().split("\n"), 1) if "pause: no" in text)
    ticks = Ticks(settings, dg.DagsterInstance.ephemeral())
    assert ticks.defs.resolve_job_def("shop").run_config == {"ops": {"shop_session": {"config": {"rate": 55}}}}
    assert isinstance(ticks.tick("keepalive_shop"), dg.RunRequest)
    with pytest.raises(
        ConfigurationError, match=rf"own.yml:{line}: resources.jobs.shop.continuous.pause: is not known"
    ):
        ticks.tick("job_yaml")
    now = time.time()
    write_status(settings, Status("orders", "running", os.getpid(), started_at=now, heartbeat=now))
    lease = acquire(settings, "orders", purpose="session")
    assert ticks.look()["orders"][1].startswith(
        f"job YAML: the last good job YAML is used, because of {settings.jobs}:{line}:"
    )
    lease.release()
    for broken in (good + "\n  x: [", good.replace("orders,customers", "orders,oders"), "a: b"):
        settings.jobs.write_text(broken)
        assert definitions(settings).resolve_job_def("shop").run_config  # still those of before
    settings.jobs.write_text(good)
    assert "can be used" in str(Ticks(settings, ticks.instance).tick("job_yaml"))


def test_without_good_definitions_of_before_a_broken_job_yaml_is_refused(shop: Settings, tmp_path: Path) -> None:
    settings = shop.model_copy(update={"jobs": tmp_path / "own.yml"})
    assert settings.jobs is not None
    settings.jobs.write_text("bundle: [")
    with pytest.raises(ConfigurationError, match=r"own.yml:1: "):
        definitions(settings)
    (shop.dagster_home).mkdir()
    (shop.dagster_home / "jobs.json").write_text('{"of": "another version"}')
    with pytest.raises(ConfigurationError, match=r"own.yml:1: "):
        definitions(settings)


def test_a_number_in_the_launchpad_is_a_number_or_a_text(defs: dg.Definitions) -> None:
    job = defs.resolve_job_def("shop")
    for rate in (5, "5", 0.5):
        assert dg.validate_run_config(job, {"ops": {"shop_session": {"config": {"rate": rate}}}})


def test_the_tables_of_a_reader_come_from_the_table_that_it_reads(settings: SettingsFactory) -> None:
    home, streams = settings(), Topology.load(["tests.support.two_steps"]).streams
    other = DeltaSource("rates", schema=CLEAN, owners=["desk"])
    foreign = Stream("converted", lambda rates: rates, {"rates": other}, {"converted": DeltaTable("converted")})
    topology = Topology.of([*streams.values(), foreign])

    @dg.multi_asset(
        specs=[spec for name in ("clean", "copied") for spec in table_assets(topology[name], home, "one")],
        can_subset=False,
    )
    def session() -> Any:
        """Both streams in one session."""
        yield from ()

    assets = [*topic_assets(topology, home), session, *table_assets(topology["converted"], home, "other")]
    graph = dg.Definitions(assets=assets).resolve_asset_graph()
    assert graph.get(dg.AssetKey("copied")).parent_keys == {dg.AssetKey("clean")}
    assert graph.get(dg.AssetKey("copied_dead_letters")).parent_keys == {dg.AssetKey("clean")}
    assert graph.get(dg.AssetKey("clean")).parent_keys == {dg.AssetKey(["kafka", "things"])}
    assert graph.get(dg.AssetKey("converted")).parent_keys == {dg.AssetKey("rates")}
    rates = graph.get(dg.AssetKey("rates"))
    assert rates.is_external and list(rates.owners) == ["team:desk"]
