"""A rule and an expectation that mean the same: both ways, judged by Great Expectations and by DataFusion."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from quality.expectations import named
from quality.shared_rules import condition_of, expectations_of
from streaming_jobs.declare.rules import Between, Holds, InSet, Matches, NotNull, Rule, Unique
from streaming_jobs.errors import UsageError

ROWS = pa.table(
    {
        "row": [0, 1, 2, 3],
        "n": pa.array([1, None, 3, 40], pa.int64()),
        "m": pa.array([1, 2, None, 50], pa.int64()),
        "name": ["a", None, "b c", "a"],
        "done": [True, False, True, None],
        "at": [datetime(2013, 1, day, tzinfo=UTC) for day in (1, 2, 3, 4)],
    }
)
RULES: list[tuple[Rule, list[int]]] = [
    (NotNull("n"), [1]),
    (Between("n", 1, 3), [3]),
    (Between("n", low=2), [0]),
    (Between("at", high=datetime(2013, 1, 3, tzinfo=UTC)), [3]),
    (InSet("name", ["a"]), [2]),
    (Matches("name", "^.$"), [2]),
]


def broken(folder: Path, condition: str) -> list[int]:
    if not (folder / "t").exists():
        write_deltalake(folder / "t", ROWS)
    sql = f'SELECT "row" FROM t WHERE ({condition}) IS NOT TRUE ORDER BY "row"'
    return list(
        pa.table(QueryBuilder().register("t", DeltaTable(folder / "t")).execute(sql).read_all())["row"].to_pylist()
    )


def unexpected(expectation: Any) -> list[int]:
    """The rows that fail by Great Expectations itself."""
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    batch = context.data_sources.add_pandas("p").add_dataframe_asset("a").add_batch_definition_whole_dataframe("b")
    frame = ROWS.to_pandas(integer_object_nulls=True)
    result = batch.get_batch({"dataframe": frame}).validate(expectation, result_format="COMPLETE")
    assert not result.exception_info.get("raised_exception"), result.exception_info
    return list(result.result.get("unexpected_index_list") or [])


@pytest.mark.parametrize(("rule", "rows"), RULES, ids=lambda part: part.name if isinstance(part, Rule) else "")
def test_a_rule_and_its_expectation_find_the_same_rows(tmp_path: Path, rule: Rule, rows: list[int]) -> None:
    (expectation,) = expectations_of([rule])
    (one,) = named([expectation])
    assert (one.name, one.severity) == (rule.name, "warning")
    condition = condition_of(one)
    assert condition is not None
    assert (
        unexpected(expectation) == rows == broken(tmp_path, condition) == broken(tmp_path, rule.condition("datafusion"))
    )


def test_conditions_of_expectations_that_no_rule_has(tmp_path: Path) -> None:
    import great_expectations.expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    def pair(**options: Any) -> Any:
        return gxe.ExpectColumnPairValuesAToBeGreaterThanB(column_A="m", column_B="n", **options)

    done = Column("done") == True  # noqa: E712 - a condition of Great Expectations
    both = (Column("n") > 2) & Column("name").is_not_null()
    cases: list[tuple[Any, list[int] | None]] = [
        (gxe.ExpectColumnValuesToBeNull(column="m"), [0, 1, 3]),
        (gxe.ExpectColumnPairValuesAToBeGreaterThanB(column_A="m", column_B="n"), [0, 1, 2]),
        (pair(or_equal=True), [1, 2]),
        (pair(ignore_row_if="either_value_is_missing"), [0]),
        (pair(ignore_row_if="neither"), [0, 1, 2]),
        (gxe.ExpectColumnValuesToNotBeNull(column="m", row_condition=done), [2]),
        (gxe.ExpectColumnValuesToNotBeNull(column="m", row_condition=both), [2]),
        (
            gxe.ExpectColumnValuesToBeInSet(column="name", value_set=["b c"], row_condition=Column("n").is_in([1, 3])),
            [0],
        ),
        (gxe.ExpectColumnValuesToBeBetween(column="n", min_value=1, strict_min=True), None),
        (gxe.ExpectTableRowCountToBeBetween(min_value=1), None),
        (gxe.ExpectColumnMaxToBeBetween(column="n", max_value=3), None),
    ]
    for one, (expectation, rows) in zip(named([each for each, _ in cases]), cases, strict=True):
        condition = condition_of(one)
        assert (None if condition is None else broken(tmp_path, condition)) == rows, one.name
        if rows is not None:
            assert sorted(unexpected(expectation)) == rows, one.name


def test_rules_that_quarantine_are_critical_and_one_without_an_expectation_is_refused() -> None:
    made = expectations_of([NotNull("n", on_fail="quarantine"), Unique("n"), Unique(["n", "m"])])
    assert [one.severity for one in named(made)] == ["critical", "warning", "warning"]
    assert [one.kind for one in named(made)] == [
        "expect_column_values_to_not_be_null",
        "expect_column_values_to_be_unique",
        "expect_compound_columns_to_be_unique",
    ]
    with pytest.raises(UsageError, match="no expectation that means the same"):
        expectations_of([Holds("n > 1")])
