"""One run of Great Expectations on one frame. Nothing outside of this package's runs imports it: it takes five seconds.

The context exists in memory only, reports nothing to anybody, and shows no progress bars. Results have SUMMARY form:
counts and `MOST_ROWS` rows; COMPLETE would bring every failing row into memory.

An expectation that raises must not hide the others. GX handles expectations that raise during evaluation, also in
Spark's job for many of them; an unreadable expectation ends GX's whole run, and then each is evaluated separately.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any, NamedTuple
from uuid import uuid4

from quality.expectations import ORDER, NamedExpectation
from quality.validation import MOST_ROWS

Positions = Callable[[dict[str, Any]], Sequence[int]]
"""Finds the positions of failing rows in the `result` of an expectation."""


@dataclass(frozen=True)
class Evaluated:
    """The result of one expectation. `positions` are of the first failing rows, at most `MOST_ROWS`.

    `result` is Great Expectations' own, for Data Docs.
    """

    named: NamedExpectation
    passed: bool
    observed: Any = None
    rows: int | None = None
    failing: int | None = None
    positions: tuple[int, ...] = ()
    error: str = ""
    result: Any = None


@dataclass(frozen=True)
class Frame:
    """A frame to evaluate expectations on: GX's source for it, the columns that name a row, its positions."""

    source: str
    data: Any
    index: Sequence[str]
    whole_rows: bool
    positions: Positions


def evaluate(frame: Frame, expectations: Sequence[NamedExpectation]) -> list[Evaluated]:
    """Evaluate all of them in one run; if the run itself raises an exception, each of them in one of its own."""
    if not expectations:
        return []
    try:
        results = _run(frame, [each.expectation for each in expectations])
    except Exception as error:  # noqa: BLE001 - of a user's expectation: its outcome says so
        if len(expectations) == 1:
            return [Evaluated(expectations[0], passed=False, error=_text(error))]
        return [evaluated for each in expectations for evaluated in evaluate(frame, [each])]
    return [_read_safely(each, results.get(each.number), frame.positions) for each in expectations]


def _run(frame: Frame, expectations: Sequence[Any]) -> dict[int, Any]:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    from great_expectations.core import ExpectationSuite, ValidationDefinition
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    _seek_callers_quickly()
    configuration = DataContextConfig(
        store_backend_defaults=InMemoryStoreBackendDefaults(),  # without a site of pages, which would be in /tmp
        analytics_enabled=False,
        progress_bars=ProgressBarsConfig(globally=False),
    )
    context = gx.get_context(mode="ephemeral", project_config=configuration)
    name = uuid4().hex  # two runs may be in one process
    # Copies: an expectation that is part of a suite refuses to be part of another one.
    sources = context.data_sources
    source = sources.add_pandas(name) if frame.source == "pandas" else sources.add_spark(name, persist=False)
    batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe(name)
    suite = context.suites.add(ExpectationSuite(name=name, expectations=list(map(copy, expectations))))
    definition = context.validation_definitions.add(ValidationDefinition(name=name, data=batch, suite=suite))
    validated = definition.run(
        batch_parameters={"dataframe": frame.data},
        result_format={
            "result_format": "SUMMARY",
            "unexpected_index_column_names": list(frame.index),
            "include_unexpected_rows": frame.whole_rows,
            "partial_unexpected_count": MOST_ROWS,
        },
    )
    return {int(each.expectation_config.meta[ORDER]): each for each in validated.results}


class Caller(NamedTuple):
    """What GX reads of a frame of the stack."""

    filename: str
    function: str


SOUGHT = "get_metrics"
"""The function for which GX looks, in a file of its profiler."""


def sought_callers() -> list[Caller]:
    """The functions on the stack that have this name."""
    codes = (frame.f_code for frame, _ in walk_stack(inspect.currentframe()))
    return [Caller(code.co_filename, code.co_name) for code in codes if code.co_name == SOUGHT]


def _seek_callers_quickly() -> None:
    """GX looks for a function of its own on the stack at each decimal that it converts: for a mean, all of a column.

    `inspect.stack` takes 1 to 70 ms each time, since it also looks for modules and lines of source.
    """
    from great_expectations import util

    if getattr(util, "stack", None) is inspect.stack:
        util.stack = sought_callers


def _read_safely(named: NamedExpectation, result: Any, positions: Positions) -> Evaluated:
    """`_read`, and an error for a result of a form that GX's own expectations do not have."""
    try:
        return _read(named, result, positions)
    except Exception as error:  # noqa: BLE001 - of a user's expectation: its outcome says so
        return Evaluated(named, passed=False, error=_text(error))


def _read(named: NamedExpectation, result: Any, positions: Positions) -> Evaluated:
    if result is None:
        return Evaluated(named, passed=False, error="Great Expectations returned no result for it")
    if error := _exception(result.exception_info or {}):
        return Evaluated(named, passed=False, error=error, result=result)
    values: dict[str, Any] = dict(result.result or {})
    failing = values.get("unexpected_count")
    failed_rows = failing is not None and int(failing) > 0
    return Evaluated(
        named,
        passed=bool(result.success),
        observed=values.get("observed_value"),
        rows=None if values.get("element_count") is None else int(values["element_count"]),
        failing=None if failing is None else int(failing),
        positions=tuple(positions(values)) if failed_rows else (),
        result=result,
    )


def _exception(info: dict[str, Any]) -> str:
    """The message of an exception; of several, the first. GX has one entry, or one per metric."""
    entries = [info] if "raised_exception" in info else [each for each in info.values() if isinstance(each, dict)]
    raised = [each for each in entries if each.get("raised_exception")]
    return _short(str(raised[0].get("exception_message") or "it raised an exception")) if raised else ""


def _text(error: Exception) -> str:
    return _short(f"{type(error).__name__}: {error}")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 500 else f"{text[:500]} ..."
