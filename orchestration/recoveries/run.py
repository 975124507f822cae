"""One run of the job `recover`: it starts the process, shows what that reports, and ends it in every case.

    the process ends in order                              SUCCESS, also if the plan waits for confirmation
    it was refused, or failed                              FAILURE, with its words
    Terminate in the UI                                    the process is interrupted; CANCELED
    kill -9 of this worker                                 the process reads end of file and ends; FAILURE (by Dagster)

In the last two cases the plan is not over: a run with `do: apply` or `do: resume` continues it, `do: abort` ends it.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import dagster as dg
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._utils.error import SerializableErrorInfo  # type: ignore[attr-defined]

from orchestration.recoveries import run_page
from orchestration.recoveries.child import GRACE, INTERRUPTED
from orchestration.recoveries.events import Event, decode
from orchestration.recoveries.launchpad import launch_of, location_of
from orchestration.recoveries.request import Launch
from orchestration.recoveries.run_page import Metadata, RunPage, RunView
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.child_run import ChildRun, Ending, fail_run
from orchestration.sessions.ownership import RECOVERY_KIND, claim
from reprocessing.plan.journal import journal_of
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.settings import Settings

PATIENCE = GRACE + 5.0
"""Seconds that an interrupted process has, before what is left of it is killed."""
READ_WITHIN = 5.0
"""Seconds that the last events of an ended process may take to be read."""


def recovery_command() -> list[str]:
    return [sys.executable, "-m", "orchestration.recoveries.child"]


class RecoveryProcess:
    """One process: its launch goes in, its events come out. It reads the end of its standard input when we are gone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: BoundedLog) -> None:
        """`environment` is added to ours; what the process logs is appended to `log`."""
        self._command = ChildCommand(list(command), {**os.environ, **environment}, stdin=subprocess.PIPE)
        self._log = log
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def start(self, launch: Launch) -> ChildProcess:
        with self._log.open() as errors:
            child = self._command.start(subprocess.PIPE, errors)
        streams = child.process
        assert streams.stdin is not None and streams.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(streams.stdout,), name="events", daemon=True)
        self._reader.start()
        with suppress(BrokenPipeError):  # it has ended already, and its exit code says so
            streams.stdin.write(f"{launch.encode()}\n".encode())
            streams.stdin.flush()
        return child

    def events(self) -> Iterator[Event]:
        """Takes the events that have come by now."""
        with suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def rest(self) -> Iterator[Event]:
        """Takes the last events of the ended process."""
        if self._reader is not None:
            self._reader.join(READ_WITHIN)
        yield from self.events()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                if line.strip():
                    self._events.put(decode(line))


class _WithoutTrace(DagsterUserCodeProcessError):
    """An error that Dagster shows as the error of another process, which has no stack trace here."""

    def __init__(self, words: str) -> None:
        infos = [SerializableErrorInfo(words, stack=[], cls_name="Failure")]
        super().__init__(words, user_code_process_error_infos=infos)  # type: ignore[no-untyped-call]


class RecoveryRefused(dg.Failure, _WithoutTrace):
    """A failed step of which Dagster shows the words and the metadata, and no stack trace: the words say it all."""


def run_recovery(
    context: dg.OpExecutionContext,
    settings: Settings,
    tables: Mapping[str, Sequence[dg.AssetKey]],
    command: Sequence[str],
) -> None:
    """Do what a run was launched for; `tables` are the assets of each stream, `command` starts the process.

    Raises Failure with the text of the error, and the interrupt for a stop.
    """
    run_id = context.run.run_id
    claim(context.instance, run_id, settings, RECOVERY_KIND)
    try:
        launch = launch_of(context.op_config)
        log = BoundedLog(settings.logs / f"recovery-{_first_stream(launch)}.log")
    except UsageError as error:
        raise _failure(context, f"{error.code} {error.found}", error.next_step, {}) from None
    view = RunView(RunPage(context, tables))
    process = RecoveryProcess(command, {"RECOURSE_RUN_ID": run_id}, log)
    run = ChildRun(context, log, f"--- run {run_id} of {launch.do} {launch.plan}".rstrip(), PATIENCE)

    def start() -> ChildProcess:
        child = process.start(launch)
        context.log.info("process %d works on this run; its log: %s", child.pid, log.path)
        return child

    def show(events: Iterator[Event]) -> None:
        for event in events:
            with run.trouble_is_logged():
                view.take(event)

    ending = run.to_end(start, lambda: show(process.events()), lambda _: show(process.rest()))
    if view.ended is not None:  # also if it was stopped in the very last moment: its work is done
        context.add_output_metadata(_results(context, view))
        return
    outcome = journal_of(settings, view.shown.plan).outcome if view.shown is not None else ""
    reason = _reason(view, ending)
    with run.trouble_is_logged():
        view.stopped(outcome or "nothing was done", reason)
    if ending.interrupt is not None:
        following = run_page.next_words(view.shown.plan, outcome) if view.shown else ""
        run.stopped(ending.interrupt, "; ".join(filter(None, [reason, view.in_words, following])))
        return
    details = run.log_metadata() if view.failed is None or view.failed.code == "REC-000" else {}
    following = view.failed.next if view.failed is not None else ""
    raise _failure(context, reason, following, details, view, outcome)


def _first_stream(launch: Launch) -> str:
    """The stream after which a recovery's log is named; raises UsageError for what is no plan's id."""
    if launch.request is not None:
        if not launch.request.streams:
            raise UsageError("no stream was given", "name one: streams: [...]")
        return launch.request.streams[0]
    from reprocessing.plan.plan_file import stream_of

    return stream_of(launch.plan)


def _reason(view: RunView, ending: Ending) -> str:
    if ending.interrupt is not None:
        return "stopped on request" + ("" if ending.code == INTERRUPTED else f" (exit code {ending.code})")
    if ending.gone:
        return f"{ending.gone}; the recovery was stopped"
    if view.failed is not None:
        return f"{view.failed.code} {view.failed.found}"
    return ending.in_words("the process of the recovery")


def _results(context: dg.OpExecutionContext, view: RunView) -> dict[str, Any]:
    assert view.shown is not None and view.ended is not None
    ended = view.ended
    return {
        "outcome": dg.MetadataValue.text(ended.outcome),  # a page shows the first six or so without a click
        **run_page.next_steps(location_of(context.run), ended.plan, ended.outcome),
        **run_page.of_changes(view.changes),
        **run_page.of_spans(ended.spans, skips=ended.skips),
        **run_page.of_plan(view.shown),
        **{f"generation_of_{name}": dg.MetadataValue.text(str(n)) for name, n in ended.generations.items()},
    }


def _failure(
    context: dg.OpExecutionContext,
    reason: str,
    following: str,
    details: Metadata,
    view: RunView | None = None,
    outcome: str = "",
) -> RecoveryRefused:
    """The step's failure with all that is known. The run's failure is one line, the reason first."""
    fail_run(context, reason)
    text = f"{reason}\n  next: {following}" if following else reason
    metadata = dict(details)
    if view is not None and view.shown is not None:
        plan = view.shown.plan
        if here := run_page.next_words(plan, outcome):
            text += f"\n  in the Launchpad: {here}"
        metadata = {
            **run_page.next_steps(location_of(context.run), plan, outcome),
            **run_page.of_changes(view.changes),
            **run_page.of_plan(view.shown),
            **metadata,
        }
    return RecoveryRefused(text, metadata, allow_retries=False)
