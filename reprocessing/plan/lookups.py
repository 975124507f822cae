"""The tables that a replay looks up: at the versions that the batches which it repeats have looked up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from reprocessing.plan.history import CommittedBatch, lineage, within
from reprocessing.plan.plan import Base
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import entries
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from streaming_jobs.table_sources.lookups import LookupHistory


def first_run(
    settings: Settings, stream: Stream, generations: Sequence[Generation], begins: TopicOffsets
) -> LookupHistory | None:
    """What the batches have looked up that read records at or after `begins`, along the path to the last generation.

    None if the stream looks up nothing, or if a replay takes the newest versions.
    """
    if not stream.lookups or settings.for_stream(stream.name).replay_lookups == "newest":
        return None
    from streaming_jobs.table_sources.lookups import LookupChange, LookupHistory  # it needs Arrow and Spark

    batches = list[LookupChange]()
    for batch in _newest_first(settings, stream, generations):
        if batch.ends.keys() <= begins.keys() and within(batch.ends, begins):
            break
        batches.append(LookupChange(batch.ends, batch.lookups))
    return LookupHistory.of(reversed(batches))


def _newest_first(settings: Settings, stream: Stream, generations: Sequence[Generation]) -> Iterator[CommittedBatch]:
    """The batches; the last one may be missing in the ledger file, and is in the table."""
    history = lineage(generations, ledger_file(settings, stream.name).days(stream.name))
    last, known = history.last, {each.number for each in generations}
    for commit, entry in entries(store_of(stream.primary).commits(settings, stream.primary), 1):
        if entry.kind == "batch" and entry.generation in known and (last is None or last.txn < entry.txn):
            yield CommittedBatch.of(entry, commit.at / 1000, {})
    yield from history.newest_first()


def looked_up(settings: Settings, stream: Stream, generations: Sequence[Generation], start: Base) -> list[str]:
    """The versions that a replay will look up, in words; raises LookupVersionGone if the oldest one is gone."""
    if not stream.lookups:
        return []
    if (history := first_run(settings, stream, generations, start.ends)) is None:
        return [f"the replay looks up the newest version of {', '.join(each.name for each in stream.lookups.values())}"]
    from streaming_jobs.table_sources.lookups import Lookups

    words = []
    for name, table in Lookups(stream, settings).tables().items():
        versions = [change.versions[name] for change in history.changes if name in change.versions]
        if not versions:
            words.append(f"the replay looks up the newest version of table {name}: no batch had looked it up")
            continue
        oldest, newest = min(versions), max(versions)
        table.check(oldest)  # what it needs was taken out of the table before what later ones need
        span = f"version {oldest.version}" if oldest == newest else f"versions {oldest.version} to {newest.version}"
        words.append(f"the replay looks up table {name} at {span}, as the batches that it repeats did")
    return words
