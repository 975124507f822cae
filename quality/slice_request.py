"""The rows that a run is asked to look at: those that are new, or all, of a partition, of a time range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from quality.suites import SliceKind
from streaming_jobs.errors import UsageError


@dataclass(frozen=True)
class TimeRange:
    """Rows whose `column`, a date or a time, is at or after `begin` and before `end`; None is open."""

    column: str
    begin: datetime | None = None
    end: datetime | None = None

    @classmethod
    def parse(cls, column: str | None, begin: str | None, end: str | None) -> TimeRange | None:
        """The range of a command's options, None without any; times without a zone are UTC."""
        if begin is None and end is None and column is None:
            return None
        if column is None or (begin is None and end is None):
            raise UsageError("a time range needs a column and an end", "--column sched_dep --from 2013-01-01")
        first, last = (_instant(text) if text is not None else None for text in (begin, end))
        if first is not None and last is not None and first >= last:
            raise UsageError(f"the range from {begin} to {end} is empty", "`to` is exclusive, and after `from`")
        return cls(column, first, last)

    @property
    def words(self) -> str:
        begin = f" from {self.begin:%Y-%m-%d %H:%M:%S}" if self.begin else ""
        end = f" to before {self.end:%Y-%m-%d %H:%M:%S}" if self.end else ""
        return f"{self.column}{begin}{end} UTC"


@dataclass(frozen=True)
class SliceRequest:
    """The slice that is asked for; a partition and a range make it smaller.

    `since`: the version after which rows are new, None for the first run.
    """

    kind: SliceKind = "new"
    since: int | None = None
    partition: Mapping[str, str] = field(default_factory=dict)
    times: TimeRange | None = None

    @property
    def narrowed(self) -> bool:
        """True if it may leave new rows out; such a run does not count as the last one."""
        return bool(self.partition) or self.times is not None


def parse_partition(texts: list[str]) -> dict[str, str]:
    """The values of partition columns from `column=value` texts."""
    values = {}
    for text in texts:
        column, equals, value = text.partition("=")
        if not column or not equals:
            raise UsageError(f"--partition {text} is not column=value", "such as --partition month=2013-01")
        values[column] = value
    return values


def _instant(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"'{text}' is not a time", "write 2013-01-31, or 2013-01-31T08:00:00+00:00") from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
