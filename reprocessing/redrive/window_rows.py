"""What becomes of the quarantined rows of rebuilt slices: pure, on the rows that were there and those of today.

A rebuild makes all rows of its slices anew, those that nobody has chosen too. So the quarantine gets what the rules of
today set aside of these slices, and nothing else: no row is in the table and in the quarantine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streaming_jobs.sinks.redriven import PLACE, Outcome, RedrivenRow

if TYPE_CHECKING:
    import pyarrow as pa

_OF_THE_BATCH = {*PLACE["quarantine"], "_reason", "_generation", "_batch"}
"""Columns that do not tell rows apart: where a row came from, and the words of its rules."""


@dataclass(frozen=True)
class SettledRows:
    """The rows that the quarantine gets in the place of those that were there, and what became of these.

    `came`: so many of the rows were not there before.
    """

    rows: pa.Table
    windows: tuple[RedrivenRow, ...]
    came: int

    @property
    def changes(self) -> bool:
        return bool(self.came) or any(each.outcome != "quarantined" for each in self.windows)


def settled(there: pa.Table, slices: Sequence[pa.Table], column: str) -> SettledRows:
    """All rows are in the columns of the quarantine; a row of today that was there before stays as it was.

    `slices` are the rows that are set aside today; `column` is that of the table's slices. Rows are the same if their
    values and their rules are.
    """
    import pyarrow as pa

    today = pa.concat_tables([there.slice(0, 0), *slices])
    waiting: dict[str, list[int]] = defaultdict(list)
    for number, key in enumerate(_keys(today)):
        waiting[key].append(number)
    stays, windows = list[int](), list[RedrivenRow]()
    rules, values = there["_rules"].to_pylist(), there[column].to_pylist()
    for number, key in enumerate(_keys(there)):
        outcome: Outcome = "quarantined" if waiting[key] else "rebuilt"
        if waiting[key]:
            waiting[key].pop()
            stays.append(number)
        windows.append(RedrivenRow(values[number].isoformat(), ", ".join(rules[number] or ()), outcome))
    came = sorted(number for numbers in waiting.values() for number in numbers)
    rows = [each.take(pa.array(which, pa.int64())) for each, which in ((there, stays), (today, came))]
    windows.sort(key=lambda each: (each.at, each.outcome))
    return SettledRows(pa.concat_tables(rows), tuple(windows), len(came))


def _keys(rows: pa.Table) -> Iterator[str]:
    for batch in rows.drop_columns([name for name in rows.column_names if name in _OF_THE_BATCH]).to_batches():
        yield from (repr(row) for row in batch.to_pylist())
