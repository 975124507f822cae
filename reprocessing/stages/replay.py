"""The replay of a recovery: the stream's ordinary session on the staging tables, and where it can be compared.

Before the batch after the border, the content of the staging tables is copied to tables beside them. The audit compares
these, so that the difference excludes records that arrived since the stream stopped.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from reprocessing.plan.conditions import refuse_unaskable
from reprocessing.plan.history import lineage
from reprocessing.plan.plan import StreamRecoveryPlan
from reprocessing.replay.session import Border, ReplayFailure, ReplayResult, ReplaySession, RowByRow
from reprocessing.report.facts import READ, BatchRows, BatchSeries
from reprocessing.stages.recovery import RecoveryContext, RecoveryEvents
from reprocessing.stages.void_ranges import border_offsets, lagged, rebuilt_tables, void_for
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import OffsetsLost, PreflightRefused, RecourseError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import TopicOffsets, by_place, ends_of, offsets_between
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.batch_hooks import Replan
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.runtime.stream_sinks import ExternalSinks
from streaming_jobs.sinks.stored import Content, StoredTable
from streaming_jobs.sinks.tables import all_tables, copied_table, existing_table, open_table, remove_tables, store_of
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state import savepoints
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.storage.files import sync, sync_tree
from streaming_jobs.storage.locations import Location
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.table_sources.topics import versions_of
from streaming_jobs.table_sources.versions import RebuiltRows, replaced_since
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

log = structlog.get_logger()

_PATIENCE = 15.0
"""Seconds without progress after which a replay says what it waits for."""
_FOLDER = "_at_the_border"
_WITH_FILES = 1
"""The version of a copied table from which on it has its files."""


def replay(context: RecoveryContext) -> Mapping[str, Any]:
    """Replay to the topics' end, or to the end of a bounded recovery and not further; returns the stage's findings.

    Raises PermanentError or TransientError, as the failure of the session was, and PermanentError for a replay that
    ended before the stream's last batch.
    """
    began, until = time.monotonic(), context.plan.until
    if until is None:
        border = border_of(context)
        steps = () if border is None else border.steps
        outcome, records = run_to(context, context.kept().ends, border, steps)
    else:
        row_by_row = RowByRow(context.replay_settings, context.stream)
        outcome, records = run_to(context, until.ends, row_by_row, bounded=True)
    assert outcome.last is not None
    return {
        "batch": outcome.last.batch,
        "seconds": round(time.monotonic() - began, 1),
        "records": records,
        "since": past_the_border(context, outcome.reached) if until is None else 0,
        "ends": {topic: dict(ends) for topic, ends in outcome.reached.items()},
    }


def run_to(
    context: RecoveryContext,
    ends: TopicOffsets,
    replan: Replan | None,
    steps: Sequence[TopicOffsets] = (),
    *,
    bounded: bool = False,
    external: ExternalSinks | None = None,
) -> tuple[ReplayResult, int]:
    """One session of the stream on its staging tables, to `ends` (`ReplaySession`), and the records replayed so far.

    `external` None: its records are appended to topics. Raises PermanentError or TransientError, as the failure of the
    session was.
    """
    plan = context.plan
    # The replay has folders of its own; archives are where the stream's tables are.
    archives = Archives(context.settings, void_for(context), rebuilt_rows(context))
    topics = (topic for topic in plan.saw.topics if not topic.continues)
    void = {topic.name: archives.void_of(context.stream, topic.name, topic.topic_id) for topic in topics}
    outcome = ReplaySession(
        context.replay_settings,
        context.stream,
        archives,
        ends,
        [each for each in context.record.generations if each.number <= plan.saw.generation],
        bounded=bounded,
        replan=replan,
        steps=steps,
        external=external,
        runtime=context.runtime,
    ).run(_ReplayWatch(context, void))
    if (failure := outcome.failure) is not None:
        raise failure.error(_next_step(plan.id, outcome, failure))
    return outcome, _read(plan, void, outcome.reached)


def _next_step(plan: str, outcome: ReplayResult, failure: ReplayFailure) -> str:
    if outcome.last is not None:  # it has ended elsewhere than planned
        return f"{failure.next_step}; give it up: {commands.abort(plan)}"
    if failure.permanent:
        return f"{commands.abort(plan)}, correct it, and plan again"
    return f"continue it: {commands.resume(plan)}"


class _ReplayWatch:
    """Reports a replay's progress, and refuses rules that cannot be evaluated on the table that it writes."""

    def __init__(self, context: RecoveryContext, void: Mapping[str, VoidRanges]) -> None:
        planned = context.plan.records
        self.context, self.void, self.rules_checked = context, void, False
        self.progress = ReplayProgress(context.events, planned, max(planned, _present(context, void)))

    def __call__(self, running: StreamRunner, batch: int | None) -> None:
        if not self.rules_checked:
            self.rules_checked = True
            table = existing_table(running.settings, running.stream.primary, running.stream.name)
            refuse_unaskable(table.readable(), self.context.plan.checks.rules)
        if batch is None or running.pipeline is None:
            return
        try:
            reached = running.pipeline.files.checkpoint.end(batch)
        except RecourseError:  # Spark is writing it
            return
        self.progress.reached(_read(self.context.plan, self.void, reached), batch)


