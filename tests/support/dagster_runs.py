"""Runs of a Dagster that answers at a URL: started, stopped and looked up as its pages do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestration.local_dagster.dagster_home import LOCATION
from orchestration.local_dagster.processes import DagsterClient
from streaming_jobs.errors import UsageError

REPOSITORY = "__repository__"


class RunsClient(DagsterClient):
    def launch(self, job: str, config: Mapping[str, Any]) -> str:
        """Start a run of the job and return its id; raises UsageError if Dagster refuses the configuration."""
        selector = {"repositoryLocationName": LOCATION, "repositoryName": REPOSITORY, "jobName": job}
        answer = self.query(_LAUNCH, {"params": {"selector": selector, "runConfigData": config}})["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            raise UsageError(f"Dagster did not start {job}: {answer}")
        return str(answer["run"]["runId"])

    def stop(self, run_id: str) -> None:
        self.query(_STOP, {"run": run_id})

    def status(self, run_id: str) -> str:
        return str(self.query(_STATUS, {"run": run_id})["runOrError"]["status"])

    def runs(self, job: str) -> list[dict[str, Any]]:
        """The job's newest runs, newest first: runId, status, tags."""
        return list(self.query(_RUNS, {"job": job})["runsOrError"]["results"])


_LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
  ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } ... on PipelineNotFoundError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
_STOP = """mutation($run: String!) { terminateRun(runId: $run, terminatePolicy: SAFE_TERMINATE) { __typename
  ... on TerminateRunFailure { message } ... on PythonError { message } } }"""
_STATUS = "query($run: ID!) { runOrError(runId: $run) { __typename ... on Run { status } } }"
_RUNS = """query($job: String!) { runsOrError(filter: {pipelineName: $job}, limit: 20) {
  ... on Runs { results { runId status tags { key value } } } } }"""
