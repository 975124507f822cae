"""Whether a topic's retention is about to overtake its archive: Kafka deletes what the archive has not read yet.

Of the records that Kafka has, the archive has not read `unread`. If these are more than nine tenths of them, there is
little time left; once the archive's position is before Kafka's first offset, records are lost to both.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from streaming_jobs.archives.declaration import is_archive
from streaming_jobs.archives.table_archive import TableArchive
from streaming_jobs.errors import RecourseError
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.platform.doctor import Check
from streaming_jobs.positions import OffsetBounds
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.topology import Topology

MARGIN = 0.1
"""The share of the records in Kafka that an archive should have read, at least."""
_ASK = timedelta(seconds=5)


def nearest(position: dict[int, int], kafka: OffsetBounds) -> tuple[int, float] | None:
    """The partition in which retention is nearest to the archive, and the share of its records that are read.

    Below 0 it has overtaken the archive. None if everything is read, or Kafka holds nothing. Partitions that the
    archive has nothing of are left out.
    """
    shares = {}
    for partition, at in position.items():
        first, end = kafka.earliest.get(partition, 0), kafka.latest.get(partition, 0)
        if at < first:
            shares[partition] = -1.0
        elif at < end:
            shares[partition] = (at - first) / (end - first)
    return min(shares.items(), key=lambda item: item[1], default=None)


def check(archive: TableArchive, position: dict[int, int], kafka: OffsetBounds) -> Check:
    """The doctor's line about one archive."""
    found, fix = nearest(position, kafka), f"let it read more quickly: recourse streams run {archive.stream}"
    name = f"archive {archive.stream}"
    if found is None:
        return Check(name, True, f"has all records of {archive.topic}")
    partition, share = found
    where = f"{archive.topic} partition {partition}"
    if share < 0:
        first, at = kafka.earliest.get(partition, 0), position.get(partition, 0)
        lost = f"offsets {at} to {first - 1} of {where} were deleted before they were archived"
        return Check(name, False, lost, f"see the next start: recourse streams run {archive.stream}")
    if share < MARGIN:
        return Check(name, None, f"retention is near: {share:.0%} of the records in {where} are archived", fix)
    return Check(name, True, f"{share:.0%} or more of the records in each partition of {archive.topic} are archived")


def checks(settings: Settings, topics: TopicReader | None = None) -> Iterator[Check]:
    """Yields a line about each declared archive that has run; none if the streams cannot be loaded."""
    try:
        archives = [each for each in Topology.load(settings.flows).streams.values() if is_archive(each)]
        if archives and topics is None:
            topics = _topics(settings)
    except RecourseError:  # other lines of the doctor say so
        return
    for declared in archives:
        (source,) = declared.topics
        record = StreamFolder.of(settings, declared.name).record
        try:
            assert topics is not None
            info = topics.describe(source.name)
            if info is None or not record.exists():
                continue
            table = settings.tables / declared.primary.name
            archive = TableArchive(declared.name, source.name, info.id, table, record)
            position = {partition: end for partition, (_, end) in archive.bounds().items()}
            if not position:
                yield Check(f"archive {declared.name}", None, "covers no offsets", "see docs/archive.md, Limits")
                continue
            yield check(archive, position, topics.offsets(source.name))
        except RecourseError as error:
            yield Check(f"archive {declared.name}", None, error.found, error.next_step)


def _topics(settings: Settings) -> TopicReader:
    from streaming_jobs.sources.connection import client_config
    from streaming_jobs.sources.topics import Topics

    return Topics(client_config(settings.kafka, bootstrap_servers(settings)), _ASK)