@dataclass
class ReplayProgress:
    """Reports the records that a replay has read when they become more; if they do not, once what it waits for.

    `planned` were there when the plan was made, `total` are there now; `clock` gives seconds.
    """

    events: RecoveryEvents
    planned: int
    total: int
    clock: Callable[[], float] = time.monotonic
    _done: int = -1
    _moved: float = 0.0
    _waits: bool = False

    def reached(self, done: int, batch: int) -> None:
        if self._done < 0 and self.total > self.planned:
            more = counted(self.total - self.planned, "record", "has", "have")
            self.events.tell(f"  replay: {more} come since the plan was made, and are read too")
        if done != self._done:
            self._done, self._moved, self._waits = done, self.clock(), False
            self.events.progress(done, max(self.total, done))
        elif not self._waits and self.clock() - self._moved >= _PATIENCE:
            self._waits = True
            what = f"the commit of batch {batch + 1}" if done < self.total else "the end of its session"
            self.events.tell(f"  replay: it waits for {what}")


def _present(context: RecoveryContext, void: Mapping[str, VoidRanges]) -> int:
    """The records that the replay will read, as its topics end now; 0 if that is not known, or bounded by the plan."""
    saw = context.plan.saw.topics
    if context.plan.until is not None or any(topic.continues for topic in saw):
        return 0
    try:
        return _read(context.plan, void, {topic.name: context.topics.latest(topic.name) for topic in saw})
    except RecourseError as error:  # the session meets it too, and says so
        log.info("the ends of the topics are not known", reason=error.found)
        return 0


def _read(plan: StreamRecoveryPlan, void: Mapping[str, VoidRanges], reached: TopicOffsets) -> int:
    """The offsets from the replay's start to where it is, without void ones."""
    begins = {(topic, p): begin for topic, p, begin, _ in plan.ranges()}
    spans = {t: {p: (begins.get((t, p), 0), end) for p, end in each.items()} for t, each in reached.items()}
    return sum(end - begin for each in spans.values() for begin, end in each.values()) - sum(
        void[topic].count(each) for topic, each in spans.items() if topic in void
    )


