"""Streams in the Dagster of a team: `build_defs` beside its definitions, and the component for its YAML."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox

import orchestration
from orchestration import build_defs, preview
from orchestration.bundle import job_yaml
from orchestration.bundle.job import Bundle
from orchestration.component import RecourseStreams
from orchestration.location import definitions
from orchestration.recoveries import definitions as recoveries
from orchestration.sessions.child_run import session_executor
from orchestration.sessions.configuration import Configuration, beside
from orchestration.sessions.ownership import LOCATION_TAG
from orchestration.sessions.supervisor import Command
from orchestration.sessions.tasks import task_assets
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from tests.dagster.fakes.execute import execute
from tests.support import ROOT
from tests.unit.orchestration.sessions.test_tasks import PLAN, job_of

JOBS = Path(__file__).parent / "fakes" / "databricks.yml"
TASK = "python_wheel_task: {package_name: recourse-streams, entry_point: recourse-session, parameters: [--streams, %s]}"
TWO_JOBS = f"""bundle: {{name: shop}}
resources:
  jobs:
    orders:
      continuous: {{pause_status: UNPAUSED}}
      tasks: [{{task_key: session, {TASK % "orders"}}}]
    idle:
      schedule: {{quartz_cron_expression: "0 0 * * * ?", timezone_id: UTC}}
      tasks: [{{task_key: session, {TASK % "idle"}}}]
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team's code server runs in a folder of its own."""
    monkeypatch.chdir(tmp_path_factory.mktemp("server"))
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


def project(folder: Path, jobs: str = JOBS.read_text()) -> Path:
    """The configuration file of a project with the fake streams."""
    folder.mkdir()
    (folder / "databricks.yml").write_text(jobs)
    file = folder / "recourse.toml"
    file.write_text('flows = ["tests.dagster.fakes.flows"]\n')
    return file


def team() -> dg.Definitions:
    """Definitions with the names that ours would have without a prefix."""

    @dg.asset(key="orders", check_specs=[dg.AssetCheckSpec("health", asset="orders")])
    def shop_session() -> Iterator[object]:
        yield dg.MaterializeResult(check_results=[dg.AssetCheckResult(passed=True, check_name="health")])

    @dg.op(name="recovery")
    def recovery() -> None: ...

    @dg.job(name="recover")
    def recover() -> None:
        recovery()

    @dg.sensor(name="watchdog", job=recover)
    def watchdog() -> dg.SkipReason:
        return dg.SkipReason("nothing")

    jobs = [recover, dg.define_asset_job("shop", dg.AssetSelection.assets("orders"))]
    return dg.Definitions(
        assets=[shop_session], jobs=jobs, sensors=[watchdog], executor=dg.multiprocess_executor, resources={"spark": 1}
    )


def names(defs: dg.Definitions) -> set[str]:
    """Every name and key by which an instance or a code location knows a definition."""
    graph, repository = defs.resolve_asset_graph(), defs.get_repository_def()
    jobs = [job for job in repository.get_all_jobs() if not job.name.startswith("__")]
    return {
        *(key.to_user_string().replace("/", "_") for key in graph.get_all_asset_keys()),
        *(graph.get(key).group_name for key in graph.get_all_asset_keys()),
        *(key.asset_key.to_user_string() for key in graph.asset_check_keys),
        *(job.name for job in jobs),
        *(node.name for job in repository.get_all_jobs() for node in job.all_node_defs),
        *(pool for job in repository.get_all_jobs() for node in job.nodes for pool in node.definition.pools),
        *(sensor.name for sensor in repository.sensor_defs),
        *(schedule.name for schedule in repository.schedule_defs),
        *(name for name in repository.get_top_level_resources() if name != "io_manager"),
    }


def test_every_key_and_name_begins_with_the_prefix(tmp_path: Path) -> None:
    bare, prefixed = (names(build_defs(project(tmp_path / f"{p}"), key_prefix=p)) for p in (None, "prod"))
    assert {name.removeprefix("prod").lstrip("_/") for name in prefixed} == bare
    assert {"orders", "kafka_shop.orders-v1", "session_shop", "keepalive_shop", "recover", "shop_session"} <= bare
    assert not {name for name in prefixed if not name.startswith(("prod_", "prod/"))}


