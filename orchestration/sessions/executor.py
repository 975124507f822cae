"""The executor of sessions: the run worker itself, and a run that ends in the session's own words.

Dagster ends a run by what its step raises: a stop on purpose would be a failed step with a stack trace, and a failure
"Steps failed". So the step leaves its word here, and the run is ended with it:

    stopped on request    the step succeeds, the run is CANCELED, one line says how the driver ended
    failed                the step fails with everything that is known, the run is FAILURE with one line that says why
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg


@dataclass
class LastWord:
    """How a session's run is to end; each in one line, None where the step alone decides."""

    stopped: str | None = None
    failed: str | None = None


AnyContext = dg.AssetExecutionContext | dg.OpExecutionContext
"""The context of a step."""

_last_words: dict[str, LastWord] = {}


def last_word(run_id: str) -> LastWord | None:
    """What the step of a run that this executor executes may leave; None under another executor."""
    return _last_words.get(run_id)


def end_stopped(context: AnyContext, interrupt: BaseException, words: str) -> None:
    """End the run of a step as CANCELED with one line if it was stopped on request; raise the interrupt otherwise."""
    run_id = context.run.run_id
    run, word = context.instance.get_run_by_id(run_id), last_word(run_id)
    if word is None or run is None or run.status not in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED):
        raise interrupt
    word.stopped = words


class SessionExecutor(dg.Executor):
    """Dagster's in-process executor, and then the run's end by its `LastWord`."""

    def __init__(self, inner: dg.Executor) -> None:
        self._inner = inner

    @property
    def retries(self) -> Any:
        """As in-process."""
        return self._inner.retries

    @property
    def step_dependency_config(self) -> Any:
        """As in-process."""
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
    """The executor of every job of the code location."""
    create = dg.in_process_executor.executor_creation_fn
    assert create is not None
    return SessionExecutor(create(init_context))
