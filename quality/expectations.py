"""The expectations of a suite with their names: stable, readable, unique within the suite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

from quality.suites import Suite
from quality.validation import Severity
from streaming_jobs.platform.main_module import seen_with_a_file

ORDER = "recourse"
"""The key in an expectation's `meta` by which a run finds it among the results, whose order differs."""

SQL_ONLY = "unexpected_rows_expectation"
"""The kind that only Spark evaluates."""

_PREFIX = re.compile(r"^expect_(column_values_|column_pair_values_|select_column_values_|column_|table_)?")
_FILLERS = re.compile(r"(^|_)to_(be_|have_)?|(?<=not_)be_")
_COLUMNS = ("column", "column_A", "column_B", "column_list")


@dataclass(frozen=True)
class NamedExpectation:
    """An expectation with its position in the suite and its columns."""

    number: int
    name: str
    kind: str
    severity: Severity
    columns: tuple[str, ...]
    expectation: Any


def built(suite: Suite) -> list[NamedExpectation]:
    """The expectations of a suite; raises what its function raises. The first one imports Great Expectations."""
    with seen_with_a_file():
        return named(suite.build(), [check.name for check in suite.checks])


def named(expectations: Iterable[Any], taken: Sequence[str] = ()) -> list[NamedExpectation]:
    """The expectations with their names, in order; a name that is `taken` already gets a number."""
    known = set(taken)
    result = []
    for number, expectation in enumerate(map(copy, expectations)):  # the user's own stay as they are
        base = _given_name(expectation) or default_name(kind_of(expectation), columns_of(expectation))
        name, count = base, 1
        while name in known:
            count += 1
            name = f"{base}_{count}"
        known.add(name)
        expectation.meta = {**(expectation.meta or {}), ORDER: number}
        severity = cast("Severity", str(getattr(expectation.severity, "value", expectation.severity)))
        columns = columns_of(expectation)
        result.append(NamedExpectation(number, name, kind_of(expectation), severity, columns, expectation))
    return result


def default_name(kind: str, columns: Sequence[str]) -> str:
    """A name of columns and kind: `dep_delay_between`, `origin_not_null`, `row_count_between`."""
    verb = _FILLERS.sub(r"\1", _PREFIX.sub("", kind)).strip("_")
    return _word("_".join([*columns, verb]))


def kind_of(expectation: Any) -> str:
    """Great Expectations' type, such as `expect_column_values_to_be_between`."""
    return str(expectation.expectation_type)


def columns_of(expectation: Any) -> tuple[str, ...]:
    """The columns that an expectation is about, in order; none if it is about the table."""
    columns: list[str] = []
    for argument in _COLUMNS:
        value = getattr(expectation, argument, None)
        columns += [value] if isinstance(value, str) else [str(each) for each in value or ()]
    return tuple(dict.fromkeys(columns))


def _given_name(expectation: Any) -> str:
    return _word(str((expectation.meta or {}).get("name") or ""))


def _word(text: str) -> str:
    """The text in letters, digits and underscores, as Dagster wants names of checks."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")
