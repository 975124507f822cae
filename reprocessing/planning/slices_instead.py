"""The command that rebuilds slices of a table in place of a bounded recovery, for streams with windows.

Spark's checkpoint has the watermark of each batch. A record that a batch has read lies after the watermark before it
(otherwise it was dropped), and no later than the watermark after it plus the delay. So the windows that depend on a
range of batches begin after the first of these, less their length, and end before the second.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

from reprocessing.planning.history import has_present_rows
from reprocessing.planning.sliceable import sliceable, tables_with_slices
from reprocessing.planning.snapshot import PlanningSnapshot
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.state import savepoints
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.text import commands


def slices_command(snapshot: PlanningSnapshot, after: Txn | None, end: Txn) -> str:
    """The command that rebuilds what depends on the records of the batches after one and up to another.

    Empty if no table of the stream has slices that can be rebuilt. Days are those of the slices' calendar.
    """
    tables = tables_with_slices(snapshot.stream)
    if not tables:
        return ""
    try:
        made = sliceable(snapshot.stream, tables[0])
    except UsageError:
        return ""
    zone, reach = made.slices.calendar, made.slices.distance
    lateness = snapshot.settings.for_stream(snapshot.stream.name).lateness
    delay = lateness if lateness is not None else made.topic.delay or timedelta(0)
    begin = made.slices.first_day
    if after is not None and (before := _watermark_until(snapshot, after)):
        begin = (_moment(before) - reach).astimezone(zone).date().isoformat()
    last = (_moment(_watermark_since(snapshot, end)) + delay).astimezone(zone).date() + timedelta(days=1)
    return commands.rebuild_slice(snapshot.stream.name, made.table.name, begin, last.isoformat())


def _watermark_until(snapshot: PlanningSnapshot, txn: Txn) -> int:
    """The watermark of a batch, or of the nearest one before it that is known; 0 without any. In ms since 1970."""
    checkpoint = StreamFolder.of(snapshot.settings, snapshot.stream.name).checkpoint(txn.generation)
    with suppress(RecourseError):
        return _watermark(checkpoint, txn.batch)
    for saved in reversed(snapshot.savepoints):
        if saved.txn <= txn and has_present_rows(snapshot.record.generations, saved.txn):
            return _watermark(Checkpoint(savepoints.checkpoint_of(snapshot.settings, saved)), saved.batch)
    return 0


def _watermark_since(snapshot: PlanningSnapshot, txn: Txn) -> int:
    """The watermark of the batch after a position, or, if that is not known, of the stream's newest one."""
    folder = StreamFolder.of(snapshot.settings, snapshot.stream.name)
    with suppress(RecourseError):
        return _watermark(folder.checkpoint(txn.generation), txn.batch + 1)
    checkpoint = folder.checkpoint(snapshot.record.generation)
    return _watermark(checkpoint, checkpoint.last_planned or 0)


def _watermark(checkpoint: Checkpoint, batch: int) -> int:
    return int(checkpoint.metadata(batch).get("batchWatermarkMs", 0))


def _moment(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
