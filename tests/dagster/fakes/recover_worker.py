"""A run worker for the tests: runs the job `recover` in this process, on the instance of DAGSTER_HOME."""

from __future__ import annotations

import sys

import dagster as dg

from orchestration.bundle.job import Bundle
from orchestration.recoveries.definitions import definitions
from orchestration.recoveries.launchpad import LAUNCHPAD
from streaming_jobs.settings import Settings
from tests.dagster.fakes.execute import execute


def fake_command() -> list[str]:
    """The command line of the fake process."""
    return [sys.executable, "-m", "tests.dagster.fakes.recovery"]


def recover(settings: Settings) -> dg.JobDefinition:
    """The job over the fake process."""
    bundle = Bundle("shop", "default", (), settings.home)
    jobs = definitions(settings, {"orders": [dg.AssetKey("orders")]}, bundle, command=fake_command)
    return jobs.resolve_job_def("recover")


def main() -> int:
    config = LAUNCHPAD.run_config({"do": "apply", "plan": "orders-0001"})
    with dg.DagsterInstance.get() as instance:
        return 0 if execute(recover(Settings.load()), instance, run_config=config).is_success else 1


if __name__ == "__main__":
    sys.exit(main())
