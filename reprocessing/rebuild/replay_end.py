"""The moment of a replay at which its tables hold what the published ones should: where these end in the topics.

A replay reads to the topics' end, and records may have come since the stream stopped. They are no difference that a
recovery makes. So one of the replay's batches ends where the published tables' last batch did; where state is kept
under a watermark one also begins where that one did, since what a window emits depends on it. Before the batch after
that, what the staging tables hold is kept in tables beside them, and the audit compares those.

How: Spark has written `offsets/N` when it calls for batch N. If that batch would go past the border, its entry is
written anew with an end on the border, and the query begins again: Spark then runs batch N as the entry says.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from reprocessing.plans.plan_file import staging
from reprocessing.rebuild.context import RecoveryContext
from streaming_jobs.declared_table import DeclaredTable
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.files import sync, sync_tree, write_atomic
from streaming_jobs.positions import Place, TopicOffsets, by_place, by_topic, decode
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.state import savepoints
from streaming_jobs.state.checkpoint import Checkpoint

_FOLDER = "_at_the_border"


@dataclass(frozen=True)
class Border:
    """Called before each batch of a replay; True when the batch's entry was written anew.

    `steps` are offsets at which a batch has to end, in order; at the last one `keep` is called. With `empty_last` the
    published tables' last batch had no records: so there has to be one like it at the border. No batch is made larger
    than `largest` offsets.
    """

    steps: tuple[TopicOffsets, ...]
    empty_last: bool
    largest: int
    keep: Callable[[], None]

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """Look at the batch that is about to run."""
        start, end, border = (
            by_place(checkpoint.start(batch)),
            by_place(checkpoint.end(batch)),
            by_place(self.steps[-1]),
        )
        if set(end) != set(border) or any(start.get(place, 0) > offset for place, offset in border.items()):
            return False  # a new partition, or past it
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
        """True if the batch before, which ended at the border, had no records."""
        try:
            return batch > 0 and by_place(checkpoint.start(batch - 1)) == by_place(self.steps[-1])
        except PreflightRefused:  # the checkpoint begins with the batch before: a savepoint at the border
            return False

    def _share(self, start: Mapping[Place, int], target: Mapping[Place, int]) -> dict[Place, int]:
        """Where a batch from `start` towards `target` ends that reads no more than the largest."""
        left = {place: max(offset - start.get(place, 0), 0) for place, offset in target.items()}
        total = sum(left.values())
        if total <= self.largest:
            return dict(target)
        shares = {place: each * self.largest // total for place, each in left.items()}
        if not any(shares.values()):
            shares[max(left, key=lambda place: left[place])] = 1
        return {place: start.get(place, 0) + share for place, share in shares.items()}

    def _rewrite(self, checkpoint: Checkpoint, batch: int, ends: Mapping[Place, int]) -> bool:
        text = checkpoint.entry_ending_at(batch, by_topic(ends))
        log = checkpoint.folder / "offsets"
        (log / f".{batch}.crc").unlink(missing_ok=True)  # Hadoop's checksum is that of the old text
        write_atomic(log / str(batch), text)
        sync(log)
        return True


def border_of(context: RecoveryContext) -> Border:
    """The border of a plan's replay: where the published tables end, and for windows where their last batch began."""
    kept, found = context.kept(), context.found("keep")
    ends = decode(found["position"])
    before: TopicOffsets | None = kept.ends
    if found["batch"] == kept.batch:
        try:
            before = Checkpoint(savepoints.checkpoint_of(context.settings, kept)).start(kept.batch)
        except PreflightRefused:  # the savepoint's log does not reach back to the batch's beginning
            before = None
    own = context.own.for_stream(context.stream.name)
    steps: tuple[TopicOffsets, ...] = (ends,)
    empty = False
    watermark = any(topic.event_time is not None for topic in context.stream.sources.values())
    if context.plan.stateful and watermark and before is not None and set(by_place(before)) == set(by_place(ends)):
        empty = by_place(before) == by_place(ends)
        steps = (ends,) if empty else (before, ends)
    return Border(steps, empty, own.max_offsets_per_trigger, lambda: keep_tables(context))


def kept_table(context: RecoveryContext, declared: DeclaredTable) -> StoredTable | None:
    """A staging table as it was at the border; None where the replay has none, or has read nothing past it."""
    place = staging(context.settings, context.plan) / _FOLDER
    return open_table(_with_tables(context.own, place), declared, context.stream.name)


def _with_tables(settings: Settings, tables: Path) -> Settings:
    return settings.model_copy(update={"tables_dir": tables})


def keep_tables(context: RecoveryContext) -> None:
    """Keep the staging tables as they are now; what was kept already stays."""
    place = staging(context.settings, context.plan) / _FOLDER
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
    sync_tree(partial)  # what lies there under its last name is believed by every resume
    partial.replace(place)
    sync(place.parent)


def at_the_border(context: RecoveryContext, reached: TopicOffsets) -> int | None:
    """Records past the border that the replay has read, when the tables were kept there; None if it has no border."""
    border = by_place(decode(context.found("keep")["position"]))
    since = {place: offset - border.get(place, 0) for place, offset in by_place(reached).items()}
    if not any(since.values()):
        return 0
    return sum(since.values()) if kept_table(context, context.stream.primary) is not None else None
