"""The jobs of a bundle, as the rest of `orchestration` sees them; `job_yaml.py` reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

from orchestration.bundle.fields import location_of
from orchestration.bundle.quartz import Quartz
from streaming_jobs.errors import ConfigurationError

PACKAGE = "recourse-streams"
"""The wheel's distribution."""
ENTRY_POINT = "recourse-session"
"""The wheel's entry point that runs a session; locally `python -m streaming_jobs.session`."""
COMMAND = "recourse"
"""The wheel's entry point of the command line; locally `python -m orchestration.cli`."""
COMMANDS = (("quality", "run"), ("recover", "plan"), ("recover", "apply"), ("recover", "resume"), ("verify",))
"""The first words of the commands that a task may run: quality runs, recoveries, a verification."""


def is_ours(package_name: object, entry_point: object) -> bool:
    """True for a wheel task that runs on this machine too."""
    return package_name == PACKAGE or entry_point == ENTRY_POINT


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
    """The job runs at these times; `quartz` as written, `cron` the same for Dagster, or more (`runs_at`)."""

    quartz: str
    cron: str
    timezone: str
    paused: bool
    kind: Literal["Schedule"] = "Schedule"

    @property
    def words(self) -> str:
        return f"Quartz: {self.quartz}"

    def runs_at(self, tick: datetime) -> bool:
        """Whether the job runs at a tick of `cron`."""
        return Quartz.of(self.quartz).runs_on(tick.astimezone(ZoneInfo(self.timezone)).date())

    def after(self, moment: datetime) -> datetime | None:
        return Quartz.of(self.quartz).after(moment, ZoneInfo(self.timezone))

    def latest(self, moment: datetime) -> datetime | None:
        return Quartz.of(self.quartz).latest(moment, ZoneInfo(self.timezone))


_MINUTES = {"MINUTES": 1, "HOURS": 60, "DAYS": 1440, "WEEKS": 10080}


@dataclass(frozen=True)
class Periodic:
    """The job runs each `interval` minutes, hours, days or weeks, counted from the first Monday of 1970, in UTC."""

    interval: int
    unit: str
    paused: bool
    kind: Literal["Periodic"] = "Periodic"
    timezone: Literal["UTC"] = "UTC"

    @property
    def words(self) -> str:
        return f"each {self.interval} {self.unit.lower()}"

    @property
    def cron(self) -> str:
        """The times for Dagster, or more (`runs_at`)."""
        if self.unit == "MINUTES":
            return f"*/{self.interval} * * * *" if 60 % self.interval == 0 and self.interval < 60 else "* * * * *"
        if self.unit == "HOURS":
            return f"0 */{self.interval} * * *" if 24 % self.interval == 0 and self.interval < 24 else "0 * * * *"
        return "0 0 * * *"

    def runs_at(self, tick: datetime) -> bool:
        return self.latest(tick) == tick.replace(second=0, microsecond=0)

    def after(self, moment: datetime) -> datetime:
        return self.latest(moment) + timedelta(minutes=self.interval * _MINUTES[self.unit])

    def latest(self, moment: datetime) -> datetime:
        step = timedelta(minutes=self.interval * _MINUTES[self.unit])
        return _MONDAY + (moment.astimezone(UTC) - _MONDAY) // step * step


_MONDAY = datetime(1970, 1, 5, tzinfo=UTC)

Trigger = Continuous | CronSchedule | Periodic
Timed = CronSchedule, Periodic
"""The triggers that start a job at known times."""


@dataclass(frozen=True)
class Task:
    """One task that runs here: a session, or a command of `recourse`, with `parameters`.

    `depends_on` has the tasks of this machine before it; times are in seconds, `max_retries` -1 is without end.
    """

    key: str
    package_name: str
    entry_point: str
    parameters: tuple[str, ...]
    depends_on: tuple[str, ...] = ()
    max_retries: int = 0
    retry_interval: float = 0.0
    retry_on_timeout: bool = False
    timeout_seconds: int = 0
    spark_conf: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_session(self) -> bool:
        return self.entry_point == ENTRY_POINT


@dataclass(frozen=True)
class Rule:
    """A rule of `health`: a warning above `value`."""

    metric: str
    value: int


@dataclass(frozen=True)
class Notification:
    """Who hears of an event (`on_start`, `on_success`, `on_failure`): addresses, and whether the webhook does."""

    event: str
    emails: tuple[str, ...] = ()
    webhook: bool = False


@dataclass(frozen=True)
class Job:
    """One job; `file` is where it was read from, `key` its name in Dagster, `tasks` those that run here, in order."""

    key: str
    name: str
    description: str
    tags: Mapping[str, str]
    parameters: tuple[Parameter, ...]
    trigger: Trigger | None
    timeout_seconds: int
    tasks: tuple[Task, ...]
    file: Path
    queue: bool = False
    rules: tuple[Rule, ...] = ()
    notifications: tuple[Notification, ...] = ()

    @property
    def session(self) -> Task | None:
        """The task that is a session; a job has one at most."""
        return next((task for task in self.tasks if task.is_session), None)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that the job's session runs."""
        parameters = self.session.parameters if self.session else ()
        return tuple(name.strip() for name in _option(parameters, "--streams").split(",") if name.strip())

    @property
    def kind(self) -> str:
        """How its sessions are started: `continuous`, `scheduled` or `manual`."""
        return "continuous" if isinstance(self.trigger, Continuous) else "scheduled" if self.trigger else "manual"

    @property
    def defaults(self) -> dict[str, str]:
        return {parameter.name: parameter.default for parameter in self.parameters}

    def arguments(self, values: Mapping[str, str] | None = None, task: Task | None = None) -> list[str]:
        """The task's arguments (default: the session's) with every job parameter resolved.

        The session of a scheduled job ends when it has caught up.
        """
        chosen = {**self.defaults, **(values or {})}
        task = task or self.session
        assert task is not None, "a job without a session has no arguments of one"
        arguments = [RUN_REFERENCE.sub(lambda m: chosen[parameter_of(m[1])], text) for text in task.parameters]
        if task.is_session and task.spark_conf:
            arguments = ["--set", f"spark.extra={json.dumps(dict(task.spark_conf))}", *arguments]
        ends = isinstance(self.trigger, Timed) or len(self.tasks) > 1
        if task.is_session and ends and not _option(arguments, "--trigger"):
            arguments += ["--trigger", "available-now"]
        return arguments


@dataclass(frozen=True)
class Bundle:
    """All jobs of a bundle, resolved for one target."""

    name: str
    target: str
    jobs: tuple[Job, ...]
    file: Path

    def stream_errors(self, known: Iterable[str]) -> Iterator[ConfigurationError]:
        """What is wrong with the streams that the jobs run: there is none of that name, or two jobs run it."""
        there = list(known)
        owner: dict[str, Job] = {}
        for job in self.jobs:
            where = f"resources.jobs.{job.key}"
            for name in job.streams:
                if name not in there:
                    yield ConfigurationError(
                        f"{location_of(job.file, where)}: {where}: no stream is named '{name}'",
                        f"the streams are: {', '.join(there) or 'none'}; correct the job, or add its module to the "
                        "setting `flows`",
                    )
                elif name in owner:
                    yield ConfigurationError(
                        f"{location_of(job.file, where)}: {where}: stream {name} is run by job {owner[name].key} too",
                        "one driver per stream: leave it to one of the two",
                    )
                owner.setdefault(name, job)

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
