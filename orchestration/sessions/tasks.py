"""Tasks of a job that are no sessions: commands of `recourse`, run in the job's order, each as an asset without data.

Dagster orders the assets of a job: a task comes after the tables of the session, or the tasks, that it depends on.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from orchestration.bundle.job import Job, Task
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.child_run import ChildRun, Ending
from orchestration.sessions.configuration import FOUND, Configuration
from orchestration.sessions.names import asset_key, named
from orchestration.sessions.ownership import SESSION_TAG, TASKS_KIND, claim
from streaming_jobs.errors import PermanentError, UsageError
from streaming_jobs.platform.processes.child import JVM_GONE_WITHIN, ChildCommand, ChildProcess
from streaming_jobs.settings import DagsterSettings, Settings

GROUP = "tasks"
PATIENCE = 30.0 + JVM_GONE_WITHIN
"""Seconds that an interrupted command has before what is left of it is killed."""
WITHOUT_END = 1_000_000
"""Retries for `max_retries: -1`."""
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_]")

Command = Callable[[Sequence[str]], list[str]]


def recourse_command(arguments: Sequence[str]) -> list[str]:
    """The command line of `recourse` with these arguments."""
    return [sys.executable, "-m", "orchestration.cli", *arguments]


def task_key(settings: DagsterSettings, job: Job, task: Task) -> dg.AssetKey:
    return asset_key(settings, GROUP, job.key, task.key)


def retry_policy(task: Task) -> dg.RetryPolicy | None:
    """The retries of a task within its run."""
    if not task.max_retries:
        return None
    return dg.RetryPolicy(WITHOUT_END if task.max_retries < 0 else task.max_retries, delay=task.retry_interval)


def before(settings: DagsterSettings, job: Job, task: Task, tables: Sequence[dg.AssetKey]) -> list[dg.AssetKey]:
    """The assets that a task waits for; `tables` are those of the job's session."""
    by_key = {other.key: other for other in job.tasks}
    waits = [by_key[name] for name in task.depends_on]
    return [key for other in waits for key in (tables if other.is_session else [task_key(settings, job, other)])]


def pool_of(settings: DagsterSettings, job: Job) -> str:
    """The pool of one run at a time that a job's runs share."""
    return named(settings, f"session_{job.key}")


@dataclass(frozen=True)
class CommandTask:
    """A task and its process. `command` builds the process's command line; `origin` is where its settings are from."""

    job: Job
    task: Task
    settings: Settings
    command: Command = recourse_command
    origin: Configuration = FOUND

    def asset(self, tables: Sequence[dg.AssetKey], config: Mapping[str, Any]) -> dg.AssetsDefinition:
        """The task as a step of its job; `config` are the job's parameters with their defaults."""
        dagster = self.settings.dagster

        @dg.multi_asset(
            name=named(dagster, f"task_{self.job.key}_{_NOT_A_NAME.sub('_', self.task.key)}"),
            specs=[
                dg.AssetSpec(
                    task_key(dagster, self.job, self.task),
                    deps=before(dagster, self.job, self.task, tables),
                    group_name=named(dagster, self.job.key),
                    kinds={"task"},
                    description=f"recourse {' '.join(self.task.parameters)}",
                )
            ],
            retry_policy=retry_policy(self.task),
            config_schema={name: dg.Field(dg.Any, default_value=value) for name, value in config.items()},
            description=f"Runs recourse {' '.join(self.task.parameters)}",
            pool=None if self.job.session else pool_of(dagster, self.job),  # beside a session, its asset has it
        )
        def run(context: dg.AssetExecutionContext) -> Any:
            yield self._run(context, context.op_execution_context.op_config or {})

        return run

    def _run(self, context: dg.AssetExecutionContext, values: Mapping[str, object]) -> dg.MaterializeResult[None]:
        job, run_id = self.job, context.run.run_id
        session = {SESSION_TAG: job.key} if job.session else {}
        claim(context.instance, run_id, self.settings, job.kind if session else TASKS_KIND, **session)
        arguments = job.arguments({name: str(value) for name, value in values.items()}, self.task)
        log = BoundedLog(self.settings.logs / f"task-{job.key}-{self.task.key}.log")
        run = ChildRun(context, log, f"--- run {run_id} of {job.key}, task {self.task.key}", PATIENCE)

        def start() -> ChildProcess:
            with log.open() as output:
                command = ChildCommand(
                    self.command(arguments), {**os.environ, **self.origin.environment()}, stdin=subprocess.DEVNULL
                )
                child = command.start(output)
            context.log.info("process %d runs recourse %s; its log: %s", child.pid, " ".join(arguments), log.path)
            return child

        ending = run.to_end(start, run.deadline(self.task.timeout_seconds))
        if ending.interrupt is not None:
            run.stopped(ending.interrupt, f"stopped on request: task {self.task.key} ended with code {ending.code}")
        elif ending.gone or ending.code:
            raise _failure(run, ending, self.task)
        return dg.MaterializeResult(
            asset_key=task_key(self.settings.dagster, job, self.task), metadata=run.log_metadata()
        )


def task_assets(
    job: Job,
    settings: Settings,
    tables: Sequence[dg.AssetKey],
    config: Mapping[str, Any],
    command: Command = recourse_command,
    origin: Configuration = FOUND,
) -> list[dg.AssetsDefinition]:
    """The job's tasks that are no session; `tables` are those of its session."""
    others = [CommandTask(job, task, settings, command, origin) for task in job.tasks if not task.is_session]
    return [task.asset(tables, config) for task in others]


def _failure(run: ChildRun, ending: Ending, task: Task) -> dg.Failure:
    """The step's failure; a command that was wrong, or was refused for good, is not tried again."""
    text = f"task {task.key}: {ending.gone or ending.in_words('the command')}"
    run.ends_with([text])
    final = ending.code in (PermanentError.exit_code, UsageError.exit_code) and not ending.gone
    again = not ending.orphaned and (task.retry_on_timeout if ending.timed_out else not final)
    return dg.Failure(text, run.log_metadata(), allow_retries=again)
