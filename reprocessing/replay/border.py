"""The border of a replay: the offsets at which one of its batches has to end, so that tables can be compared there.

A replay reads records that arrived after the published tables' last batch. They are no difference that the new code
makes. So one of the replay's batches ends at the border, where that last batch ended; for state under a watermark, one
batch also begins where it began, since the rows of a window depend on it.

Spark has written `offsets/N` when it calls for batch N. If that batch would read past the border, its entry is written
anew with an end on the border, and the query is restarted: Spark then runs batch N by the new entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.positions import Place, TopicOffsets, by_place, by_topic
from streaming_jobs.platform.files import sync, write_atomic
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.spark_plan import not_row_by_row
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream


@dataclass(frozen=True)
class Border:
    """Called before each batch of a replay; returns True if it wrote the batch's entry anew.

    `steps` are offsets at which a batch has to end, in order; at the last one `at_border` is called. With `empty_last`
    the last batch of the published tables had no records, so the replay needs such a batch at the border too. No batch
    gets more than `largest` offsets, apart from the content of `tables` that it reads from version 0 on: one batch.
    """

    steps: tuple[TopicOffsets, ...]
    empty_last: bool
    largest: int
    at_border: Callable[[], None]
    tables: frozenset[str] = frozenset()

    @classmethod
    def at(
        cls,
        ends: TopicOffsets,
        before: TopicOffsets | None,
        stream: Stream,
        settings: Settings,
        at_border: Callable[[], None],
    ) -> Border:
        """The border at `ends`; `before` is where the last batch of the published tables began.

        `before` counts under a watermark only; None if the stream keeps no state, or if it is not known.
        """
        watermark = any(topic.event_time is not None for topic in stream.sources.values())
        steps: tuple[TopicOffsets, ...] = (ends,)
        empty_last = False
        if watermark and before is not None and set(by_place(before)) == set(by_place(ends)):
            empty_last = by_place(before) == by_place(ends)
            steps = (ends,) if empty_last else (before, ends)
        largest = settings.for_stream(stream.name).max_offsets_per_trigger
        return cls(steps, empty_last, largest, at_border, frozenset(table.name for table in stream.tables_read))

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """Check the batch that is about to run, and limit its end if necessary."""
        start, end = by_place(checkpoint.start(batch)), by_place(checkpoint.end(batch))
        border = by_place(self.steps[-1])
        if set(end) != set(border) or any(start.get(place, 0) > offset for place, offset in border.items()):
            return False  # a new partition, or past the border
        if all(start.get(place, 0) == offset for place, offset in border.items()):
            again = self._ended_here_before(checkpoint, batch)
            if self.empty_last and not again and end != border:
                return self._rewrite(checkpoint, batch, border)
            if again if self.empty_last else not again:
                self.at_border()
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

    replay_settings: Settings
    stream: Stream

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:  # noqa: ARG002 - of any batch
        """False: no batch is planned anew. Raises PreflightRefused if rows may depend on earlier records."""
        record = stream_record.existing(self.replay_settings, self.stream.name)
        nodes = output_plans.nodes(
            StreamFolder.of(self.replay_settings, self.stream.name).output_plans,
            {code.hash for code in record.code[-1:]},
        )
        if others := not_row_by_row(nodes, len(self.stream.sources)):
            raise PreflightRefused(
                f"the code of stream {self.stream.name} has operators that keep state, or may keep it: "
                f"{', '.join(others)}",
                "rows after the end of a bounded recovery may depend on records before it: plan again without --until",
            )
        return False
