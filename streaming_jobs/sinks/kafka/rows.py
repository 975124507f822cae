"""Rows of a stream's output as records of a topic: the columns, and the verdict on every row, before anything is sent.

| reason              | row                                                                                          |
|---------------------|----------------------------------------------------------------------------------------------|
| those of the format | there is no value that the topic's readers would read back equal (`docs/json.md`)            |
| `unknown_topic`     | the topic that the row names does not exist, or the stream reads it, or another sink or      |
|                     | another declared stream writes it; and the sink is declared with `dead_letter`               |
| `too_large`         | key, value and headers are larger than the topic or `topic_sink.max_record_kb` allows        |
| `null_key`          | the topic is compacted, and the row has no key                                               |
| `time_out_of_range` | its timestamp is not after 1970-01-01: Kafka has no such time                                |
| `nameless_header`   | a header without a name                                                                      |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from streaming_jobs.declare.columns import DETAIL_COLUMN, REASON_COLUMN, SOURCE_COLUMN
from streaming_jobs.declare.format import BlockWriter
from streaming_jobs.declare.names import cluster_of, in_cluster, is_topic_name
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import OutputMismatch, PermanentError, RecourseError
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.kafka.clients import NO_LIMIT
from streaming_jobs.sinks.kafka.producer import Header, Record
from streaming_jobs.sources.topics import UNKNOWN_FOR, TopicInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The columns beside a record's value, by row: key, headers, timestamp and topic.

KEY, HEADERS, TIMESTAMP, ROUTE = "__key", "__headers", "__timestamp", "__route"
PLACE = ("__topic", "__partition", "__offset")
RECORD_OVERHEAD, HEADER_OVERHEAD = 100, 10
"""Bytes that Kafka's format adds at most to a record alone in its batch, and to a header."""
_SOURCE = "recourse.source"


class RecordColumns:
    """The columns of a block of rows; rows without a route go to `topic`, others to a topic of its cluster.

    All have the `fixed` headers, and those `of_values`, which belong to the format.
    """

    def __init__(
        self, rows: pa.RecordBatch, topic: str, fixed: Sequence[Header], of_values: Sequence[Header] = ()
    ) -> None:
        self._rows = rows
        self._names = frozenset(rows.schema.names)
        self._topic = topic
        self._fixed = [*fixed, *of_values]
        self.keys: Sequence[bytes | None] = self._list(KEY)
        self.times: Sequence[int | None] = self._list(TIMESTAMP)
        self._own = rows.column(HEADERS).to_pylist() if HEADERS in self._names else None
        self._sources = self._source_headers() if self._names.issuperset(PLACE) and fixed else None

    @cached_property
    def topics(self) -> Sequence[str]:
        if ROUTE not in self._names:
            return [self._topic] * self._rows.num_rows
        routes: list[str | None] = self._rows.column(ROUTE).to_pylist()
        cluster = cluster_of(self._topic)
        return [in_cluster(route, cluster) if route else self._topic for route in routes]

    def headers(self, row: int) -> list[Header]:
        """The headers of a record: those of the batch, its source position, its own."""
        headers = list(self._fixed)
        if self._sources is not None and (source := self._sources[row]) is not None:
            headers.append((_SOURCE, source))
        if self._own is not None and self._own[row]:
            headers += [(header["key"], header["value"]) for header in self._own[row] if header is not None]
        return headers

    def records(self, values: Sequence[bytes | None]) -> Iterator[Record]:
        """The records of all rows, made without a step of Python per row where the headers are the same."""
        alike = self._sources is None and self._own is None
        headers = repeat(self._fixed) if alike else map(self.headers, range(self._rows.num_rows))
        topics = self.topics if ROUTE in self._names else repeat(self._topic)
        times = [time or 0 for time in self.times] if TIMESTAMP in self._names else repeat(0)
        return zip(topics, self.keys, values, headers, times, repeat(-1))

    def most_bytes(self, values: Sequence[bytes | None]) -> int | None:
        """What none of the records is larger than; None if rows have headers of their own, which are not looked at."""
        if self._own is not None:
            return None
        longest = max((len(value) for value in values if value is not None), default=0)
        if KEY in self._names:
            longest += pc.max(pc.binary_length(self._rows.column(KEY))).as_py() or 0
        longest += sum(len(name.encode()) + len(content or b"") + HEADER_OVERHEAD for name, content in self._fixed)
        if self._sources is not None:
            longest += max((len(source) for source in self._sources if source is not None), default=0)
            longest += len(_SOURCE) + HEADER_OVERHEAD
        return longest + RECORD_OVERHEAD

    def _list(self, name: str) -> list[Any]:
        values: list[Any] = self._rows.column(name).to_pylist() if name in self._names else [None] * self._rows.num_rows
        return values

    def _source_headers(self) -> Sequence[bytes | None]:
        """`topic/partition/offset`; None for a row without one."""
        parts = [self._rows.column(name).cast(pa.string()) for name in PLACE]
        joined: list[bytes | None] = pc.binary_join_element_wise(*parts, "/").cast(pa.binary()).to_pylist()
        return joined


