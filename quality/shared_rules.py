"""One definition for a row rule and an expectation where both mean the same, in both directions.

| rule                        | expectation                                                       |
|-----------------------------|-------------------------------------------------------------------|
| NotNull                     | expect_column_values_to_not_be_null                               |
| Between                     | expect_column_values_to_be_between, both bounds included          |
| InSet                       | expect_column_values_to_be_in_set                                 |
| Matches                     | expect_column_values_to_match_regex (Java's syntax, and Python's) |
| Unique, within a batch      | expect_compound_columns_to_be_unique, within a sample             |
| Holds                       | none: unexpected_rows_expectation needs Spark's SQL               |

A rule that warns becomes an expectation of severity `warning`, any other a critical one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from streaming_jobs.declare.rules import Between, InSet, Matches, NotNull, Rule, Unique
from streaming_jobs.errors import UsageError
from streaming_jobs.text.sql import literal, quoted

if TYPE_CHECKING:
    from quality.expectations import NamedExpectation


def expectations_of(rules: Iterable[Rule]) -> list[Any]:
    """The rules as expectations, with their names; call it in a suite's function, since it imports Great Expectations.

    Raises UsageError for a rule that has no such expectation.
    """
    import great_expectations.expectations as gxe

    def expectation(rule: Rule) -> Any:
        severity = "warning" if rule.on_fail == "warn" else "critical"
        common: dict[str, Any] = {"meta": {"name": rule.name}, "severity": severity}
        if isinstance(rule, NotNull):
            return gxe.ExpectColumnValuesToNotBeNull(column=rule.column, **common)
        if isinstance(rule, Between):
            bounds: dict[str, Any] = {"min_value": rule.low, "max_value": rule.high}
            return gxe.ExpectColumnValuesToBeBetween(column=rule.column, **bounds, **common)
        if isinstance(rule, InSet):
            return gxe.ExpectColumnValuesToBeInSet(column=rule.column, value_set=list(rule.values), **common)
        if isinstance(rule, Matches):
            return gxe.ExpectColumnValuesToMatchRegex(column=rule.column, regex=rule.pattern, **common)
        if isinstance(rule, Unique) and len(rule.columns) > 1:
            return gxe.ExpectCompoundColumnsToBeUnique(column_list=list(rule.columns), **common)
        if isinstance(rule, Unique):
            return gxe.ExpectColumnValuesToBeUnique(column=rule.columns[0], **common)
        raise UsageError(
            f"rule {rule.name} has no expectation that means the same", "leave it out, or write the expectation itself"
        )

    return [expectation(rule) for rule in rules]


def condition_of(named: NamedExpectation) -> str | None:
    """DataFusion SQL that is true for a row that meets an expectation; None for expectations not on single rows.

    Rows to which an expectation's `row_condition` does not apply keep it.
    """
    rule, expectation = _rule(named), named.expectation
    if rule is None:
        return None
    condition = rule if isinstance(rule, str) else rule.condition("datafusion")
    if expectation.row_condition is None:
        return condition
    applies = _applies(expectation.row_condition)
    return None if applies is None else f"(({applies}) IS NOT TRUE) OR ({condition})"


def _rule(named: NamedExpectation) -> Rule | str | None:
    """The rule that means the same as an expectation, or its condition; None if there is none."""
    kind, expectation = named.kind.removeprefix("expect_column_values_to_"), named.expectation
    if kind == "not_be_null":
        return NotNull(expectation.column)
    if kind == "be_null":
        return f"{quoted(expectation.column, 'datafusion')} IS NULL"
    if kind == "be_between" and not (expectation.strict_min or expectation.strict_max):
        return Between(expectation.column, expectation.min_value, expectation.max_value)
    if kind == "be_in_set":
        return InSet(expectation.column, list(expectation.value_set))
    if kind == "match_regex":
        return Matches(expectation.column, expectation.regex)
    if named.kind == "expect_column_pair_values_a_to_be_greater_than_b":
        return _pair(expectation, ">=" if expectation.or_equal else ">")
    if named.kind == "expect_column_pair_values_to_be_equal":
        return _pair(expectation, "=")
    return None


def _pair(expectation: Any, operator: str) -> str | None:
    """A comparison of two columns; a row that has only one of the values breaks it, unless the expectation says so."""
    a, b = (quoted(column, "datafusion") for column in (expectation.column_A, expectation.column_B))
    ignored = {
        "both_values_are_missing": f"({a} IS NULL AND {b} IS NULL) OR ",
        "either_value_is_missing": f"{a} IS NULL OR {b} IS NULL OR ",
        "neither": "",
    }.get(str(getattr(expectation.ignore_row_if, "value", expectation.ignore_row_if)))
    return None if ignored is None else f"{ignored}{a} {operator} {b}"


def _applies(condition: Any) -> str | None:
    """A row condition of Great Expectations as SQL; None for one of a kind that is not known."""
    if isinstance(condition, str):
        return None
    kind = getattr(condition, "type", "")
    if kind in ("and", "or"):
        parts = [_applies(each) for each in condition.conditions]
        known = [part for part in parts if part is not None]
        return f" {kind.upper()} ".join(f"({part})" for part in known) if len(known) == len(parts) else None
    if kind not in ("comparison", "nullity"):
        return None
    name = quoted(condition.column.name, "datafusion")
    if kind == "nullity":
        return f"{name} IS {'' if condition.is_null else 'NOT '}NULL"
    operator = str(getattr(condition.operator, "value", condition.operator)).upper()
    if operator in ("IN", "NOT_IN", "NOT IN"):
        values = ", ".join(literal(value, "datafusion") for value in condition.parameter)
        return f"{name} {operator.replace('_', ' ')} ({values})"
    return f"{name} {'=' if operator == '==' else operator} {literal(condition.parameter, 'datafusion')}"
