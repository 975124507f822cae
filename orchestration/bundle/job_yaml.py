"""The job YAML: a bundle as `databricks bundle` takes it, read for this machine.

The same files deploy to Databricks and feed the Dagster loader. A field has its meaning here, or means nothing here
and is noted, or is refused with file and line; none is ignored. `docs/jobs.md` shows the format.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestration.bundle import references, targets
from orchestration.bundle.fields import (
    Position,
    Problem,
    Steps,
    YamlMap,
    checked,
    position_of,
    read_yaml,
    spelled,
)
from orchestration.bundle.job import (
    ENTRY_POINT,
    PACKAGE,
    Bundle,
    Continuous,
    CronSchedule,
    Job,
    Notification,
    Parameter,
    Periodic,
    Rule,
    Task,
    Trigger,
)
from orchestration.bundle.model import (
    KEY,
    TAKEN,
    AnyTrigger,
    Head,
    JobFields,
    Presets,
    Root,
    ScheduleFields,
    TaskFields,
)
from orchestration.bundle.notes import field_notes, job_notes, not_taken, spark_conf, spark_problems
from orchestration.bundle.quartz import Quartz
from orchestration.bundle.references import References
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings, project_folder

FILE_NAME = "databricks.yml"
OWN_NAME = "recourse-jobs.yml"
"""The file of a project whose databricks.yml is not for Recourse."""


def find(settings: Settings) -> Path:
    """The bundle file: the setting `jobs`, else recourse-jobs.yml or databricks.yml in the project's folder, else the
    shipped one.

    Raises ConfigurationError when the setting names no file.
    """
    if settings.jobs is not None:
        path = settings.jobs.expanduser().absolute()
        if not path.is_file():
            raise ConfigurationError(f"jobs: there is no file {path}", "name a databricks.yml, or leave it out")
        return path
    here = Path(__file__).parent
    candidates = (
        project_folder() / OWN_NAME,
        project_folder() / FILE_NAME,
        here / FILE_NAME,
        here.parents[1] / FILE_NAME,
    )
    for path in candidates:
        if path.is_file():
            return path
    raise ConfigurationError(f"no {FILE_NAME} in {project_folder()}", "write one, or set `jobs` to its path")


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
        task = Task("session", PACKAGE, ENTRY_POINT, ("--streams", ",".join(rest)))
        description = "The streams that no job names, in one session. Write a databricks.yml to run them otherwise."
        jobs.append(Job("streams", "streams", description, {}, (), Continuous(paused=False), 0, (task,), bundle.file))
    return replace(bundle, jobs=tuple(jobs))


@dataclass
class Reading:
    """A bundle read for one target: its jobs if it can be used, else why not; `notes` are about unused fields.

    `resolved` is the bundle as Databricks would see it, with overrides merged and references resolved.
    """

    target: str
    bundle: Bundle | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    resolved: Mapping[str, Any] = field(default_factory=dict)


def load(path: Path, target: str = "") -> Bundle:
    """Read a bundle for `target` (empty: its default one); raises ConfigurationError naming file and key."""
    reading = read(path, target)
    if reading.bundle is None:
        raise reading.problems[0].error()
    return reading.bundle


def read(path: Path, target: str = "") -> Reading:
    """Read a bundle with everything that is wrong in it; raises ConfigurationError for a file that is no YAML."""
    source = _Source.of(path)
    reading = Reading(target, problems=source.problems)
    if source.problems:
        return reading
    reading.target = _target(source, target)
    if not source.problems:
        _resolve(source, reading)
    return reading


def files_of(path: Path) -> list[Path]:
    """A bundle's file and those that it includes; raises ConfigurationError where it cannot be read."""
    source = _Source.of(path)
    if source.problems:
        raise source.problems[0].error()
    return [path, *_included(source.tree, source.head, path, [])]


def target_names(path: Path) -> list[str]:
    """The targets of a bundle, or the one of a bundle without any."""
    return list(_Source.of(path).head.targets) or [""]


