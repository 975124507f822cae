"""The job YAML: `databricks.yml` and the files it includes, in a subset of the Databricks bundle format.

The same files deploy to Databricks and feed the Dagster loader. A field that is not understood here is
refused, never ignored, and so is a job that the two would run differently. One job is one session: its
task's `--streams` run in one driver. `docs/jobs.md` shows the format.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator, model_validator

from orchestration.bundle.fields import (
    Count,
    Fields,
    Flag,
    Scalar,
    Section,
    Text,
    read_yaml,
    refusal,
    refused,
    validated,
)
from orchestration.bundle.job import RUN_REFERENCE, Bundle, Continuous, CronSchedule, Job, Parameter, Task, parameter_of
from orchestration.bundle.quartz import cron_of
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings, project_folder
from streaming_jobs.text.spelling import nearest_zone

FILE_NAME = "databricks.yml"
ENTRY_POINT = "recourse-session"
"""The wheel's entry point that runs a session; locally `python -m streaming_jobs.session`."""

TAKEN = {"bool", "conf", "config", "context", "dict", "float", "input", "int", "meta", "output", "str", "type"}
TAKEN |= {"arg_dict", "input_arg_dict", "output_arg_dict", *keyword.kwlist}
"""Names that Dagster does not accept for a job."""
_KEY = re.compile(r"[a-z][a-z0-9_]{0,62}")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TAG = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


def find(settings: Settings) -> Path:
    """The bundle file: the setting `jobs`, else databricks.yml in the project's folder, else the shipped one.

    Raises ConfigurationError when the setting names no file.
    """
    if settings.jobs is not None:
        path = settings.jobs.expanduser().absolute()
        if not path.is_file():
            raise ConfigurationError(f"jobs: there is no file {path}", "name a databricks.yml, or leave it out")
        return path
    here = Path(__file__).parent
    candidates = (project_folder() / FILE_NAME, here / FILE_NAME, here.parents[1] / FILE_NAME)
    for path in candidates:
        if path.is_file():
            return path
    raise ConfigurationError(f"no {FILE_NAME} in {candidates[0].parent}", "write one, or set `jobs` to its path")


def is_shipped(path: Path) -> bool:
    """True if a bundle file is the packaged one, for the shipped streams."""
    here = Path(__file__).parent
    return path in (here / FILE_NAME, here.parents[1] / FILE_NAME)


def for_streams(bundle: Bundle, declared: Sequence[str]) -> Bundle:
    """The shipped bundle, fitted to the declared streams: without its jobs for streams that are not declared.

    Declared streams in none of its jobs share one continuous job, so that a project needs no bundle to begin with.
    """
    jobs = [job for job in bundle.jobs if any(name in declared for name in job.streams)]
    rest = [name for name in declared if not any(name in job.streams for job in jobs)]
    if rest and len(jobs) < len(bundle.jobs):
        task = Task("session", "recourse-streams", "recourse-session", ("--streams", ",".join(rest)))
        description = "The streams that no job names, in one session. Write a databricks.yml to run them otherwise."
        jobs.append(Job("streams", "streams", description, {}, (), Continuous(paused=False), 0, task, bundle.file))
    return replace(bundle, jobs=tuple(jobs))


class _Pausable(Fields):
    pause_status: Annotated[Literal["UNPAUSED", "PAUSED"], Scalar] = "UNPAUSED"

    @property
    def paused(self) -> bool:
        return self.pause_status == "PAUSED"


class _Schedule(_Pausable):
    quartz_cron_expression: Text
    timezone_id: Text

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        try:
            cron_of(self.quartz_cron_expression)
        except ValueError as error:
            raise refusal(f"quartz_cron_expression '{self.quartz_cron_expression}': {error}") from error
        try:
            ZoneInfo(self.timezone_id)
        except (OSError, ValueError, KeyError) as error:
            problem = f"timezone_id: no time zone '{self.timezone_id}'"
            raise refusal(problem, nearest_zone(self.timezone_id)) from error
        return self


class _Wheel(Fields):
    package_name: Text
    entry_point: Text
    parameters: list[Text]

    @model_validator(mode="after")
    def _starts_a_session(self) -> Self:
        if self.entry_point != ENTRY_POINT:
            raise refusal(f"entry_point '{self.entry_point}' starts no session", f"write {ENTRY_POINT}")
        return self


