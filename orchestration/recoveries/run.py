"""One run of the job `recover`: it starts the process, shows what that reports, and ends it in every case.

    the process ends in order                              SUCCESS, also if the plan waits for confirmation
    it was refused, or failed                              FAILURE, with its words
    Terminate in the UI                                    the process is interrupted; CANCELED
    kill -9 of this worker                                 the process reads end of file and ends; FAILURE (by Dagster)

In the last two cases the plan is not over: a run with `do: apply` or `do: resume` continues it, `do: abort` ends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import structlog
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._utils.error import SerializableErrorInfo  # type: ignore[attr-defined]

from orchestration.recoveries import metadata as made
from orchestration.recoveries.child import GRACE, INTERRUPTED
from orchestration.recoveries.launch import Launch, launch_of
from orchestration.recoveries.launchpad import location_of
from orchestration.recoveries.metadata import Metadata
from orchestration.recoveries.process import RecoveryProcess, recovery_command
from orchestration.recoveries.view import View
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.events import report_without_run
from orchestration.sessions.executor import end_stopped, last_word
from orchestration.sessions.ownership import claim
from orchestration.sessions.reasons import one_line
from orchestration.sessions.supervisor import (
    LOOK_AT_RUN_EVERY,
    POLL,
    TAIL,
    Gone,
    check_own_run,
    check_parents,
    uninterrupted,
)
from orchestration.sessions.tags import RECOVERY_KIND
from reprocessing.plan.journal import journal_of
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import Settings

log = structlog.get_logger()

PATIENCE = GRACE + 5.0
"""Seconds that an interrupted process has, before what is left of it is killed."""


@dataclass(frozen=True)
class RecoverySpec:
    """The recoveries of a code location: the assets of each stream's tables, and the process's command line."""

    settings: Settings
    tables: Mapping[str, Sequence[dg.AssetKey]]
    command: Callable[[], list[str]] = field(default_factory=lambda: recovery_command)


class _WithoutTrace(DagsterUserCodeProcessError):
    """An error that Dagster shows as the error of another process, which has no stack trace here."""

    def __init__(self, words: str) -> None:
        infos = [SerializableErrorInfo(words, stack=[], cls_name="Failure")]
        super().__init__(words, user_code_process_error_infos=infos)  # type: ignore[no-untyped-call]


class Refused(dg.Failure, _WithoutTrace):
    """A failed step of which Dagster shows the words and the metadata, and no stack trace: the words say it all."""


@dataclass
class RunPage:
    """The run's own page, and those of the tables."""

    context: dg.OpExecutionContext
    tables: Mapping[str, Sequence[dg.AssetKey]]

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.context.run.run_id

    def line(self, text: str) -> None:
        """A line of the run's log."""
        self.context.log.info(text)

    def tag(self, name: str, value: str) -> None:
        """A tag of the run."""
        self.context.instance.add_run_tags(self.run_id, {name: value})

    def observe(self, stream: str, metadata: Metadata) -> None:
        """An observation of each table of a stream, which the run's log has too."""
        for key in self.tables.get(stream, ()):
            self.context.log_event(dg.AssetObservation(key, metadata=metadata))

    def rebuilt(self, stream: str, metadata: Metadata) -> None:
        """A materialisation of each table; without a run, or Dagster would no longer show the tables' checks."""
        for key in self.tables.get(stream, ()):
            report_without_run(self.context.instance, dg.AssetMaterialization(key, metadata=metadata))
            self.context.log_event(dg.AssetObservation(key, metadata=metadata))


