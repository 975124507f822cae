"""The border of a replay: the offsets at which the published tables end, and the comparison of tables there.

A replay reads to the topics' end, and records may have arrived since the stream stopped. They are no difference that
the recovery makes. So one of the replay's batches ends at the border, where the last batch of the published tables
ended. For state under a watermark, one batch also begins where that last batch began, since the rows of a window depend
on it. Before the batch after the border, the content of the staging tables is copied to tables beside them, and the
audit compares those.

For this, Spark has written `offsets/N` when it calls for batch N. If that batch would read past the border, its entry
is written anew with an end on the border, and the query is restarted: Spark then runs batch N by the new entry.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from reprocessing.plans.plan import StreamPlan
from reprocessing.plans.plan_file import staging_folder
from reprocessing.rebuild.context import RecoveryContext
from reprocessing.rebuild.void import border_offsets, lagged
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import OffsetsLost, PermanentError, PreflightRefused
from streaming_jobs.ledger.positions import Place, TopicOffsets, by_place, by_topic, ends_of
from streaming_jobs.platform.files import sync, sync_tree, write_atomic
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.spark_plan import not_row_by_row
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Content, StoredTable
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.topics import versions_of
from streaming_jobs.table_sources.versions import replaced_since
from streaming_jobs.text import commands

_FOLDER = "_at_the_border"


@dataclass(frozen=True)
class Border:
    """Called before each batch of a replay; returns True if it wrote the batch's entry anew.

    `steps` are offsets at which a batch has to end, in order; at the last one `keep` is called. With `empty_last` the
    last batch of the published tables had no records, so the replay needs such a batch at the border too. No batch is
    made larger than `largest` offsets, beside the content of `tables` that it reads from version 0 on: that is one.
    """

    steps: tuple[TopicOffsets, ...]
    empty_last: bool
    largest: int
    keep: Callable[[], None]
    tables: frozenset[str] = frozenset()

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """Check the batch that is about to run, and limit its end if necessary."""
        start, end, border = (
            by_place(checkpoint.start(batch)),
            by_place(checkpoint.end(batch)),
            by_place(self.steps[-1]),
        )
        if set(end) != set(border) or any(start.get(place, 0) > offset for place, offset in border.items()):
            return False  # a new partition, or past the border
        if all(start.get(place, 0) == offset for place, offset in border.items()):
            again = self._ended_here_before(checkpoint, batch)
            if self.empty_last and not again and end != border:
                return self._rewrite(checkpoint, batch, border)
            if again if self.empty_last else not again:
                self.keep()
            return False
        target = next(
            step for step in map(by_place, self.steps) if any(start.get(place, 0) < step[place] for place in step)
        )
        if all(end[place] <= offset for place, offset in target.items()):
            return False
        return self._rewrite(checkpoint, batch, self._share(start, target))

    def _ended_here_before(self, checkpoint: Checkpoint, batch: int) -> bool:
        """True if the batch before, which ended at the border, began there too."""
        try:
            return batch > 0 and by_place(checkpoint.start(batch - 1)) == by_place(self.steps[-1])
        except PreflightRefused:  # the checkpoint begins with the batch before: a savepoint at the border
            return False

    def _share(self, start: Mapping[Place, int], target: Mapping[Place, int]) -> dict[Place, int]:
        """The end of a batch from `start` towards `target` with at most `largest` offsets."""
        whole = {place for place in target if place[0] in self.tables and start.get(place, 0) == 0}
        left = {place: max(end - start.get(place, 0), 0) for place, end in target.items() if place not in whole}
        total = sum(left.values())
        if total <= self.largest:
            return dict(target)
        shares = {place: each * self.largest // total for place, each in left.items()}
        if not any(shares.values()):
            shares[max(left, key=lambda place: left[place])] = 1
        return {place: end if place in whole else start.get(place, 0) + shares[place] for place, end in target.items()}

    def _rewrite(self, checkpoint: Checkpoint, batch: int, ends: Mapping[Place, int]) -> bool:
        text = checkpoint.entry_ending_at(batch, by_topic(ends))
        log = checkpoint.folder / "offsets"
        (log / f".{batch}.crc").unlink(missing_ok=True)  # Hadoop's checksum is that of the old text
        write_atomic(log / str(batch), text)
        sync(log)
        return True


@dataclass(frozen=True)
class RowByRow:
    """Called before each batch of a bounded replay: its code must make each row of one record, and keep no state."""

    own: Settings
    stream: Stream

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:  # noqa: ARG002 - of any batch
        """False: no batch is planned anew. Raises PreflightRefused if rows may depend on earlier records."""
        record = stream_record.load(self.own, self.stream.name)
        assert record is not None
        nodes = output_plans.nodes(
            StreamFolder.of(self.own, self.stream.name).output_plans, {code.hash for code in record.code[-1:]}
        )
        if others := not_row_by_row(nodes, len(self.stream.sources)):
            raise PreflightRefused(
                f"the code of stream {self.stream.name} has operators that keep state, or may keep it: "
                f"{', '.join(others)}",
                "rows after the end of a bounded recovery may depend on records before it: plan again without --until",
            )
        return False


def border_of(context: RecoveryContext) -> Border | None:
    """The border of a plan's replay: the end of the published tables, and for windows the start of their last batch.

    None if the replay cannot end there: it reads the content of a table from the beginning, and the table's log no
    longer shows what the content was then, or a recovery, a rebuilt slice or another program has replaced rows since.
    """
    savepoint, findings = context.kept(), context.found("keep")
    ends = border_offsets(context)
    before: TopicOffsets | None = None if context.whole.upstream(context.stream.name) else savepoint.ends
    if before is not None and findings["batch"] == savepoint.batch:
        try:
            before = Checkpoint(savepoints.checkpoint_of(context.settings, savepoint)).start(savepoint.batch)
        except PreflightRefused:  # the savepoint's log does not reach back to the batch's beginning
            before = None
    stream_settings = context.own.for_stream(context.stream.name)
    watermark = any(topic.event_time is not None for topic in context.stream.sources.values())
    steps, empty = steps_to(ends, before if context.plan.stateful and watermark else None)
    if not all(_can_end_at(context, step) for step in steps):
        return None
    tables = frozenset(table.name for table in context.stream.tables_read)
    return Border(steps, empty, stream_settings.max_offsets_per_trigger, lambda: keep_tables(context), tables)


def _can_end_at(context: RecoveryContext, step: TopicOffsets) -> bool:
    for table in context.stream.tables_read:
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


def steps_to(ends: TopicOffsets, before: TopicOffsets | None) -> tuple[tuple[TopicOffsets, ...], bool]:
    """The steps of a border at `ends`, and whether its last batch is empty.

    `before` is where the last batch of the published tables began; None if that does not matter, or is not known.
    """
    if before is None or set(by_place(before)) != set(by_place(ends)):
        return (ends,), False
    if by_place(before) == by_place(ends):
        return (ends,), True
    return (before, ends), False


def check_end(plan: StreamPlan, reached: TopicOffsets, before: TopicOffsets) -> None:
    """Raise PermanentError if a replay ended before the stream's last batch, `before`.

    That of a bounded recovery has to end exactly at its end: a later record would be in the tables twice.
    """
    wanted, at = by_place(before if plan.until is None else plan.until.ends), by_place(reached)
    short = [place for place, end in wanted.items() if at.get(place, 0) < end]
    beyond = [place for place, end in wanted.items() if plan.until is not None and at.get(place, 0) > end]
    if short or beyond:
        (topic, partition), *_ = short or beyond
        how = "before" if short else "after"
        raise PermanentError(
            f"the replay ended at {at.get((topic, partition), 0)} of topic {topic}, partition {partition}, {how} where "
            f"it was to end, {wanted[topic, partition]}",
            f"{'records are missing from the topic; ' if short else ''}abort: {commands.abort(plan.id)}",
        )


def kept_table(context: RecoveryContext, declared: DeclaredTable) -> StoredTable | None:
    """A staging table as it was at the border; None if there is no border, or nothing was read past it."""
    place = staging_folder(context.settings, context.plan) / _FOLDER
    return open_table(_with_tables(context.own, place), declared, context.stream.name)


def _with_tables(settings: Settings, tables: Path) -> Settings:
    return settings.model_copy(update={"tables_dir": tables})


def keep_tables(context: RecoveryContext) -> None:
    """Copy the staging tables as they are now; an existing copy stays."""
    place = staging_folder(context.settings, context.plan) / _FOLDER
    if place.is_dir():
        return
    partial = place.with_name(f"{_FOLDER}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for declared, _ in all_tables(context.stream):
        table = open_table(context.own, declared, context.stream.name)
        if table is not None:
            store_of(declared).create(
                _with_tables(context.own, partial), declared, context.stream.name, table.content(), None
            )
    partial.mkdir(parents=True, exist_ok=True)
    sync_tree(partial)  # every resume relies on what is there under the final name
    partial.replace(place)
    sync(place.parent)


def at_the_border(context: RecoveryContext, reached: TopicOffsets) -> int | None:
    """Records that the replay has read past the border; None if no tables were copied there."""
    border = by_place(border_offsets(context))
    since = {place: offset - border.get(place, 0) for place, offset in by_place(reached).items()}
    if not any(since.values()):
        return 0
    return sum(since.values()) if kept_table(context, context.stream.primary) is not None else None


def rows_past_the_border(context: RecoveryContext, reached: TopicOffsets) -> dict[str, Content]:
    """By table, the pieces of the staging tables that came after the border; without tables where that is not known.

    It is not known for a table that has a batch from after the border: a kill came between it and the primary table.
    """
    known = context.journal.done("keep") is not None and not lagged(context)
    past = at_the_border(context, reached) if known else None
    if past is None:
        return {}
    beyond = _with_rows_past_the_border(context)
    staged = {name: table for name, table in context.staged().items() if name not in beyond}
    if past == 0:
        return {name: table.no_rows() for name, table in staged.items()}
    found = {}
    for declared, _ in all_tables(context.stream):
        kept = kept_table(context, declared)
        if declared.mode == "append" and declared.name in staged:
            content = staged[declared.name].content()
            found[declared.name] = content if kept is None else content.without(kept.content())
    return found


def _with_rows_past_the_border(context: RecoveryContext) -> set[str]:
    """The published tables whose own newest batch ends past the border."""
    border = by_place(border_offsets(context))
    found = set()
    for declared, _ in all_tables(context.stream):
        commits = store_of(declared).commits(context.settings, declared)
        read = (c.entry for c in commits if c.moves(context.stream.name) and c.entry and c.entry.kind != "fence")
        newest = next(read, None)
        ends = {} if newest is None else by_place(ends_of(newest.offsets))
        if any(end > border.get(place, 0) for place, end in ends.items()):
            found.add(declared.name)
    return found
