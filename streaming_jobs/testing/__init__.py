"""Tests of streams: a stream on records, with Spark and without a broker. Read `stream_test.py` first.

The others are doubles: the seams of this package without broker, JVM or disk (`tables.py`).

    table = MemoryTable("clean")
    table.rows()        # the visible rows, as Arrow
    table.log           # one MemoryCommit per version: its ledger entry and the rows that it added

A table in memory may be declared for a stream; then preflight, savepoints and recoveries work on it as on any other:

    store = MemoryStore()
    Stream("things", things, {"value": topic}, {"clean": MemoryDeclaration("clean", store)})
"""

from streaming_jobs.testing.session import MemoryLease, MemoryLeases, MemoryQueries, MemoryQuery, MemoryRuntime
from streaming_jobs.testing.stream_test import StreamTest
from streaming_jobs.testing.tables import MemoryCommit, MemoryContent, MemoryDeclaration, MemoryStore, MemoryTable
from streaming_jobs.testing.topic import MemoryRecord, MemoryTopic

__all__ = [
    "MemoryCommit",
    "MemoryContent",
    "MemoryDeclaration",
    "MemoryLease",
    "MemoryLeases",
    "MemoryQueries",
    "MemoryQuery",
    "MemoryRecord",
    "MemoryRuntime",
    "MemoryStore",
    "MemoryTable",
    "MemoryTopic",
    "StreamTest",
]
