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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import dagster as dg
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._utils.error import SerializableErrorInfo  # type: ignore[attr-defined]

from orchestration.recoveries.child import GRACE, INTERRUPTED
from orchestration.recoveries.events import (
    ChangedTable,
    Ended,
    Event,
    Failed,
    OffsetSpan,
    PlanShown,
    Progress,
    Said,
    decode,
)
from orchestration.recoveries.launchpad import Launchpad, launch_of
from orchestration.recoveries.progress_text import ReplayPace
from orchestration.recoveries.request import Launch
from orchestration.sessions import reporting
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.child_run import ChildRun, Ending, code_block, fail_run, table
from orchestration.sessions.configuration import FOUND, Configuration
from orchestration.sessions.ownership import PLAN_TAG, RECOVERY_KIND, STAGE_TAG, claim
from reprocessing.corrections import corrections
from reprocessing.plan.journal import journal_of
from reprocessing.plan.plan_file import load
from reprocessing.stages.recovery import StageBegun
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.settings import Settings

PATIENCE = GRACE + 5.0
"""Seconds that an interrupted process has before its remaining processes are killed."""
READ_WITHIN = 5.0
"""Seconds that the last events of an ended process may take to be read."""


def recovery_command() -> list[str]:
    return [sys.executable, "-m", "orchestration.recoveries.child"]


class RecoveryProcess:
    """One process: it reads its launch and writes its events. Its standard input ends when this process ends."""

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
        """Takes the events that have arrived."""
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
    origin: Configuration = FOUND,
) -> None:
    """Do what a run was launched for; `tables` are the assets of each stream, `command` starts the process,
    which loads the settings of `origin`.

    Raises Failure with the text of the error, and the interrupt for a stop.
    """
    run_id, launchpad = context.run.run_id, Launchpad.of(settings, context.run)
    claim(context.instance, run_id, settings, RECOVERY_KIND)
    try:
        launch = launch_of(context.op_config)
        log = BoundedLog(settings.logs / f"recovery-{_first_stream(launch)}.log")
    except UsageError as error:
        raise _failure(context, launchpad, f"{error.code} {error.found}", error.next_step, {}) from None
    view = RunView(RunPage(context, tables))
    process = RecoveryProcess(command, {**origin.environment(), "RECOURSE_RUN_ID": run_id}, log)
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
        corrected: Metadata = {}
        with run.trouble_is_logged():
            corrected = of_corrections(settings, view.ended)
        context.add_output_metadata({**_results(launchpad, view), **corrected})
        return
    outcome = journal_of(settings, view.shown.plan).outcome if view.shown is not None else ""
    reason = _reason(view, ending)
    with run.trouble_is_logged():
        view.stopped(outcome or "nothing was done", reason)
    if ending.interrupt is not None:
        following = next_words(view.shown.plan, outcome) if view.shown else ""
        run.stopped(ending.interrupt, "; ".join(filter(None, [reason, view.in_words, following])))
        return
    details = run.log_metadata() if view.failed is None or view.failed.code == "REC-000" else {}
    following = view.failed.next if view.failed is not None else ""
    raise _failure(context, launchpad, reason, following, details, view, outcome)


def _first_stream(launch: Launch) -> str:
    """The stream that names a recovery's log; raises UsageError for an invalid plan id."""
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


def _results(launchpad: Launchpad, view: RunView) -> dict[str, Any]:
    assert view.shown is not None and view.ended is not None
    ended = view.ended
    return {
        "outcome": dg.MetadataValue.text(ended.outcome),  # a page shows the first six or so without a click
        **next_steps(launchpad, ended.plan, ended.outcome),
        **of_changes(view.changes),
        **of_spans(ended.spans, skips=ended.skips),
        **of_plan(view.shown),
        **{f"generation_of_{name}": dg.MetadataValue.text(str(n)) for name, n in ended.generations.items()},
    }


