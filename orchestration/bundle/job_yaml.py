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
from zoneinfo import ZoneInfo

from orchestration.bundle.fields import Section, read_yaml
from orchestration.bundle.job import RUN_REFERENCE, Bundle, Continuous, Job, Parameter, Schedule, Task, parameter_of
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
    """True if a bundle file is the one that comes with the package, for the shipped streams."""
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


def load(path: Path, target: str = "") -> Bundle:
    """Read a bundle for `target` (empty: its default one); raises ConfigurationError naming file and key."""
    root = Section.of(read_yaml(path), path, allowed=("bundle", "include", "variables", "targets", "resources"))
    name = root.section("bundle", allowed=("name",), required=True).text("name")
    chosen, overrides = _target(root, target)
    references = {"bundle.name": name, "bundle.target": chosen, **_variables(root, overrides)}
    jobs: dict[str, Job] = {}
    sections = [root, *(Section.of(read_yaml(p), p, allowed=("resources",)) for p in _included(root, path))]
    for section in sections:
        resolved = section.resolved(lambda text, where: _resolve(text, references, where), only="resources")
        for key, entry in resolved.section("resources", allowed=("jobs",)).section("jobs").sections(_JOB_FIELDS):
            if key in jobs:
                raise entry.error(f"job {key} is also in {jobs[key].file}", "rename one of the two")
            jobs[key] = _job(key, entry)
    return Bundle(name, chosen, tuple(jobs.values()), path)


_JOB_FIELDS = (
    "name",
    "description",
    "tags",
    "parameters",
    "continuous",
    "schedule",
    "max_concurrent_runs",
    "timeout_seconds",
    "tasks",
)


def _job(key: str, entry: Section) -> Job:
    if not _KEY.fullmatch(key):
        raise entry.error(f"'{key}' is not a job key", "use lower-case letters, digits and '_', a letter first")
    if key in TAKEN:
        raise entry.error(f"'{key}' cannot be a job key: Dagster or Python keeps the name", "rename the job")
    if entry.number("max_concurrent_runs", 1) != 1:
        raise entry.error("max_concurrent_runs is not 1", "one driver per stream: leave it out, or write 1")
    parameters = _parameters(entry)
    trigger = _trigger(entry)
    task = _task(entry, trigger)
    declared = {parameter.name for parameter in parameters}
    for text in task.parameters:
        for reference in RUN_REFERENCE.finditer(text):
            if (used := parameter_of(reference[1])) not in declared:
                raise entry.error(
                    f"tasks: {{{{{reference[1]}}}}} names no parameter of the job",
                    f"declare '{used}' under parameters" if used else "write {{job.parameters.<name>}}",
                )
    job = Job(
        key=key,
        name=entry.text("name", key),
        description=entry.text("description", ""),
        tags=_tags(entry),
        parameters=parameters,
        trigger=trigger,
        timeout_seconds=entry.number("timeout_seconds", 0),
        task=task,
        file=entry.file,
    )
    if not job.streams:
        raise entry.error("tasks: the parameters name no streams", "add '--streams' and the streams, joined by commas")
    return job


def _trigger(entry: Section) -> Continuous | Schedule | None:
    if entry.has("continuous") and entry.has("schedule"):
        raise entry.error("has both continuous and schedule", "keep one; without either the job is started by hand")
    if entry.has("continuous"):
        continuous = entry.section("continuous", allowed=("pause_status",))
        return Continuous(_paused(continuous))
    if not entry.has("schedule"):
        return None
    schedule = entry.section("schedule", allowed=("quartz_cron_expression", "timezone_id", "pause_status"))
    quartz, zone = schedule.text("quartz_cron_expression"), schedule.text("timezone_id")
    try:
        cron = cron_of(quartz)
    except ValueError as error:
        raise schedule.error(f"quartz_cron_expression '{quartz}': {error}") from error
    try:
        ZoneInfo(zone)
    except (OSError, ValueError, KeyError) as error:
        raise schedule.error(f"timezone_id: no time zone '{zone}'", nearest_zone(zone)) from error
    return Schedule(quartz, cron, zone, _paused(schedule))


def _paused(section: Section) -> bool:
    return section.choice("pause_status", ("UNPAUSED", "PAUSED"), "UNPAUSED") == "PAUSED"