class _Task(Fields):
    task_key: Text
    description: Text = ""
    python_wheel_task: _Wheel


class _Parameter(Fields):
    name: Text
    default: Text


class _Job(Fields):
    name: Text = ""
    description: Text = ""
    tags: dict[str, Text] = Field(default_factory=dict)
    parameters: list[_Parameter] = Field(default_factory=list)
    continuous: Annotated[_Pausable | None, Section] = None
    schedule: Annotated[_Schedule | None, Section] = None
    max_concurrent_runs: Count = 1
    timeout_seconds: Count = 0
    tasks: list[_Task]

    @model_validator(mode="before")
    @classmethod
    def _without_retries(cls, value: Any) -> Any:
        tasks = value.get("tasks") if isinstance(value, Mapping) and "continuous" in value else None
        for retry in ("max_retries", "min_retry_interval_millis", "retry_on_timeout"):
            if isinstance(tasks, list) and tasks and isinstance(tasks[0], Mapping) and retry in tasks[0]:
                problem = f"tasks[0].{retry}: a continuous job has no task retries"
                raise refusal(problem, "remove it; the job is restarted anyway")
        return value

    @field_validator("tags")
    @classmethod
    def _can_be_tags(cls, tags: dict[str, str]) -> dict[str, str]:
        for text in (*tags, *filter(None, tags.values())):
            if not _TAG.fullmatch(text):
                raise refusal(f"'{text}' cannot be a tag", "use letters, digits, '_', '-' and '.', 63 at most")
        return tags

    @model_validator(mode="after")
    def _is_one_session(self) -> Self:
        if self.max_concurrent_runs != 1:
            raise refusal("max_concurrent_runs is not 1", "one driver per stream: leave it out, or write 1")
        if self.continuous and self.schedule:
            raise refusal("has both continuous and schedule", "keep one; without either the job is started by hand")
        if len(self.tasks) != 1:
            found = f"has {len(self.tasks)} tasks"
            raise refusal(found, "one task is one session; give another session a job of its own")
        names = [parameter.name for parameter in self.parameters]
        for number, name in enumerate(names):
            if not _PARAMETER.fullmatch(name) or name in names[:number]:
                problem = f"'{name}' is not a new parameter name"
                raise refusal(problem, "use letters, digits and '_', each name once", below=f"parameters[{number}]")
        for text in self.tasks[0].python_wheel_task.parameters:
            for reference in RUN_REFERENCE.finditer(text):
                if (used := parameter_of(reference[1])) not in names:
                    raise refusal(
                        f"tasks: {{{{{reference[1]}}}}} names no parameter of the job",
                        f"declare '{used}' under parameters" if used else "write {{job.parameters.<name>}}",
                    )
        return self

    def job(self, key: str, file: Path) -> Job:
        trigger: Continuous | CronSchedule | None = None
        if self.continuous:
            trigger = Continuous(self.continuous.paused)
        elif when := self.schedule:
            quartz = when.quartz_cron_expression
            trigger = CronSchedule(quartz, cron_of(quartz), when.timezone_id, when.paused)
        wheel = self.tasks[0].python_wheel_task
        return Job(
            key=key,
            name=self.name or key,
            description=self.description,
            tags=self.tags,
            parameters=tuple(Parameter(parameter.name, parameter.default) for parameter in self.parameters),
            trigger=trigger,
            timeout_seconds=self.timeout_seconds,
            task=Task(self.tasks[0].task_key, wheel.package_name, wheel.entry_point, tuple(wheel.parameters)),
            file=file,
        )


class _Resources(Fields):
    jobs: dict[str, _Job] = Field(default_factory=dict)


class _Included(Fields):
    resources: Any = None


class _Bundle(Fields):
    name: Text


class _Variable(Fields):
    description: Text = ""
    default: Annotated[str | None, Scalar] = None


class _Target(Fields):
    mode: Annotated[Literal["development", "production"], Scalar] = "development"
    default: Flag = False
    variables: dict[str, Text] = Field(default_factory=dict)


