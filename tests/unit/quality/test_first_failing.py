"""The batch of the first failing row: from the log, through compactions, from the ledger file; else a reason."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import great_expectations.expectations as gxe

from quality import Suite
from quality.runs.runner import RunRequest, run_suite
from quality.validation import Validation
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_folder import StreamFolder
from tests.support.checked_orders import TOPOLOGY, OrdersTable, order


def run(table: OrdersTable, *more: Any) -> Validation:
    checks = [gxe.ExpectColumnValuesToBeBetween(column="amount", min_value=0), *more]
    suite = Suite("orders_rows", "orders", lambda: checks, key=["id"], slice="all")
    return run_suite(table.settings, TOPOLOGY, suite, RunRequest(docs=False))


def test_it_is_the_earliest_batch_of_all_failing_expectations(table: OrdersTable) -> None:
    table.append(order(1))
    table.code = "bbbb"
    table.append(order(2, item=None))
    table.append(order(3, amount=-1))
    first = run(table, gxe.ExpectColumnValuesToNotBeNull(column="item")).first_failing
    assert first is not None
    assert (first.expectation, first.generation, first.batch, first.code) == ("item_not_null", 1, 1, "bbbb (0.1.0)")
    assert first.command == "recourse recover plan orders --before-first-broken item_not_null"


def test_a_warning_comes_after_what_is_critical_and_offers_no_recovery(table: OrdersTable) -> None:
    table.append(order(1, item=None))
    warning = gxe.ExpectColumnValuesToNotBeNull(column="item", severity="warning")
    first = run(table, warning).first_failing
    assert first is not None and (first.expectation, first.command) == ("item_not_null", "")
    table.append(order(2, amount=-1))
    first = run(table, warning).first_failing
    assert first is not None and (first.expectation, first.batch) == ("amount_between", 1)
    assert first.command.endswith("--before-first-broken amount_between")


def test_without_failing_rows_there_is_none(table: OrdersTable) -> None:
    table.append(order(1))
    validation = run(table)
    assert (validation.first_failing, validation.first_failing_note) == (None, "")


def test_a_compacted_row_is_found_in_the_file_it_came_from(table: OrdersTable) -> None:
    table.append(order(1))
    table.append(order(2, amount=-1))
    table.append(order(3))
    table.compact()
    first = run(table).first_failing
    assert first is not None and first.batch == 1


def test_a_compacted_row_whose_file_is_gone_has_a_reason(table: OrdersTable) -> None:
    table.append(order(1))
    table.append(order(2, amount=-1))
    table.compact()
    table.vacuum()
    validation = run(table)
    assert validation.first_failing is None
    assert "from g0001 batch 0 to g0001 batch 1" in validation.first_failing_note


def test_a_compacted_row_is_of_the_batches_of_its_partition(table: OrdersTable) -> None:
    for number, month in enumerate((4, 4, 3, 3)):
        table.append(order(number, month=month, amount=-1 if number == 3 else 1))
    table.compact()
    table.vacuum()
    assert "from g0001 batch 2 to g0001 batch 3" in run(table).first_failing_note


def test_a_foreign_commit_is_named(table: OrdersTable) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    from tests.support.checked_orders import SCHEMA

    table.append(order(1))
    write_deltalake(table.path, pa.Table.from_pylist([order(9, amount=-9)], schema=SCHEMA), mode="append")
    validation = run(table)
    assert validation.first_failing is None and "no commit of stream orders" in validation.first_failing_note


def cut(table: OrdersTable) -> None:
    """Leave only the newest checkpoint of the log."""
    table.handle.create_checkpoint()
    for commit in Path(table.path, "_delta_log").glob("*.json"):
        if commit.name[0].isdigit() and int(commit.stem) <= table.handle.version():
            commit.unlink()


def ledger(table: OrdersTable, batch: int, seconds: float) -> None:
    code = CodeVersion("cccc", "0.1.0")
    entry = LedgerEntry("batch", "orders", "orders", 1, batch, rows={"written": 5}, code=code)
    LedgerFile(StreamFolder.of(table.settings, "orders").make().ledger).append(entry, {"orders": 1}, seconds)


def test_where_the_log_ends_the_ledger_file_tells_by_the_time_of_the_file(table: OrdersTable) -> None:
    begun = time.time()
    table.append(order(1, amount=-1))
    ledger(table, 0, time.time() - begun + 0.02)
    time.sleep(0.05)  # no other batch may be possible
    begun = time.time()
    table.append(order(2))
    ledger(table, 1, time.time() - begun)
    cut(table)
    validation = run(table)
    assert validation.first_failing is not None
    assert (validation.first_failing.batch, validation.first_failing.code) == (0, "cccc (0.1.0)")
    assert "by the time" in validation.first_failing_note


def test_a_file_that_no_batch_wrote_is_ascribed_to_none(table: OrdersTable) -> None:
    begun = time.time()
    table.append(order(1, amount=-1))
    table.append(order(2))
    ledger(table, 1, time.time() - begun)
    time.sleep(0.05)
    table.compact()
    time.sleep(0.05)
    ledger(table, 2, 0.01)
    cut(table)
    validation = run(table)
    assert validation.first_failing is None and "no longer has the version" in validation.first_failing_note


def test_the_code_of_the_newest_batch_is_in_the_validation(table: OrdersTable) -> None:
    table.append(order(1))
    table.code = "dddd"
    table.append(order(2))
    table.compact()
    assert run(table).code == "dddd (0.1.0)"