def _failure(
    context: dg.OpExecutionContext,
    launchpad: Launchpad,
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
        if here := next_words(plan, outcome):
            text += f"\n  in the Launchpad: {here}"
        metadata = {
            **next_steps(launchpad, plan, outcome),
            **of_changes(view.changes),
            **of_plan(view.shown),
            **metadata,
        }
    return RecoveryRefused(text, metadata, allow_retries=False)


# What Dagster shows of a recovery: lines and tags of its run, and events of its streams' tables.


Metadata = dict[str, dg.MetadataValue]

SOON, LATE = 5.0, 300.0
"""Seconds between two lines of progress: minimum and maximum of a twentieth of the replay's duration so far."""
_NEXT: dict[str, tuple[tuple[str, str], ...]] = {
    "planned": (("apply", "carry it out"),),
    "applying": (("resume", "continue it"), ("abort", "give it up")),
    "waits for confirmation": (("apply", "publish the rebuilt rows"), ("abort", "give it up")),
    "refused": (("resume", "check again"), ("abort", "give it up")),
    "published": (("undo", "take it back"),),
    "aborting": (("abort", "finish that"),),
    "aborted": (),
}
"""The actions that are possible for a plan with this outcome, and what they do."""


@dataclass
class RunPage:
    """The pages in Dagster that a recovery writes to: its run's page, and the pages of the streams' tables."""

    context: dg.OpExecutionContext
    tables: Mapping[str, Sequence[dg.AssetKey]]

    @property
    def run_id(self) -> str:
        return self.context.run.run_id

    def line(self, text: str) -> None:
        self.context.log.info(text)

    def tag(self, name: str, value: str) -> None:
        self.context.instance.add_run_tags(self.run_id, {name: value})

    def observe(self, stream: str, metadata: Metadata) -> None:
        """Report an observation of each table of a stream, which the run's log has too."""
        for key in self.tables.get(stream, ()):
            self.context.log_event(dg.AssetObservation(key, metadata=metadata))

    def rebuilt(self, stream: str, metadata: Metadata) -> None:
        """Report a materialisation of each table; without a run, or Dagster would no longer show the tables' checks."""
        for key in self.tables.get(stream, ()):
            self.context.instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=metadata))
            self.context.log_event(dg.AssetObservation(key, metadata=metadata))


@dataclass
class RunView:
    """Turns the events of one process into lines, tags and marks; `clock` gives seconds."""

    page: RunPage
    clock: Callable[[], float] = time.monotonic
    shown: PlanShown | None = None
    ended: Ended | None = None
    failed: Failed | None = None
    stage: StageBegun | None = None
    changes: list[ChangedTable] = field(default_factory=list)
    _since: float = 0.0
    _pace: ReplayPace | None = None
    _reported_at: float = float("-inf")
    _done: int = 0

    def take(self, event: Event) -> None:
        match event:
            case PlanShown():
                self.shown = event
                self.page.tag(PLAN_TAG, event.plan)
                self.page.line(event.text)
            case StageBegun():
                self._begin(event)
            case Progress():
                self._progress(event)
            case Said():
                self.page.line(event.text)
            case ChangedTable():
                self.changes.append(event)
                self.page.line("\n".join(event.lines))
            case Ended():
                self.ended = event
                self._end(event)
            case Failed():
                self.failed = event

    def stopped(self, outcome: str, words: str) -> None:
        """Mark the tables of a recovery that stopped before its end; `words` is the reason."""
        how = "stopped" if outcome in ("applying", "aborting") else outcome
        self.page.tag(STAGE_TAG, f"{how} in {self._where}" if self._where else how)
        if self.shown is not None and self.stage is not None:
            for stream in self.shown.streams:
                self.page.observe(stream, not_over(self.shown, self.page.run_id, self._where, outcome, words))

    @property
    def in_words(self) -> str:
        """The plan and its stage, such as `plan inventory-0001, in stage replay`; empty before there is a plan."""
        if self.shown is None:
            return ""
        return f"plan {self.shown.plan}" + (f", in stage {self._where}" if self._where else "")

    @property
    def _where(self) -> str:
        return self.stage.name if self.stage is not None else ""

    def _begin(self, stage: StageBegun) -> None:
        assert self.shown is not None, "a plan is shown before its stages"
        if self.stage is None:
            for stream in self.shown.streams:
                self.page.observe(stream, under_recovery(self.shown, self.page.run_id))
        self._stage_over()
        self.stage, self._since = stage, self.clock()
        self._pace, self._reported_at, self._done = ReplayPace(self.clock), float("-inf"), 0
        of_which = f" ({stage.stream})" if stage.stream and len(self.shown.streams) > 1 else ""
        progress = f"{stage.number} of {stage.stages}"
        self.page.tag(STAGE_TAG, f"{progress}: {stage.name}{of_which}")
        self.page.line(f"stage {progress}, {stage.name}{of_which}: {stage.words}")

    def _progress(self, progress: Progress) -> None:
        now = self.clock()
        self._pace = self._pace or ReplayPace(self.clock)
        words = self._pace.words(progress.done, progress.total)
        over = progress.done >= progress.total
        pause = min(max((now - self._since) / 20, SOON), LATE)
        if not over and (now - self._reported_at < (pause if progress.done > self._done else LATE)):
            return
        self._reported_at, self._done = now, progress.done
        share = f" ({progress.done / progress.total:.0%})" if progress.total else ""
        self.page.line(f"replay: {words}{share}")

    def _stage_over(self) -> None:
        if self.stage is not None:
            self.page.line(f"stage {self.stage.name} took {self.clock() - self._since:.1f} s")

    def _end(self, ended: Ended) -> None:
        assert self.shown is not None
        self._stage_over()
        self.page.tag(STAGE_TAG, ended.outcome)
        following = next_words(ended.plan, ended.outcome)
        where = ", ".join(f"stream {stream} is in generation {number}" for stream, number in ended.generations.items())
        self.page.line(
            f"plan {ended.plan} is {ended.outcome}" + "".join(f"; {text}" for text in (where, following) if text)
        )
        if ended.outcome == "planned":
            return
        for stream in self.shown.streams:
            marks = after_recovery(self.shown, ended, stream, self.page.run_id)
            changed = ended.outcome == "published" and not ended.skips
            (self.page.rebuilt if changed else self.page.observe)(stream, marks)


