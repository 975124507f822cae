"""The job definitions that could be used last, kept beside the home: a broken job YAML does not stop what runs.

Dagster loads the code location anew when somebody reloads it, or when its server has died. Without definitions there
would be no job, no sensor and no keepalive, only because a line of YAML is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from orchestration import job_yaml
from orchestration.job_yaml import Bundle, Continuous, Job, Parameter, Schedule, Task
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.files import private_folder, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.topology import Topology

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """Why the job YAML cannot be used: where, what, and what to do next."""

    found: str
    next_step: str


def path(settings: Settings) -> Path:
    """Where the last good definitions are kept."""
    return settings.dagster_home / "jobs.json"


def read(settings: Settings, topology: Topology) -> Bundle:
    """The job YAML of now; raises ConfigurationError with file and line where it cannot be used."""
    file = job_yaml.find(settings)
    bundle = job_yaml.load(file, settings.target)
    return job_yaml.for_streams(bundle, list(topology.streams)) if job_yaml.is_shipped(file) else bundle


def use(settings: Settings, topology: Topology, make: Callable[[Bundle], T]) -> T:
    """What `make` makes of the job YAML of now, or else of the last one of which it could make something.

    Raises the ConfigurationError of now when there is no such one.
    """
    try:
        bundle = read(settings, topology)
        made = make(bundle)
    except ConfigurationError as error:
        kept = _load(settings)
        if kept is None:
            raise
        log.error("the job YAML cannot be used: the last good one is", found=error.found, next=error.next_step)
        try:
            return make(kept)
        except ConfigurationError:  # streams have changed too: what is wrong now is what a person has to correct
            raise error from None
    _keep(settings, bundle)
    return made


def fault(settings: Settings, topology: Topology, make: Callable[[Bundle], object]) -> Fault | None:
    """What is wrong with the job YAML at this moment; None if it can be used."""
    try:
        make(read(settings, topology))
    except ConfigurationError as error:
        return Fault(error.found, error.next_step or "correct it, then reload the code location")
    return None


def _keep(settings: Settings, bundle: Bundle) -> None:
    text = json.dumps(_plain(bundle), indent=1, sort_keys=True)
    file = path(settings)
    try:
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            private_folder(file.parent)
            write_atomic(file, text)
    except OSError as error:  # a copy that cannot be written must not stop what can be loaded
        log.warning("the job definitions could not be kept", file=str(file), reason=str(error))


def _load(settings: Settings) -> Bundle | None:
    try:
        value = json.loads(path(settings).read_text(encoding="utf-8"))
        return _bundle(value)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.info("there are no job definitions of before", reason=repr(error))
        return None


def _plain(bundle: Bundle) -> dict[str, Any]:
    jobs = [
        {**asdict(job), "file": str(job.file), "trigger": _plain_trigger(job.trigger), "tags": dict(job.tags)}
        for job in bundle.jobs
    ]
    return {"name": bundle.name, "target": bundle.target, "file": str(bundle.file), "jobs": jobs}


def _plain_trigger(trigger: Continuous | Schedule | None) -> dict[str, Any] | None:
    return {"kind": type(trigger).__name__, **asdict(trigger)} if trigger is not None else None


def _bundle(value: dict[str, Any]) -> Bundle:
    return Bundle(value["name"], value["target"], tuple(_job(job) for job in value["jobs"]), Path(value["file"]))


def _job(value: dict[str, Any]) -> Job:
    return Job(
        **{
            **value,
            "file": Path(value["file"]),
            "parameters": tuple(Parameter(**parameter) for parameter in value["parameters"]),
            "task": Task(**{**value["task"], "parameters": tuple(value["task"]["parameters"])}),
            "trigger": _trigger(value["trigger"]),
        }
    )


def _trigger(value: dict[str, Any] | None) -> Continuous | Schedule | None:
    if value is None:
        return None
    own = {key: item for key, item in value.items() if key != "kind"}
    return Continuous(**own) if value["kind"] == "Continuous" else Schedule(**own)