def test_two_homes_and_a_team_s_definitions_of_the_same_names_are_one_location(tmp_path: Path) -> None:
    """And each job has the executor that was meant for it."""
    dev = build_defs(project(tmp_path / "dev"), key_prefix="dev", executor=dg.in_process_executor)
    prod = build_defs(project(tmp_path / "prod"), key_prefix=["prod", "eu"])
    merged = dg.Definitions.merge(team(), dev, prod)
    dg.Definitions.validate_loadable(merged)
    graph = merged.resolve_asset_graph()
    for key in ("orders", ["dev", "orders"], ["prod", "eu", "orders"]):
        assert dg.AssetCheckKey(dg.AssetKey(key), "health") in graph.asset_check_keys
    assert graph.get(dg.AssetKey(["prod", "eu", "orders"])).parent_keys == {
        dg.AssetKey(["prod", "eu", "kafka", "shop.orders-v1"])
    }
    executors = {
        name: merged.resolve_job_def(name).executor_def
        for name in ("shop", "recover", "dev_shop", "dev_recover", "prod_eu_shop", "prod_eu_preview", "prod_eu_recover")
    }
    assert executors == {
        **dict.fromkeys(("shop", "recover"), dg.multiprocess_executor),
        **dict.fromkeys(("dev_shop", "dev_recover"), dg.in_process_executor),
        **dict.fromkeys(("prod_eu_shop", "prod_eu_preview", "prod_eu_recover"), session_executor),
    }
    homes = {merged.resolve_job_def(name).tags[LOCATION_TAG] for name in ("dev_shop", "prod_eu_shop")}
    assert len(homes) == 2, "each home has an id of its own"


def test_recourse_up_and_a_workspace_give_the_location_its_executor(shop: Settings) -> None:
    defs = importlib.reload(importlib.import_module("orchestration.definitions")).defs
    assert defs.executor is session_executor, "of runs launched from the page of a table"
    assert build_defs().executor is None
    assert {"orders", "shop", "recover"} <= names(defs)


def test_chosen_jobs_bring_their_streams_alone(tmp_path: Path) -> None:
    file = project(tmp_path / "shop", TWO_JOBS)
    orders, both = build_defs(file, jobs=["orders"]), build_defs(file)
    assert {"orders", "idle", "customers", "schedule_idle"} <= names(both)
    assert not names(orders) & {"idle", "customers", "schedule_idle"}
    assert {"orders", "keepalive_orders", "recover", "retention"} <= names(orders)
    with pytest.raises(ConfigurationError, match="has no job named order\n") as error:
        build_defs(file, jobs=["order"])
    assert "orders, idle" in error.value.next_step


