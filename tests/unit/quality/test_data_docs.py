"""The page of a validation: one file that loads nothing and shows what rows hold as text; the newest are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import great_expectations.expectations as gxe
import pytest

from quality import Suite
from quality.runs.runner import RunRequest, run_suite
from tests.support.checked_orders import TOPOLOGY, OrdersTable, order


def page_of(table: OrdersTable, *expectations: Any) -> Path:
    suite = Suite("orders_rows", "orders", lambda: expectations, key=["id"])
    return Path(run_suite(table.settings, TOPOLOGY, suite, RunRequest(slice="all")).docs)


def test_what_a_row_holds_is_text_on_the_page(table: OrdersTable) -> None:
    table.append(order(1, item="<script>alert(1)</script>"))
    checks = [gxe.ExpectColumnValuesToMatchRegex(column="item", regex="^[a-z]+$", meta={"name": "plain"})]
    page = page_of(table, *checks).read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script" not in page


def test_pages_are_kept_up_to_a_number_and_nothing_lands_elsewhere(
    table: OrdersTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import tempfile

    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    # Great Expectations removes its folder of pages at once, so that it would not be seen afterwards.
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda *_, **__: pytest.fail("a folder in /tmp"))
    table.append(*(order(1, item=None, amount=None) for _ in range(2)))
    kept = table.settings.quality.model_copy(update={"docs_kept": 2})
    table.settings = table.settings.model_copy(update={"quality": kept})
    checks = [
        gxe.ExpectColumnValuesToNotBeNull(column="item"),
        gxe.ExpectColumnValuesToNotBeNull(column="amount"),
        gxe.ExpectCompoundColumnsToBeUnique(column_list=["amount", "id"]),
        gxe.ExpectColumnMeanToBeBetween(column="id", min_value=0),
    ]
    pages = [page_of(table, *checks) for _ in range(3)]
    assert [page.exists() for page in pages] == [False, True, True]
    assert pages[-1].parent == table.settings.home.absolute() / "quality" / "docs" / "orders_rows"
    html = pages[-1].read_text()
    assert "Failing rows: item_not_null" in html and "values must never be null" in html
    assert not re.search(r"(src|href)=.?(https?:|//)|url\(", html), "the page loads something from elsewhere"
    assert pages[-1].stat().st_mode & 0o077 == 0
    assert list(elsewhere.iterdir()) == []
    assert "data docs rendering" not in caplog.text  # it goes on without what it cannot show
