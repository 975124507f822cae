"""The job of previews: its command, its verdicts as runs, its end; and the real command without a broker."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from orchestration.bundle import job_yaml
from orchestration.bundle.job import Bundle
from orchestration.location import location
from orchestration.preview import JOB, STEP, VERDICT_TAG, definitions, preview_command
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from tests.support.waiting import wait_for


def fake(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tests.dagster.fakes.preview", *arguments]


def execute(
    settings: Settings, instance: dg.DagsterInstance, command: Any = fake, **config: Any
) -> dg.ExecuteInProcessResult:
    bundle = Bundle("shop", "default", (), settings.home)
    job = definitions(Topology.of_settings(settings), settings, bundle, command).resolve_job_def(JOB)
    run_config = {"ops": {STEP: {"config": config}}}
    return job.execute_in_process(run_config=run_config, instance=instance, raise_on_error=False)


def test_it_is_a_job_of_the_location_and_no_other_may_have_its_name(shop: Settings, tmp_path: Path) -> None:
    assert shop.jobs is not None
    defs = location(job_yaml.load(shop.jobs), Topology.of_settings(shop), shop)
    job = defs.resolve_job_def(JOB)
    assert [node.name for node in job.nodes] == [STEP] and "orders" in (job.description or "")
    path = tmp_path / "databricks.yml"
    path.write_text(shop.jobs.read_text().replace("    shop:\n", f"    {JOB}:\n"))
    with pytest.raises(ConfigurationError, match=f"resources.jobs.{JOB}"):
        location(job_yaml.load(path), Topology.of_settings(shop), shop)


@pytest.mark.parametrize(("verdict", "passes"), [("equal", True), ("different", True), ("broken", False)])
def test_the_verdict_ends_the_run_and_is_its_metadata(shop: Settings, verdict: str, passes: bool) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(shop, instance, stream=verdict, last="2 hours", suites=False)
        assert result.success is passes
        run = instance.get_run_by_id(result.run_id)
        assert run is not None and run.tags[VERDICT_TAG] == verdict
    if passes:
        found = next(e for e in result.all_events if e.is_successful_output).step_output_data.metadata
    else:
        failure = result.failure_data_for_node(STEP)
        assert failure is not None and failure.user_failure_data is not None
        assert "broken it is" in (failure.user_failure_data.description or "")
        found = failure.user_failure_data.metadata
    assert (found["verdict"].value, found["records"].value) == (verdict, 100)
    assert str(found["report"].value).startswith("file:///")
    assert [record.data["table"] for record in found["tables"].records] == ["orders"]
    assert "--last 2 hours --no-suites" in str(found["text"].value)


@pytest.mark.parametrize(
    ("command", "stream", "found"),
    [
        (fake, "usage", "REC-001 stream usage has never run"),
        pytest.param(preview_command, "orders", "REC-012 the embedded broker", id="the real command"),
    ],
)
def test_what_could_not_be_previewed_fails_with_the_reason(
    shop: Settings, instance: dg.DagsterInstance, command: Any, stream: str, found: str
) -> None:
    failure = execute(shop, instance, command, stream=stream).failure_data_for_node(STEP)
    assert failure is not None and failure.user_failure_data is not None
    assert found in (failure.user_failure_data.description or "")


def test_a_run_that_is_canceled_ends_its_preview(shop: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestration.sessions.child_run.LOOK_AT_RUN_EVERY", 0.5)
    with dg.DagsterInstance.ephemeral() as instance:

        def cancel() -> None:
            wait_for((shop.home / "pid").is_file, "the preview")
            (run,) = instance.get_runs()
            instance.report_run_canceling(run)

        canceling = threading.Thread(target=cancel)
        canceling.start()
        assert not execute(shop, instance, stream="slow").success
        canceling.join(60)
    pid = int((shop.home / "pid").read_text())
    assert not psutil.pid_exists(pid) and pid != os.getpid()
