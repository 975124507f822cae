"""The lag of one stream in detail: records by partition, and the age of the oldest unread record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestration.cli.output import ago, number, print_table, say
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from orchestration.cli.invocation import Invocation
    from orchestration.cli.observed import Observed
    from streaming_jobs.runtime.lag import PartitionLag, Unread

_SHOWN = 40
"""Partitions that are printed, those with the most unread records."""
_COLUMNS = ["topic", "partition", "next offset", "end", "lag", "oldest unread", "age"]


def unread_now(call: Invocation, observed: Sequence[Observed]) -> dict[str, Unread]:
    """What the streams have not read; nothing where no broker answers, or the code on disk cannot be loaded."""
    seen = [o.stream for o in observed if o.status is not None and o.lag_is_fresh]
    if not seen:
        return {}
    try:
        streams = [call.topology[name] for name in seen]
    except UsageError:  # without its code, the topics of a stream are not known
        return {}
    from streaming_jobs.runtime.lag import unread_now as look  # it loads the Kafka client

    return look(call.settings, streams)


def print_unread(observed: Observed, unread: Unread | None) -> None:
    """Print the partitions of a stream; without a broker the last known records of each, with their age."""
    if unread is None:
        _print_last_known(observed)
        return
    from reprocessing.planning.instants import instant_words

    age, unit = unread.oldest_age, unread.unit
    if not unread.records:
        say(f"{observed.stream}: everything in its {'tables' if unit == 'version' else 'topics'} is read")
    elif age is None or unread.oldest is None:
        say(f"{observed.stream}: {unread.records:,} {unit}s unread; none of them could be read within two seconds")
    else:
        say(
            f"{observed.stream}: {unread.records:,} {unit}s unread; by timestamps the oldest is of "
            f"{instant_words(unread.oldest)}, {ago(age)} old"
        )
    shown = sorted(unread.partitions, key=lambda each: -each.records)[:_SHOWN]
    rows = [_row(each, unread.at) for each in sorted(shown, key=lambda each: (each.topic, each.partition))]
    print()
    print_table(_COLUMNS, rows, right=_COLUMNS[1:5])
    if len(unread.partitions) > _SHOWN:
        say(f"{len(unread.partitions) - _SHOWN} more partitions, with fewer unread records: -o json has all of them")


def _row(each: PartitionLag, at: float) -> list[str]:
    from reprocessing.planning.instants import instant_words

    oldest = ["not read in time", "?"] if each.oldest is None else [instant_words(each.oldest), ago(at - each.oldest)]
    return [
        each.topic,
        str(each.partition),
        number(each.position),
        number(each.end),
        number(each.records),
        *(oldest if each.records else ["-", "-"]),
    ]


def _print_last_known(observed: Observed) -> None:
    status = observed.status
    if status is None or not status.lag_partitions or observed.lag_age is None:
        return
    say(
        f"{observed.stream}: the end of its topics cannot be seen; the lag by partition {ago(observed.lag_age)} ago was"
    )
    rows = [
        [topic, partition, number(records)]
        for topic, each in sorted(status.lag_partitions.items())
        for partition, records in sorted(each.items(), key=lambda pair: int(pair[0]))
    ]
    print()
    print_table(["topic", "partition", "lag"], rows[:_SHOWN], right=["partition", "lag"])
