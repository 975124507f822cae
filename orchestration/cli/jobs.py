"""`recourse jobs`: the job YAML as this machine reads it, for any target."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import FAILED, Output, OutputOption, say, show, show_lines, show_table
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from orchestration.bundle.fields import Problem
    from orchestration.bundle.job import Bundle, Job
    from orchestration.cli.options import Invocation

app = typer.Typer(no_args_is_help=True, help="The jobs of databricks.yml.", rich_markup_mode=None)

TargetOption = Annotated[
    str, typer.Option("--target", metavar="TARGET", help="A target; none: the default one.", show_default=False)
]
File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="A bundle; none: the one that `recourse up` reads.")
]


@app.callback()
def jobs() -> None:
    """The jobs of databricks.yml."""


@app.command(short_help="Check the job YAML: every error and note with file and line.")
def validate(
    context: typer.Context,
    file: File = None,
    target: Annotated[
        str, typer.Option("--target", metavar="TARGET", help="Only this target; none: each.", show_default=False)
    ] = "",
    output: OutputOption = Output.text,
) -> None:
    """Read the bundle for each target and print what is wrong, and what means nothing on this machine.

    Exit code 1 if a target cannot be used.
    """
    from orchestration.bundle import job_yaml

    call = invocation(context)
    path = file or job_yaml.find(call.settings)
    errors: dict[str, dict[str, Any]] = {}
    notes: dict[str, Problem] = {}
    targets = [target] if target else job_yaml.target_names(path)
    for name in targets:
        reading = job_yaml.read(path, name)
        notes |= {note.text: note for note in reading.notes}
        found = [(problem.text, problem.next_step) for problem in reading.problems]
        found += [(error.found, error.next_step or "") for error in _of_streams(call, reading.bundle)]
        for words, next_step in found:
            errors.setdefault(words, {"found": words, "next": next_step, "targets": []})["targets"].append(name)
    value = {
        "file": str(path),
        "targets": targets,
        "errors": list(errors.values()),
        "notes": [{"found": note.text, "field": note.path} for note in notes.values()],
    }

    def text() -> None:
        for error in errors.values():
            only = "" if error["targets"] == targets else f" (target {', '.join(error['targets'])})"
            print(f"error: {error['found']}{only}")
            if error["next"]:
                print(f"  next: {error['next']}")
        for note in notes.values():
            print(f"note: {note.text}")

    show(output, value, text)
    judged = f"{counted(len(errors), 'error')}, {counted(len(notes), 'note')}"
    say(f"{path}: {judged if errors or notes else 'good'}")
    if not call.settings.flows and not job_yaml.is_shipped(path):
        say("nothing names `flows`, so the names of streams were not checked")
    if errors:
        raise typer.Exit(FAILED)


def _of_streams(call: Invocation, bundle: Bundle | None) -> Iterator[Any]:
    if bundle is not None and call.settings.flows:
        yield from bundle.stream_errors(call.topology.streams)


@app.command("show", short_help="Print the jobs as a target resolves them.")
def show_jobs(
    context: typer.Context, file: File = None, target: TargetOption = "", output: OutputOption = Output.text
) -> None:
    """Print each job with its trigger, next time, parameters and tasks; overrides merged, references resolved."""
    bundle = _bundle(context, file, target)
    value = {"name": bundle.name, "target": bundle.target, "jobs": {job.key: describe(job) for job in bundle.jobs}}
    lines: list[str] = []
    for job in bundle.jobs:
        lines += [job.key, *(f"  {path}  {text}" for path, text in _leaves(describe(job)))]
    show_lines(output, value, lines)


@app.command(short_help="Print what two targets do differently.")
def diff(
    context: typer.Context,
    first: Annotated[str, typer.Argument(metavar="TARGET", help="A target.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="The target to compare with.", show_default=False)],
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="A bundle.", show_default=False)] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print each field of a job that differs between two targets: job, field, and both values."""
    left, right = (
        {(job.key, path): text for job in _bundle(context, file, target).jobs for path, text in _leaves(describe(job))}
        for target in (first, second)
    )
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key) and key[1] != "trigger.next"]
    value = [{"job": j, "field": f, first: left.get((j, f)), second: right.get((j, f))} for j, f in keys]
    if not keys and output is Output.text:
        say(f"{first} and {second} have the same jobs")
        return
    rows = [[job, path, left.get((job, path), ""), right.get((job, path), "")] for job, path in keys]
    show_table(output, value, ["job", "field", first, second], rows)


def _bundle(context: typer.Context, file: Path | None, target: str) -> Bundle:
    from orchestration.bundle import job_yaml

    settings = invocation(context).settings
    return job_yaml.load(file or job_yaml.find(settings), target or settings.target)


def describe(job: Job) -> dict[str, Any]:
    """A job as data, with stable keys; tasks, parameters and rules by their names."""
    from orchestration.bundle.job import Timed

    trigger: dict[str, Any] = {"kind": job.kind}
    if isinstance(job.trigger, Timed):
        due = job.trigger.after(datetime.now(UTC))
        trigger |= {"when": f"{job.trigger.words} ({job.trigger.timezone})", "next": due and due.isoformat()}
    if job.trigger:
        trigger["paused"] = job.trigger.paused
    return {
        "name": job.name,
        "description": job.description,
        "file": str(job.file),
        "streams": list(job.streams),
        "trigger": trigger,
        "tags": dict(job.tags),
        "parameters": job.defaults,
        "timeout_seconds": job.timeout_seconds,
        "queue": job.queue,
        "health": {rule.metric: rule.value for rule in job.rules},
        "notifications": {one.event: {"emails": list(one.emails), "webhook": one.webhook} for one in job.notifications},
        "tasks": {
            task.key: {
                "command": [task.entry_point, *job.arguments(task=task)],
                "depends_on": list(task.depends_on),
                "max_retries": task.max_retries,
                "retry_interval_s": task.retry_interval,
                "retry_on_timeout": task.retry_on_timeout,
                "timeout_seconds": task.timeout_seconds,
                "spark_conf": dict(task.spark_conf),
            }
            for task in job.tasks
        },
    }


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The values that are not empty, by dotted paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        if value:
            yield path, " ".join(str(item) for item in value)
    elif value not in (None, "", 0, False):
        yield path, "true" if value is True else str(value)
