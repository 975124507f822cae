"""What Dagster shows of a suite's run: passed or not, words, tables of failing rows, plotted numbers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dagster as dg
import pytest
import yaml

from orchestration.quality.suites import MOST_TABLES, of_exception, of_validation, table
from orchestration.recoveries.definitions import JOB, STEP, schema
from orchestration.recoveries.request import launch_of
from quality.validation import MOST_ROWS, FirstFailing, Outcome, Severity
from streaming_jobs.errors import UsageError
from tests.support.validations import validation


def outcome(name: str = "customer_not_null", **values: Any) -> Outcome:
    return Outcome(name, "expect_column_values_to_not_be_null", **{"passed": True, **values})


def failed(name: str = "customer_not_null", severity: Severity = "critical", **values: Any) -> Outcome:
    return outcome(name, passed=False, severity=severity, **{"rows": 3120, "failing": 17, **values})


@pytest.mark.parametrize(
    ("outcomes", "passed", "severity"),
    [
        ((outcome(),), True, "ERROR"),
        ((outcome(), failed()), False, "ERROR"),
        ((outcome(), failed(severity="warning")), False, "WARN"),
        ((failed(severity="info"), failed("b", severity="warning")), False, "WARN"),
        ((failed(severity="warning"), failed("b")), False, "ERROR"),
        ((failed(severity="warning", error="no column customer"),), False, "ERROR"),
    ],
)
def test_a_check_is_an_error_unless_only_warnings_failed(
    outcomes: tuple[Outcome, ...], passed: bool, severity: str
) -> None:
    verdict = of_validation(validation(*outcomes))
    assert (verdict.passed, verdict.severity.value) == (passed, severity)


def test_the_words_say_what_failed_by_how_many_rows_and_of_which_slice_the_worst_first() -> None:
    found = of_validation(
        validation(
            outcome("id_unique"),
            failed("late", severity="warning", failing=3000),
            failed("total_between", observed="17 of 3120 rows failed"),
            failed("mean_total", failing=None, observed="mean 12.5"),
            failed("broken", failing=None, error="no column `totl`"),
        )
    )
    text = found.text
    assert text.startswith("4 of 5 expectations failed on 3,120 rows: rows of versions 41 to 44.")
    assert "total_between: 17 of 3,120 rows;" in text
    assert "mean_total: observed mean 12.5" in text
    assert "broken could not be evaluated: no column `totl`" in text
    assert "late (warning): 3,000 of 3,120 rows" in text
    assert text.index("total_between") < text.index("late (warning)")
    well = of_validation(replace(validation(outcome()), since=None))
    assert well.text == "1 of 1 expectations passed on 3,120 rows: rows of versions 41 to 44."


def test_failing_rows_are_a_table_for_each_failing_expectation_and_their_number_is_bounded() -> None:
    rows = tuple({"order_id": number, "customer": None} for number in range(MOST_ROWS + 5))
    many = [failed(f"e{number}", sample=rows, failing=100 - number) for number in range(MOST_TABLES + 2)]
    metadata = of_validation(validation(*many, outcome("well", sample=rows))).metadata
    tables = {name: value for name, value in metadata.items() if isinstance(value, dg.TableMetadataValue)}
    assert list(tables) == [f"failing rows: e{number}" for number in range(MOST_TABLES)]
    assert all(len(value.records) == MOST_ROWS for value in tables.values())
    assert metadata["further failing"].value == f"e{MOST_TABLES}, e{MOST_TABLES + 1}"


def test_cells_that_the_page_would_show_wrongly_are_text() -> None:
    shown = table(
        [
            {"id": 2**60, "price": Decimal("1.10"), "at": datetime(2026, 1, 2, tzinfo=UTC), "ratio": float("nan")},
            {"id": 7, "name": "x" * 500, "on": True},
        ]
    )
    first, second = (record.data for record in shown.records)
    assert first["id"] == str(2**60)
    assert (first["price"], first["at"], first["ratio"]) == ("1.10", "2026-01-02 00:00:00+00:00", "nan")
    assert first["name"] == "null"
    assert len(str(second["name"])) == 40
    assert [(c.name, c.type) for c in shown.schema.columns][-1] == ("on", "bool")
    assert {c.name: c.type for c in shown.schema.columns}["id"] == "str", "a column of two kinds is text"
    wide = table([{f"c{number}": number for number in range(40)}])
    assert [c.name for c in wide.schema.columns] == [f"c{number}" for number in range(10)]


def test_every_number_is_plotted_and_the_rest_is_what_an_operator_looks_for() -> None:
    first = FirstFailing("total_between", 2, 118, "3f2a", "recourse recover plan orders --before-first-broken x")
    found = validation(
        failed("total_between", number=0.5),
        failed("id_unique"),
        outcome("rows_enough", number=12),
        outcome("odd", number=float("inf")),
    )
    metadata = of_validation(replace(found, first_failing=first, docs="/home/docs/orders.html")).metadata
    assert metadata["observed: total_between"] == dg.MetadataValue.float(0.5)
    assert metadata["observed: rows_enough"] == dg.MetadataValue.float(12.0)
    assert metadata["failing: id_unique"] == dg.MetadataValue.int(17)
    assert "failing: total_between" not in metadata, "one plot for each"
    assert "observed: odd" not in metadata
    assert metadata["command to put it right"].value == first.command
    assert metadata["batch of the first failing row"].value == "batch 118 of generation 2, by total_between"
    assert metadata["code that wrote it"].value == "3f2a"
    names = sorted(metadata)  # as the page does
    rows = names.index("failing: id_unique")
    assert (
        max(names.index(name) for name in ("batch of the first failing row", "command to put it right", "data docs"))
        < rows
    )
    assert metadata["data docs"] == dg.MetadataValue.path("/home/docs/orders.html")
    assert metadata["stream"].value == "orders"
    assert metadata["slice"].value == "rows of versions 41 to 44"
    assert metadata["version"].value == "44, rows that came after version 40"
    assert metadata["files"].value == "3 of 120 files"
    assert metadata["engine"].value == "pandas"


def test_a_click_on_a_red_check_fills_the_launchpad_with_the_plan_that_its_command_makes() -> None:
    command = "recourse recover plan orders --before-first-broken total_between"
    first = FirstFailing("total_between", 2, 118, "3f2a", command)
    found = replace(validation(failed("total_between")), first_failing=first)
    link = str(of_validation(found, location="my place").metadata["by one click"].value)
    address = urlsplit(link.partition("](")[2].partition(")")[0])
    assert address.path == "/locations/my%20place/jobs/recover/playground/setup"
    config = yaml.safe_load(parse_qs(address.query)["config"][0])
    job = dg.Definitions(jobs=[job_of_fields(["orders"])]).resolve_job_def("recover")
    launch = launch_of(dg.validate_run_config(job, config)["ops"]["recovery"]["config"])
    assert launch.do == "plan" and launch.request is not None
    assert (launch.request.streams, launch.request.target) == (("orders",), ("first-broken", "total_between"))
    warned = replace(found, first_failing=replace(first, command=""))
    assert "by one click" not in of_validation(warned).metadata


def job_of_fields(streams: list[str]) -> dg.JobDefinition:
    """A job with the fields of `recover`."""

    @dg.op(name=STEP, config_schema=schema(streams))
    def recovery() -> None:
        """Nothing."""

    @dg.job(name=JOB)
    def recover() -> None:
        recovery()

    return recover


def test_failing_rows_are_left_out_where_the_settings_say_so() -> None:
    found = validation(failed("total_between", sample=({"id": 1},)))
    assert "failing rows: total_between" in of_validation(found).metadata
    hidden = of_validation(found, show_rows=False)
    assert not any(name.startswith("failing rows") for name in hidden.metadata)
    assert "17 of" in hidden.text and hidden.metadata["failing: total_between"] == dg.MetadataValue.int(17)


def test_a_suite_that_is_green_again_says_that_earlier_rows_were_not_looked_at() -> None:
    newest = of_validation(replace(validation(outcome("rows_enough")), since=40))
    assert newest.text.endswith("Rows that came before were not looked at again.")
    assert "before" not in of_validation(replace(validation(outcome("rows_enough")), since=None)).text


def test_an_exception_is_red_with_its_text() -> None:
    verdict = of_exception("orders_rows", UsageError("there is no table orders", "start the stream"))
    assert (verdict.passed, verdict.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "there is no table orders" in verdict.text
    assert "start the stream" in verdict.text
    assert "KeyError: 'x'" in of_exception("orders_rows", KeyError("x")).text
