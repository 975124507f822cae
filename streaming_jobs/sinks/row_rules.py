"""Row rules on the rows of a batch: the verdict is a column of the batch's own plan, and decides where a row goes.

`marked` adds the column `__broken` to a frame before the query starts: a number with a bit for each rule that the row
breaks. So no rule costs a second job. `split` divides rows in the driver's memory by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.declare.rules import RowRules, Rule, Unique
from streaming_jobs.errors import RuleBroken, UsageError
from streaming_jobs.text.spelling import counted, instead

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import Column, DataFrame

    from streaming_jobs.sinks.base import PendingWrite

BROKEN_COLUMN = "__broken"
_SAMPLE = 3
_COLUMNS = 6
_NESTED = frozenset({"array", "map", "struct", "variant"})


@dataclass(frozen=True)
class Judged:
    """The verdict on a batch's rows for one table.

    `broken`: rule -> rows that break it. `dropped` rows are written nowhere; `quarantine` is the write of those that
    are set aside, None if there is none.
    """

    broken: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    quarantine: PendingWrite | None = None


NOTHING_BROKEN = Judged()


@dataclass(frozen=True)
class Split:
    """The rows of a batch by what happens to them; `quarantined` ones still have the column `__broken`."""

    written: pa.Table
    quarantined: pa.Table | None = None
    dropped: int = 0
    broken: Mapping[str, int] = field(default_factory=dict)


def marked(frame: DataFrame, table: str, rules: RowRules, *, exempt: Column | None = None) -> DataFrame:
    """The frame with the column `__broken`; it is 0 for a row that is `exempt`.

    Rules that the rows of a batch decide together are not in it. Raises UsageError for a rule that Spark cannot
    evaluate on the table's columns.
    """
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    def verdict(bits: Sequence[tuple[int, Rule]]) -> Column:
        each = [
            F.expr(f"CASE WHEN {rule.condition()} THEN CAST(0 AS BIGINT) ELSE CAST({bit} AS BIGINT) END")
            for bit, rule in bits
        ]
        whole = reduce(lambda a, b: a.bitwiseOR(b), each, F.lit(0).cast("bigint"))
        return whole if exempt is None else F.when(exempt, F.lit(0).cast("bigint")).otherwise(whole)

    for _, unique in rules.unique:
        _check_equality(unique, table, frame)
    for bit, rule in (*rules.alone, *rules.unique):
        try:
            frame.select(verdict([(bit, rule)]), *(f"`{column}`" for column in rule.columns))
        except (AnalysisException, ParseException) as error:
            raise UsageError(
                f"rule {rule.name} of table {table} cannot be evaluated: {str(error).splitlines()[0][:300]}",
                "write it in Spark's SQL, on the columns of the table",
            ) from error
    return frame.withColumn(BROKEN_COLUMN, verdict(rules.alone))


def _check_equality(rule: Unique, table: str, frame: DataFrame) -> None:
    """Raise UsageError for a column that is not there, or whose values cannot be compared."""
    kinds = {field.name: field.dataType.typeName() for field in frame.schema.fields}
    for column in rule.columns:
        if column not in kinds:
            raise UsageError(f"rule {rule.name} of table {table} is on '{column}'", instead(column, kinds))
        if kinds[column] in _NESTED:
            raise UsageError(f"rule {rule.name} of table {table}: values of {column}, a {kinds[column]}, are not equal")


def split(rows: pa.Table, table: str, rules: RowRules, keys: Sequence[str], exempt: str = "") -> Split:
    """Divide rows with the column `__broken`; raises RuleBroken if a row breaks a rule that stops the stream.

    `keys` name a row in that error. `exempt` is a column that is true for rows that are not judged.
    """
    if BROKEN_COLUMN not in rows.column_names:
        return Split(rows)
    verdicts = _verdicts(rows, rules, exempt)
    rows = rows.drop_columns([BROKEN_COLUMN])
    if not verdicts.any():
        return Split(rows)
    numbers = [int(np.count_nonzero(verdicts & (1 << n))) for n in range(len(rules.rules))]
    broken = {rule.name: number for rule, number in zip(rules.rules, numbers, strict=True) if number}
    if (failing := (verdicts & rules.bits("fail")) != 0).any():
        sample = rows.take(np.flatnonzero(failing)[:_SAMPLE])
        refuse(table, rules, sample, numbers, keys)
    aside = (verdicts & rules.bits("quarantine")) != 0
    dropped = ((verdicts & rules.bits("drop")) != 0) & ~aside
    if not aside.any() and not dropped.any():
        return Split(rows, broken=broken)
    quarantined = None
    if aside.any():
        quarantined = rows.filter(pa.array(aside)).append_column(BROKEN_COLUMN, pa.array(verdicts[aside]))
    written = rows.filter(pa.array(~aside & ~dropped))
    return Split(written, quarantined, int(np.count_nonzero(dropped)), broken)


def refuse(table: str, rules: RowRules, sample: pa.Table, numbers: Sequence[int], keys: Sequence[str]) -> None:
    """Raise RuleBroken with the rules that stop the stream and some of the rows; `numbers` are rows by rule."""
    stopping = [(rule, n) for rule, n in zip(rules.rules, numbers, strict=True) if rule.on_fail == "fail"]
    names = [rule.name for rule, number in stopping if number]
    counts = "; ".join(f"{counted(n, 'row', 'breaks', 'break')} {rule.name}" for rule, n in stopping if n)
    of_rules = [column for rule, n in stopping if n for column in rule.columns]
    known = [c for c in sample.column_names if not c.startswith("__")]
    columns = [c for c in dict.fromkeys([*keys, *of_rules, *known]) if c in known]
    shown = "; ".join(_shown(row) for row in sample.select(columns[:_COLUMNS]).to_pylist())
    raise RuleBroken(
        f"table {table}: {counts} ({shown}); the batch was not written",
        f"correct the function or the data, or change on_fail of {', '.join(names)}; then start the stream again",
    )


def names_rule(found: str, table: str, rule: str) -> bool:
    """True if the message of a RuleBroken, as `refuse` writes it, names this rule of this table."""
    counts = found.partition(f"table {table}: ")[2].partition(" (")[0]
    return any(each.endswith((f" breaks {rule}", f" break {rule}")) for each in counts.split("; "))


def set_aside(
    rows: pa.Table, rules: RowRules, batch: tuple[int, int], place: Sequence[pa.Array | pa.ChunkedArray | None]
) -> pa.Table:
    """Quarantined rows, which have the column `__broken`, in the columns of the quarantine (`schemas.quarantine_of`).

    `place` are topic, partition and offset of their records, where these are known; `batch` is (generation, batch id).
    """
    verdicts = rows[BROKEN_COLUMN].to_numpy() & rules.bits("quarantine")
    known, at = np.unique(verdicts, return_inverse=True)
    broken = [rules.broken(int(verdict)) for verdict in known]
    names = pa.array([[rule.name for rule in each] for each in broken], pa.list_(pa.string()))
    words = pa.array(["; ".join(rule.words for rule in each) for each in broken], pa.string())
    size = rows.num_rows
    kinds = (pa.string(), pa.int32(), pa.int64())
    columns = {
        "_rules": names.take(pa.array(at)),
        "_reason": words.take(pa.array(at)),
        **{
            name: pa.nulls(size, kind) if values is None else values.cast(kind)
            for name, values, kind in zip(("_topic", "_partition", "_offset"), place, kinds, strict=True)
        },
        "_generation": pa.array([batch[0]] * size, pa.int32()),
        "_batch": pa.array([batch[1]] * size, pa.int64()),
    }
    aside = rows.drop_columns([BROKEN_COLUMN])
    for name, values in columns.items():
        aside = aside.append_column(name, values)
    return aside


def _verdicts(rows: pa.Table, rules: RowRules, exempt: str) -> NDArray[np.int64]:
    verdicts = np.array(rows[BROKEN_COLUMN].to_numpy(), np.int64)
    if rules.unique:
        judged = pc.invert(rows[exempt]) if exempt in rows.column_names else None
        for bit, rule in rules.unique:
            verdicts[_doubled(rows, rule.columns, judged)] |= bit
    return verdicts


def _doubled(rows: pa.Table, columns: Sequence[str], judged: pa.ChunkedArray | None) -> NDArray[np.int64]:
    """Positions of the rows whose values in these columns occur more than once."""
    known = reduce(pc.and_, [pc.is_valid(rows[column]) for column in columns])
    mask = known if judged is None else pc.and_(known, judged)
    names = [f"c{number}" for number in range(len(columns))]
    values = [pc.add(v, 0.0) if pa.types.is_floating(v.type) else v for v in (rows[c] for c in columns)]  # -0.0 is 0.0
    numbered = pa.table([*values, pa.array(np.arange(rows.num_rows))], names=[*names, "__row"])
    groups = numbered.filter(mask).group_by(names).aggregate([("__row", "list"), ("__row", "count")])
    lists = groups.filter(pc.greater(groups["__row_count"], 1))["__row_list"]
    return np.asarray(pc.list_flatten(lists).to_numpy(), np.int64)


def _shown(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'null' if value is None else str(value)[:60]}" for name, value in row.items())