def test_a_child_loads_the_settings_of_its_code_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file is in the working directory, and whatever home the environment names."""
    Path("recourse.toml").write_text('flows = ["of_another"]\nhome = "elsewhere"\n')
    monkeypatch.setenv("RECOURSE_HOME", str(tmp_path / "another"))
    file = project(tmp_path / "shop")
    kafka = '[kafka]\nsasl_username = "me"\nsecurity_protocol = "SASL_SSL"\nbootstrap_servers = "k:1"\n'
    file.write_text(f'{file.read_text()}tables_dir = "out"\n{kafka}')
    origin = beside(file, {"kafka.sasl_password": "secret", "dagster.key_prefix": ["prod"], "stream.pace": "economy"})
    settings = origin.load().settings
    assert (settings.home, settings.tables) == (tmp_path / "shop" / ".recourse", tmp_path / "shop" / "out")
    assert (settings.jobs, settings.dagster.key_prefix) == (tmp_path / "shop" / "databricks.yml", ["prod"])
    code = (
        "import json, streaming_jobs.settings as settings; s = settings.load().settings; "
        "print(json.dumps([s.model_dump(mode='json'), s.kafka.sasl_password.get_secret_value(), "
        "str(settings.project_folder())]))"
    )
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "RECOURSE_HOME": str(tmp_path / "another")}
    environment |= origin.environment()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found, password, folder = json.loads(done.stdout)
    assert found == settings.model_dump(mode="json")
    assert password == "secret"
    assert folder == str(tmp_path / "shop"), "the modules beside the file can be imported"


def test_a_yaml_file_adds_streams_to_a_project(tmp_path: Path) -> None:
    """As `dg scaffold defs` writes it, and `load_from_defs_folder` reads it."""
    with create_defs_folder_sandbox() as sandbox:
        folder = sandbox.scaffold_component(component_cls=RecourseStreams, defs_path="streams")
        file = folder / "defs.yaml"
        assert file.read_text().startswith("type: orchestration.component.RecourseStreams\n")
        project(folder / "shop", TWO_JOBS)
        text = file.read_text().replace("config: recourse.toml", "config: shop/recourse.toml")
        file.write_text(f"{text}  jobs:\n  - orders\n")
        with sandbox.build_all_defs() as defs:
            assert {"streams_orders", "streams_keepalive_orders"} <= names(defs)
            assert "streams_idle" not in names(defs)
            assert (folder / "shop" / ".recourse" / "dagster" / "location").is_file()


def test_dg_finds_the_component_by_the_entry_point() -> None:
    project_file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (module,) = project_file["project"]["entry-points"]["dagster_dg_cli.registry_modules"].values()
    from dagster.components.core.package_entry import discover_package_objects

    assert {key.name for key in discover_package_objects([module])} == {"RecourseStreams"}


def test_the_package_exports_build_defs_alone() -> None:
    assert orchestration.__all__ == ["build_defs"]
    with pytest.raises(AttributeError, match="no attribute 'build_def'"):
        orchestration.build_def  # type: ignore[attr-defined]  # noqa: B018


def _session(settings: Settings, bundle: Bundle, command: Command, origin: Configuration) -> dg.JobDefinition:
    return definitions(settings, command, origin=origin).resolve_job_def("shop")


def _preview(settings: Settings, bundle: Bundle, command: Command, origin: Configuration) -> dg.JobDefinition:
    topology = Topology.of_settings(settings)
    return preview.definitions(topology, settings, bundle, command, origin).resolve_job_def("preview")


def _recovery(settings: Settings, bundle: Bundle, command: Command, origin: Configuration) -> dg.JobDefinition:
    defs = recoveries.definitions(settings, {"orders": []}, bundle, lambda: command([]), origin)
    return defs.resolve_job_def("recover")


def _task(settings: Settings, bundle: Bundle, command: Command, origin: Configuration) -> dg.JobDefinition:
    (asset,) = task_assets(job_of(PLAN), settings, (), {}, command, origin)
    job = dg.define_asset_job("task", dg.AssetSelection.assets(asset))
    return dg.Definitions(assets=[asset], jobs=[job], executor=session_executor).resolve_job_def("task")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("job", [_session, _preview, _recovery, _task])
def test_every_child_of_a_run_gets_the_configuration_of_its_code_location(
    job: Callable[..., dg.JobDefinition], tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    origin = beside(project(tmp_path / "shop"), {"quality.every": "7 minutes"})
    settings, seen = origin.load().settings, tmp_path / "seen"
    code = f"import json, os, pathlib; pathlib.Path({str(seen)!r}).write_text(json.dumps(dict(os.environ)))"
    made = job(settings, job_yaml.load(JOBS), lambda _: [sys.executable, "-c", code], origin)
    config = {"ops": {preview.STEP: {"config": {"stream": "orders"}}}} if job is _preview else None
    execute(made, instance, run_config=config)
    assert origin.environment().items() <= json.loads(seen.read_text()).items()
    assert origin.environment()["RECOURSE_QUALITY__EVERY"] == "7 minutes"


def test_a_continuous_job_has_no_limit_of_duration_whatever_the_instance_has(tmp_path: Path) -> None:
    defs = build_defs(project(tmp_path / "shop", TWO_JOBS))
    limits = {name: defs.resolve_job_def(name).tags.get(dg.MAX_RUNTIME_SECONDS_TAG) for name in ("orders", "idle")}
    assert limits == {"orders": "0", "idle": None}


def test_a_prefix_that_cannot_be_a_part_of_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"dagster.key_prefix \(flag\): 'prod/eu' is not a letter"):
        build_defs(project(tmp_path / "shop"), key_prefix="prod/eu")
