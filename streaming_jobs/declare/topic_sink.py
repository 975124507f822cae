"""The declaration of a topic as a sink. `sinks/kafka` writes it, docs/kafka_sink.md explains it.

orders = KafkaTopic("orders", value=Json(ORDER))

@stream(source=KafkaTopic("raw_orders", value=Json(RAW)), sink=KafkaSink(orders, key="customer"))
def clean(raw_orders: DataFrame) -> DataFrame: ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from streaming_jobs.declare.columns import DETAIL_COLUMN, REASON_COLUMN
from streaming_jobs.declare.format import Schemas
from streaming_jobs.declare.names import checked_choice
from streaming_jobs.declare.table import Emit
from streaming_jobs.declare.topic import KafkaTopic
from streaming_jobs.errors import UsageError

Delivery = Literal["exactly_once", "at_least_once"]

TOPIC_SINK = "topic:"
"""Begins the name of a topic sink in ledger entries, so that a table and a topic may share a name."""

MOST_SHARDS = 64
"""Each of them costs a transaction per batch, and a connection."""


@dataclass(frozen=True)
class KafkaSink:
    """A Kafka topic as a sink: one record for each row that the function returns.

    `topic` is the declaration that its readers use too; its `value` says how rows become values. The function returns
    the columns of that schema, and those that are named here: `key` (STRING or BINARY), `headers` (a map, or an array
    of structs of key and value), `timestamp` (TIMESTAMP; null: the time of writing), and `route` (STRING: the topic of
    each row; null: `topic`). Other columns are refused, except `_source`, which becomes a header. If the topic keeps
    tombstones, a row whose value columns are all null is one. A row for a topic that does not exist, that the stream
    reads, or that another sink or another declared stream writes, stops the stream, or with
    `unknown_topic="dead_letter"` becomes a dead letter.

    `delivery`: `exactly_once` for readers of committed records, in one transaction per batch; `at_least_once` is
    quicker, and a batch that is repeated after a failure is in the topic twice. `emit` matters for operators with state
    only: `close` writes final results, `update` every change. `shards`: batches that do not pass through the driver
    are written by the executors, in so many transactions side by side.
    """

    topic: KafkaTopic
    key: str | None = None
    headers: str | None = None
    timestamp: str | None = None
    route: str | None = None
    unknown_topic: Literal["fail", "dead_letter"] = "fail"
    delivery: Delivery = "exactly_once"
    emit: Emit = "close"
    shards: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.topic, KafkaTopic):
            raise UsageError(
                f"a KafkaSink has the topic {self.topic!r}, not a KafkaTopic",
                f"write KafkaSink(KafkaTopic({self.topic!r}, value=...))",
            )
        for option, allowed in _CHOICES.items():
            checked_choice(f"topic {self.topic.name}", option, getattr(self, option), allowed)
        if not hasattr(self.topic.value, "writer"):
            raise UsageError(
                f"topic {self.topic.name}: its format {type(self.topic.value).__name__} only reads",
                "declare Json, Csv, CloudEvents, Avro, Protobuf, Text or Raw, or write a `writer` (declare/format.py)",
            )
        if (unwritable := getattr(self.topic.value, "unwritable", None)) is not None:
            raise UsageError(f"topic {self.topic.name}: {unwritable[0]}", unwritable[1])
        fields = self.topic.value.schema.fieldNames()
        if taken := _TAKEN.intersection(fields):
            raise UsageError(
                f"topic {self.topic.name}: the field name {min(taken)} is taken by Recourse itself", "rename the field"
            )
        for option in ("headers", "timestamp", "route"):
            if (column := getattr(self, option)) is not None and column == self.key:
                raise UsageError(
                    f"topic {self.topic.name}: {option} and key are both the column '{column}'", "name two columns"
                )
        if self.shards is not None:
            self._check_shards(self.shards)
        if self.headers is not None and self.headers in fields:
            raise UsageError(
                f"topic {self.topic.name}: the column '{self.headers}' of headers is a field of the value",
                "give the headers a column of their own",
            )

    def _check_shards(self, shards: int) -> None:
        if not 1 <= shards <= MOST_SHARDS:
            raise UsageError(f"topic {self.topic.name}: shards={shards}", f"name a number from 1 to {MOST_SHARDS}")
        if self.route is not None or not self.exactly_once:
            raise UsageError(
                f"topic {self.topic.name} has shards, and "
                + ("a route" if self.route is not None else f"delivery='{self.delivery}'"),
                "leave the shards out: they write one topic, exactly once",
            )

    @property
    def name(self) -> str:
        return self.topic.name

    def bound(self, schemas: Schemas) -> KafkaSink:
        """The sink with a format that has its schemas at hand (`KafkaTopic.bound`)."""
        topic = self.topic.bound(schemas)
        return self if topic is self.topic else replace(self, topic=topic)

    @property
    def ledger_name(self) -> str:
        return f"{TOPIC_SINK}{self.topic.name}"

    @property
    def exactly_once(self) -> bool:
        """True if each batch is one transaction."""
        return self.delivery == "exactly_once"

    @property
    def options(self) -> dict[str, str]:
        """The options that are set, by name: they are part of the code's version."""
        names = ("key", "headers", "timestamp", "route", "unknown_topic", "delivery", "emit")
        set_here = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**set_here, "tombstones": self.topic.tombstones}

    @property
    def own_columns(self) -> tuple[str, ...]:
        """The columns of key, headers, timestamp and route, as far as they are declared."""
        return tuple(column for column in (self.key, self.headers, self.timestamp, self.route) if column is not None)


_TAKEN = frozenset(
    {"__key", "__headers", "__timestamp", "__route", "__topic", "__partition", "__offset", REASON_COLUMN, DETAIL_COLUMN}
)
"""Columns that Recourse adds to rows on their way into a topic."""
_CHOICES: Mapping[str, Sequence[str]] = {
    "unknown_topic": ("fail", "dead_letter"),
    "delivery": ("exactly_once", "at_least_once"),
    "emit": get_args(Emit),
}


def checked_topic_sinks(
    stream: str, sinks: Mapping[str, KafkaSink], rules: Iterable[str], sources: Sequence[str]
) -> None:
    """Raise UsageError for a topic that is written twice, or read too, or that row rules are declared for."""
    names = [sink.name for sink in sinks.values()]
    if len(set(names)) < len(names):
        raise UsageError(f"stream {stream} writes a topic twice: {names}", "declare it once")
    for name in names:
        if name in sources:
            raise UsageError(
                f"stream {stream} reads the topic {name} and writes it: it would read its own records for ever",
                "write another topic",
            )
    for name in rules:
        if name in sinks:
            raise UsageError(
                f"stream {stream} has row rules of the topic {sinks[name].name}; they are for tables",
                "filter in the function, or write a table too and give it the rules",
            )