def next_words(plan: str, outcome: str) -> str:
    """The actions that are possible now, as fields of the Launchpad."""
    return "; ".join(f"{words}: do: {do}, plan: {plan}" for do, words in _NEXT.get(outcome, ()))


def next_steps(launchpad: Launchpad, plan: str, outcome: str) -> Metadata:
    """The actions that are possible now, as links that fill in the Launchpad; empty if there are none."""
    links = [
        f"- [{words}]({launchpad.link({'do': do, 'plan': plan})}) (`do: {do}`, `plan: {plan}`)"
        for do, words in _NEXT[outcome]
    ]
    text = "\n".join(["Each opens the Launchpad; nothing happens before *Launch Run*.\n", *links])
    return {"next_steps": dg.MetadataValue.md(text)} if links else {}


def of_plan(shown: PlanShown) -> Metadata:
    """The plan: its id, its text, and where its files are."""
    return reporting.shown(
        {
            "plan": shown.plan,
            "plan_text": code_block(shown.text),
            "streams": ", ".join(shown.streams),
            "target": shown.target,
            "records_to_replay": shown.records,
            "undoes": shown.undoes,
            **_files(shown, plan_file="plan.json", journal="journal.jsonl", report="report.html"),
        }
    )


def of_changes(changes: Sequence[ChangedTable]) -> Metadata:
    """What the audit found: the numbers for each table, and some of the rows."""
    if not changes:
        return {}
    columns = {"table": "string", **dict.fromkeys(("published", "rebuilt", "corrected", "new", "gone"), "int")}
    return {
        "changed_rows": table(columns, [[getattr(change, name) for name in columns] for change in changes]),
        "changed_rows_in_words": code_block("\n".join(line for change in changes for line in change.lines)),
    }


def of_spans(spans: Iterable[OffsetSpan], *, skips: bool) -> Metadata:
    """The offsets that were replayed or skipped, by partition."""
    columns = {"stream": "string", "topic": "string", **dict.fromkeys(("partition", "first", "last", "records"), "int")}
    rows = [(s.stream, s.topic, s.partition, s.begin, s.end - 1, s.end - s.begin) for s in spans if s.end > s.begin]
    return {"skipped_offsets" if skips else "recovered_offsets": table(columns, rows)} if rows else {}


def of_corrections(settings: Settings, ended: Ended) -> Metadata:
    """What a published plan has corrected, for programs outside."""
    if ended.outcome != "published":
        return {}
    return {"corrections": dg.MetadataValue.json(corrections(settings, load(settings, ended.plan)))}


def under_recovery(shown: PlanShown, run_id: str) -> Metadata:
    """The mark of a table whose stream is being recovered: the plan, and the run that carries it out."""
    return {
        "recovery": dg.MetadataValue.text(
            f"under recovery by plan {shown.plan}: the stream stands still, and readers see the rows from before until "
            "the plan publishes"
        ),
        **_who(shown, run_id),
    }


def not_over(shown: PlanShown, run_id: str, stage: str, outcome: str, words: str) -> Metadata:
    """The mark of a table whose recovery stopped in a stage; its plan can be continued. `words` is the reason."""
    return {
        "recovery": dg.MetadataValue.text(f"plan {shown.plan} is not over, it ended in stage {stage}: {words}"),
        "next": dg.MetadataValue.text(f"in job recover: {next_words(shown.plan, outcome)}"),
        **_who(shown, run_id),
    }


def after_recovery(shown: PlanShown, ended: Ended, stream: str, run_id: str) -> Metadata:
    """The mark of a table whose recovery is over: how, with which generation, and the offsets concerned."""
    done = {"published": "skipped records" if ended.skips else "recovered", "aborted": "given up"}
    how = done.get(ended.outcome, ended.outcome)
    generation = ended.generations.get(stream)
    spans = [span for span in ended.spans if span.stream == stream]
    return {
        "recovery": dg.MetadataValue.text(
            f"{how} by plan {shown.plan}" if ended.spans else f"plan {shown.plan}: {how}"
        ),
        "generation": dg.MetadataValue.text(str(generation)),
        **of_spans(spans, skips=ended.skips),
        **_who(shown, run_id),
    }


def _who(shown: PlanShown, run_id: str) -> Metadata:
    return {
        "plan": dg.MetadataValue.text(shown.plan),
        "plan_text": code_block(shown.text),
        "run": dg.MetadataValue.dagster_run(run_id),
        **_files(shown, report="report.html"),
    }


def _files(shown: PlanShown, **files: str) -> Metadata:
    """The paths of those files of a plan that exist."""
    paths = {name: Path(shown.folder) / file for name, file in files.items()}
    return {name: dg.MetadataValue.path(str(path)) for name, path in paths.items() if path.is_file()}
