"""A run worker for the tests: runs the job `shop` in this process, on the instance of DAGSTER_HOME."""

from __future__ import annotations

import sys

import dagster as dg

from orchestration.location import definitions
from orchestration.sessions import child_run
from streaming_jobs.settings import Settings
from tests.dagster.fakes.command import fake_command
from tests.dagster.fakes.execute import execute


def main() -> int:
    child_run.POLL = 0.1
    job = definitions(Settings.load(), fake_command).resolve_job_def("shop")
    with dg.DagsterInstance.get() as instance:
        return 0 if execute(job, instance).is_success else 1


if __name__ == "__main__":
    sys.exit(main())
