"""A stream under test: records go in, rows come out, through the query that a session would run.

    def test_a_total_is_the_sum_of_the_payments(stream_test):
        test = stream_test(account_totals)
        test.send({"account": "a", "amount": 1.5, "at": NOON})      # a dict by the format, bytes as they are
        test.send(b"no JSON")
        test.run()
        assert test.rows() == [{"account": "a", "total": 1.5}]
        assert [letter["reason"] for letter in test.dead_letters()] == ["malformed_json"]

Planner, readers, decoder, rules, state, batches, ledger and Delta tables are the real ones. Kafka is replaced by topics
in a file, and by topics in memory for those that the stream writes; PostgreSQL by tables in memory. So a test has
nothing of a cluster or a database: no log-in, no retention, no transaction that fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.declare.format import Refusal
from streaming_jobs.declare.schemas import nullable
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.platform.failures import classify
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchReport
from streaming_jobs.runtime.crash_points import POINTS
from streaming_jobs.runtime.stream_queries import QueryHooks, RunningQuery, SparkQueries
from streaming_jobs.runtime.stream_sinks import DiscardedSinks, SinkOpening
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.kafka.writer import Discarded, TopicRecords
from streaming_jobs.sources.connection import Connection, remove_client_file
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.testing.topic import FileClients, MemoryRecord, MemoryTopic, MemoryTopics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from streaming_jobs.declare.postgres_table import PostgresTable
    from streaming_jobs.declare.topic_sink import KafkaSink
    from streaming_jobs.sinks.postgres.rows import DiscardedTable
    from streaming_jobs.stream import KafkaTopic, Stream
    from streaming_jobs.testing.postgres import MemoryPostgres

ENDS_WITHIN = 120.0
"""Seconds that a run may take, before it fails."""
Headers = Sequence[tuple[str, bytes | None]]


class Crashed(Exception):
    """Ends a batch at a crash point, as a kill would."""


@dataclass(frozen=True)
class WrittenRecord:
    """A record that the stream has written to a topic; `timestamp` is None if it is the time of writing."""

    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes | None]
    timestamp: datetime | None


@dataclass
class MemoryTopicWriter(Discarded):
    """The records of one topic sink, exactly once; what a topic has stays when the stream starts again."""

    into: dict[str, list[WrittenRecord]]
    newest: LedgerEntry | None = None

    @property
    def position(self) -> Txn | None:  # type: ignore[override]
        return None if self.newest is None else self.newest.txn

    def write(self, entry: LedgerEntry, records: TopicRecords) -> bool:
        if self.position is not None and self.position >= entry.txn:
            return False
        first = {topic: len(there) for topic, there in self.into.items()}
        for topic, key, value, headers, ms, _ in records:
            at = datetime.fromtimestamp(ms / 1000, UTC) if ms else None
            own = {name: content for name, content in headers if not name.startswith("recourse.")}
            self.into.setdefault(topic, []).append(WrittenRecord(key, value, own, at))
        grown = [(t, first.get(t, 0), len(there)) for t, there in self.into.items() if len(there) > first.get(t, 0)]
        ranges = tuple(WrittenRange(t, records.topic_ids[t], 0, begin, end, end - begin) for t, begin, end in grown)
        self.newest = replace(entry, written=ranges)
        return True


@dataclass
class MemorySinks(DiscardedSinks):
    """The topics and the tables of PostgreSQL of a stream, in memory."""

    written: dict[str, list[WrittenRecord]] = field(default_factory=dict)
    tables: dict[str, MemoryPostgres] = field(default_factory=dict)
    _writers: dict[str, MemoryTopicWriter] = field(default_factory=dict, init=False)

    def table(self, start: SinkOpening, name: str, declared: PostgresTable) -> DiscardedTable:
        from streaming_jobs.testing.postgres import MemoryPostgres, MemoryPostgresOutput

        judged = super().table(start, name, declared)
        kept = self.tables.setdefault(declared.name, MemoryPostgres())
        return MemoryPostgresOutput(declared, judged.schema, judged.folder, kept)

    def writer(self, sink: KafkaSink) -> Discarded:
        return self._writers.setdefault(sink.name, MemoryTopicWriter(self.written))


class _TopicsOfTest(MemoryTopics):
    """The topics that the stream reads, and each topic that it writes, whatever its name."""

    def describe(self, name: str) -> TopicInfo | None:
        return super().describe(name) or TopicInfo(name, "memory", 1)


class StreamTest:
    """One stream with folders of its own below `folder`; a method that reads shows what the last run has left.

    Each `run` is a start of the stream: it continues from the checkpoint, and ends when it has read all records.
    `settings`, such as `{"streams": {"my_stream": {"lateness": "1 minute"}}}`, are the only ones: neither a project's
    file nor the environment is read, so that no test writes to the tables that they name.
    `clock` is the timestamp of records that are sent without one.
    """

    def __init__(
        self,
        stream: Stream,
        spark: SparkSession,
        folder: Path,
        *,
        partitions: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if stream.tables_read:
            raise UsageError(
                f"stream {stream.name} reads table {stream.tables_read[0].name}; a StreamTest sends records of topics",
                "call the stream's function with frames of rows",
            )
        self.stream = _with_its_tables(stream)
        self.settings = Settings(**{"home": folder.absolute() / ".recourse", **(settings or {})})
        self.clock = datetime.now(UTC)
        self.batches: list[LedgerEntry] = []
        """The ledger entries of the batches that are done, the oldest first."""
        self._spark = spark
        self._sent: dict[str, dict[int, list[MemoryRecord]]] = {
            topic.name: {partition: [] for partition in range(partitions)} for topic in stream.topics
        }
        self._sinks = MemorySinks()
        self._crash: str | None = None
        self._runs = 0

    def send(
        self,
        value: Mapping[str, Any] | bytes | None,
        *,
        key: str | bytes | None = None,
        timestamp: datetime | None = None,
        headers: Mapping[str, bytes | None] | Headers = (),
        topic: str | None = None,
        partition: int = 0,
    ) -> None:
        """Add a record to a topic: a dict in the topic's format, bytes as they are, None for a tombstone.

        `topic` may be left out if the stream reads one. Raises UsageError for a topic or partition that is not there,
        and for a dict that the format does not write.
        """
        source = self._source(topic)
        partitions = self._sent[source.name]
        if partition not in partitions:
            raise UsageError(
                f"topic {source.name} has no partition {partition}", f"partitions={partition + 1} for the StreamTest"
            )
        content = _encoded(source, value) if isinstance(value, Mapping) else value
        pairs = tuple(headers.items()) if isinstance(headers, Mapping) else tuple(headers)
        ms = int((timestamp or self.clock).timestamp() * 1000)
        as_bytes = key.encode() if isinstance(key, str) else key
        partitions[partition].append(MemoryRecord(content, as_bytes, ms, pairs))

    def run(self) -> None:
        """Run the stream over the records that it has not read, up to the point of `crash_at` if there is one.

        Raises what a session would report, such as FunctionRaised, PreflightRefused or OutputMismatch.
        """
        point = self._crash
        topics = {name: MemoryTopic(name, sent) for name, sent in self._sent.items()}
        self._runs += 1
        home = self.settings.home
        home.mkdir(parents=True, exist_ok=True)
        # Without a class of this module, which Spark's processes would import with all that it needs, at each start.
        client = FileClients.save(MemoryTopics(topics), home / f"topics-{self._runs}")
        try:
            self._run(_TopicsOfTest(topics), client)
        finally:
            remove_client_file(client)
        if point is not None and self._crash is not None and point != POINTS[-1]:
            raise UsageError(f"no batch came to {point}: the stream had read all records", "send a record before `run`")
        self._crash = None

    def crash_at(self, point: str) -> None:
        """Let the next run end at a point of its first batch (`runtime/crash_points.py`), as if it had been killed.

        The run after that continues from what the batch has left.
        """
        if point not in POINTS:
            raise UsageError(f"'{point}' is not a point of a batch", f"the points are {', '.join(POINTS)}")
        self._crash = point

    def deploy(self, stream: Stream) -> None:
        """Let the next run have another version of the stream, on the same state and tables."""
        if stream.name != self.stream.name:
            raise UsageError(f"the test is of stream {self.stream.name}, not {stream.name}", "make a second StreamTest")
        self.stream = _with_its_tables(stream)

    def lookup(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the rows of a table that the stream looks up: the next batch that is planned reads them.

        Raises UsageError for a table that the stream does not look up, and for rows that do not fit its columns.
        """
        import pyarrow as pa
        from deltalake import write_deltalake
        from pyspark.sql.pandas.types import to_arrow_schema

        declared = next((each for each in self.stream.lookups.values() if each.name == table), None)
        if declared is None:
            named = ", ".join(each.name for each in self.stream.lookups.values()) or "(none)"
            raise UsageError(f"stream {self.stream.name} does not look up table {table}", f"it looks up {named}")
        columns = nullable(declared.columns)
        if unknown := {name for row in rows for name in row} - set(columns.fieldNames()):
            raise UsageError(f"table {table} has no column {', '.join(sorted(unknown))}", "correct the rows")
        try:
            content = pa.Table.from_pylist([dict(row) for row in rows], to_arrow_schema(columns, timezone="UTC"))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(f"these are no rows of table {table}: {error}", "correct them") from error
        write_deltalake(str(self.settings.tables / table), content, mode="overwrite")

    def rows(self, table: str | None = None) -> list[dict[str, Any]]:
        """The rows of a table of the stream, sorted by their columns; the primary table if none is named."""
        from deltalake.exceptions import TableNotFoundError

        from streaming_jobs.platform.table_rows import rows

        name = table or self.stream.primary.name
        if name not in self.stream.table_names:
            raise UsageError(f"{name} is no table of the stream", f"its tables: {', '.join(self.stream.table_names)}")
        try:
            return sorted(rows(self.settings.tables / name).to_pylist(), key=_order)
        except TableNotFoundError:
            return []

    def postgres(self, table: str | None = None) -> list[dict[str, Any]]:
        """The rows of a table of PostgreSQL, sorted by their columns; of the stream's only one if none is named."""
        names = [each.name for each in self.stream.postgres_tables.values()] if table is None else [table]
        if len(names) != 1:
            named = ", ".join(names) or "(none)"
            raise UsageError(f"stream {self.stream.name} writes the PostgreSQL tables {named}", "name one of them")
        kept = self._sinks.tables.get(names[0])
        return [] if kept is None else sorted(kept.rows(), key=_order)

    def dead_letters(self) -> list[dict[str, Any]]:
        """The dead letters, in the order of topic, partition and offset."""
        return self.rows(self.stream.dead_letters)

    def topic(self, name: str | None = None) -> list[WrittenRecord]:
        """The records that the stream has written to a topic, in their order; its only one if none is named."""
        names = [sink.name for sink in self.stream.topic_sinks.values()] if name is None else [name]
        if len(names) != 1:
            named = ", ".join(names) or "(none)"
            raise UsageError(f"stream {self.stream.name} writes the topics {named}", "name one of them: topic(NAME)")
        return list(self._sinks.written.get(names[0], []))

    @property
    def late(self) -> int:
        """The records that came behind the watermark and were left out of the state."""
        return sum(entry.rows.get("late", 0) for entry in self.batches)

    @property
    def watermark(self) -> datetime | None:
        """The watermark of the next batch; None before a record has moved it."""
        ms = self._checkpoint.next_watermark
        return datetime.fromtimestamp(ms / 1000, UTC) if ms else None

    def state(self, key: Any = None) -> list[dict[str, Any]]:
        """The entries of the stream's state, of one key or of all: operator, store, key, value."""
        from streaming_jobs.inspection.operator_state import entries_of

        return entries_of(self._spark, self._checkpoint, key)

    @property
    def _checkpoint(self) -> Checkpoint:
        record = stream_record.load(self.settings, self.stream.name) or stream_record.first(self.stream.name)
        return StreamFolder.of(self.settings, self.stream.name).checkpoint(record.generation)

    def _source(self, topic: str | None) -> KafkaTopic:
        found = [each for each in self.stream.topics if topic in (None, each.name)]
        if len(found) != 1:
            named = ", ".join(each.name for each in self.stream.topics)
            raise UsageError(f"stream {self.stream.name} reads the topics {named}", "name one of them: topic=...")
        return found[0]

    def _run(self, topics: MemoryTopics, client: Path) -> None:
        connection = Connection(client, topics, topics, FileClients())
        queries = SparkQueries(self.settings, connection=connection, external=self._sinks)
        checked = queries.preflight(self.stream)
        pipelines: list[BatchPipeline] = []
        hooks = QueryHooks("available-now", threading.Event(), partial(self._built, pipelines), self._done)
        launched = queries.launch(self._spark, self.stream, checked.snapshot, hooks)
        _wait(launched.query)
        pipeline = pipelines[0]
        failure = pipeline.failure or (None if pipeline.stopped_at_border else launched.query.exception())
        if failure is not None and not isinstance(failure, Crashed):
            raise classify(failure, rebuild=self.stream.rebuild_step())

    def _built(self, pipelines: list[BatchPipeline], pipeline: BatchPipeline) -> None:
        pipeline.hooks = replace(pipeline.hooks, at=self._at)
        pipelines.append(pipeline)

    def _at(self, point: str, stream: str, batch: int) -> None:
        if point == self._crash and batch >= 0:
            self._crash = None
            raise Crashed(f"{stream}, batch {batch}: {point}")

    def _done(self, report: BatchReport) -> None:
        others = [entry for entry in self.batches if entry.txn != report.entry.txn]
        self.batches = [*others, report.entry]


