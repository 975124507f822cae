"""`recourse quality`: exit codes, failing rows in the text, JSON for programs, and a list that imports little."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.checked_orders import OrdersTable, order
from tests.unit.orchestration.cli.conftest import Printed, Run

pytestmark = pytest.mark.slow

SUITES = """
from quality import suite
from tests.support.checked_orders import orders

@suite(table="orders", key=["id"], slice="all")
def orders_rows():
    import great_expectations.expectations as gxe
    return [
        gxe.ExpectColumnValuesToBeBetween(column="amount", min_value=0, severity=SEVERITY),
        gxe.ExpectColumnValuesToNotBeNull(column="item"),
    ]
"""


Recourse = Callable[..., Printed]


@pytest.fixture
def home(settings: SettingsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OrdersTable:
    """A table of orders, with a module of suites for each severity."""
    monkeypatch.setenv("RECOURSE_HOME", str(settings().home))
    monkeypatch.setenv("COLUMNS", "200")
    for severity in ("critical", "warning", "info"):
        (tmp_path / f"orders_suites_{severity}.py").write_text(SUITES.replace("SEVERITY", repr(severity)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return OrdersTable(settings())


@pytest.fixture
def recourse(home: OrdersTable, run: Run) -> Recourse:
    """Runs `recourse quality` with the suites of a severity."""

    def recourse(severity: str, *arguments: str, code: int = 0) -> Printed:
        return run.ended(code, "--set", f'flows=["orders_suites_{severity}"]', "quality", *arguments)

    return recourse


@pytest.mark.parametrize(("severity", "code"), [("critical", 1), ("warning", 0), ("info", 0)])
def test_only_a_critical_failure_fails_the_command(
    home: OrdersTable, recourse: Recourse, severity: str, code: int
) -> None:
    home.append(order(1), order(77, amount=-5))
    text = recourse(severity, "run", "--no-docs", code=code).out
    assert "amount_between" in text and "1 of 2 rows failed" in text and "77" in text and "-5" in text
    offered = "recourse recover plan orders --before-first-broken amount_between" in text
    assert offered == (severity == "critical")


def test_json_has_the_whole_validation(home: OrdersTable, recourse: Recourse) -> None:
    home.append(order(77, amount=-5))
    (validation,) = recourse("warning", "run", "--no-docs", "-o", "json").value
    assert (validation["passed"], validation["broken"], validation["rows"]) == (False, False, 1)
    assert validation["outcomes"][0]["sample"] == [{"id": 77, "amount": -5}]


def test_what_was_found_can_be_read_later(home: OrdersTable, recourse: Recourse, tmp_path: Path) -> None:
    home.append(order(77, amount=-5))
    assert "never" in recourse("critical", "list").out
    for _ in range(2):
        recourse("critical", "run", "orders_rows", "--no-docs", code=1)
    listed = recourse("critical", "list").out
    assert "failed" in listed and "amount_between" in listed
    shown = recourse("critical", "show", "orders_rows").out
    assert "amount_between: failing rows" in shown and "77" in shown
    past = recourse("critical", "history", "orders_rows", "--last", "1", "-o", "json").value
    assert [each["passed"] for each in past] == [False, True]
    picture = tmp_path / "trend.svg"
    recourse("critical", "plot", "orders_rows", "--out", str(picture))
    text = picture.read_text()
    assert "amount_between" in text and text.count("<circle") == 4 and "#cf222e" in text
    refused = recourse("critical", "plot", "orders_rows", "--out", str(tmp_path / "trend.png"), code=2)
    assert "the picture is SVG" in refused.err and not (tmp_path / "trend.png").exists()


def test_a_warning_is_not_drawn_as_a_failure(home: OrdersTable, recourse: Recourse, tmp_path: Path) -> None:
    home.append(order(77, amount=-5))
    recourse("warning", "run", "orders_rows", "--no-docs")
    picture = tmp_path / "trend.svg"
    recourse("warning", "plot", "orders_rows", "--expectation", "amount_between", "--out", str(picture))
    text = picture.read_text()
    assert "#cf222e" not in text and "warning:" in text


def test_a_range_without_its_column_is_a_usage_error(home: OrdersTable, recourse: Recourse) -> None:
    home.append(order(1))
    assert "needs a column" in recourse("critical", "run", "--from", "2026-01-01", code=2).err


LIST = """
import sys
from orchestration.cli.app import app
try:
    app(["quality", "list"])
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = [name for name in ("great_expectations", "pandas", "dagster") if name in sys.modules]
assert not heavy, heavy
"""


def test_the_list_imports_neither_great_expectations_nor_pandas(home: OrdersTable) -> None:
    from quality import history
    from tests.unit.quality.test_history import validation

    history.record(home.settings, validation("a", suite="flights_rows"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LIST], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "flights_rows" in done.stdout and "failed" in done.stdout
