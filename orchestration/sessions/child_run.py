"""A run of Dagster whose work a child process does: started, watched together with its run, ended in every case.

Sessions, recoveries and previews are such runs. The child ends, and the run with it, when

    the child ends on its own                              the caller decides by the exit code
    Stop in the UI, or the run was set to canceling        the child is asked to end      CANCELED
    the code server or `recourse up` above it is gone      the child is asked to end      FAILURE
    kill -9 of this worker                                 a child with a pipe reads the end of its standard input

Only the child's own pid gets the signal: a signal to its process group would kill the JVM first, and a batch with it.

Dagster ends a run by what its step raises: a stop on purpose would be a failed step with a stack trace, and a failure
"Steps failed". So the step leaves a `LastWord`, with which `session_executor`, the executor of every job, ends the run:

    stopped on request    the step succeeds, the run is CANCELED, one line says how the child ended
    failed                the step fails with everything that is known, the run is FAILURE with one line that says why
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import dagster as dg
import structlog

from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.ownership import PARENT_VARIABLE, parent_lives
from streaming_jobs.errors import PermanentError, RecourseError, UsageError
from streaming_jobs.platform.processes.child import JVM_GONE_WITHIN, ChildProcess
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration

log = structlog.get_logger()

POLL = 1.0
LOOK_AT_RUN_EVERY = 5.0
TAIL = 6000
"""Bytes of the log that a failed run shows."""
LONGEST_LINE = 500
"""Characters of the line with which a run ends."""

AnyContext = dg.AssetExecutionContext | dg.OpExecutionContext
_CANCELED = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)


@contextmanager
def errors_fail_the_step() -> Iterator[None]:
    """A RecourseError of the block fails the step; Dagster tries it again unless a person has to act first."""
    try:
        yield
    except RecourseError as error:
        retry = not isinstance(error, PermanentError | UsageError)
        raise dg.Failure(description=str(error), allow_retries=retry) from error


class Gone(Exception):
    """The process above this worker is gone, or the child hangs; the text says which."""


class Orphaned(Gone):
    """The process above this worker is gone: nobody would end what a further try of the step starts."""


class TimedOut(Gone):
    """The task has reached its time limit."""


@dataclass(frozen=True)
class Ending:
    """How a child ended: with exit code `code`, on its own unless there is an `interrupt` or the text of a `Gone`."""

    code: int | None
    gone: str = ""
    interrupt: BaseException | None = None
    timed_out: bool = False
    orphaned: bool = False

    def in_words(self, child: str) -> str:
        """The exit code of a child that ended on its own."""
        if self.code == -signal.SIGKILL:
            return f"{child} was killed (-9, perhaps out of memory)"
        if self.code is not None and self.code < 0:
            return f"{child} was ended by signal {-self.code}"
        return f"{child} ended with exit code {self.code}"


@dataclass
class ChildRun:
    """One run and its child. `mark` is the first line of the run's part of the log.

    `patience`: seconds that a child which was asked to end has, before what is left of its process group is killed.
    """

    context: AnyContext
    log: BoundedLog
    mark: str
    patience: float
    child: ChildProcess | None = None
    parent: int = field(default_factory=os.getppid)
    _looked_at: float = 0.0
    _last_trouble: str = ""

    def to_end(
        self,
        start: Callable[[], ChildProcess],
        look: Callable[[], None] = lambda: None,
        at_end: Callable[[Ending], None] = lambda _: None,
    ) -> Ending:
        """Start the child, wait until the run is over, and end the child.

        `look` is called about each second and may raise Gone; `at_end` is called when the child has ended, and no
        request to stop cuts it short. Any other exception ends the child too, and is raised.
        """
        self.log.write(self.mark)
        if word := _last_words.get(self.context.run.run_id):
            word.failed = None  # of an earlier try of the step
        gone, interrupt, ending = None, None, Ending(None)
        try:
            with self.trouble_is_logged():
                check_own_run(self.context)  # a step before this one may have been stopped
            self.child = start()
            self._watch(self.child, look)
        except Gone as error:
            gone = error
        except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as error:
            interrupt = error
        finally:
            # BaseException too: Dagster's interrupt is one. A second Stop must not cut the first one short.
            with uninterrupted():
                code = self.child.end(self.patience, JVM_GONE_WITHIN) if self.child is not None else None
                ending = Ending(
                    code, str(gone or ""), interrupt, isinstance(gone, TimedOut), isinstance(gone, Orphaned)
                )
                at_end(ending)
                with self.trouble_is_logged():
                    self.log.trim(self.mark)
        return ending

    def deadline(self, seconds: float) -> Callable[[], None]:
        """A `look` that raises TimedOut when this many seconds are over; 0: never."""
        begun = time.monotonic()

        def look() -> None:
            if seconds and time.monotonic() - begun > seconds:
                raise TimedOut(f"it has lasted {format_duration(timedelta(seconds=seconds))}, its time limit")

        return look

    def _watch(self, child: ChildProcess, look: Callable[[], None]) -> None:
        while child.exit_code is None:
            check_parents(self.parent)
            look()
            with self.trouble_is_logged():
                self.log.trim(self.mark)
            if time.monotonic() - self._looked_at >= LOOK_AT_RUN_EVERY:
                self._looked_at = time.monotonic()
                with self.trouble_is_logged():
                    check_own_run(self.context)
            child.wait(POLL)

    @contextmanager
    def trouble_is_logged(self) -> Iterator[None]:
        """A full disk or a locked database of Dagster's must not end the child: logged, once while it is the same."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            if (text := repr(error)) != self._last_trouble:
                self._last_trouble = text
                log.warning("report to Dagster failed, work continues", run=self.context.run.run_id, error=text)

    def tail(self) -> str:
        """The end of the run's part of the log."""
        return self.log.tail_from(self.mark, TAIL)

    def log_metadata(self, name: str = "log") -> dict[str, dg.MetadataValue]:
        """The path of the log under `name`, and its end."""
        return {name: dg.MetadataValue.path(str(self.log.path)), "log_tail": code_block(self.tail())}

    def stopped(self, interrupt: BaseException, line: str) -> None:
        """End the run as CANCELED with one line if it was stopped on request; raise the interrupt otherwise."""
        run_id = self.context.run.run_id
        run, word = self.context.instance.get_run_by_id(run_id), _last_words.get(run_id)
        if word is None or run is None or run.status not in _CANCELED:
            raise interrupt
        word.stopped = line

    def ends_with(self, reasons: Sequence[str]) -> None:
        """Let the run fail with one line: the reasons, without their next steps."""
        fail_run(self.context, "; ".join(text.partition("\n  next: ")[0] for text in reasons))