@dataclass
class _Source:
    """The files of a bundle, merged."""

    path: Path
    tree: YamlMap
    head: Head
    problems: list[Problem]

    @classmethod
    def of(cls, path: Path) -> _Source:
        start = Position(path, 0)
        tree = read_yaml(path)
        head, problems = checked(Head, tree, start)
        if head is None:
            return cls(path, YamlMap(), Head(), problems)
        tree = tree if isinstance(tree, YamlMap) else YamlMap()
        for file in _included(tree, head, path, problems):
            part = read_yaml(file)
            _, wrong = checked(Head, part, Position(file, 0))
            if isinstance(part, YamlMap) and "include" in part:
                at, found = position_of(part, ("include",), Position(file, 0)), "only the bundle's file includes others"
                wrong = [*wrong, Problem(at, "include", found, f"name them in {path.name}")]
            problems += wrong
            if not wrong and isinstance(part, YamlMap):
                problems += _written_twice(tree, part)
                tree = targets.merged(tree, part, (), problems, Position(file, 0))
        head, wrong = checked(Head, tree, start)
        return cls(path, tree, head or Head(), [*problems, *(wrong if not problems else [])])

    def position(self, *steps: str | int) -> Position:
        return position_of(self.tree, steps, Position(self.path, 0))

    def refuse(self, steps: Steps, path: str, found: str, next_step: str = "") -> None:
        self.problems.append(Problem(self.position(*steps), path, found, next_step))


def _included(tree: YamlMap, head: Head, path: Path, problems: list[Problem]) -> list[Path]:
    files: list[Path] = []
    position = position_of(tree, ("include",), Position(path, 0))
    at_file = Position(path, 0)
    for pattern in head.include:
        try:
            if any("**" in step and step != "**" for step in pattern.split("/")):  # which pathlib refuses up to 3.12
                raise ValueError("'**' can only be an entire path component")
            matches = sorted(p for p in path.parent.glob(pattern) if p.is_file())
        except Exception as error:  # noqa: BLE001  (pathlib raises many kinds)
            problem = f"include: '{pattern}' cannot be used: {error}"
            problems.append(Problem(at_file, "", problem, "name files below its folder"))
            continue
        if not matches:
            found = f"include: nothing matches '{pattern}'"
            problems.append(Problem(position, "", found, f"the pattern counts from {path.parent}"))
        files += [p for p in matches if p not in files and p != path]
    return files


def _written_twice(tree: YamlMap, part: YamlMap) -> Iterator[Problem]:
    """Resources that a file has although another one has them already."""
    low, high = tree.get("resources") or {}, part.get("resources") or {}
    for kind, entries in high.items() if isinstance(low, Mapping) and isinstance(high, Mapping) else ():
        known = low.get(kind)
        for key in entries if isinstance(entries, YamlMap) else ():
            if isinstance(known, YamlMap) and key in known:
                noun, found = kind.removesuffix("s"), known.positions[key].file
                path = f"resources.{kind}.{key}"
                yield Problem(entries.positions[key], path, f"{noun} {key} is also in {found}", "rename one of the two")


def _target(source: _Source, wanted: str) -> str:
    """The requested target, or the default one; "default" for a bundle without targets."""
    head = source.head
    if not head.targets:
        if wanted:
            source.refuse((), "", f"there is no target '{wanted}'", "the file has no targets")
        return "default"
    for target, declared in head.targets.items():
        for name in declared.variables:
            if name not in head.variables:
                known = f"the variables are: {', '.join(head.variables) or 'none'}"
                path = ("targets", target, "variables", name)
                source.refuse(path, spelled(path[:-1]), f"'{name}' is not declared", known)
    if wanted:
        if wanted not in head.targets:
            known = f"the targets are: {', '.join(head.targets)}"
            source.refuse((), "", f"targets: there is no '{wanted}'", known)
        return wanted
    defaults = [name for name, declared in head.targets.items() if declared.default]
    if len(defaults) == 1 or len(head.targets) == 1:
        return (defaults or list(head.targets))[0]
    source.refuse(("targets",), "", f"targets: {len(defaults)} have default: true", "mark exactly one")
    return ""


