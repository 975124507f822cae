"""Run a job in this process as a run worker does: under the job's own executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run


def execute(
    job: dg.JobDefinition,
    instance: dg.DagsterInstance,
    *,
    run_config: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.DagsterRun:
    """Create a run of the job and execute it; the run as it is then."""
    run = instance.create_run_for_job(job, run_config=run_config or job.run_config, tags=tags)
    execute_run(InMemoryJob(job), run, instance)
    ended = instance.get_run_by_id(run.run_id)
    assert ended is not None
    return ended
