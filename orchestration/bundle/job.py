"""The jobs of a bundle, as the rest of `orchestration` sees them; `job_yaml.py` reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streaming_jobs.errors import ConfigurationError

RUN_REFERENCE = re.compile(r"\{\{\s*(.*?)\s*\}\}")
"""A reference that is resolved when a run starts: `{{job.parameters.<name>}}`."""


@dataclass(frozen=True)
class Parameter:
    name: str
    default: str


@dataclass(frozen=True)
class Continuous:
    """The job shall always run: one session after the other."""

    paused: bool
    kind: Literal["Continuous"] = "Continuous"


@dataclass(frozen=True)
class CronSchedule:
    """The job runs at these times; `quartz` as written, `cron` the same for Dagster."""

    quartz: str
    cron: str
    timezone: str
    paused: bool
    kind: Literal["Schedule"] = "Schedule"


@dataclass(frozen=True)
class Task:
    """The one task of a job: a session started with `parameters`."""

    key: str
    package_name: str
    entry_point: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """One job; `file` is where it was read from, `key` its name in Dagster."""

    key: str
    name: str
    description: str
    tags: Mapping[str, str]
    parameters: tuple[Parameter, ...]
    trigger: Continuous | CronSchedule | None
    timeout_seconds: int
    task: Task
    file: Path

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that the job's session runs."""
        return tuple(name.strip() for name in _option(self.task.parameters, "--streams").split(",") if name.strip())

    @property
    def kind(self) -> str:
        """How its sessions are started: `continuous`, `scheduled` or `manual`."""
        return "continuous" if isinstance(self.trigger, Continuous) else "scheduled" if self.trigger else "manual"

    @property
    def defaults(self) -> dict[str, str]:
        return {parameter.name: parameter.default for parameter in self.parameters}

    def arguments(self, values: Mapping[str, str] | None = None) -> list[str]:
        """The session's arguments with every job parameter resolved; a scheduled job ends when it has caught up."""
        chosen = {**self.defaults, **(values or {})}
        arguments = [RUN_REFERENCE.sub(lambda m: chosen[parameter_of(m[1])], text) for text in self.task.parameters]
        if isinstance(self.trigger, CronSchedule) and not _option(arguments, "--trigger"):
            arguments += ["--trigger", "available-now"]
        return arguments


@dataclass(frozen=True)
class Bundle:
    """All jobs of a bundle, resolved for one target."""

    name: str
    target: str
    jobs: tuple[Job, ...]
    file: Path

    def refuse(self, names: Iterable[str], whose: str) -> None:
        """Raise ConfigurationError if a job has one of these names, which is that of the job `whose` already."""
        if taken := sorted(set(names) & {job.key for job in self.jobs}):
            raise ConfigurationError(f"resources.jobs.{taken[0]}: this name is that of {whose}", "rename the job")


def parameter_of(reference: str) -> str:
    """The name of the job parameter that a reference names; empty if it names none."""
    return reference.removeprefix("job.parameters.") if reference.startswith("job.parameters.") else ""


def _option(parameters: Any, option: str) -> str:
    texts = list(parameters)
    for position, text in enumerate(texts):
        if text == option and position + 1 < len(texts):
            return str(texts[position + 1])
        if text.startswith(f"{option}="):
            return str(text.partition("=")[2])
    return ""