class _Root(_Included):
    bundle: _Bundle
    include: list[Text] = Field(default_factory=list)
    variables: dict[str, _Variable] = Field(default_factory=dict)
    targets: dict[str, _Target] = Field(default_factory=dict)


def load(path: Path, target: str = "") -> Bundle:
    """Read a bundle for `target` (empty: its default one); raises ConfigurationError naming file and key."""
    root = validated(_Root, read_yaml(path), path)
    chosen = _target(root, path, target)
    references = {"bundle.name": root.bundle.name, "bundle.target": chosen, **_variables(root, path, chosen)}
    files = {path: root.resources}
    files |= {file: validated(_Included, read_yaml(file), file).resources for file in _included(root, path)}
    jobs: dict[str, Job] = {}
    for file, written in files.items():
        resources = _resolved(written, references, file, "resources")
        for key, entry in validated(_Resources, resources, file, "resources").jobs.items():
            where = f"resources.jobs.{key}"
            if key in jobs:
                raise refused(file, where, f"job {key} is also in {jobs[key].file}", "rename one of the two")
            if not _KEY.fullmatch(key):
                usable = "use lower-case letters, digits and '_', a letter first"
                raise refused(file, where, f"'{key}' is not a job key", usable)
            if key in TAKEN:
                problem = f"'{key}' cannot be a job key: Dagster or Python keeps the name"
                raise refused(file, where, problem, "rename the job")
            jobs[key] = job = entry.job(key, file)
            if not job.streams:
                problem = "tasks: the parameters name no streams"
                raise refused(file, where, problem, "add '--streams' and the streams, joined by commas")
    return Bundle(root.bundle.name, chosen, tuple(jobs.values()), path)


def _target(root: _Root, file: Path, wanted: str) -> str:
    """The requested target, or the default one."""
    if not root.targets:
        if wanted:
            raise refused(file, "", f"there is no target '{wanted}'", "the file has no targets")
        return "default"
    for target, declared in root.targets.items():
        for name in declared.variables:
            if name not in root.variables:
                known = f"the variables are: {', '.join(root.variables) or 'none'}"
                raise refused(file, f"targets.{target}.variables", f"'{name}' is not declared", known)
    if wanted:
        if wanted not in root.targets:
            known = f"the targets are: {', '.join(root.targets)}"
            raise refused(file, "", f"targets: there is no '{wanted}'", known)
        return wanted
    defaults = [name for name, declared in root.targets.items() if declared.default]
    if len(defaults) != 1:
        raise refused(file, "", f"targets: {len(defaults)} have default: true", "mark exactly one")
    return defaults[0]


def _variables(root: _Root, file: Path, target: str) -> dict[str, str]:
    overrides = root.targets[target].variables if root.targets else {}
    values = {}
    for name, variable in root.variables.items():
        value = overrides.get(name, variable.default)
        if value is None:
            raise refused(file, f"variables.{name}", "has no default and the target sets none", "give it a value")
        values[f"var.{name}"] = value
    return values


def _included(root: _Root, path: Path) -> list[Path]:
    files: list[Path] = []
    for pattern in root.include:
        try:
            matches = sorted(p for p in path.parent.glob(pattern) if p.is_file())
        except Exception as error:
            problem = f"include: '{pattern}' cannot be used: {error}"
            raise refused(path, "", problem, "name files below its folder") from error
        if not matches:
            found = f"include: nothing matches '{pattern}'"
            raise refused(path, "", found, f"the pattern counts from {path.parent}")
        files += [p for p in matches if p not in files]
    return files


def _resolved(value: Any, references: Mapping[str, str], file: Path, path: str) -> Any:
    """The value with every `${...}` in its texts replaced."""

    def reference(match: re.Match[str]) -> str:
        if match[1] not in references:
            known = f"known are: {', '.join(sorted(references))}"
            raise refused(file, path, f"${{{match[1]}}} is not known", known)
        return references[match[1]]

    if isinstance(value, str):
        return _REFERENCE.sub(reference, value)
    if isinstance(value, list):
        return [_resolved(item, references, file, f"{path}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: _resolved(item, references, file, f"{path}.{key}") for key, item in value.items()}
    return value
