"""Row rules at work on the rows of one batch for one Delta table, in the driver's memory or on the executors.

On the executors the verdicts are counted in the pass that writes the rows. Only if rows are to be taken out is the
batch computed a second time, from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F

from streaming_jobs.declare.columns import REASON_COLUMN
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.sinks import row_rules
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta.direct_writers import ArrowAppend, CommittedBefore
from streaming_jobs.sinks.delta.quarantine import NO_JUDGE, Judge, frame_aside, rows_aside
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN
from streaming_jobs.sinks.row_rules import BROKEN_COLUMN, NOTHING_BROKEN, Judged

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SAMPLE = 3
_FAILING, _ASIDE, _DROPPED = "__failing", "__aside", "__dropped"


@dataclass(frozen=True)
class Judging:
    """The rules of a table and one batch; `batch` is (generation, batch id), `topics` are the stream's."""

    sink: DeltaSink
    judge: Judge
    batch: tuple[int, int]
    topics: Sequence[str] = ()

    def without_rules(self, quarantine: DeltaSink) -> Judging:
        """The same batch for the quarantine, whose rows are judged already."""
        return Judging(quarantine, NO_JUDGE, self.batch)

    def judges(self, rows: DataFrame) -> bool:
        """True if the rows carry a verdict."""
        return BROKEN_COLUMN in rows.columns

    def split(self, rows: pa.Table) -> tuple[pa.Table, Judged]:
        """Rows in the driver's memory: those to be written, and the verdict. Raises RuleBroken."""
        rules = self.judge.rules
        made = row_rules.split(rows, self.sink.name, rules, self.sink.declared.keys, DELETE_COLUMN)
        aside = None
        if made.quarantined is not None:
            assert self.judge.quarantine is not None
            columns = rows_aside(self.sink, made.quarantined, rules, self.batch, self.topics)
            aside = ArrowAppend(self.judge.quarantine, columns)
        if not made.broken:
            return made.written, NOTHING_BROKEN
        return made.written, Judged(made.broken, made.dropped, aside)

    def verdicts(self, rows: DataFrame) -> DataFrame:
        """Rows on executors with their whole verdict; one that is refused (it has a `__reason`) breaks no rule."""
        if not self.judges(rows):
            return rows
        judged = F.col(REASON_COLUMN).isNull()
        if DELETE_COLUMN in rows.columns:
            judged = judged & ~F.col(DELETE_COLUMN)
        for bit, rule in self.judge.rules.unique:
            columns = [F.col(f"`{column}`") for column in rule.columns]
            known = judged
            for column in columns:
                known = known & column.isNotNull()
            equal = F.count_if(known).over(Window.partitionBy(*columns))
            doubled = F.when(known & (equal > 1), F.lit(bit)).otherwise(F.lit(0)).cast("bigint")
            rows = rows.withColumn(BROKEN_COLUMN, F.col(BROKEN_COLUMN).bitwiseOR(doubled))
        return rows.withColumn(BROKEN_COLUMN, F.when(judged, F.col(BROKEN_COLUMN)).otherwise(F.lit(0).cast("bigint")))

    def counts(self, rows: DataFrame) -> list[Column]:
        """Aggregates: rows by broken rule, and by what happens to them; none without verdicts."""
        if not self.judges(rows):
            return []
        names = [F.count_if(_has(1 << n)).alias(f"__rule{n}") for n in range(len(self.judge.rules.rules))]
        aside, dropped, failing = self._aside, self._dropped, _has(self.judge.rules.bits("fail"))
        kinds = ((_ASIDE, aside), (_DROPPED, dropped), (_FAILING, failing))
        return [*names, *(F.count_if(condition).alias(name) for name, condition in kinds)]

    def taken_out(self, found: Mapping[str, Any]) -> int:
        """The number of rows that are not written, by the aggregates."""
        return int(found.get(_ASIDE, 0)) + int(found.get(_DROPPED, 0))

    def takes_out(self, found: Mapping[str, Any]) -> bool:
        """True if rows are not written, or stop the stream."""
        return bool(self.taken_out(found) or found.get(_FAILING, 0))

    def only_counted(self, found: Mapping[str, Any]) -> Judged:
        """The verdict where every row is written."""
        return Judged(self._broken(found))

    def refuse(self, rows: DataFrame, found: Mapping[str, Any]) -> None:
        """Raise RuleBroken, with some of the rows, if rows stop the stream."""
        if not found.get(_FAILING, 0):
            return
        rules, bits = self.judge.rules, self.judge.rules.bits("fail")
        sample = rows.where(_has(bits)).limit(_SAMPLE).toArrow()
        numbers = [int(found[f"__rule{n}"]) for n in range(len(rules.rules))]
        shown = [c for c in sample.column_names if not c.startswith("__")]
        row_rules.refuse(self.sink.name, rules, sample.select(shown), numbers, self.sink.declared.keys)

    def remaining(self, rows: DataFrame) -> DataFrame:
        return rows.where(~(self._aside | self._dropped)) if self.judges(rows) else rows

    def judged(
        self,
        rows: DataFrame,
        found: Mapping[str, Any],
        write: Callable[[DeltaSink, DataFrame, int], PendingWrite],
    ) -> Judged:
        """The verdict; `write` prepares the quarantined rows, whose number it is given.

        Rows that the quarantine has from an earlier attempt are not prepared: their files would be in no version.
        """
        if not self.judges(rows):
            return NOTHING_BROKEN
        aside: PendingWrite | None = None
        if number := int(found[_ASIDE]):
            quarantine = self.judge.quarantine
            assert quarantine is not None
            quarantine.refresh()
            if (at := quarantine.position) is not None and at >= Txn(*self.batch):
                aside = CommittedBefore(quarantine, number)
            else:
                frame = frame_aside(self.sink, rows.where(self._aside), self.judge.rules, self.batch, self.topics)
                aside = write(quarantine, frame, number)
        return Judged(self._broken(found), int(found[_DROPPED]), aside)

    @property
    def _aside(self) -> Column:
        return _has(self.judge.rules.bits("quarantine"))

    @property
    def _dropped(self) -> Column:
        return _has(self.judge.rules.bits("drop")) & ~self._aside

    def _broken(self, found: Mapping[str, Any]) -> dict[str, int]:
        numbers = ((rule.name, int(found[f"__rule{n}"])) for n, rule in enumerate(self.judge.rules.rules))
        return {name: number for name, number in numbers if number}


def _has(bits: int) -> Column:
    """True for a row that breaks one of these rules."""
    return F.col(BROKEN_COLUMN).bitwiseAND(F.lit(bits).cast("bigint")) != 0
