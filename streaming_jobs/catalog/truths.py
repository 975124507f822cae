"""Truths: functions, written by a table's author, that compute the rows which `recourse verify` compares it with.

    @truth(totals)
    def totals_by_hand(records: Iterable[Record]) -> list[dict[str, Any]]:
        counts = Counter(record.value["k"] for record in records)
        return [{"k": key, "c": count} for key, count in counts.items()]

The function receives the records that the stream has read from its topics, decoded in plain Python, without those that
the format refuses; so it shares nothing with Spark or with the stream's own function. It returns the rows:
dictionaries, an Arrow table, or a pandas frame. Like streams, truths are in the modules of the setting `flows`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.stream import Stream


class NotComparable(RecourseError):
    """Raised by a truth that cannot state the rows for these records; the table is then not compared.

    Nothing, if the truth's author intended it: the message has the author's reason.
    """

    code = "REC-032"


class Record:
    """One record: `topic`, `partition`, `offset`, `at`, `key`, `raw` (bytes), and `value`, decoded when it is read."""

    __slots__ = ("_ms", "_read", "_value", "key", "offset", "partition", "raw", "topic")

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        timestamp: int | None,
        key: bytes | None,
        raw: bytes | None,
        read: Callable[[bytes], dict[str, Any]],
    ) -> None:
        """`timestamp` in milliseconds since 1970; `read` decodes the bytes, once at most."""
        self.topic, self.partition, self.offset, self.key, self.raw = topic, partition, offset, key, raw
        self._ms, self._read = timestamp, read
        self._value: dict[str, Any] | None = None

    @property
    def at(self) -> datetime | None:
        """The record's timestamp, UTC; None if it has none."""
        return None if self._ms is None else datetime.fromtimestamp(self._ms / 1000, UTC)

    @property
    def value(self) -> dict[str, Any]:
        """The decoded record, every declared field included; of a tombstone that the stream keeps, empty.

        Raises NotComparable where other code has read the record, and today's format refuses it; what the format
        raises, such as SchemaUnavailable.
        """
        if self._value is None:
            self._value = self._read(self.raw) if self.raw is not None else {}
        return self._value


@dataclass(frozen=True)
class Truth:
    """A declared truth. `final` names the column with the time of a final row; `tolerance` is relative, of floats."""

    table: str
    function: Callable[..., Any]
    final: str | None = None
    tolerance: float = 0.0

    def __call__(self, *records: Iterable[Record], **named: Iterable[Record]) -> Any:
        return self.function(*records, **named)


def truth(
    of: Stream | str, *, final: str | None = None, tolerance: float = 0.0
) -> Callable[[Callable[..., Any]], Truth]:
    """Declare the decorated function as the truth about a table, or about a stream's primary one.

    It takes one argument, the records, or for a stream of several topics one for each, named like the stream's sources.
    With `final`, a column of times such as the end of a window, a row is expected once the watermark has passed it.
    Floats may differ by `tolerance` of their value. Columns that the function does not return are not compared.
    """
    name = of.primary.name if isinstance(of, Stream) else of

    def declare(function: Callable[..., Any]) -> Truth:
        if not inspect.signature(function).parameters:
            raise UsageError(f"the truth of table {name} takes no records", f"def {function.__name__}(records): ...")
        return Truth(name, function, final, tolerance)

    return declare