def border_of(context: RecoveryContext) -> Border | None:
    """The border of a plan's replay: the end of the published tables, and for windows the start of their last batch.

    None if the replay cannot end there: it reads the content of a table from the beginning, and the table's log no
    longer shows what the content was then, or a recovery, a rebuilt slice or another program has replaced rows since.
    """
    savepoint, stopped = context.kept(), context.result("take_savepoint")
    before: TopicOffsets | None = None if context.whole.upstream(context.stream.name) else savepoint.ends
    if before is not None and stopped["batch"] == savepoint.batch:
        try:
            before = Checkpoint(savepoints.checkpoint_of(context.settings, savepoint)).start(savepoint.batch)
        except PreflightRefused:  # the savepoint's log does not reach back to the batch's beginning
            before = None
    border = Border.at(
        border_offsets(context),
        before if context.plan.stateful else None,
        context.stream,
        context.replay_settings,
        lambda: keep_tables(context),
        {each.table: (each.begin, each.end) for each in rebuilt_tables(context)},
    )
    return border if all(_can_end_at(context, step) for step in border.steps) else None


def rebuilt_rows(context: RecoveryContext) -> dict[str, RebuiltRows]:
    """By table that the stream reads and the plan rebuilds, what its replay reads in place of the wrong versions.

    Raises PreflightRefused if rows of records that came since the writer stopped cannot be told from the others.
    """
    found = {}
    for each in rebuilt_tables(context):
        assert context.other is not None, "the writer is a stream of the plan"
        writer = context.other(each.writer)
        if writer.result("replay").get("since") is None:
            raise PreflightRefused(
                f"the replay of stream {each.writer} has no batch that ends where its table {each.table} does",
                f"{commands.abort(context.plan.id)}, let the stream read one more batch, and plan again",
            )
        declared = next(table for table, _ in all_tables(writer.stream) if table.name == each.table)
        content = (kept_table(writer, declared) or writer.rebuilt_table(declared)).content()
        base, before = writer.base(), None
        if base is not None:
            before = savepoints.contents_of(context.settings, writer.stream, base).get(each.table)
        found[each.table] = RebuiltRows.of(each.begin, each.end, content, before)
    return found


def _can_end_at(context: RecoveryContext, step: TopicOffsets) -> bool:
    rebuilt = {each.table for each in rebuilt_tables(context)}
    for table in context.stream.tables_read:
        if table.name in rebuilt:
            continue
        end = step.get(table.name, {}).get(0, 0)
        if context.plan.base.ends.get(table.name, {}).get(0, 0) == 0 < end:
            versions = versions_of(context.settings, context.stream, table.name)
            if replaced_since(versions.table, versions.writer, end):
                return False
            try:
                versions.content(end - 1)
            except OffsetsLost:
                return False
    return True


def kept_table(context: RecoveryContext, declared: DeclaredTable) -> StoredTable | None:
    """A staging table as it was at the border; None if there is no border, or nothing was read past it."""
    kept = context.replay_settings.with_tables(context.beside(_FOLDER))
    return open_table(kept, declared, context.stream.name)