def _with_its_tables(stream: Stream) -> Stream:
    """The stream; the tables that it looks up are those of the test, wherever they are declared."""
    here = {parameter: replace(lookup, path=None) for parameter, lookup in stream.lookups.items()}
    return replace(stream, lookups=here) if stream.lookups else stream


def _wait(query: RunningQuery) -> None:
    deadline = time.monotonic() + ENDS_WITHIN
    while query.isActive or not query.ended:
        if time.monotonic() >= deadline:
            query.stop()
            raise TimeoutError(f"the stream had not read its records after {ENDS_WITHIN:g} s")
        time.sleep(0.02)


def _encoded(topic: KafkaTopic, value: Mapping[str, Any]) -> bytes | None:
    """The value by the topic's format; raises UsageError if that does not write, or refuses the value."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    written = getattr(topic.value, "writer", None)
    if written is None:
        raise UsageError(f"the format {type(topic.value).__name__} of topic {topic.name} does not write", "send bytes")
    schema = topic.value.schema
    if unknown := value.keys() - set(schema.fieldNames()):
        raise UsageError(f"topic {topic.name} has no field {', '.join(sorted(unknown))}", "correct it, or send bytes")
    try:
        row = pa.RecordBatch.from_pylist([dict(value)], to_arrow_schema(schema, timezone="UTC"))
        refused = (block := written().write(row)).refused.get(0)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        refused = Refusal("other_type", str(error))
    if refused is not None:
        raise UsageError(f"{dict(value)} is no record of topic {topic.name}: {refused.detail}", "send bytes for that")
    content: bytes | None = block.values[0]
    return content


def _order(row: Mapping[str, Any]) -> list[tuple[bool, Any]]:
    """A key to sort rows of one table: nulls first, then the values; what has no order by its text."""
    plain = (bool, int, float, str, bytes, date, Decimal)
    return [
        (value is not None, 0 if value is None else value if isinstance(value, plain) else repr(value))
        for value in row.values()
    ]
