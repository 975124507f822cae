"""What a bundle has that is not used on this machine, and the Spark properties of its clusters that a session takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from orchestration.bundle.fields import Noted, Position, Problem, Steps, position_of, spelled
from orchestration.bundle.job import PACKAGE
from orchestration.bundle.model import Email, JobFields, TaskFields, Webhooks
from orchestration.bundle.quartz import Quartz


def spark_conf(task: TaskFields, entry: JobFields) -> dict[str, str]:
    """The Spark properties of the cluster that the task runs on."""
    shared = {cluster.job_cluster_key: cluster.new_cluster for cluster in entry.job_clusters}
    cluster = task.new_cluster or shared.get(task.job_cluster_key)
    return {key: str(value) for key, value in (getattr(cluster, "spark_conf_", None) or {}).items()}


_DECIDED = {
    "spark.master": "spark.master",
    "spark.driver.memory": "spark.driver_memory_mb",
    "spark.driver.host": "spark.driver_host",
    "spark.driver.bindAddress": "spark.bind_address",
    "spark.sql.shuffle.partitions": "spark.shuffle_partitions",
}
"""Spark properties that a setting decides here."""
_KEPT = (
    "spark.sql.streaming.stateStore.",
    "spark.sql.streaming.checkpointFileManagerClass",
    "spark.sql.extensions",
    "spark.sql.catalog.spark_catalog",
    "spark.sql.session.timeZone",
)
"""Beginnings of Spark properties on which state and tables depend."""


def not_taken(key: str, text: str) -> str:
    """Why a Spark property of a cluster is not a session's; empty if it is."""
    if key in _DECIDED:
        return f"the setting {_DECIDED[key]} decides about it here"
    return "it is a secret of Databricks: set spark.extra here" if "{{secrets/" in text else ""


def spark_problems(entry: JobFields, at: Steps, resolved: Any) -> Iterator[Problem]:
    for number, task in enumerate(entry.tasks):
        for key in spark_conf(task, entry) if task.ours else ():
            if key.startswith(_KEPT):
                found = f"spark_conf: Recourse sets {key} itself, because state and tables depend on it"
                where = (*at, "tasks", number)
                position = position_of(resolved, where, Position(Path(), 0))
                yield Problem(position, spelled(where), found, "remove it")


def field_notes(value: Any, written: Any, at: Steps, position: Position) -> Iterator[Problem]:
    """The fields of a resolved bundle that mean nothing here."""
    if isinstance(value, BaseModel):
        kind = type(value)
        for name in sorted(value.model_fields_set, key=list(kind.model_fields).index):
            step, item = kind.model_fields[name].alias or name, getattr(value, name)
            here = position_of(written, (step,), position)
            reason = next((mark.reason for mark in kind.model_fields[name].metadata if isinstance(mark, Noted)), None)
            if reason is not None and item is not None:
                yield Problem(here, spelled((*at, step)), f"means nothing here: {reason}")
            elif reason is None:
                yield from field_notes(item, written[step] if isinstance(written, Mapping) else None, (*at, step), here)
        return
    steps: list[Any] = (
        [*value] if isinstance(value, Mapping) else [*range(len(value))] if isinstance(value, list) else []
    )
    for below in steps:
        there = written[below] if isinstance(written, (list, Mapping)) else None
        yield from field_notes(value[below], there, (*at, below), position_of(written, (below,), position))


_NO_FIGURE = ("STREAMING_BACKLOG_BYTES", "STREAMING_BACKLOG_FILES")
"""Metrics of health rules for which Recourse has no figure."""


def job_notes(entry: JobFields, path: str, position: Position) -> Iterator[Problem]:
    """What a job leaves undone on this machine although its fields are honoured."""
    found = (
        _of_schedule(entry) if entry.own_tasks else [("", "has no task that runs here, so Dagster shows no such job")]
    )
    if entry.own_tasks:
        found = [
            *found,
            *_of_health(entry),
            *_of_tasks(entry),
            *_of_notifications("", entry.webhook_notifications, entry.email_notifications),
        ]
        for task in entry.own_tasks:
            where = f"tasks.{task.task_key}."
            found += _of_notifications(where, task.webhook_notifications, task.email_notifications)
    for below, text in found:
        yield Problem(position, f"{path}.{below}" if below else path, text)


Found = Iterable[tuple[str, str]]
"""Fields of a job and what is to be said about them."""


def _of_schedule(entry: JobFields) -> Found:
    for when in filter(None, (entry.schedule, *(one.schedule for one in entry.triggers))):
        if second := Quartz.of(when.quartz_cron_expression).second:
            yield "schedule", f"starts at second 0 here, not at second {second}: Dagster's ticks are whole minutes"


def _of_health(entry: JobFields) -> Found:
    for rule in (*entry.health.rules, *(rule for task in entry.own_tasks for rule in task.health.rules)):
        if rule.metric in _NO_FIGURE:
            yield "health", f"{rule.metric} is not judged here: there is no such figure; use _RECORDS or _SECONDS"


def _of_tasks(entry: JobFields) -> Found:
    ours = {task.task_key for task in entry.own_tasks}
    for task in entry.tasks:
        where = f"tasks.{task.task_key}"
        if task.task_key not in ours:
            if task.python_wheel_task is not None:
                other = f"runs on Databricks only: its package is not {PACKAGE}"
                yield where, "is disabled" if task.disabled else other
            continue
        for earlier in task.depends_on:
            if earlier.task_key not in ours:
                yield where, f"does not wait here for {earlier.task_key}, which does not run here"
        for key, text in spark_conf(task, entry).items():
            if reason := not_taken(key, text):
                yield where, f"spark_conf {key} is not used here: {reason}"


def _of_notifications(where: str, hooks: Webhooks, emails: Email) -> Found:
    if any(getattr(hooks, event) for event in type(hooks).model_fields):
        text = "a destination's id means nothing here: the webhook of the setting quality.webhook is called"
        yield f"{where}webhook_notifications", text
    for event in ("on_duration_warning_threshold_exceeded", "on_streaming_backlog_exceeded"):
        if getattr(hooks, event) or getattr(emails, event):
            text = "a broken rule of `health` turns the check `health` yellow, of which quality.webhook and "
            yield f"{where}{event}", f"{text}quality.email_to hear"
