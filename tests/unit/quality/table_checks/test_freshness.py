"""Freshness and lag: old tables, empty tables, rows of the future, a log that no longer has the rows' commit."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from quality.table_checks import Freshness, Lag
from streaming_jobs.state.status import Status, write_status
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.checked_tables import AT, Orders, row, rows


def test_a_fresh_table_passes_and_an_old_one_fails(orders: Orders) -> None:
    orders.batch(0)
    fresh = orders.look(Freshness("10 minutes"))
    assert fresh.passed and fresh.number is not None and fresh.number < 60
    old = orders.look(Freshness("10 minutes"), now=time.time() + 700)
    assert not old.passed and old.number == pytest.approx(700, abs=30)
    assert "10 minutes" in old.observed and not old.error


def test_a_batch_without_rows_and_a_compaction_make_nothing_fresh(orders: Orders) -> None:
    orders.batch(0)
    orders.batch(1)
    last = orders.checked().commits[0].at / 1000
    time.sleep(0.05)
    orders.batch(2, [])
    orders.compact()
    assert orders.look(Freshness("1 hour"), now=last + 100).number == pytest.approx(100)


def test_rows_of_another_program_and_a_shortened_log_count(orders: Orders) -> None:
    orders.batch(0)
    line = next(iter(orders.ledger_file.days("orders")))[-1].read().at
    orders.batch(1, [])
    orders.shorten()
    assert orders.look(Freshness("1 hour"), now=line + 50).number == pytest.approx(50, abs=0.01)
    orders.foreign(rows(0, 1))
    assert orders.look(Freshness("1 hour"), now=time.time() + 1000).number == pytest.approx(1000, abs=30)


def test_a_table_that_never_had_a_row_fails(orders: Orders) -> None:
    for check in (Freshness("1 day"), Freshness("1 day", "at")):
        outcome = orders.look(check)
        assert not outcome.passed and "there is no" in outcome.observed and not outcome.error


def test_the_newest_value_of_a_column_is_judged(orders: Orders) -> None:
    orders.batch(0, rows(0, 10))
    check = Freshness("1 minute", column="at")
    assert orders.look(check, now=AT + 9 + 59).passed
    outcome = orders.look(check, now=AT + 9 + 61)
    assert not outcome.passed and outcome.number == pytest.approx(61)


def test_values_of_the_future_hide_nothing(orders: Orders) -> None:
    orders.batch(0, [row(0), row(1, at=datetime(2999, 1, 1, tzinfo=UTC)), row(2, at=None)])
    outcome = orders.look(Freshness("1 minute", "at"), now=AT + 100)
    assert not outcome.passed and outcome.number == pytest.approx(100)
    assert "1 value after now not counted" in outcome.observed


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us")])
def test_a_date_is_its_midnight_and_a_time_without_a_zone_is_utc(orders: Orders, kind: pa.DataType) -> None:
    value = date(2026, 1, 1) if kind == pa.date32() else datetime(2026, 1, 1)
    orders.other("days", pa.table({"day": pa.array([value, None], kind)}))
    now = datetime(2026, 1, 1, 1, tzinfo=UTC).timestamp()
    outcome = orders.look(Freshness("2 hours", "day"), declared=Declared("days"), now=now)
    assert outcome.passed and outcome.number == 3600


def test_a_damaged_log_is_an_error_and_not_a_pass(orders: Orders) -> None:
    orders.batch(0)
    checked = orders.checked()
    (orders.path / "_delta_log" / f"{1:020d}.json").write_text("{")
    outcome = Freshness("1 minute").look(checked)
    assert not outcome.passed and "cannot be read" in outcome.error


LAG: dict[str, tuple[Lag, float, dict[str, Any], bool, float | None]] = {
    "records and seconds within their bounds": (Lag(records=50, seconds=30), 1010.0, {}, True, 50),
    "too many records": (Lag(records=49), 1010.0, {}, False, 50),
    "too many seconds": (Lag(seconds=29), 1010.0, {}, False, 30),
    "seconds grow while nothing runs": (Lag(seconds=3999), 5000.0, {"lag_records": 0, "lag_s": 0.0}, False, 4000),
    "records are then not known": (Lag(records=5), 5000.0, {"lag_records": 0, "lag_s": 0.0}, False, None),
    "a stream that never ran has no lag": (Lag(records=5), 1010.0, {"lag_at": None}, False, None),
}


@pytest.mark.parametrize(("check", "now", "changes", "passed", "number"), LAG.values(), ids=LAG)
def test_lag_is_judged_by_records_and_by_seconds(
    orders: Orders, check: Lag, now: float, changes: dict[str, Any], passed: bool, number: float | None
) -> None:
    lag = {"lag_at": 1000.0, "lag_records": 50, "lag_s": 20.0, **changes}
    write_status(orders.settings, Status("orders", state="running", **lag))
    outcome = orders.look(check, now=now)
    assert (outcome.passed, outcome.number, bool(outcome.error)) == (passed, number, number is None)
