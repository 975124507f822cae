"""What cannot be redriven, with the command that puts it right instead.

A redrive adds the rows of single records to tables that have those of all others already. So each row has to be made of
one record, whatever came before it. A topic, and a table of PostgreSQL, know only the stream's own batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from streaming_jobs.errors import UsageError
from streaming_jobs.stream import Stream
from streaming_jobs.verification.dead_letters import OF_ROWS

if TYPE_CHECKING:
    from reprocessing.redrive.selection import SetAside
    from streaming_jobs.runtime.spark_plan import PlanTraits


def check_stream(stream: Stream) -> None:
    """Raise UsageError for a stream whose records cannot be redriven, by its declaration alone."""
    again = f"rebuild its tables from before them: {stream.rebuild_step()}"
    if stream.tables_read:
        raise _refused(stream, f"reads table {stream.tables_read[0].name}, whose rows have no offset", again)
    if stream.external_words:
        found = (
            f"writes {stream.external_words[0]}: what is written there exactly once is the stream's batches, in order"
        )
        raise _refused(stream, found, again)
    for sink in stream.sinks.values():
        if sink.keys and not sink.order_by:
            raise _refused(
                stream,
                f"writes table {sink.name} by keys without an order: an old record would replace a newer row",
                f"declare order_by, or {again}",
            )
        if sink.delete_when:
            raise _refused(
                stream, f"deletes keys of table {sink.name}: a redrive adds rows, and remembers no deletes", again
            )
        if removing := [rule for _, rule in stream.rules_of(sink.name).unique if rule.on_fail != "warn"]:
            raise _refused(
                stream,
                f"has rule {removing[0].name}, which compares the rows of one batch, and a redrive has other batches",
                again,
            )


def with_state(stream: Stream, before: int = -1, why: str = "") -> UsageError:
    """The refusal of a stream that keeps state; `before`: the last batch before the records, -1 if unknown.

    `why` says why no slice of its tables is rebuilt instead.
    """
    again = f"rebuild its tables from before them: {stream.rebuild_step(before)}"
    return _refused(stream, f"keeps state: a row depends on other records too{why and '; ' + why}", again)


def check_plan(stream: Stream, traits: PlanTraits, *, of_rows: bool, in_slices: bool) -> None:
    """Raise UsageError for a function of today that keeps state, or of whose rows some are in the tables already.

    `of_rows`: single rows of records were set aside, not whole records. `in_slices`: slices are rebuilt from the
    records, which checks the plan itself.
    """
    if in_slices:
        return
    if traits.may_keep_state or traits.joins_streams:
        raise with_state(stream)
    if of_rows and traits.multiplies:
        raise _refused(
            stream,
            "makes several rows of a record, and the rows that were not set aside are in the table already",
            f"rebuild its tables: {stream.rebuild_step()}",
        )


def check_quarantined(stream: Stream, reasons: set[str]) -> None:
    """Raise UsageError if one of several tables refuses a row: which of them is not known."""
    if len(stream.output_names) > 1 and (refused := sorted(reasons & OF_ROWS)):
        raise _refused(
            stream,
            f"makes a row that one of its tables cannot hold ({', '.join(refused)}), and which one is not known",
            "choose other records (--offsets, --rule), or correct the function",
        )


def refused_rows(
    stream: Stream, rows: Sequence[SetAside], *, of_windows: bool = False
) -> Iterator[tuple[SetAside, str]]:
    """Yields what cannot be redriven by itself, with the reason."""
    topics = {topic.name for topic in stream.topics}
    for row in rows:
        if of_windows and not row.is_whole:
            yield row, f"it is a row of a window, and names no record: {stream.rebuild_step()}"
        elif row.place is None:
            yield row, "it does not name its record: let the function pass _source on"
        elif row.place[0] not in topics:
            yield row, f"the stream no longer reads topic {row.place[0]}"
        elif not row.is_whole and not row.rules and len(stream.output_names) > 1:
            yield row, "which of the stream's tables refused the row is not known"


def _refused(stream: Stream, found: str, next_step: str) -> UsageError:
    return UsageError(f"records of stream {stream.name} cannot be redriven: it {found}", next_step)
