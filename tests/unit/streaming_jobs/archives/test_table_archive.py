"""What an archive covers and gives, by record, ledger and table, without a broker; and when retention overtakes it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from streaming_jobs import Raw, Topology, UsageError, archive
from streaming_jobs.catalog.archive import COLUMNS, archive_of, columns, is_archive
from streaming_jobs.errors import TransientError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange
from streaming_jobs.preflight.doctor import archive_checks, check
from streaming_jobs.settings import Settings
from streaming_jobs.sources.record_blocks import HEADERS_ARROW
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Accepted
from streaming_jobs.storage.object_files import ObjectHandle
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, stream
from streaming_jobs.table_sources.archives import Archives, ReadableTopics
from streaming_jobs.table_sources.table_archive import TableArchive
from tests.support.memory_files import MemoryFiles
from tests.support.stream_on_disk import StreamOnDisk, append

TOPIC, TOPIC_ID = "archived-create", "topic-1"
KEEPER = archive(TOPIC, name="create_archive")
MS = 1_700_000_000_000


@stream(source=KafkaTopic(TOPIC, value=Raw()), sink=Declared("reader"))
def reader(records: Any) -> Any:
    """A stream of the topic."""
    return records


class Keeper(StreamOnDisk):
    """The archive, batch by batch: ten offsets of partition 0 and five of 1; each third offset has no record."""

    topic, topic_id, per_batch, columns = TOPIC, TOPIC_ID, {0: 10, 1: 5}, columns()

    def entry(self, batch: int, generation: int = 1) -> LedgerEntry:
        return LedgerEntry("batch", KEEPER.name, KEEPER.name, generation, batch, (self.offsets(batch),))

    def batch(self, number: int) -> None:
        ends, starts = self.ends(number)[TOPIC], self.ends(number - 1)[TOPIC]
        places = [(p, o) for p in ends for o in range(starts[p], ends[p]) if o % 3]
        append(self.stored(), rows(places), self.entry(number))

    @property
    def archive(self) -> TableArchive:
        record = StreamFolder.of(self.settings, KEEPER.name).record
        made = TableArchive(KEEPER.name, TOPIC, TOPIC_ID, self.settings.tables / KEEPER.name, record)
        return pickle.loads(pickle.dumps(made))  # type: ignore[no-any-return]


def rows(places: list[tuple[int, int]]) -> pa.Table:
    headers = [None if o % 2 else [{"key": "a", "value": b"1"}, {"key": "a", "value": None}] for _, o in places]
    return pa.table(
        {
            "topic": [TOPIC] * len(places),
            "partition": pa.array([p for p, _ in places], pa.int32()),
            "offset": pa.array([o for _, o in places], pa.int64()),
            "timestamp_ms": pa.array([MS + o * 1000 for _, o in places], pa.int64()),
            "timestamp_type": ["CreateTime"] * len(places),
            "key": pa.array([None if o % 4 else b"" for _, o in places], pa.binary()),
            "value": pa.array([None if o % 5 == 0 else b"v%d" % o for _, o in places], pa.binary()),
            "headers": pa.array(headers, HEADERS_ARROW),
        }
    )


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    settings = Settings.load({"home": tmp_path, "flows": ["tests.support.archived"]})
    made = Keeper(settings, KEEPER).make()
    for number in range(4):
        made.batch(number)
    return made


def read(from_archive: TableArchive, partition: int, start: int, end: int, most: int = 1000) -> list[dict[str, Any]]:
    parts = list(from_archive.read(partition, (start, end), most))
    assert all(0 < len(part) <= most for part in parts)
    return [row for part in parts for row in part.rows.to_pylist()]


def records_of(partition: int, offsets: range) -> list[dict[str, Any]]:
    made = rows([(partition, o) for o in offsets if o % 3])
    return list(made.drop_columns(["topic", "partition"]).to_pylist())


def test_it_covers_what_its_ledger_says_but_for_a_range_that_was_skipped(keeper: Keeper) -> None:
    assert keeper.archive.bounds() == {0: (0, 40), 1: (0, 20)}
    keeper.batch(4)
    assert keeper.archive.bounds() == {0: (0, 50), 1: (0, 25)}
    void: Mapping[str, Any] = {"topic": TOPIC, "partition": 0, "from": 12, "to": 17, "plan": "p", "generation": 2}
    keeper.save(replace(keeper.record, void_ranges=(void,)))
    assert keeper.archive.bounds() == {0: (17, 50), 1: (0, 25)}


def test_it_gives_the_records_of_a_range_in_order_and_none_twice_also_after_a_compaction(keeper: Keeper) -> None:
    expected = records_of(0, range(5, 33))
    assert read(keeper.archive, 0, 5, 33) == expected == read(keeper.archive, 0, 5, 33, most=4)
    table = DeltaTable(keeper.settings.tables / KEEPER.name)
    table.optimize.compact()
    assert len(table.file_uris()) == 2, "one file per partition"
    assert read(keeper.archive, 0, 5, 33) == expected
    assert read(keeper.archive, 1, 0, 1000) == records_of(1, range(20))
    assert read(keeper.archive, 0, 33, 34) == []


def test_only_files_of_the_range_are_read(keeper: Keeper) -> None:
    files = pa.table(DeltaTable(keeper.settings.tables / KEEPER.name).get_add_actions(flatten=True)).to_pylist()
    for file in files:
        if (file["partition.partition"], file["min.offset"]) != (0, 10):
            (keeper.settings.tables / KEEPER.name / file["path"]).unlink()
    assert [row["offset"] for row in read(keeper.archive, 0, 10, 20)] == [10, 11, 13, 14, 16, 17, 19]


@pytest.mark.parametrize("damage", ["other topic", "accepted", "foreign", "no record"])
def test_it_covers_nothing_if_what_it_has_is_not_known(keeper: Keeper, damage: str) -> None:
    table = keeper.settings.tables / KEEPER.name
    made = keeper.archive
    if damage == "other topic":
        made = replace(made, topic_id="topic-2")
    elif damage == "accepted":
        keeper.save(replace(keeper.record, accepted=(Accepted(KEEPER.name, 3, "a test", 0.0),)))
    elif damage == "foreign":
        DeltaTable(table).delete("offset = 4")
    else:
        made.record.delete()
    assert made.bounds() == {}


def test_a_fence_leaves_the_rows_and_a_publish_that_is_not_finished_has_to_be_waited_for(keeper: Keeper) -> None:
    table = keeper.stored()
    table.mark(LedgerEntry("fence", KEEPER.name, KEEPER.name, 2, -1, plan="p"))
    assert keeper.archive.bounds() == {0: (0, 40), 1: (0, 20)}
    table.mark(LedgerEntry("publish", KEEPER.name, KEEPER.name, 2, 3, (keeper.offsets(3),), plan="p"))
    with pytest.raises(TransientError, match="is being recovered by plan p"):  # nothing is lost: it passes
        keeper.archive.bounds()


def test_times_and_sizes_are_those_of_its_records_for_a_reader_of_the_topic_too(keeper: Keeper) -> None:
    spans = {0: (0, 30), 1: (0, 20)}
    assert keeper.archive.first_at(MS + 12_000, spans) == {0: 13, 1: 13}
    assert keeper.archive.first_at(MS + 19_500, spans) == {0: 20}
    assert keeper.archive.mean_size({0: 10, 1: 5}) == pytest.approx(2.3, abs=0.7)
    assert keeper.archive.mean_size({0: 1000}) is None
    topics = readable(keeper, {0: 35, 1: 20})
    assert topics.offsets_for_time(TOPIC, MS + 12_000) == {0: 13, 1: 13}
    assert topics.offsets_for_time(TOPIC, MS + 36_000) == {0: 36, 1: 36}
    assert topics.mean_size(TOPIC, {0: 0, 1: 20}) != 100.0 == topics.mean_size(TOPIC, {0: 35, 1: 20})


@dataclass
class Kafka:
    """The topic as Kafka has it: what is before `first` is gone."""

    first: Mapping[int, int]

    def describe(self, name: str) -> TopicInfo:
        return TopicInfo(name, TOPIC_ID, 2, -1, "delete")

    def offsets(self, name: str) -> OffsetBounds:
        return OffsetBounds(dict(self.first), self.latest(name))

    def latest(self, _: str) -> dict[int, int]:
        return {0: 60, 1: 60}

    def offsets_for_time(self, _: str, ms: int) -> dict[int, int]:
        return {p: max(first, (ms - MS) // 1000) for p, first in self.first.items()}

    def mean_size(self, _: str, starts: Mapping[int, int]) -> float:
        assert all(start >= self.first[p] for p, start in starts.items())
        return 100.0


def readable(keeper: Keeper, first: Mapping[int, int]) -> ReadableTopics:
    topics = Archives(keeper.settings).added_to(Kafka(first), reader)
    assert isinstance(topics, ReadableTopics)
    return topics


def test_a_topic_begins_where_its_archive_does_and_ends_are_those_of_its_own_topic(keeper: Keeper) -> None:
    offsets = readable(keeper, {0: 35, 1: 25}).offsets(TOPIC)
    assert (offsets.earliest, offsets.latest) == ({0: 0, 1: 25}, {0: 60, 1: 60}), "a hole parts partition 1"
    assert offsets.archived is not None and offsets.archived.first == {0: 35, 1: 25}
    other = OffsetRange("another", "x", {0: 0}, {0: 999})
    keeper.stored().mark(replace(keeper.entry(4), offsets=(other, keeper.offsets(4))))
    assert keeper.archive.bounds() == {0: (0, 50), 1: (0, 25)}


def test_an_archive_itself_and_a_stream_without_one_read_kafka_alone(keeper: Keeper) -> None:
    kafka = Kafka({0: 35, 1: 25})
    without = replace(reader, sources={"records": KafkaTopic("others", value=Raw())})
    for alone in (KEEPER, without):
        assert Archives(keeper.settings).added_to(kafka, alone) is kafka, "no further request to the broker"
    assert Archives(keeper.settings).of(KEEPER, TOPIC, TOPIC_ID) is None
    assert Archives(keeper.settings).of(reader, TOPIC, TOPIC_ID) is not None
    assert Archives(keeper.settings).of(reader, "another", TOPIC_ID) is None


def test_the_declaration_is_a_stream_that_refuses_nothing() -> None:
    (source,) = KEEPER.sources.values()
    assert (source.tombstones, source.headers, source.timestamp_type) == ("keep", True, True)
    assert columns().fieldNames() == list(COLUMNS) and KEEPER.primary.partition_by == ("partition",)
    assert is_archive(KEEPER) and not is_archive(reader)
    assert archive(KafkaTopic("flights", value=Raw())).name == "flights_archive"
    assert archive(KafkaTopic("flights", value=Raw(), cluster="eu")).name == "flights_eu_archive"
    with pytest.raises(UsageError, match="is not a table name"):
        archive("Flights.v2")
    with pytest.raises(UsageError, match="several archives"):
        archive_of(TOPIC, Topology.of([KEEPER, archive(TOPIC, name="second")]).streams.values())


ARCHIVE = TableArchive("a", "things", "x", Path("/nowhere"), ObjectHandle(MemoryFiles(), "none"))
KAFKA = OffsetBounds({0: 100, 1: 100}, {0: 200, 1: 200})


@pytest.mark.parametrize(
    ("position", "ok", "words"),
    [
        ({0: 200, 1: 200}, True, "has all records"),
        ({0: 110, 1: 200}, True, "10% or more"),
        ({0: 200, 1: 109}, None, "retention is near: 9% of the records in things partition 1"),
        ({0: 101, 1: 90}, False, "offsets 90 to 99 of things partition 1 were deleted"),
        ({0: 200}, True, "has all records"),
    ],
)
def test_the_nearest_partition_decides(position: dict[int, int], ok: bool | None, words: str) -> None:
    found = check(ARCHIVE, position, KAFKA)
    assert found.ok is ok and words in found.found
    assert ok or "recourse streams run a" in found.fix


def test_a_topic_without_records_is_no_reason() -> None:
    assert check(ARCHIVE, {0: 100}, OffsetBounds({0: 100}, {0: 100})).ok


def test_each_archive_that_has_run_has_a_line(tmp_path: Path) -> None:
    settings = Settings.load({"home": tmp_path, "flows": ["tests.support.archived"]})
    assert list(archive_checks(settings, Kafka({0: 0, 1: 0}))) == []
    keeper = Keeper(settings, KEEPER).make()
    assert [(line.ok, line.found) for line in archive_checks(settings, Kafka({0: 0}))] == [(None, "covers no offsets")]
    keeper.batch(0)
    (line,) = archive_checks(settings, Kafka({0: 5, 1: 5}))
    assert (line.name, line.ok) == (
        "archive create_archive",
        None,
    ) and "0% of the records in archived-create" in line.found