log = structlog.get_logger()

_HEADERS_TYPE = "array<struct<key:string,value:binary>>"
_BLOCK = 10_000
_SURE_OF = 5
"""The number of unknown topics per batch that are looked up until the answer is certain, half a second each."""


def fitted(sink: KafkaSink, output: DataFrame) -> DataFrame:
    """The value's columns, then key, headers, timestamp, route and source position; raises as `check_columns`."""
    from pyspark.sql import functions as F

    check_columns(sink, output)
    columns = [F.col(f"`{name}`") for name in sink.topic.value.schema.fieldNames()]
    if sink.key is not None:
        columns.append(F.col(f"`{sink.key}`").cast("binary").alias(KEY))
    if sink.headers is not None:
        headers = F.col(f"`{sink.headers}`")
        entries = F.map_entries(headers) if _kind(output, sink.headers) == "map" else headers
        columns.append(entries.cast(_HEADERS_TYPE).alias(HEADERS))
    if sink.timestamp is not None:
        columns.append(F.unix_millis(F.col(f"`{sink.timestamp}`")).alias(TIMESTAMP))
    if sink.route is not None:
        columns.append(F.col(f"`{sink.route}`").alias(ROUTE))
    if SOURCE_COLUMN in output.columns:
        columns += [F.col(f"{SOURCE_COLUMN}.{name.strip('_')}").alias(name) for name in PLACE]
    return output.select(*columns)


def check_columns(sink: KafkaSink, output: DataFrame) -> None:
    """Raise OutputMismatch for a column that is missing, not declared, or of another type."""
    schema = sink.topic.value.schema
    wanted = {f.name: f.dataType.simpleString() for f in schema.fields}
    there = {f.name: f.dataType.simpleString() for f in output.schema.fields}
    missing = [name for name in (*wanted, *sink.own_columns) if name not in there]
    known = {*wanted, *sink.own_columns, SOURCE_COLUMN}
    unknown = [name for name in there if name not in known]
    if missing or unknown:
        words = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)} too"] * bool(unknown)
        raise OutputMismatch(
            f"the output for topic {sink.name} {' and '.join(words)}; its value has {', '.join(wanted)}",
            "return the columns of the topic's value, and those that the sink names",
        )
    for name, kind in wanted.items():
        if there[name] != kind:
            raise OutputMismatch(
                f"column {name} for topic {sink.name} is {there[name]}, its value has {kind}",
                f"cast it: F.col('{name}').cast('{kind}')",
            )
    for option, kinds in _OWN_TYPES.items():
        column = getattr(sink, option)
        if column is not None and there[column] not in kinds:
            raise OutputMismatch(
                f"column {column} for topic {sink.name} is {there[column]}, and its {option} is one of {list(kinds)}",
                f"cast it: F.col('{column}').cast('{kinds[0]}')",
            )


_OWN_TYPES: Mapping[str, Sequence[str]] = {
    "key": ("string", "binary"),
    "timestamp": ("timestamp",),
    "route": ("string",),
    "headers": tuple(
        kind
        for value in ("string", "binary")
        for kind in (f"map<string,{value}>", f"array<struct<key:string,value:{value}>>")
    ),
}


def _kind(output: DataFrame, column: str) -> str:
    return output.schema[column].dataType.typeName()


class TopicLookup(Protocol):
    def describe(self, name: str) -> TopicInfo | None:
        """The topic; None if there is none, which takes half a second to be sure of."""

    def names(self, cluster: str = "") -> set[str]:
        """The names of all topics of a cluster."""


