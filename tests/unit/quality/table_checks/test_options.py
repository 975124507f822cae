"""Options of table checks: wrong ones are refused where the check is declared."""

from __future__ import annotations

from typing import Any

import pytest

from quality.table_checks import (
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