def _resolve(source: _Source, reading: Reading) -> None:
    problems, start = source.problems, Position(source.path, 0)
    tree = targets.with_target(source.tree, reading.target, problems, start)
    values, lookups = _variables(source, reading.target)
    if problems:
        return
    known = References(tree, reading.target, values, lookups, problems)
    reading.resolved = resolved = known.resolved(tree, (), start)
    root, wrong = checked(Root, resolved, start)
    problems += _not_reported(wrong, problems)
    if root is None or problems:
        return
    mode = source.head.targets[reading.target].mode if source.head.targets else None
    if mode == "development" and root.presets.trigger_pause_status == "UNPAUSED":
        path = ("presets", "trigger_pause_status")
        found = "a target with mode: development cannot start the triggers of all jobs"
        next_step = "write pause_status: UNPAUSED at the triggers that shall run"
        problems.append(Problem(position_of(resolved, path, start), spelled(path), found, next_step))
    presets = targets.presets_of(mode, root.presets, references.user())
    reading.notes = list(field_notes(root, resolved, (), start))
    jobs = []
    for key, entry in root.resources.jobs.items():
        at: Steps = ("resources", "jobs", key)
        position = position_of(resolved, at, start)
        if entry.own_tasks:
            problems += [*_name_problems(key, position), *spark_problems(entry, at, resolved)]
            job = _job(key, entry, presets, position.file)
            if job.session is not None and not job.streams:
                number = next(n for n, task in enumerate(entry.tasks) if task.task_key == job.session.key)
                where = (*at, "tasks", number)
                found, next_step = "the parameters name no streams", "add '--streams' and the streams, joined by commas"
                problems.append(Problem(position_of(resolved, where, start), spelled(where), found, next_step))
            jobs.append(job)
        reading.notes += job_notes(entry, spelled(at), position)
    if not problems:
        reading.bundle = Bundle(root.bundle.name, reading.target, tuple(jobs), source.path)


def _not_reported(new: list[Problem], problems: list[Problem]) -> list[Problem]:
    """New problems about fields that have none yet: a reference that failed is reported once."""
    known = {problem.path for problem in problems}
    return [problem for problem in new if problem.path not in known]


def _name_problems(key: str, position: Position) -> Iterator[Problem]:
    path = f"resources.jobs.{key}"
    if not KEY.fullmatch(key):
        usable = "use lower-case letters, digits and '_', a letter first"
        yield Problem(position, path, f"'{key}' is not a job key", usable)
    if key in TAKEN:
        problem = f"'{key}' cannot be a job key: Dagster or Python keeps the name"
        yield Problem(position, path, problem, "rename the job")


def _variables(source: _Source, target: str) -> tuple[dict[str, Any], frozenset[str]]:
    """The values of the variables for a target, and the names of those that only Databricks looks up."""
    given = (source.tree.get("targets") or {}).get(target) or {}
    written = given.get("variables") or {}
    try:
        from_outside = references.overrides(source.path.parent, target, os.environ, source.head.variables)
    except (OSError, ValueError) as error:
        source.refuse(("variables",), "variables", str(error), "correct it")
        return {}, frozenset()
    values: dict[str, Any] = {}
    lookups = set()
    for name, variable in source.head.variables.items():
        value, lookup = variable.default, variable.lookup
        if name in written:
            override = written[name]
            full = isinstance(override, Mapping) and override and set(override) <= _DEFINITION
            if full and override.get("lookup") is not None:
                value, lookup = None, override["lookup"]
            elif not full or "default" in override:
                value, lookup = override["default"] if full else override, None
        value = from_outside.get(name, value)
        if value is None and lookup:
            lookups.add(name)
        elif value is None:
            path = ("variables", name)
            source.refuse(path, spelled(path), "has no default and the target sets none", "give it a value")
        elif isinstance(value, (Mapping, list)) and variable.type != "complex":
            where = ("targets", target, "variables", name)
            found = "is a mapping or list, but the variable is not complex"
            source.refuse(where, spelled(where), found, "write `type: complex` where the variable is declared")
        else:
            values[name] = value
    return values, frozenset(lookups)