def keep_tables(context: RecoveryContext) -> None:
    """Copy the staging tables as they are now; an existing copy stays."""
    folder = context.beside(_FOLDER)
    if isinstance(folder, Path):
        if folder.is_dir():
            return
        partial = folder.with_name(f"{_FOLDER}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        _copy_staged(context, partial)
        partial.mkdir(parents=True, exist_ok=True)
        sync_tree(partial)  # every resume relies on what is there under the final name
        partial.replace(folder)
        sync(folder.parent)
    elif (kept := kept_table(context, context.stream.primary)) is None or kept.version < _WITH_FILES:
        remove_tables(folder, context.stream)
        _copy_staged(context, folder)


def _copy_staged(context: RecoveryContext, folder: Location) -> None:
    """Copy the staging tables, the primary one last: on a store, all copies are there once it has its files."""
    for declared, _ in reversed(list(all_tables(context.stream))):
        table = open_table(context.replay_settings, declared, context.stream.name)
        if table is not None:
            copied_table(context.replay_settings, folder, declared, context.stream.name, table.content())


def past_the_border(context: RecoveryContext, reached: TopicOffsets) -> int | None:
    """Records that the replay has read past the border; None if no tables were copied there."""
    since = offsets_between(border_offsets(context), reached)
    return None if since and kept_table(context, context.stream.primary) is None else since


def rows_past_the_border(context: RecoveryContext, reached: TopicOffsets) -> dict[str, Content]:
    """By table, the pieces of the staging tables from after the border; leaves out tables where they are unknown.

    They are unknown for a table with a batch from after the border: a kill happened between it and the primary table.
    """
    known = context.journal.done("take_savepoint") is not None
    past = past_the_border(context, reached) if known else None
    if past is None:
        return {}
    beyond = _with_rows_past_the_border(context)
    if lagged(context):  # streams of the plan have read up to the border, whatever the published tables had
        beyond |= {declared.name for declared, _ in all_tables(context.stream)} - set(context.plan.wrong_versions)
    staged = {name: table for name, table in context.staged().items() if name not in beyond}
    if past == 0:
        return {name: table.no_rows() for name, table in staged.items()}
    contents = {}
    for declared, _ in all_tables(context.stream):
        kept = kept_table(context, declared)
        if declared.mode == "append" and declared.name in staged:
            content = staged[declared.name].content()
            contents[declared.name] = content if kept is None else content.without(kept.content())
    return contents


def _with_rows_past_the_border(context: RecoveryContext) -> set[str]:
    """The published tables whose own newest batch ends past the border."""
    border = by_place(border_offsets(context))
    names = set()
    for declared, _ in all_tables(context.stream):
        commits = store_of(declared).commits(context.settings, declared)
        read = (c.entry for c in commits if c.moves(context.stream.name) and c.entry and c.entry.kind != "fence")
        newest = next(read, None)
        ends = {} if newest is None else by_place(ends_of(newest.offsets))
        if any(end > border.get(place, 0) for place, end in ends.items()):
            names.add(declared.name)
    return names


def replay_batches(context: RecoveryContext) -> dict[str, Any]:
    """The findings of a replay about batches: `replaced`, those after the plan's base, and `replayed`, its own."""
    kept = context.journal.done("take_savepoint") or {}
    up_to = Txn(context.plan.saw.generation, kept.get("batch", context.plan.saw.batch))
    up_to = up_to if context.plan.until is None else context.plan.until.txn
    own = ledger_file(context.replay_settings, context.plan.stream)
    replayed = own.after(context.plan.stream, None, at_most=READ + 1)
    return {
        "replaced": asdict(_series(_replaced(context, context.plan.base.after, up_to))),
        "replayed": asdict(_series(_batch(line.at, line.entry) for line in replayed)),
    }


def _replaced(context: RecoveryContext, after: Txn, up_to: Txn) -> Iterable[BatchRows]:
    days = ledger_file(context.settings, context.plan.stream).days(context.plan.stream)
    generations = [each for each in context.record.generations if each.number <= up_to.generation]
    for batch in lineage(generations, days).newest_first():
        if batch.txn <= after:
            return
        if batch.txn <= up_to:
            yield BatchRows(batch.at, batch.txn.batch, batch.rows, batch.records)


def _batch(at: float, entry: LedgerEntry) -> BatchRows:
    records = entry.records
    return BatchRows(at, entry.batch, entry.rows.get("written", 0), records)


def _series(newest_first: Iterable[BatchRows]) -> BatchSeries:
    batches = list(islice(newest_first, READ + 1))
    return BatchSeries.of(batches[:READ][::-1], cut=len(batches) > READ)


def border_words(context: RecoveryContext) -> str:
    """The moment of the replay that is compared with the published tables."""
    if context.plan.until is not None:
        return f"  compared as of batch {context.plan.until.batch}; the rows after it are not part of the difference"
    since = context.result("replay").get("since", 0)
    if since is None:
        return (
            "  the replay has no batch that ends where the published tables do: what came since shows as a difference"
        )
    if not since:
        return "  compared where the published tables end"
    came = counted(since, "record")
    return (
        f"  compared where the published tables end; {came} that came since {'is' if since == 1 else 'are'} rebuilt too"
    )
