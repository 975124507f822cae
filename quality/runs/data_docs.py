"""Data Docs: one HTML page per validation, `<home>/quality/docs/<suite>/<time>-<id>.html`; the newest ones are kept.

Great Expectations' own renderer makes the page from the results. No site is made: a site would have its stores, and
the default one is in /tmp.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quality.history import make_quality_folder
from streaming_jobs.files import private_folder, write_atomic
from streaming_jobs.settings import Settings


def write_page(settings: Settings, suite: str, validation: str, at: float, results: Sequence[Any]) -> Path:
    """Write the page of a validation from its results, and remove the oldest pages of the suite; returns the path."""
    folder = private_folder(make_quality_folder(settings) / "docs" / suite)
    path = folder / f"{datetime.fromtimestamp(at, UTC):%Y%m%dT%H%M%S%f}-{validation[:8]}.html"
    write_atomic(path, _html(suite, at, results), durable=False)
    for old in sorted(folder.glob("*.html"))[: -settings.quality.docs_kept]:
        old.unlink(missing_ok=True)
    return path


def _html(suite: str, at: float, results: Sequence[Any]) -> str:
    from great_expectations.core import ExpectationSuiteValidationResult, RunIdentifier
    from great_expectations.render.renderer import ValidationResultsPageRenderer
    from great_expectations.render.view import DefaultJinjaPageView

    for each in results:
        each.result = _shown(dict(each.result or {}))
    passed = sum(bool(each.success) for each in results)
    run = RunIdentifier(run_name=suite, run_time=datetime.fromtimestamp(at, UTC))
    whole = ExpectationSuiteValidationResult(
        suite_name=suite,
        success=passed == len(results),
        results=list(results),
        suite_parameters={},
        statistics={
            "evaluated_expectations": len(results),
            "successful_expectations": passed,
            "unsuccessful_expectations": len(results) - passed,
            "success_percent": 100 * passed / len(results) if results else None,
        },
        meta={"run_id": run, "validation_time": datetime.fromtimestamp(at, UTC).isoformat()},
    )
    html: str = DefaultJinjaPageView().render(ValidationResultsPageRenderer().render(whole))
    return html


def _shown(value: Any) -> Any:
    """A result as the renderer can show it: it fails on pandas' NA and NumPy's numbers, and needs no frame of rows."""
    import numpy as np
    import pandas as pd

    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items() if name != "unexpected_rows"}
    if isinstance(value, (list, tuple)):
        return [_shown(each) for each in value]
    if value is pd.NA or value is pd.NaT:
        return None
    return value.item() if isinstance(value, np.generic) else value