_DEFINITION = {"default", "description", "lookup", "type"}
"""The keys of a variable that is declared in full; other mappings are the value of a complex one."""


def _job(key: str, entry: JobFields, presets: Presets, file: Path) -> Job:
    rules = [*entry.health.rules, *(rule for task in entry.own_tasks for rule in task.health.rules)]
    return Job(
        key=key,
        name=f"{presets.name_prefix or ''}{entry.name or key}",
        description=entry.description,
        tags={**presets.tags, **entry.tags},
        parameters=tuple(Parameter(parameter.name, parameter.default) for parameter in entry.parameters),
        trigger=_trigger(entry, presets),
        timeout_seconds=entry.timeout_seconds,
        tasks=tuple(_task(task, entry) for task in _in_order(entry.own_tasks)),
        file=file,
        queue=entry.queue is not None and entry.queue.enabled,
        rules=tuple(Rule(rule.metric, rule.value) for rule in rules),
        notifications=tuple(_notifications(entry)),
    )


def _trigger(entry: JobFields, presets: Presets) -> Trigger | None:
    def paused(status: str | None) -> bool:
        return (status or presets.trigger_pause_status) == "PAUSED"

    if entry.continuous:
        return Continuous(paused(entry.continuous.pause_status))
    if when := entry.schedule:
        return _cron(when, paused(when.pause_status))
    for one in [entry.trigger] if entry.trigger else entry.triggers:
        if one.periodic:
            return Periodic(one.periodic.interval, one.periodic.unit, paused(one.pause_status))
        if isinstance(one, AnyTrigger) and one.schedule:
            return _cron(one.schedule, paused(one.pause_status))
        if isinstance(one, AnyTrigger) and one.continuous:
            return Continuous(paused(one.pause_status))
    return None


def _cron(when: ScheduleFields, paused: bool) -> CronSchedule:
    quartz = when.quartz_cron_expression
    return CronSchedule(quartz, Quartz.of(quartz).cron, when.timezone_id, paused)


def _in_order(tasks: list[TaskFields]) -> list[TaskFields]:
    """The tasks, each after those that it depends on; otherwise in the order of the file."""
    ordered: list[TaskFields] = []
    waiting = list(tasks)
    while waiting:
        left = {task.task_key for task in waiting}
        ready = next(task for task in waiting if not left & {before.task_key for before in task.depends_on})
        ordered.append(ready)
        waiting.remove(ready)
    return ordered


def _task(task: TaskFields, entry: JobFields) -> Task:
    wheel = task.python_wheel_task
    assert wheel is not None, "a task of this machine is a wheel"
    ours = {other.task_key for other in entry.own_tasks}
    return Task(
        key=task.task_key,
        package_name=wheel.package_name,
        entry_point=wheel.entry_point,
        parameters=wheel.arguments,
        depends_on=tuple(before.task_key for before in task.depends_on if before.task_key in ours),
        max_retries=task.max_retries,
        retry_interval=task.min_retry_interval_millis / 1000,
        retry_on_timeout=task.retry_on_timeout,
        timeout_seconds=task.timeout_seconds,
        spark_conf={key: text for key, text in spark_conf(task, entry).items() if not not_taken(key, text)},
    )


def _notifications(entry: JobFields) -> Iterator[Notification]:
    for event in ("on_start", "on_success", "on_failure"):
        levels = [(entry.email_notifications, entry.webhook_notifications)]
        levels += [(task.email_notifications, task.webhook_notifications) for task in entry.own_tasks]
        emails = tuple(dict.fromkeys(address for email, _ in levels for address in getattr(email, event)))
        webhook = any(getattr(hooks, event) for _, hooks in levels)
        if emails or webhook:
            yield Notification(event, emails, webhook)
