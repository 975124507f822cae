"""Kafka -> PySpark Structured Streaming -> Delta Lake streams, exactly once. Read `stream.py` first.

The names that a stream's author needs:

    from streaming_jobs import DeltaTable, Json, KafkaTopic, stream

Heavy modules are imported when they are first used, so that importing a part of this package costs only that part.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from streaming_jobs.catalog.truths import Record, Truth, truth
from streaming_jobs.declare.error_policy import ErrorPolicy
from streaming_jobs.declare.interval_join import interval_join
from streaming_jobs.declare.lookup import Lookup
from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.declare.rules import Between, Holds, InSet, Matches, NotNull, Unique
from streaming_jobs.declare.salt import salt
from streaming_jobs.declare.slices import Slices
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.declare.topic import ComputedTime, EpochMicros, EpochMillis, EpochSeconds, RecordTimestamp
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import PermanentError, RecourseError, TransientError, UsageError
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream, stream

if TYPE_CHECKING:
    from streaming_jobs.catalog.archive import archive
    from streaming_jobs.catalog.snapshots import read_snapshot
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.declare.format import Format
    from streaming_jobs.formats import Avro, CloudEvents, Csv, Debezium, Json, JsonSchema, Protobuf, Raw, Text
    from streaming_jobs.settings import Settings

_LAZY = {
    "Avro": "streaming_jobs.formats",
    "CloudEvents": "streaming_jobs.formats",
    "Csv": "streaming_jobs.formats",
    "Debezium": "streaming_jobs.formats",
    "Format": "streaming_jobs.declare.format",
    "Json": "streaming_jobs.formats",
    "JsonSchema": "streaming_jobs.formats",
    "Protobuf": "streaming_jobs.formats",
    "Raw": "streaming_jobs.formats",
    "Settings": "streaming_jobs.settings",
    "Text": "streaming_jobs.formats",
    "Topology": "streaming_jobs.catalog.topology",
    "archive": "streaming_jobs.catalog.archive",
    "read_snapshot": "streaming_jobs.catalog.snapshots",
}

__all__ = [
    "Avro",
    "Between",
    "CloudEvents",
    "ComputedTime",
    "Csv",
    "Debezium",
    "DeltaSource",
    "DeltaTable",
    "EpochMicros",
    "EpochMillis",
    "EpochSeconds",
    "ErrorPolicy",
    "Format",
    "Holds",
    "InSet",
    "Json",
    "JsonSchema",
    "KafkaSink",
    "KafkaTopic",
    "Lookup",
    "Matches",
    "NotNull",
    "PermanentError",
    "PostgresTable",
    "Protobuf",
    "Raw",
    "Record",
    "RecordTimestamp",
    "RecourseError",
    "Settings",
    "Slices",
    "Stream",
    "Text",
    "Topology",
    "TransientError",
    "Truth",
    "Unique",
    "UsageError",
    "archive",
    "interval_join",
    "read_snapshot",
    "salt",
    "stream",
    "truth",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a heavy name from the module that defines it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
