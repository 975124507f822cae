"""The owner of a run and the process of its worker: the tags of every run of this code location.

A Dagster instance may have other code locations, with jobs and tables of the same names: a job's name says nothing.
So each home has an id, which is a tag of each of its jobs (present before a worker is) and of each run whose worker has
begun: a run that was launched from the page of a table or of a check has no job that could carry it.
"""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from streaming_jobs.platform.processes.identity import is_alive, mark
from streaming_jobs.settings import Settings
from streaming_jobs.storage.files import private_folder, sync

if TYPE_CHECKING:
    import dagster as dg


WORKER_TAG = "recourse/worker"
"""Host, pid and start time of the run worker, by which the watchdog checks that it still runs."""

LOCATION_TAG = "recourse/location"
"""Id of the home that the run belongs to (`ownership.py`): other code locations may have jobs of the same name."""

HEARTBEAT_TAG = "recourse/heartbeat"
"""When the run's worker last reported (seconds since 1970), for a watchdog on another host."""

SESSION_TAG = "recourse/session"
"""The job of the session; a run launched from a table's page, which has no job, gets it when it begins."""

FAILURE_TAG = "recourse/failure"
"""`permanent` or `lease_busy`, for keepalive."""

FINGERPRINT_TAG = "recourse/fingerprint"
"""Fingerprint of the configuration and code that failed for good; keepalive tries again when it has changed."""

STOPPED_BY_TAG = "recourse/stopped_by"
"""`shutdown` when `recourse up` ended the run, so that the next one starts the session again."""

KIND_TAG = "recourse/kind"
"""`continuous`, `scheduled` or `manual`: how the job of a session is started; `tasks` for a job of other tasks;
`quality` for a run of suites; `recovery`, `preview`, `slices`, `redrive` for those jobs; `health` and `rules` for a
check executed from its page."""

SESSION_KINDS = ("continuous", "scheduled", "manual")
TASKS_KIND = "tasks"
"""Value of `KIND_TAG` for a run of a job of the bundle that has no session."""
KINDS = (*SESSION_KINDS, TASKS_KIND, "quality", "recovery", "preview", "slices", "redrive", "health", "rules")

QUALITY_KIND = "quality"
"""Value of `KIND_TAG`; dagster.yaml lets one run that has it run at a time."""

RECOVERY_KIND = "recovery"
"""Value of `KIND_TAG` for a run of the job `recover`."""

PLAN_TAG = "recourse/plan"
"""Id of the plan that a run of the job `recover` made or works on."""

STAGE_TAG = "recourse/stage"
"""The stage in which that plan is, and the plan's outcome when the run has ended."""

WAITS_FOR_TAG = "recourse/waits_for"
"""Id of the running session that this queued run waits for."""

PARENT_VARIABLE = "RECOURSE_PARENT"
"""Environment: pid and start time of `recourse up`; a run does not outlive it."""


def location_id(settings: Settings) -> str:
    return _id_in(settings.dagster_home / "location")


def job_tags(settings: Settings, kind: str) -> dict[str, str]:
    """The tags of a job whose runs are of that kind (`KIND_TAG`)."""
    return {KIND_TAG: kind, LOCATION_TAG: location_id(settings), "dagster/max_retries": "0"}


def claim(instance: dg.DagsterInstance, run_id: str, settings: Settings, kind: str, **tags: str) -> None:
    """Tag a run that begins as ours, with the process that executes it; `tags` are further ones.

    A kind that the run has already stays: a session launched from a table's page may evaluate checks at its end.
    """
    run = instance.get_run_by_id(run_id)
    known = run.tags.get(KIND_TAG, kind) if run is not None else kind
    ours = {KIND_TAG: known, LOCATION_TAG: location_id(settings), WORKER_TAG: identity()}
    instance.add_run_tags(run_id, {**ours, **tags})


def identity(pid: int | None = None) -> str:
    """Host, pid and mark (`processes/identity.py`) of a process (this one), as a tag value."""
    return f"{_host()}:{os.getpid() if pid is None else pid}:{mark(pid)}"


def is_running(worker: str) -> bool | None:
    """True if the process that `identity` described runs; None if it is on another host or in another container."""
    try:
        host, pid, started = worker.rsplit(":", 2)
    except ValueError:
        return None
    if host != _host():
        return None
    return pid.isdigit() and is_alive(int(pid), started)


def parent_lives(parent: str) -> bool:
    """True unless this process was started by a `recourse up` that is gone."""
    return not parent or is_running(parent) is not False


def _host() -> str:
    """The host, and the namespace in which a pid of this process means something: each container has its own."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


@cache
def _id_in(path: Path) -> str:
    if not path.exists():
        folder = private_folder(path.parent)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".location.") as file:
            file.write(uuid.uuid4().hex[:16])
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first: its id is valid
                os.link(file.name, path)
        sync(folder)
    return path.read_text(encoding="utf-8").strip()