def _task(entry: Section, trigger: Continuous | Schedule | None) -> Task:
    tasks = entry.items("tasks")
    if len(tasks) != 1:
        raise entry.error(f"has {len(tasks)} tasks", "one task is one session; give another session a job of its own")
    fields: tuple[str, ...] = ("task_key", "description", "python_wheel_task")
    if isinstance(trigger, Continuous) and isinstance(tasks[0], Mapping):
        for retry in ("max_retries", "min_retry_interval_millis", "retry_on_timeout"):
            if retry in tasks[0]:
                problem = f"tasks[0].{retry}: a continuous job has no task retries"
                raise entry.error(problem, "remove it; the job is restarted anyway")
    task = entry.item("tasks", 0, allowed=fields)
    wheel = task.section("python_wheel_task", allowed=("package_name", "entry_point", "parameters"), required=True)
    entry_point = wheel.text("entry_point")
    if entry_point != ENTRY_POINT:
        raise wheel.error(f"entry_point '{entry_point}' starts no session", f"write {ENTRY_POINT}")
    return Task(task.text("task_key"), wheel.text("package_name"), entry_point, tuple(wheel.texts("parameters")))


def _parameters(entry: Section) -> tuple[Parameter, ...]:
    parameters: dict[str, Parameter] = {}
    for position in range(len(entry.items("parameters", []))):
        item = entry.item("parameters", position, allowed=("name", "default"))
        name = item.text("name")
        if not _PARAMETER.fullmatch(name) or name in parameters:
            raise item.error(f"'{name}' is not a new parameter name", "use letters, digits and '_', each name once")
        parameters[name] = Parameter(name, item.text("default"))
    return tuple(parameters.values())


def _tags(entry: Section) -> dict[str, str]:
    section = entry.section("tags")
    tags = {key: section.text(key) for key in section.values}
    for text in (*tags, *filter(None, tags.values())):
        if not _TAG.fullmatch(text):
            raise section.error(f"'{text}' cannot be a tag", "use letters, digits, '_', '-' and '.', 63 at most")
    return tags


def _target(root: Section, wanted: str) -> tuple[str, Section | None]:
    targets = dict(root.section("targets").sections(("mode", "default", "variables")))
    if not targets:
        if wanted:
            raise root.error(f"there is no target '{wanted}'", "the file has no targets")
        return "default", None
    declared = root.section("variables").values
    for target in targets.values():
        target.choice("mode", ("development", "production"), "development")
        variables = target.section("variables")
        for name in variables.values:
            if name not in declared:
                raise variables.error(
                    f"'{name}' is not declared", f"the variables are: {', '.join(declared) or 'none'}"
                )
    if wanted:
        if wanted not in targets:
            raise root.error(f"targets: there is no '{wanted}'", f"the targets are: {', '.join(targets)}")
        return wanted, targets[wanted]
    defaults = [name for name, target in targets.items() if target.flag("default")]
    if len(defaults) != 1:
        raise root.error(f"targets: {len(defaults)} have default: true", "mark exactly one")
    return defaults[0], targets[defaults[0]]


def _variables(root: Section, target: Section | None) -> dict[str, str]:
    declared = dict(root.section("variables").sections(("description", "default")))
    overrides = target.section("variables") if target else None
    values = {}
    for name, variable in declared.items():
        if overrides and overrides.has(name):
            values[f"var.{name}"] = overrides.text(name)
        elif variable.has("default"):
            values[f"var.{name}"] = variable.text("default")
        else:
            raise variable.error("has no default and the target sets none", "give it a value")
    return values


def _included(root: Section, path: Path) -> list[Path]:
    files: list[Path] = []
    for pattern in root.texts("include", []):
        try:
            matches = sorted(p for p in path.parent.glob(pattern) if p.is_file())
        except Exception as error:
            raise root.error(f"include: '{pattern}' cannot be used: {error}", "name files below its folder") from error
        if not matches:
            raise root.error(f"include: nothing matches '{pattern}'", f"the pattern counts from {path.parent}")
        files += [p for p in matches if p not in files]
    return files


def _resolve(text: str, references: Mapping[str, str], where: Section) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in references:
            raise where.error(f"${{{match[1]}}} is not known", f"known are: {', '.join(sorted(references))}")
        return references[match[1]]

    return _REFERENCE.sub(value, text)
