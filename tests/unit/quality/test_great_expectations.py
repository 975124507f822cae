"""What Great Expectations does by itself, where a run would take minutes for it."""

from __future__ import annotations

import inspect
from decimal import Decimal
from typing import NoReturn

import great_expectations.expectations as gxe
import pandas as pd
import pytest
from great_expectations import util

from quality.engines.great_expectations import SOUGHT, Caller, Frame, evaluate, sought_callers
from quality.expectations import named

pytestmark = pytest.mark.slow


def test_no_decimal_makes_gx_look_for_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> NoReturn:
        raise AssertionError("looks for modules and lines of source, tens of milliseconds for each decimal")

    monkeypatch.setattr(inspect, "getframeinfo", slow)
    prices = pd.DataFrame({"price": [Decimal(n) / 4 for n in range(10)]})
    frame = Frame("pandas", prices, [], whole_rows=True, positions=lambda _: range(2))
    expected = [
        gxe.ExpectColumnMeanToBeBetween(column="price", min_value=2),
        gxe.ExpectColumnValuesToBeBetween(column="price", min_value=Decimal("0.5")),
    ]
    mean, between = evaluate(frame, named(expected))
    assert (mean.error, mean.passed, mean.observed) == ("", False, 1.125)
    assert (between.error, between.passed, between.failing) == ("", False, 2)


def test_the_function_that_gx_looks_for_is_found_on_the_stack() -> None:
    def get_metrics() -> list[Caller]:
        return sought_callers()

    assert sought_callers() == []
    assert get_metrics() == [(__file__, "get_metrics")]
    assert inspect.getsource(util).count("stack()") == 1, "GX reads the stack for something else too"
    assert f'"{SOUGHT}"' in inspect.getsource(util.convert_decimal_to_float), "GX looks for another function"
