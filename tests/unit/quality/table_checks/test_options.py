"""Options of table checks: wrong ones are refused where the check is declared, what a table lacks is an error."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from quality.table_checks import (
    Check,
    Freshness,
    Lag,
    References,
    SameDistribution,
    SameSchema,
    UniqueKey,
    UsualRows,
    UsualTotal,
)
from streaming_jobs.errors import UsageError
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.checked_tables import Orders


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Freshness("soon"),
        lambda: Freshness("0 s"),
        lambda: Freshness(10),  # type: ignore[arg-type]
        lambda: Freshness("1 s", column=""),
        lambda: Freshness("1 s", severity="fatal"),  # type: ignore[arg-type]
        Lag,
        lambda: Lag(records=-1),
        lambda: UniqueKey("id"),
        lambda: UniqueKey([""]),
        lambda: References("", "places", "name"),
        lambda: References("place", "Places!", "name"),
        lambda: References("place", "places", None),  # type: ignore[arg-type]
        lambda: SameDistribution(""),
        lambda: SameDistribution("x", method="kss"),  # type: ignore[arg-type]
        lambda: SameDistribution("x", threshold=0),
        lambda: SameDistribution("x", bins=1),
        lambda: SameDistribution("x", at_least=1),
        lambda: SameDistribution("x", at_least=10, at_most=9),
        lambda: UsualRows(threshold=0),
        lambda: UsualRows(threshold=float("nan")),
        lambda: UsualRows(at_least=1),
        lambda: UsualRows(at_least=9, at_most=8),
        lambda: UsualRows(window="often"),
        lambda: UsualTotal(""),
    ],
)
def test_options_are_checked_when_it_is_declared(declare: Any) -> None:
    with pytest.raises(UsageError):
        declare()


def test_a_misspelt_option_names_the_right_one() -> None:
    with pytest.raises(UsageError, match="warning"):
        Freshness("1 s", severity="warnin")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="declared"):
        SameSchema(against="declard")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (Freshness("1 minute", "att"), "did you mean 'at'?"),
        (Freshness("1 minute", "id"), "no time"),
        (UniqueKey(), "no keys"),
        (UniqueKey(["plase"]), "did you mean 'place'"),
        (References("place", "place", "name"), "did you mean 'places'"),
        (References("place", "places", "nam"), "did you mean 'name'"),
        (References("place", "places", "n"), "one type"),
        (SameDistribution("valu"), "did you mean 'value'"),
        (SameDistribution("place", method="ks"), "no order for ks"),
        (SameSchema(against="declared"), "without a schema"),
        (UsualTotal("place"), "no sum"),
        (UsualTotal("id", time="place"), "no time"),
        (UsualTotal("prise"), "did you mean 'price'"),
    ],
)
def test_a_column_or_table_that_is_not_there_or_of_another_kind_is_an_error(
    orders: Orders, check: Check, words: str
) -> None:
    orders.other("places", pa.table({"name": ["a"], "n": [1]}))
    outcome = orders.look(check)
    assert not outcome.passed and words in outcome.error


def test_a_nested_column_is_an_error(orders: Orders) -> None:
    orders.other("nested", pa.table({"s": [{"a": 1}], "l": [[1]]}))
    nested = Declared("nested")
    assert "cannot be a key" in orders.look(UniqueKey(["s"]), declared=nested).error
    assert "no distribution" in orders.look(SameDistribution("l"), declared=nested).error
