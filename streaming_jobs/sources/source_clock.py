"""How far the event times of a source are, as its planner tells the query (`runtime/batch_watermark.py`)."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_MESSAGE = struct.Struct(">iqb")
"""Source, watermark in milliseconds since 1970, and 1 if the source is idle."""
_ANSWER = struct.Struct(">q")
"""The query's watermark from now on."""
_UNKNOWN = -(2**63)
_PATIENCE = 60.0
"""Seconds that a planner waits for the JVM, which answers in less than a millisecond.

The JVM may move the watermark only while the query waits for the planner, so a planner must not give up on one that is
merely slow."""


@dataclass(frozen=True)
class TimedSource:
    """One source with a watermark: where its planner says how far it is, and how that is computed.

    `number` counts the query's sources with a watermark. `column` of the record is its event time, `delay_ms` its
    lateness. `idle_after`: seconds without a record after which it holds the other sources back no longer.
    """

    path: str
    number: int
    column: str
    delay_ms: int
    idle_after: float | None = None


@dataclass
class SourceClock:
    """A planner's part: tells the query how far the event times of its source are, while a batch is planned."""

    source: TimedSource
    monotonic: Callable[[], float] = time.monotonic
    _connection: socket.socket | None = field(default=None, init=False)
    _lost: bool = field(default=False, init=False)
    _newest: int = field(default=_UNKNOWN, init=False)
    _seen: float = field(init=False)
    _idle: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._seen = self.monotonic()

    def batch(self, records: Sequence[pa.RecordBatch] | None) -> None:
        """The source has a batch: its records, or None if workers will read it."""
        self._seen, self._idle = self.monotonic(), False
        newest = None if records is None or self._lost else newest_time(records, self.source.column)
        if newest is not None:
            self._newest = max(self._newest, newest - self.source.delay_ms)
        self._tell()

    def nothing(self) -> None:
        """The source has no new record."""
        after = self.source.idle_after
        if not self._idle and after is not None and self.monotonic() - self._seen >= after:
            self._idle = True
            self._idle = self._tell()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._lost = True

    def _tell(self) -> bool:
        """True unless the query is not known yet to the one that listens."""
        if self._lost:
            return True
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._connection.settimeout(_PATIENCE)
                self._connection.connect(self.source.path)
            self._connection.sendall(_MESSAGE.pack(self.source.number, self._newest, self._idle))
            received = b""
            while len(received) < _ANSWER.size:
                if not (more := self._connection.recv(_ANSWER.size - len(received))):
                    raise ConnectionResetError("the JVM has closed the connection")
                received += more
            return bool(_ANSWER.unpack(received)[0] != _UNKNOWN)
        except OSError:  # nobody listens: the query has no state, or the driver has said why
            self.close()
            return True


def newest_time(records: Sequence[pa.RecordBatch], column: str) -> int | None:
    """The greatest event time of the good records in milliseconds, rounded down as Spark does; None without one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    newest = None
    for block in records:
        times = pc.struct_field(block.column("_record"), column)
        if not pa.types.is_timestamp(times.type):
            return None
        good = pc.if_else(pc.fill_null(block.column("_bad"), True), None, times)
        if (latest := pc.max(good).cast(pa.int64()).as_py()) is not None:
            unit = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[times.type.unit]
            newest = max(latest * 1_000 // unit, newest if newest is not None else _UNKNOWN)
    return newest
