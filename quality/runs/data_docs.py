"""Data Docs: one HTML page per validation, `<home>/quality/docs/<suite>/<time>-<id>.html`; the newest ones are kept.

The page is one file that loads nothing from elsewhere: the result of the run, failing rows, and below them what Great
Expectations' renderer makes of its results. Its own page would load fifteen files from the internet.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from quality.history import make_quality_folder
from quality.validation import Validation
from streaming_jobs.page import colours
from streaming_jobs.settings import Settings
from streaming_jobs.storage.files import private_folder, write_atomic
from streaming_jobs.text.spelling import instant_words

_TEMPLATE = "page.html.j2"
_ROWS = ("unexpected_rows", "partial_unexpected_list", "partial_unexpected_counts")
"""Values of failing rows in a result: the page shows these rows already, with their keys."""


def write_page(settings: Settings, validation: Validation, results: Sequence[Any]) -> Path:
    """Write the page of a validation, and remove the oldest pages of the suite; returns the path."""
    folder = private_folder(make_quality_folder(settings) / "docs" / validation.suite)
    begun = datetime.fromtimestamp(validation.started_at, UTC)
    path = folder / f"{begun:%Y%m%dT%H%M%S%f}-{validation.id[:8]}.html"
    write_atomic(path, _html(validation, results), durable=False)
    for old in sorted(folder.glob("*.html"))[: -settings.quality.docs_kept]:
        old.unlink(missing_ok=True)
    return path


def _html(validation: Validation, results: Sequence[Any]) -> str:
    from great_expectations.render.view import DefaultJinjaPageView

    page = DefaultJinjaPageView(custom_views_directory=str(Path(__file__).parent))
    outcomes = sorted(validation.outcomes, key=lambda each: ("failed", "warning", "info", "ok").index(each.word))
    rendered = _rendered(validation, results)
    values = {"run": validation, "facts": _facts(validation), "outcomes": outcomes}
    html: str = page.render(rendered, template=_TEMPLATE, colours=colours(), **values)
    return html


def _rendered(validation: Validation, results: Sequence[Any]) -> Any:
    """What Great Expectations makes of its results, in sections by column; the first one is an overview."""
    from great_expectations.core import ExpectationSuiteValidationResult, RunIdentifier
    from great_expectations.render.renderer import ValidationResultsPageRenderer

    for each in results:
        each.result = _shown(dict(each.result or {}))
    passed, begun = sum(bool(each.success) for each in results), datetime.fromtimestamp(validation.started_at, UTC)
    whole = ExpectationSuiteValidationResult(
        suite_name=validation.suite,
        success=passed == len(results),
        results=list(results),
        suite_parameters={},
        statistics={
            "evaluated_expectations": len(results),
            "successful_expectations": passed,
            "unsuccessful_expectations": len(results) - passed,
            "success_percent": 100 * passed / len(results) if results else None,
        },
        meta={"run_id": RunIdentifier(run_name=validation.suite, run_time=begun)},
    )
    return ValidationResultsPageRenderer().render(whole)


def _facts(validation: Validation) -> dict[str, str]:
    """The evaluated sample, and the origin of the first failing row."""
    first = validation.first_failing
    since = f"generation {first.generation}, batch {first.batch}, by {first.expectation}" if first else ""
    return {
        "table": f"{validation.table}, version {validation.version}",
        "rows": f"{validation.rows:,}: {validation.slice}",
        "files": validation.files_read,
        "time": f"{instant_words(validation.started_at)}",
        "engine": validation.engine,
        "first failing batch": since,
        "code that wrote it": first.code if first else "",
        "command to put it right": first.command if first else "",
        "note": validation.first_failing_note,
    }


def _shown(value: Any) -> Any:
    """A result as the renderer can show it: it fails on pandas' NA and NumPy's numbers, and takes text for HTML."""
    import numpy as np
    import pandas as pd

    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items() if name not in _ROWS}
    if isinstance(value, (list, tuple)):
        return [_shown(each) for each in value]
    if value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, str):
        return escape(value)
    return value.item() if isinstance(value, np.generic) else value