def fail_run(context: AnyContext, reason: str) -> None:
    """Let the run of a step that fails fail with this reason as one line."""
    if word := _last_words.get(context.run.run_id):
        line = " ".join(reason.split())
        word.failed = line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 1]}…"


def code_block(text: str) -> dg.MarkdownMetadataValue:
    """Text as it is, in Markdown."""
    safe = text.rstrip().replace("```", "'''")
    return dg.MetadataValue.md(f"```\n{safe}\n```")


def table(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> dg.TableMetadataValue:
    """Rows as a table; `columns` are their names, with `string` or `int`."""
    records = [dg.TableRecord(dict(zip(columns, row, strict=True))) for row in rows]
    return dg.MetadataValue.table(
        records, dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    )


def check_own_run(context: AnyContext) -> None:
    """Raise the interrupt if the run was stopped, or declared dead, in Dagster's storage alone.

    A new code server cannot reach the workers of an older one.
    """
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is not None and run.status in (*_CANCELED, dg.DagsterRunStatus.FAILURE):
        raise dg.DagsterExecutionInterruptedError(f"the run is {run.status.value}")


def check_parents(parent: int) -> None:
    """Raise Orphaned if the code server, which was our parent when the run began, or `recourse up` is gone."""
    if os.getppid() != parent:
        raise Orphaned("the code server that this run belonged to is gone")
    if not parent_lives(os.environ.get(PARENT_VARIABLE, "")):
        raise Orphaned(f"{commands.up()}, which this run belonged to, is gone")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM within the block, so that an orderly end is not cut short by another request."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class LastWord:
    """The line with which a run ends, stopped or failed; None where the step alone decides."""

    stopped: str | None = None
    failed: str | None = None


_last_words: dict[str, LastWord] = {}


class SessionExecutor(dg.Executor):
    """Dagster's in-process executor: no process is between run worker and child. Then the run's end by `LastWord`."""

    def __init__(self, inner: dg.Executor) -> None:
        self._inner = inner

    @property
    def retries(self) -> Any:
        return self._inner.retries

    @property
    def step_dependency_config(self) -> Any:
        return self._inner.step_dependency_config

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        """Execute the run's steps here; raises the interrupt after it has ended the run, which Dagster then leaves."""
        run_id = plan_context.run_id
        word = _last_words[run_id] = LastWord()
        try:
            yield from self._inner.execute(plan_context, execution_plan)
        finally:
            del _last_words[run_id]
        if self._end(plan_context.instance, run_id, word):
            raise dg.DagsterExecutionInterruptedError

    @staticmethod
    def _end(instance: dg.DagsterInstance, run_id: str, word: LastWord) -> bool:
        run = instance.get_run_by_id(run_id)
        if run is None or (word.stopped is None and word.failed is None):
            return False
        if run.is_finished:
            return True
        if word.stopped is not None:
            instance.report_run_canceled(run, word.stopped)
        else:
            instance.report_run_failed(run, word.failed)
        return True


_SCHEMA: Any = dg.in_process_executor.config_schema


@dg.executor(name="session", config_schema=_SCHEMA)
def session_executor(init_context: dg.InitExecutorContext) -> dg.Executor:
    create = dg.in_process_executor.executor_creation_fn
    assert create is not None
    return SessionExecutor(create(init_context))