class KnownTopics:
    """The topics that rows name, as the broker describes them; None for those that are `forbidden` to rows.

    All are of one `cluster`: a transaction cannot reach further. `forbidden` has the reason of each, such as "is read
    by the stream". A topic that an earlier batch has found is gone only if it stays unknown for `UNKNOWN_FOR`; the
    batch waits that long.
    """

    def __init__(
        self,
        topics: TopicLookup,
        settings: TopicSinkSettings,
        forbidden: Mapping[str, str] = MappingProxyType({}),
        cluster: str = "",
    ) -> None:
        self._topics = topics
        self._settings = settings
        self._forbidden = forbidden
        self._cluster = cluster
        self._known: dict[str, TopicInfo | None] = {}
        self._found_before: set[str] = set()
        self._names: set[str] | None = None

    def forget(self) -> None:
        """Ask again, once for each batch."""
        self._found_before |= self.ids.keys()
        self._known.clear()
        self._names = None

    def ask_ahead(self, name: str) -> Callable[[], None]:
        """Ask for a topic in a thread; the returned function waits for the answer, and takes it over if there is one.

        Without an answer, whoever needs the topic asks again, and knows what to do about it.
        """
        answers: list[TopicInfo | None] = []

        def ask() -> None:
            with suppress(RecourseError):
                answers.append(self._topics.describe(name))

        thread = threading.Thread(target=ask, name="kafka: topic", daemon=True)
        thread.start()

        def take() -> None:
            thread.join()
            if answers and answers[0] is not None:
                self._known[name] = answers[0]

        return take

    def __getitem__(self, name: str) -> TopicInfo | None:
        if name in self._forbidden:
            return None
        if name not in self._known:
            possible = is_topic_name(name) and cluster_of(name) == self._cluster and not name.startswith("__")
            self._known[name] = self._found(name) if possible else None
        return self._known[name]

    def why_not(self, name: str) -> str:
        """Says of a topic that is None here why it is."""
        return self._forbidden.get(name, "does not exist")

    def _found(self, name: str) -> TopicInfo | None:
        if name in self._found_before:
            self._found_before.discard(name)
            if (info := self._topics.describe(name)) is None:
                log.warning("the broker does not know a topic that was there; the batch waits", topic=name)
                until = time.monotonic() + UNKNOWN_FOR
                while info is None and time.monotonic() < until:
                    info = self._topics.describe(name)
            return info
        if sum(info is None for info in self._known.values()) < _SURE_OF:
            return self._topics.describe(name)
        if self._names is None:  # rows that name very many topics: one look at all of them
            self._names = self._topics.names(self._cluster)
        return self._topics.describe(name) if name in self._names else None

    @property
    def ids(self) -> dict[str, str]:
        """The ids of the topics that exist, by name."""
        return {name: info.id for name, info in self._known.items() if info is not None}

    @property
    def smallest_batch(self) -> int:
        """The bytes that the most restrictive of them takes in one request for a partition."""
        return min((info.max_message_bytes for info in self._known.values() if info is not None), default=NO_LIMIT)

    def most_bytes(self, info: TopicInfo) -> int:
        """The largest record that topic and producer take."""
        return min(info.max_message_bytes, self._settings.max_record_kb * 1000)


@dataclass
class RowBlock:
    """Some rows with their values; `written` are the indices of rows that go to a topic."""

    rows: pa.RecordBatch
    values: Sequence[bytes | None]
    written: Sequence[int]


