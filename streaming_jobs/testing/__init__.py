"""Tests of streams: a stream on records, with Spark and without a broker. Read `stream_test.py` first.

The others are doubles: the seams of this package without broker, JVM or disk (`tables.py`).

    table = MemoryTable("clean")
    table.rows()        # the visible rows, as Arrow
    table.log           # one MemoryCommit per version: its ledger entry and the rows that it added

A table in memory may be declared for a stream; then preflight, savepoints and recoveries work on it as on any other:

    store = MemoryStore()
    Stream("things", things, {"value": topic}, {"clean": MemoryDeclaration("clean", store)})

Modules are imported when one of their names is first used: at each start of a stream, a process of Spark's imports this
package with the topics in memory, and needs nothing else of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streaming_jobs.testing.session import MemoryLease, MemoryLeases, MemoryQueries, MemoryQuery, MemoryRuntime
    from streaming_jobs.testing.stream_test import StreamTest
    from streaming_jobs.testing.tables import MemoryCommit, MemoryContent, MemoryDeclaration, MemoryStore, MemoryTable
    from streaming_jobs.testing.topic import MemoryRecord, MemoryTopic

_LAZY = {
    "MemoryCommit": "tables",
    "MemoryContent": "tables",
    "MemoryDeclaration": "tables",
    "MemoryLease": "session",
    "MemoryLeases": "session",
    "MemoryQueries": "session",
    "MemoryQuery": "session",
    "MemoryRecord": "topic",
    "MemoryRuntime": "session",
    "MemoryStore": "tables",
    "MemoryTable": "tables",
    "MemoryTopic": "topic",
    "StreamTest": "stream_test",
}

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


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a name from the module that defines it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
