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

from orchestration.bundle import job_yaml
from orchestration.bundle.job_yaml import Bundle, Continuous, Job, Parameter, Schedule, Task
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.files import private_folder, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.topology import Topology

log = structlog.get_logger()

T = TypeVar("T")

CORRECT = "correct it, then reload the code location"


@dataclass(frozen=True)
class Fault:
    """Why the job YAML cannot be used: where, what, and what to do next."""

    found: str
    next_step: str


@dataclass(frozen=True)
class _Kept:
    """What was kept; `shipped`: it came with the package, wherever that was installed then (None: not written)."""

    bundle: Bundle
    shipped: bool | None


def path(settings: Settings) -> Path:
    """Where the last good definitions are kept."""
    return settings.dagster_home / "jobs.json"


def read(settings: Settings, topology: Topology) -> Bundle:
    """The job YAML of now; raises ConfigurationError with file and line where it cannot be used."""
    file = job_yaml.find(settings)
    bundle = job_yaml.load(file, settings.target)
    if not job_yaml.is_shipped(file):
        return bundle
    if settings.jobs is None:
        _refuse_in_place_of_own(settings, bundle)
    return job_yaml.for_streams(bundle, list(topology.streams))


def made_of_now(settings: Settings, topology: Topology, make: Callable[[Bundle], T]) -> tuple[Bundle, T]:
    """The job YAML of now and what `make` makes of it; raises ConfigurationError, whatever is wrong with it."""
    where = "the job YAML"
    try:
        bundle = read(settings, topology)
        where = str(bundle.file)
        return bundle, make(bundle)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{where}: cannot be used: {_words(error)}", CORRECT) from error


def use(settings: Settings, topology: Topology, make: Callable[[Bundle], T]) -> T:
    """What `make` makes of the job YAML of now, or else of the last one of which it could make something.

    Raises the ConfigurationError of now when there is no such one.
    """
    try:
        bundle, made = made_of_now(settings, topology, make)
    except ConfigurationError as error:
        kept = _load(settings)
        if kept is None:
            raise
        log.error("the job YAML cannot be used: the last good one is", found=error.found, next=error.next_step)
        try:
            return make(kept.bundle)
        except Exception as other:  # noqa: BLE001  (streams have changed too, or Dagster has)
            log.error("nor can the last good one be used", found=_words(other))
            raise error from None  # what is wrong now is what a person has to correct
    _keep(settings, bundle)
    return made


def fault(settings: Settings, topology: Topology, make: Callable[[Bundle], object]) -> Fault | None:
    """What is wrong with the job YAML at this moment; None if it can be used. Raises nothing."""
    try:
        made_of_now(settings, topology, make)
    except ConfigurationError as error:
        return Fault(error.found, error.next_step or CORRECT)
    return None


def _refuse_in_place_of_own(settings: Settings, shipped: Bundle) -> None:
    """A project's file that is moved away must not turn what it says into the shipped jobs, which always run."""
    kept = _load(settings)
    if kept is None or kept.shipped or (kept.shipped is None and kept.bundle.name == shipped.name):
        return
    raise ConfigurationError(
        f"the jobs of this home are those of {kept.bundle.file}; it is not found from {Path.cwd()}, "
        f"and {shipped.file}, which comes with Recourse, is not taken in its place",
        f"put it back, or set `jobs` to its path; to run the jobs that come with Recourse, remove {path(settings)}",
    )


def _words(error: BaseException) -> str:
    """The kind and text of an error, and of what it came from: Dagster names the cause there."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{text}; from {_words(error.__cause__)}" if error.__cause__ is not None else text


def _keep(settings: Settings, bundle: Bundle) -> None:
    plain = {**_plain(bundle), "shipped": job_yaml.is_shipped(bundle.file)}
    text = json.dumps(plain, indent=1, sort_keys=True)
    file = path(settings)
    try:
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            private_folder(file.parent)
            write_atomic(file, text)
    except OSError as error:  # a copy that cannot be written must not stop what can be loaded
        log.warning("the job definitions could not be kept", file=str(file), reason=str(error))


def _load(settings: Settings) -> _Kept | None:
    try:
        value = json.loads(path(settings).read_text(encoding="utf-8"))
        return _Kept(_bundle(value), value.get("shipped"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