@dataclass
class RowJudge:
    """Makes blocks of rows, and keeps the refused rows with reason and detail."""

    sink: KafkaSink
    topics: KnownTopics
    fixed: Sequence[Header]
    """The headers that all records of the batch have."""
    refused: list[pa.Table] = field(default_factory=list)
    _writer: BlockWriter = field(init=False)
    _of_values: Sequence[Header] = field(init=False)

    def __post_init__(self) -> None:
        self._writer = self.sink.topic.value.writer()  # type: ignore[attr-defined]
        self._of_values = getattr(self._writer, "headers", ())

    def blocks(self, tables: Iterator[pa.Table | pa.RecordBatch]) -> Iterator[RowBlock]:
        """Yields all rows; raises PermanentError for a topic that does not exist, if the sink is declared so."""
        for table in tables:
            whole = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
            for rows in whole.to_batches(max_chunksize=_BLOCK):
                if rows.num_rows:
                    yield self._judged(rows)

    def records(self, block: RowBlock) -> Iterator[Record]:
        """The records of a block, in the order of the rows."""
        rows, values = block.rows, block.values
        if len(block.written) < rows.num_rows:
            rows, values = rows.take(pa.array(block.written, pa.int64())), [values[row] for row in block.written]
        return RecordColumns(rows, self.sink.name, self.fixed, self._of_values).records(values)

    def refused_rows(self) -> pa.Table | None:
        """All refused rows, with `__reason` and `__detail`; None without any."""
        return pa.concat_tables(self.refused) if self.refused else None

    def _judged(self, rows: pa.RecordBatch) -> RowBlock:
        fields = self.sink.topic.value.schema.fieldNames()
        made = self._writer.write(rows.select(fields))
        verdicts = {row: (refusal.reason, refusal.detail) for row, refusal in made.refused.items()}
        values = made.values
        if self.sink.topic.tombstones == "keep":
            nothing = pc.is_null(rows.column(fields[0]))
            for name in fields[1:]:
                nothing = pc.and_(nothing, pc.is_null(rows.column(name)))
            tombs = set(pc.indices_nonzero(nothing).to_pylist())
            verdicts = {row: verdict for row, verdict in verdicts.items() if row not in tombs}
            values = [None if row in tombs else value for row, value in enumerate(values)] if tombs else values
        columns = RecordColumns(rows, self.sink.name, self.fixed, self._of_values)
        for row in range(rows.num_rows) if not self._all_are_taken(columns, values) else ():
            if row not in verdicts and (verdict := self._verdict(columns, row, values[row])) is not None:
                verdicts[row] = verdict
        if verdicts:
            bad = sorted(verdicts)
            taken = pa.Table.from_batches([rows]).take(pa.array(bad, pa.int64()))
            for name, part in ((REASON_COLUMN, 0), (DETAIL_COLUMN, 1)):
                taken = taken.append_column(name, pa.array([verdicts[row][part] for row in bad], pa.string()))
            self.refused.append(taken)
        written = [row for row in range(rows.num_rows) if row not in verdicts] if verdicts else range(rows.num_rows)
        return RowBlock(rows, values, written)

    def _all_are_taken(self, columns: RecordColumns, values: Sequence[bytes | None]) -> bool:
        """True if no row of a block is refused by its topic, from the block's extremes; False: nobody knows."""
        largest = columns.most_bytes(values)
        if largest is None or any(time is not None and time <= 0 for time in columns.times):
            return False
        keyless = None in columns.keys
        for name in set(columns.topics):
            info = self.topics[name]
            if info is None or largest > self.topics.most_bytes(info) or (keyless and "compact" in info.cleanup_policy):
                return False
        return True

    def _verdict(self, columns: RecordColumns, row: int, value: bytes | None) -> tuple[str, str] | None:
        topic, key = columns.topics[row], columns.keys[row]
        info = self.topics[topic]
        if info is None:
            if self.sink.unknown_topic == "fail":
                raise PermanentError(
                    f"a row goes to topic {topic!r}, which {self.topics.why_not(topic)}",
                    f"create the topic, correct the function, or declare the sink of topic {self.sink.name} with "
                    "unknown_topic='dead_letter'",
                )
            return "unknown_topic", f"topic {topic!r} {self.topics.why_not(topic)}"
        if key is None and "compact" in info.cleanup_policy:
            return "null_key", f"the row has no key, and topic {topic} is compacted"
        time = columns.times[row]
        if time is not None and time <= 0:
            return "time_out_of_range", f"the timestamp, {time} ms after 1970-01-01, is none that Kafka has"
        headers = columns.headers(row)
        if any(name is None for name, _ in headers):
            return "nameless_header", "a header has no name"
        most = self.topics.most_bytes(info)
        size = len(key or b"") + len(value or b"") + RECORD_OVERHEAD
        size += sum(len(name.encode()) + len(content or b"") + HEADER_OVERHEAD for name, content in headers)
        if size > most:
            return "too_large", f"the record has up to {size:,} bytes, and topic {topic} takes {most:,}"
        return None


@dataclass
class BatchRecords:
    """The records of one batch; it can be gone through again."""

    judge: RowJudge
    blocks: Iterable[RowBlock]
    count: int
    topic_ids: Mapping[str, str]
    most_bytes: int

    def __iter__(self) -> Iterator[Record]:
        return chain.from_iterable(map(self.judge.records, self.blocks))