@dataclass
class _Watch:
    """Watches the process of one run, and shows its events."""

    context: dg.OpExecutionContext
    process: RecoveryProcess
    view: View
    logged: BoundedLog
    parent: int = field(default_factory=os.getppid)
    looked_at: float = 0.0
    last_trouble: str = ""

    def until_end(self) -> None:
        """Return when the process has ended; raises when something else ends the run."""
        while self.process.exit_code is None:
            check_parents(self.parent)
            if (event := self.process.next(POLL)) is not None:
                with self.trouble_is_logged():
                    self.view.take(event)
            if time.monotonic() - self.looked_at >= LOOK_AT_RUN_EVERY:
                self.looked_at = time.monotonic()
                with self.trouble_is_logged():
                    self.logged.trim()
                    check_own_run(self.context)

    def take_rest(self) -> None:
        """Show the last events of the ended process."""
        for event in self.process.rest():
            with self.trouble_is_logged():
                self.view.take(event)

    @contextmanager
    def trouble_is_logged(self) -> Iterator[None]:
        """A full disk or a locked database of Dagster's must not end a recovery."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            if (text := repr(error)) != self.last_trouble:
                self.last_trouble = text
                log.warning("report to Dagster failed, recovery continues", run=self.context.run.run_id, error=text)


def run_recovery(context: dg.OpExecutionContext, spec: RecoverySpec) -> None:
    """Do what a run was launched for; raises Failure with the words of the error, and the interrupt for a stop."""
    claim(context.instance, context.run.run_id, spec.settings, RECOVERY_KIND)
    try:
        launch = launch_of(context.op_config)
        logged = BoundedLog(spec.settings.logs / f"recovery-{_first_stream(launch)}.log")
    except UsageError as error:
        raise _failure(context, f"{error.code} {error.found}", error.next_step, {}) from None
    view = View(RunPage(context, spec.tables))
    process = RecoveryProcess(spec.command(), {"RECOURSE_RUN_ID": context.run.run_id}, logged)
    watch = _Watch(context, process, view, logged)
    mark = f"--- run {context.run.run_id} of {launch.do} {launch.plan}".rstrip()
    logged.write(mark)
    gone, interrupt, code = "", None, None
    try:
        pid = process.start(launch)
        context.log.info("process %d works on this run; its log: %s", pid, logged.path)
        watch.until_end()
    except Gone as error:
        gone = str(error)
    except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as error:
        interrupt = error
    finally:
        with uninterrupted():  # a second Stop must not cut the first one short
            code = process.end(PATIENCE)
            watch.take_rest()
    if view.ended is not None:  # also if it was stopped in the very last moment: its work is done
        context.add_output_metadata(_results(context, view))
        return
    outcome = _outcome(spec.settings, view)
    words = _why(view, gone, code, interrupted=interrupt is not None)
    with watch.trouble_is_logged():
        view.stopped(outcome or "nothing was done", words)
    if interrupt is not None:
        following = made.next_words(view.shown.plan, outcome) if view.shown else ""
        end_stopped(context, interrupt, "; ".join(filter(None, [words, view.in_words, following])))
        return
    details = _log_of(logged, mark) if view.failed is None or view.failed.code == "REC-000" else {}
    following = view.failed.next if view.failed is not None else ""
    raise _failure(context, words, following, details, view, outcome)


def _first_stream(launch: Launch) -> str:
    """The stream after which a recovery's log is named; raises UsageError for what is no plan's id."""
    if launch.request is not None:
        if not launch.request.streams:
            raise UsageError("no stream was given", "name one: streams: [...]")
        return launch.request.streams[0]
    from reprocessing.plan.plan_file import stream_of

    return stream_of(launch.plan)


def _outcome(settings: Settings, view: View) -> str:
    return journal_of(settings, view.shown.plan).outcome if view.shown is not None else ""


def _why(view: View, gone: str, code: int | None, *, interrupted: bool) -> str:
    if interrupted:
        return "stopped on request" if code == INTERRUPTED else f"stopped on request (exit code {code})"
    if gone:
        return f"{gone}; the recovery was stopped"
    if view.failed is not None:
        return f"{view.failed.code} {view.failed.found}"
    if code is not None and code < 0:
        return f"the process of the recovery was ended by signal {-code}" + (
            " (perhaps out of memory)" if code == -9 else ""
        )
    return f"the process of the recovery ended with exit code {code}"


def _results(context: dg.OpExecutionContext, view: View) -> dict[str, Any]:
    """The metadata of the run's output."""
    assert view.shown is not None and view.ended is not None
    ended = view.ended
    return {
        "outcome": dg.MetadataValue.text(ended.outcome),  # a page shows the first six or so without a click
        **made.next_steps(location_of(context.run), ended.plan, ended.outcome),
        **made.of_changes(view.changes),
        **made.of_spans(ended.spans, skips=ended.skips),
        **made.of_plan(view.shown),
        **{f"generation_of_{name}": dg.MetadataValue.text(str(n)) for name, n in ended.generations.items()},
    }


def _failure(
    context: dg.OpExecutionContext,
    words: str,
    following: str,
    details: Metadata,
    view: View | None = None,
    outcome: str = "",
) -> Refused:
    """The step's failure with all that is known. The run's failure is one line, the reason first."""
    if word := last_word(context.run.run_id):
        word.failed = one_line(words)
    text = f"{words}\n  next: {following}" if following else words
    metadata = dict(details)
    if view is not None and view.shown is not None:
        plan = view.shown.plan
        if here := made.next_words(plan, outcome):
            text += f"\n  in the Launchpad: {here}"
        metadata = {
            **made.next_steps(location_of(context.run), plan, outcome),
            **made.of_changes(view.changes),
            **made.of_plan(view.shown),
            **metadata,
        }
    return Refused(text, metadata, allow_retries=False)


def _log_of(logged: BoundedLog, mark: str) -> Metadata:
    tail = logged.tail_from(mark, TAIL).replace("```", "'''")
    return {
        "log": dg.MetadataValue.path(str(logged.path)),
        "log_tail": dg.MetadataValue.md(f"```\n{tail}\n```"),
    }
