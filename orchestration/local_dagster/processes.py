"""Dagster's code server, webserver and daemon as children of `recourse up`.

Each has a process group of its own (Ctrl-C in a terminal does not reach it), ends with us even on kill -9, is
started again with a growing delay when it dies, and writes to a bounded log below <home>/logs.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import dagster as dg
import structlog

from orchestration.bundle import last_good
from orchestration.local_dagster.dagster_home import (
    CODE_SERVER_HOST,
    LOCATION,
    code_server_port,
    longest_stop,
    prepare,
    write_workspace,
)
from orchestration.location import location
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.decisions import IN_PROGRESS
from orchestration.sessions.ownership import KIND_TAG, PARENT_VARIABLE, STOPPED_BY_TAG, identity
from orchestration.sessions.supervisor import GRACE
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError, RecourseError, SetupError, TransientError
from streaming_jobs.platform import ports
from streaming_jobs.platform.back_off import BackOff
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess, ProcessTree
from streaming_jobs.platform.processes.parent_death import terminated_with_parent
from streaming_jobs.settings import Settings
from streaming_jobs.text import commands

log = structlog.get_logger()

READY_WITHIN = 120.0
"""Seconds for all three to be up and the streams to be loaded."""
CODE_SERVER, WEBSERVER, DAEMON = "code-server", "webserver", "daemon"
_BACK_OFF = BackOff(0.5, 30.0, healthy_after=60.0)
_PATIENCE = 2.0
_KILLED_WITHIN = 5.0
_IN_PROGRESS = dg.RunsFilter(statuses=[status for status in dg.DagsterRunStatus if status.value in IN_PROGRESS])


@dataclass
class _DagsterProcess:
    """One of the three processes and its restarts."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: BoundedLog
    child: ChildProcess | None = None
    started: float = 0.0
    restart_at: float | None = None
    quick_ends: int = 0
    tree: ProcessTree = field(default_factory=ProcessTree)

    def start(self) -> None:
        command = ChildCommand(terminated_with_parent(os.getpid(), self.command), {**os.environ, **self.environment})
        with self.log.open() as output:
            self.child = command.start(output)
        self.started, self.restart_at = time.monotonic(), None

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.exit_code is None

    def look_after(self) -> None:
        """Start it again when it has died, later each time in a row."""
        self.log.trim()
        if self.running:
            return
        now = time.monotonic()
        if self.restart_at is None:
            self.quick_ends = 0 if now - self.started > _BACK_OFF.healthy_after else self.quick_ends + 1
            delay = _BACK_OFF.delay(self.quick_ends + 1)
            self.restart_at = now + delay
            code = self.child.exit_code if self.child else None
            log.warning("a Dagster process died", process=self.name, exit_code=code, again_in_s=delay)
        elif now >= self.restart_at:
            self.start()

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting; what it has started is noted, for `end`."""
        if self.child is not None and not self.tree.processes:
            self.tree = ProcessTree.of(self.child)
            self.child.ask_to_end()

    def end(self, patience: float) -> None:
        """SIGTERM, then after `patience` seconds SIGKILL for it and for what it started and left behind."""
        if self.child is None:
            return
        self.ask_to_end()
        left = self.tree.wait(patience)
        left.kill()
        left.wait(_KILLED_WITHIN)
        self.child.collect()
        self.tree = ProcessTree()


@dataclass
class DagsterProcesses:
    """The three processes, as a context manager or by `start`, by `supervise` each second, and by `stop`.

    Start and supervise from a thread that lives as long as the process: the children end with that thread
    (`terminated_with_parent`). `environment` is added to theirs, `module` is what the code server loads.
    """

    settings: Settings
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "orchestration.definitions"
    url: str = ""
    _children: dict[str, _DagsterProcess] = field(default_factory=dict)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def start(self) -> str:
        """Start all three, wait until the streams are loaded, and return the UI's address.

        Raises SetupError when the port is taken or the processes do not come up in time, and ConfigurationError
        when the streams or the job YAML cannot be loaded.
        """
        host, port = self.settings.dagster.host, self.settings.dagster.port
        if port and not ports.is_free(port, host):
            raise SetupError(
                f"port {port} of {host} is taken, so the UI cannot be there",
                "end what uses it, or take another: --port 0",
            )
        # A person is there to correct it: the last good definitions are for reloads.
        topology = Topology.of_settings(self.settings)
        last_good.made_of_now(self.settings, topology, lambda bundle: location(bundle, topology, self.settings))
        home = prepare(self.settings)
        port = port or ports.free_port(host)
        server_port = code_server_port(home)
        workspace = str(write_workspace(home, server_port))
        self.url = f"http://{_reachable(host)}:{port}"
        python = sys.executable
        command_lines = {
            CODE_SERVER: [
                *(python, "-m", "dagster", "code-server", "start", "-m", self.module, "--location-name", LOCATION),
                *("-h", CODE_SERVER_HOST, "-p", str(server_port), "--use-python-environment-entry-point"),
            ],
            WEBSERVER: [python, "-m", "dagster_webserver", "-h", host, "-p", str(port), "-w", workspace],
            DAEMON: [python, "-m", "dagster._daemon", "run", "-w", workspace],
        }
        for name, command in command_lines.items():
            bounded = BoundedLog(self.settings.logs / f"dagster-{name}.log")
            self._children[name] = _DagsterProcess(name, command, self._environment(), bounded)
        # The others are only useful with it, and quieter when it is there.
        try:
            self._children[CODE_SERVER].start()
            self._children[WEBSERVER].start()
            self._await_ready()
            self._children[DAEMON].start()
        except (RecourseError, OSError):
            self.kill()  # so that a second start finds their ports free
            raise
        return self.url

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes that run, by name."""
        return {name: one.child.pid for name, one in self._children.items() if one.child and one.running}

    def supervise(self) -> None:
        """Start again what has died; call it about each second."""
        for child in self._children.values():
            child.look_after()

    def stop(self) -> None:
        """End the sessions at a batch border, then the three processes.

        Each process gets a signal once no other needs it, and is killed if it is slow: their state is in Dagster's
        storage.
        """
        for name in (DAEMON, WEBSERVER):
            if name in self._children:
                self._children[name].ask_to_end()
        with self._instance() as instance:
            if instance is not None:
                self._stop_runs(instance)
            self._end(DAEMON, _PATIENCE)
            if instance is not None:
                self._stop_runs(instance)  # what the daemon has started, or taken out of the queue, before it was gone
                self._await_runs(instance)
        # The code server has no runs left, and its graceful end takes seconds.
        for name in (CODE_SERVER, WEBSERVER):
            self._end(name, 0.0)

    def kill(self) -> None:
        """End the three and all below them at once; the next session repeats the batch it was in."""
        for name in (DAEMON, WEBSERVER, CODE_SERVER):
            self._end(name, 0.0)

    def _end(self, name: str, patience: float) -> None:
        if name in self._children:
            self._children[name].end(patience)

    def _environment(self) -> dict[str, str]:
        return {
            "RECOURSE_HOME": str(self.settings.home),
            "DAGSTER_HOME": str(self.settings.dagster_home),
            "DAGSTER_DISABLE_TELEMETRY": "1",
            PARENT_VARIABLE: identity(),
            "RECOURSE_DAGSTER__OWN_INSTANCE": "true",
            **({} if self.settings.quality.ui_url else {"RECOURSE_QUALITY__UI_URL": self.url}),
            **self.environment,
        }

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN
        client = DagsterClient(self.url)
        up = False
        while time.monotonic() < deadline:
            for name in (CODE_SERVER, WEBSERVER):
                child = self._children[name]
                if not child.running:
                    raise SetupError(
                        f"Dagster's {name} ended at once:\n{child.log.tail(2000)}", f"see {child.log.path}"
                    )
            with suppress(TransientError):
                up = up or client.answers()
                if up:
                    loaded, problem = client.location_state()
                    if loaded:
                        return
                    if problem and "Connect Failed" not in problem and "UNAVAILABLE" not in problem:
                        raise ConfigurationError(f"the streams could not be loaded: {problem[-2000:]}")
            time.sleep(0.25)
        raise SetupError(f"Dagster was not ready within {READY_WITHIN:.0f} s", f"see the logs in {self.settings.logs}")

    @contextmanager
    def _instance(self) -> Iterator[dg.DagsterInstance | None]:
        if not (self.settings.dagster_home / "dagster.yaml").is_file() or not self._children:
            yield None
            return
        with dg.DagsterInstance.from_config(str(self.settings.dagster_home)) as instance:
            yield instance

    def _stop_runs(self, instance: dg.DagsterInstance) -> None:
        """Cancel each run in progress that is not being cancelled, tagged so that the next start continues it."""
        for run in instance.get_runs(_IN_PROGRESS):
            if run.status is not dg.DagsterRunStatus.CANCELING:
                instance.add_run_tags(run.run_id, {STOPPED_BY_TAG: "shutdown"})
                self._cancel(instance, run.run_id)

    def _await_runs(self, instance: dg.DagsterInstance) -> None:
        runs = instance.get_runs(_IN_PROGRESS)
        deadline = time.monotonic() + longest_stop(self.settings) + 2 * GRACE
        while runs and time.monotonic() < deadline:
            runs = [run for run in runs if not _finished(instance, run.run_id)]
            time.sleep(0.2)
        for run in runs:
            log.warning("a run did not end in time", run=run.run_id, job=run.job_name, kind=run.tags.get(KIND_TAG))

    def _cancel(self, instance: dg.DagsterInstance, run_id: str) -> None:
        try:
            instance.run_coordinator.cancel_run(run_id)
        except Exception as error:  # noqa: BLE001  (gRPC and Dagster raise many kinds; the run sees CANCELING by itself)
            log.info("a run could not be told to stop; it looks for itself", run=run_id, error=str(error)[:200])


def _reachable(host: str) -> str:
    """The host as a URL on this machine has it."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  (where people are told to look, not where we listen)
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _finished(instance: dg.DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    return run is None or run.is_finished


@dataclass(frozen=True)
class DagsterClient:
    """A webserver at `url`. Every call has a deadline and raises TransientError without an answer."""

    url: str
    timeout: float = 20.0

    def query(self, text: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body = json.dumps({"query": text, "variables": dict(variables or {})}).encode()
        answer = self._request("/graphql", body)
        if answer.get("errors"):
            raise TransientError(
                f"Dagster refused a query: {answer['errors'][0]['message']}", "see the webserver's log"
            )
        data: dict[str, Any] = answer["data"]
        return data

    def answers(self) -> bool:
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
                f"no answer from Dagster at {self.url}: {error}", f"is `{commands.up()}` running?"
            ) from error
        return answer


_WORKSPACE = """query { workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError {
  __typename ... on PythonError { message errorChain { error { message } } } } } } } }"""
