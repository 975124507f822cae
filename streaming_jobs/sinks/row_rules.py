"""Row rules on the rows of a batch: the verdict is a column of the batch's own plan, and decides where a row goes.

`marked` adds the column `__broken` to a frame before the query starts: a number with a bit for each rule that the row
breaks. So no rule costs a second job. `evaluate` divides the computed rows by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.declare.rules import RowRules, Rule, Unique
from streaming_jobs.errors import RuleBroken, UsageError
from streaming_jobs.sinks.base import NOTHING_BROKEN, RuleOutcome
from streaming_jobs.text.spelling import counted, instead

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import Column, DataFrame

BROKEN_COLUMN = "__broken"
_SAMPLE = 3
_COLUMNS = 6
_NESTED = frozenset({"array", "map", "struct", "variant"})


@dataclass(frozen=True)
class RuleEvaluation:
    """The rows of a batch by what happens to them; `quarantined` ones still have the column `__broken`.

    `failing` are some of the rows that stop the stream, None without any; `numbers` are the rows that break each rule.
    """

    written: pa.Table
    quarantined: pa.Table | None = None
    dropped: int = 0
    numbers: Sequence[int] = ()
    failing: pa.Table | None = None


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


def evaluate(rows: pa.Table, rules: RowRules, exempt: str = "", *, with_unique: bool = True) -> RuleEvaluation:
    """Divide rows by the column `__broken`; rows without it are all written.

    `exempt` is a column that is true for rows that are not judged. Without `with_unique`, the column has the verdicts
    of the rules that the rows of a batch decide together (`mark_equal`).
    """
    if BROKEN_COLUMN not in rows.column_names:
        return RuleEvaluation(rows)
    verdicts = np.array(rows[BROKEN_COLUMN].to_numpy(), np.int64)
    if with_unique:
        for bit, rule in rules.unique:
            verdicts[equal_rows(rows, rule.columns, exempt)] |= bit
    rows = rows.drop_columns([BROKEN_COLUMN])
    if not verdicts.any():
        return RuleEvaluation(rows)
    numbers = [int(np.count_nonzero(verdicts & (1 << n))) for n in range(len(rules.rules))]
    if (stopping := (verdicts & rules.bits("fail")) != 0).any():
        return RuleEvaluation(rows, numbers=numbers, failing=rows.take(np.flatnonzero(stopping)[:_SAMPLE]))
    aside = (verdicts & rules.bits("quarantine")) != 0
    dropped = ((verdicts & rules.bits("drop")) != 0) & ~aside
    if not aside.any() and not dropped.any():
        return RuleEvaluation(rows, numbers=numbers)
    quarantined = None
    if aside.any():
        quarantined = rows.filter(pa.array(aside)).append_column(BROKEN_COLUMN, pa.array(verdicts[aside]))
    return RuleEvaluation(
        rows.filter(pa.array(~aside & ~dropped)), quarantined, int(np.count_nonzero(dropped)), numbers
    )


def outcome(rules: RowRules, numbers: Sequence[int], dropped: int) -> RuleOutcome:
    """The outcome of a batch; `numbers` are the rows that break each rule, empty if no row breaks any."""
    if not any(numbers):
        return NOTHING_BROKEN
    return RuleOutcome({rule.name: n for rule, n in zip(rules.rules, numbers, strict=True) if n}, dropped)


def refuse(table: str, rules: RowRules, sample: pa.Table, numbers: Sequence[int], keys: Sequence[str]) -> None:
    """Raise RuleBroken with the rules that stop the stream and some of the rows; `numbers` are rows by rule."""
    stopping = [(rule, n) for rule, n in zip(rules.rules, numbers, strict=True) if rule.on_fail == "fail"]
    names = [rule.name for rule, number in stopping if number]
    counts = "; ".join(f"{counted(n, 'row', 'breaks', 'break')} {rule.name}" for rule, n in stopping if n)
    of_rules = [column for rule, n in stopping if n for column in rule.columns]
    known = [c for c in sample.column_names if not c.startswith("__")]
    columns = [c for c in dict.fromkeys([*keys, *of_rules, *known]) if c in known]
    shown = "; ".join(_shown(row) for row in sample.slice(0, _SAMPLE).select(columns[:_COLUMNS]).to_pylist())
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


def comparable(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values that Arrow groups as SQL does: -0.0 is 0.0, and every NaN is the same NaN."""
    if not pa.types.is_floating(values.type):
        return values
    return pc.if_else(
        pc.is_nan(values), pa.scalar(float("nan"), values.type), pc.add(values, pa.scalar(0.0, values.type))
    )


def equal_rows(rows: pa.Table, columns: Sequence[str], exempt: str) -> NDArray[np.int64]:
    """Positions of the judged rows whose values in these columns occur more than once; a null is equal to nothing."""
    known = reduce(pc.and_, [pc.is_valid(rows[column]) for column in columns])
    mask = pc.and_(known, pc.invert(rows[exempt])) if exempt in rows.column_names else known
    names = [f"c{number}" for number in range(len(columns))]
    values = [comparable(rows[column]) for column in columns]
    numbered = pa.table([*values, pa.array(np.arange(rows.num_rows))], names=[*names, "__row"])
    groups = numbered.filter(mask).group_by(names).aggregate([("__row", "list"), ("__row", "count")])
    lists = groups.filter(pc.greater(groups["__row_count"], 1))["__row_list"]
    return np.asarray(pc.list_flatten(lists).to_numpy(), np.int64)


def _shown(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'null' if value is None else str(value)[:60]}" for name, value in row.items())
