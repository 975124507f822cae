"""A GraphQL client of a running Dagster webserver: readiness, launch, stop, wait."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestration.local_dagster.dagster_home import LOCATION
from streaming_jobs.errors import TransientError, UsageError

REPOSITORY = "__repository__"
ENDED = ("SUCCESS", "FAILURE", "CANCELED")


@dataclass(frozen=True)
class DagsterClient:
    """A webserver at `url`. Every call has a deadline and raises TransientError when there is no answer."""

    url: str
    timeout: float = 20.0

    def query(self, text: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run a GraphQL query and return its data."""
        body = json.dumps({"query": text, "variables": dict(variables or {})}).encode()
        answer = self._request("/graphql", body)
        if answer.get("errors"):
            raise TransientError(
                f"Dagster refused a query: {answer['errors'][0]['message']}", "see the webserver's log"
            )
        data: dict[str, Any] = answer["data"]
        return data

    def answers(self) -> bool:
        """True if the webserver is up."""
        try:
            self._request("/server_info", None)
        except TransientError:
            return False
        return True

    def location_state(self) -> tuple[bool, str]:
        """True if the code location is loaded, and the error if it cannot be."""
        data = self.query(_WORKSPACE)["workspaceOrError"]
        entries = data.get("locationEntries", [])
        if not entries or entries[0]["loadStatus"] != "LOADED":
            return False, ""
        location = entries[0]["locationOrLoadError"]
        if location["__typename"] != "PythonError":
            return True, ""
        causes = [location["message"], *(link["error"]["message"] for link in location.get("errorChain", []))]
        return False, "\n".join(text.strip() for text in causes)

    def launch(self, job: str, parameters: Mapping[str, str] | None = None) -> str:
        """Start a session of the job and return the run's id; raises UsageError when Dagster refuses."""
        return self.launch_with(job, {"ops": {f"{job}_session": {"config": dict(parameters)}}} if parameters else {})

    def launch_with(self, job: str, config: Mapping[str, Any]) -> str:
        """Start a run of the job with this configuration and return its id; raises UsageError when Dagster refuses."""
        selector = {"repositoryLocationName": LOCATION, "repositoryName": REPOSITORY, "jobName": job}
        answer = self.query(_LAUNCH, {"params": {"selector": selector, "runConfigData": config}})["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            errors = "; ".join(error["message"] for error in answer.get("errors", ()))
            raise UsageError(f"Dagster did not start {job}: {answer.get('message') or errors or answer['__typename']}")
        return str(answer["run"]["runId"])

    def stop(self, run_id: str) -> None:
        """Ask a run to stop; it ends at its streams' next batch border."""
        self.query(_STOP, {"run": run_id})

    def status(self, run_id: str) -> str:
        """A run's status, such as STARTED; raises UsageError for an unknown run."""
        answer = self.query(_STATUS, {"run": run_id})["runOrError"]
        if "status" not in answer:
            raise UsageError(f"Dagster knows no run {run_id}")
        return str(answer["status"])

    def wait(self, run_id: str, *, timeout: float, until: tuple[str, ...] = ENDED) -> str:
        """Wait for one of the statuses and return it; raises TransientError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.status(run_id)) not in until:
            if time.monotonic() > deadline:
                raise TransientError(f"run {run_id} is still {status} after {timeout:.0f} s", "look at the run's page")
            time.sleep(0.2)
        return status

    def runs(self, job: str, limit: int = 20) -> list[dict[str, Any]]:
        """The job's newest runs, newest first: runId, status, tags."""
        answer = self.query(_RUNS, {"job": job, "limit": limit})["runsOrError"]
        return list(answer["results"])

    def _request(self, path: str, body: bytes | None) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310  (our own address)
            self.url + path, data=body, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:  # noqa: S310
                answer: dict[str, Any] = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise TransientError(
                f"Dagster answers {error.code} at {self.url}{path}", "see the webserver's log"
            ) from error
        except (OSError, ValueError) as error:
            raise TransientError(
                f"no answer from Dagster at {self.url}: {error}", "is `recourse up` running?"
            ) from error
        return answer


_WORKSPACE = """query { workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError {
  __typename ... on PythonError { message errorChain { error { message } } } } } } } }"""
_LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
  ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } ... on PipelineNotFoundError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
_STOP = """mutation($run: String!) { terminateRun(runId: $run, terminatePolicy: SAFE_TERMINATE) { __typename
  ... on TerminateRunFailure { message } ... on PythonError { message } } }"""
_STATUS = "query($run: ID!) { runOrError(runId: $run) { __typename ... on Run { status } } }"
_RUNS = """query($job: String!, $limit: Int!) { runsOrError(filter: {pipelineName: $job}, limit: $limit) {
  ... on Runs { results { runId status tags { key value } } } } }"""
