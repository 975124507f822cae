"""Freshness and lag: old tables, empty tables, rows of the future, a log that no longer has the rows' commit."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quality.table_checks import Freshness, Lag
from streaming_jobs.state.status import Status, write_status
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.checked_tables import AT, Orders, row, rows


def test_a_fresh_table_passes_and_an_old_one_fails(orders: Orders) -> None:
    orders.batch(0)
    fresh = Freshness("10 minutes").look(orders.checked())
    assert fresh.passed and fresh.number is not None and fresh.number < 60
    old = Freshness("10 minutes").look(orders.checked(now=time.time() + 700))
    assert not old.passed and old.number == pytest.approx(700, abs=30)
    assert "10 minutes" in old.observed and not old.error


def test_a_batch_without_rows_and_a_compaction_make_nothing_fresh(orders: Orders) -> None:
    orders.batch(0)
    orders.batch(1)
    last = orders.checked().commits[0].at / 1000
    time.sleep(0.05)
    orders.batch(2, [])
    orders.compact()
    assert Freshness("1 hour").look(orders.checked(now=last + 100)).number == pytest.approx(100)


def test_rows_of_another_program_and_a_shortened_log_count(orders: Orders) -> None:
    orders.batch(0)
    line = next(iter(orders.ledger_file.days("orders")))[-1].read().at
    orders.batch(1, [])
    orders.shorten()
    assert Freshness("1 hour").look(orders.checked(now=line + 50)).number == pytest.approx(50, abs=0.01)
    orders.foreign(rows(0, 1))
    assert Freshness("1 hour").look(orders.checked(now=time.time() + 1000)).number == pytest.approx(1000, abs=30)


def test_a_table_that_never_had_a_row_fails(orders: Orders) -> None:
    for check in (Freshness("1 day"), Freshness("1 day", "at")):
        outcome = check.look(orders.checked())
        assert not outcome.passed and "there is no" in outcome.observed and not outcome.error


def test_the_newest_value_of_a_column_is_judged(orders: Orders) -> None:
    orders.batch(0, rows(0, 10))
    check = Freshness("1 minute", column="at")
    assert check.look(orders.checked(now=AT + 9 + 59)).passed
    outcome = check.look(orders.checked(now=AT + 9 + 61))
    assert not outcome.passed and outcome.number == pytest.approx(61)


def test_values_of_the_future_hide_nothing(orders: Orders) -> None:
    orders.batch(0, [row(0), row(1, at=datetime(2999, 1, 1, tzinfo=UTC)), row(2, at=None)])
    outcome = Freshness("1 minute", "at").look(orders.checked(now=AT + 100))
    assert not outcome.passed and outcome.number == pytest.approx(100)
    assert "1 value after now not counted" in outcome.observed


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us")])
def test_a_date_is_its_midnight_and_a_time_without_a_zone_is_utc(orders: Orders, kind: pa.DataType) -> None:
    value = date(2026, 1, 1) if kind == pa.date32() else datetime(2026, 1, 1)
    orders.other("days", pa.table({"day": pa.array([value, None], kind)}))
    now = datetime(2026, 1, 1, 1, tzinfo=UTC).timestamp()
    outcome = Freshness("2 hours", "day").look(orders.checked(declared=Declared("days"), now=now))
    assert outcome.passed and outcome.number == 3600


def test_a_column_that_is_not_there_or_no_time_is_an_error(orders: Orders) -> None:
    misspelt = Freshness("1 minute", "att").look(orders.checked())
    assert not misspelt.passed and "did you mean 'at'?" in misspelt.error
    assert "no time" in Freshness("1 minute", "id").look(orders.checked()).error


def test_a_damaged_log_is_an_error_and_not_a_pass(orders: Orders) -> None:
    orders.batch(0)
    checked = orders.checked()
    (orders.path / "_delta_log" / f"{1:020d}.json").write_text("{")
    outcome = Freshness("1 minute").look(checked)
    assert not outcome.passed and "cannot be read" in outcome.error


def lagging(orders: Orders, **changes: Any) -> Orders:
    write_status(orders.settings, Status("orders", state="running", **changes))
    return orders


def test_lag_is_judged_by_records_and_by_seconds(tmp_path: Path) -> None:
    orders = lagging(Orders.begin(tmp_path), lag_at=1000.0, lag_records=50, lag_s=20.0)
    checked = orders.checked(now=1010.0)
    assert Lag(records=50, seconds=30).look(checked).passed
    assert not Lag(records=49).look(checked).passed
    late = Lag(seconds=29).look(checked)
    assert not late.passed and late.number == 30


def test_lag_in_seconds_grows_while_nothing_runs_and_in_records_is_unknown(tmp_path: Path) -> None:
    checked = lagging(Orders.begin(tmp_path), lag_at=1000.0, lag_records=0, lag_s=0.0).checked(now=5000.0)
    assert Lag(seconds=3999).look(checked).number == 4000
    assert not Lag(seconds=3999).look(checked).passed
    unknown = Lag(records=5).look(checked)
    assert not unknown.passed and "not known" in unknown.error


def test_a_stream_that_never_ran_has_no_lag(tmp_path: Path) -> None:
    assert Lag(records=5).look(Orders.begin(tmp_path).checked()).error
