"""The differences of a table in groups: by time, and by key. Their number is bounded, so that a journal can hold them.

Times are in seconds since 1970: DataFusion's TIMESTAMP counts nanoseconds and ends in the year 2262.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from deltalake import QueryBuilder

from reprocessing.planning.conditions import quoted
from reprocessing.rebuild.audit_sql import DIFFERING, new, old, one
from streaming_jobs.platform.table_rows import rows_of

PERIODS = 10
"""Periods at most in the text of a difference."""
FINE_PERIODS = 60
"""Periods at most in its plot."""
KEYS = 20
"""Keys at most that are listed by name."""
KEY_LENGTH = 60
"""Characters at most of a key's text."""

_FIRST_SECOND = -62_135_596_800  # 0001-01-01; the period that contains it may begin before
_LAST_SECOND = 253_402_300_799  # of 9999
# Each divides the next ones of the rough widths, so that fine periods can be joined to rough ones.
_ROUGH = (60, 600, 3_600, 6 * 3_600, 86_400, 7 * 86_400, 28 * 86_400, 364 * 86_400)
_FINE = tuple(sorted({*_ROUGH, 120, 300, 1_200, 1_800, 7_200, 10_800, 2 * 21_600}))
_DECADE = 3_640 * 86_400

Period = tuple[int, int, int, int]
"""Start in seconds since 1970, then the numbers of rows that vanish, appear and change."""


@dataclass(frozen=True)
class ByTime:
    """The differences by time: periods of `seconds` each, in order, and only those with differences."""

    seconds: int = 0
    periods: Sequence[Period] = ()

    def rough(self) -> list[tuple[str, int, int, int]]:
        """The same in at most `PERIODS` periods, the start as text."""
        if not self.periods:
            return []
        width = _width(self.periods[-1][0] - self.periods[0][0], _ROUGH, PERIODS)
        width += -width % self.seconds
        sums: dict[int, list[int]] = {}
        for start, *counts in self.periods:
            into = sums.setdefault(start - start % width, [0, 0, 0])
            for place, count in enumerate(counts):
                into[place] += count
        return [(minute(start), gone, came, changed) for start, (gone, came, changed) in sums.items()]


@dataclass(frozen=True)
class ByKey:
    """The keys with most differences: `columns` name the part of the key that groups rows, `groups` how many differ.

    `largest`: at most `KEYS` of them, each with its text, the numbers of rows that vanish, appear and change, and the
    number of values that differ in these rows; most rows first, then most values.
    """

    columns: Sequence[str] = ()
    groups: int = 0
    largest: Sequence[tuple[str, int, int, int, int]] = ()


NO_TIMES = ByTime()
NO_KEYS = ByKey()


def minute(seconds: int) -> str:
    """A time as text, in UTC; before the year 1 its first minute, after 9999 its last."""
    return datetime.fromtimestamp(min(max(seconds, _FIRST_SECOND), _LAST_SECOND), UTC).isoformat(" ", "minutes")[:16]


def by_time(data: QueryBuilder, table: str, found: str) -> ByTime:
    """The differences in at most `FINE_PERIODS` periods; `found` is SQL with columns at, gone, came and changed.

    A changed row counts in the period of its published time.
    """
    epoch = "CAST(arrow_cast(at, 'Timestamp(Second, None)') AS BIGINT)"
    seconds = f"SELECT {epoch} AS s, gone, came, changed FROM ({found}) d"
    ends = one(data, f"SELECT min(s) AS a, max(s) AS b FROM ({seconds}) x WHERE s IS NOT NULL", table)
    if ends["a"] is None:
        return ByTime()
    width = _width(ends["b"] - ends["a"], _FINE, FINE_PERIODS)
    period = f"s - ((s % {width}) + {width}) % {width}"  # % keeps the sign, and times may lie before 1970
    rows = rows_of(
        data,
        f"SELECT {period} AS p, sum(gone) AS gone, sum(came) AS came, sum(changed) AS changed "
        f"FROM ({seconds}) x WHERE s IS NOT NULL GROUP BY {period} ORDER BY p",
        table,
    )
    return ByTime(width, [(int(r["p"]), int(r["gone"]), int(r["came"]), int(r["changed"])) for r in rows])


def by_key(
    data: QueryBuilder, table: str, found: str, names: Sequence[str], keys: Sequence[str], times: Sequence[str]
) -> ByKey:
    """The differences by the part of the key that is no time, by the whole key if all of it is. `found`: `matched`."""
    columns = [name for name in keys if name not in times] or list(keys)
    rest = [name for name in names if name not in keys]
    values = " + ".join(f"CASE WHEN {old(n)} IS DISTINCT FROM {new(n)} THEN 1 ELSE 0 END" for n in rest) or "0"
    parts = ", ".join(f'{quoted(k)} AS "__k{place}"' for place, k in enumerate(columns))
    named = ", ".join(f'"__k{place}"' for place in range(len(columns)))
    grouped = (
        f'SELECT {named}, sum("__gone") AS gone, sum("__came") AS came, sum("__changed") AS changed, '
        f'sum("__values") AS "__values", count(*) AS "__rows" FROM (SELECT {parts}, "__gone", "__came", "__changed", '
        f'CASE WHEN "__changed" = 1 THEN {values} ELSE {max(len(rest), 1)} END AS "__values" FROM ({found}) f) d '
        f"GROUP BY {named}"
    )
    groups = one(data, f"SELECT count(*) AS c FROM ({grouped}) g", table)["c"]
    rows = rows_of(data, f'{grouped} ORDER BY "__rows" DESC, "__values" DESC, {named} LIMIT {KEYS}', table)
    return ByKey(
        columns,
        groups,
        [
            (
                _text([r[f"__k{place}"] for place in range(len(columns))]),
                int(r["gone"]),
                int(r["came"]),
                int(r["changed"]),
                int(r["__values"]),
            )
            for r in rows
        ],
    )


def _text(parts: Sequence[object]) -> str:
    text = ", ".join(part.hex() if isinstance(part, bytes) else str(part) for part in parts)
    return text if len(text) <= KEY_LENGTH else text[: KEY_LENGTH - 3] + "..."


def _width(seconds: int, widths: Sequence[int], periods: int) -> int:
    """The length of a period in seconds: the shortest with which so many `periods` cover the time."""
    for width in widths:
        if seconds <= width * (periods - 1):
            return width
    return _DECADE * -(-seconds // (_DECADE * (periods - 1)))


def dated_by_key(found: str, keys: Sequence[str], when: str) -> str:
    """The SQL of `by_time` for differences that were matched by key."""
    at = quoted(when) if when in keys else f"coalesce({old(when)}, {new(when)})"
    return f'SELECT {at} AS at, "__gone" AS gone, "__came" AS came, "__changed" AS changed FROM ({found}) f'


def dated_by_row(when: str) -> str:
    """The SQL of `by_time` for rows without keys."""
    return (
        f'SELECT {quoted(when)} AS at, CASE WHEN "__net" < 0 THEN -"__net" ELSE 0 END AS gone, '
        f'CASE WHEN "__net" > 0 THEN "__net" ELSE 0 END AS came, 0 AS changed FROM "{DIFFERING}"'
    )
