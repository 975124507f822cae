"""How Dagster shows a recovery: lines and tags of its run, and marks on its streams' tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from orchestration.recoveries.events import ChangedTable, Ended, Event, Failed, OffsetSpan, PlanShown, Progress, Said
from orchestration.recoveries.launchpad import link
from orchestration.recoveries.progress_text import ReplayPace
from orchestration.sessions.child_run import code_block, table
from orchestration.sessions.ownership import PLAN_TAG, STAGE_TAG
from reprocessing.stages.recovery import StageBegun

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
    """The pages in Dagster that a recovery writes to: its run's page, and those of the streams' tables."""

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


def next_steps(location: str, plan: str, outcome: str) -> Metadata:
    """The actions that are possible now, as links that fill in the Launchpad; empty if there are none."""
    links = [
        f"- [{words}]({link(location, {'do': do, 'plan': plan})}) (`do: {do}`, `plan: {plan}`)"
        for do, words in _NEXT[outcome]
    ]
    text = "\n".join(["Each opens the Launchpad; nothing happens before *Launch Run*.\n", *links])
    return {"next_steps": dg.MetadataValue.md(text)} if links else {}


def of_plan(shown: PlanShown) -> Metadata:
    """The plan: its id, its text, and where its files are."""
    metadata: Metadata = {
        "plan": dg.MetadataValue.text(shown.plan),
        "plan_text": code_block(shown.text),
        "streams": dg.MetadataValue.text(", ".join(shown.streams)),
        "target": dg.MetadataValue.text(shown.target),
        "records_to_replay": dg.MetadataValue.int(shown.records),
    }
    if shown.undoes is not None:
        metadata["undoes"] = dg.MetadataValue.text(shown.undoes)
    return metadata | _files(shown, plan_file="plan.json", journal="journal.jsonl", report="report.html")


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
