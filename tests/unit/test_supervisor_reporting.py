"""What a session tells Dagster, and when; and the log that stays small. No Dagster process."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from orchestration.driver import BoundedLog
from orchestration.reporting import Reporter, figures
from streaming_jobs.progress import Status
from streaming_jobs.settings import DagsterSettings
from tests.dagster.fakes.flows import customers, orders

STATUS = Status(
    "orders",
    state="running",
    generation=1,
    batch=4,
    committed_at=1.0,
    batch_ms=12,
    input_rows_per_s=1.5,
    processed_rows_per_s=3.0,
    lag_records=9,
    watermark="2013-05-01T10:00:00.000Z",
    state_rows=0,
    state_mb=0.25,
)


class Desk:
    """A reporter with a clock that is set by hand, and what it has said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[dg.AssetObservation | dg.AssetMaterialization] = []
        self.errors: list[str] = []
        settings = DagsterSettings(observe_every=timedelta(seconds=60), materialize_every=timedelta(minutes=15))
        self.reporter = Reporter(
            [orders, customers], settings, self.events.append, self.errors.append, clock=lambda: self.now
        )

    def tell(self, now: float, **changes: object) -> list[str]:
        """Report at a time; what was said, such as `observed orders`."""
        self.now = now
        self.reporter.report({"orders": replace(STATUS, **changes), "customers": None})  # type: ignore[arg-type]
        return self.said()

    def said(self) -> list[str]:
        found = [
            f"{'observed' if isinstance(e, dg.AssetObservation) else 'materialised'} {e.asset_key.to_user_string()}"
            for e in self.events
        ]
        self.events.clear()
        return found


@pytest.fixture
def desk() -> Desk:
    return Desk()


FIRST = ["materialised orders", "materialised orders_dead_letters", "observed orders", "observed orders_dead_letters"]


def test_the_first_committed_batch_is_materialised_and_observed(desk: Desk) -> None:
    assert desk.tell(0, batch=None, committed_at=None, state="starting") == []
    assert desk.tell(1) == FIRST


def test_observations_come_each_minute_and_dead_letters_only_when_there_are_new_ones(desk: Desk) -> None:
    desk.tell(0)
    assert desk.tell(59, batch=5) == []
    assert desk.tell(60, batch=6) == ["observed orders"]
    assert desk.tell(120, batch=7, dead_letters=1) == ["observed orders", "observed orders_dead_letters"]


def test_materialisations_come_each_quarter_of_an_hour_and_only_for_new_batches(desk: Desk) -> None:
    desk.tell(0)
    desk.tell(899, batch=5)
    assert desk.tell(900, batch=6)[:2] == FIRST[:2]
    assert desk.tell(1800, batch=6) == ["observed orders"]


def test_the_end_materialises_what_was_committed_since(desk: Desk) -> None:
    desk.tell(0)
    desk.reporter.finish({"orders": replace(STATUS, batch=9), "customers": None})
    assert desk.said() == FIRST[:2]
    desk.reporter.finish({"orders": replace(STATUS, batch=9), "customers": None})
    assert desk.said() == []


def test_a_failed_stream_is_told_once(desk: Desk) -> None:
    error = {"code": "REC-022", "found": "records are gone", "next": "see the docs"}
    for second in range(3):
        desk.tell(second, state="failed", error=error)
    assert desk.errors == ["stream orders failed: REC-022 records are gone\n  next: see the docs"]


def test_figures_are_numbers_where_there_is_one_and_absent_where_not() -> None:
    found = figures(STATUS)
    assert found["batch_id"] == dg.MetadataValue.int(4)
    assert found["processed_rows_per_s"] == dg.MetadataValue.float(3.0)
    assert found["state_rows"] == dg.MetadataValue.int(0)
    assert found["watermark"] == dg.MetadataValue.timestamp(1367402400.0)
    assert "watermark_delay_s" not in found
    assert "batch_id" not in figures(Status("orders"))


def test_a_log_keeps_its_newest_half_while_others_still_write_to_it(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "logs" / "x.log", limit=1000)
    writer = log.open()
    for number in range(200):
        os.write(writer, f"line {number}\n".encode())
    log.trim()
    os.write(writer, b"after\n")
    os.close(writer)
    text = log.path.read_text()
    assert len(text) < 1000
    assert text.startswith("(older lines dropped)\nline ")
    assert text.endswith("line 199\nafter\n")
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_a_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "x.log")
    assert log.tail() == ""
    log.write("first line")
    log.write("second")
    assert log.tail(12) == "second"
    assert log.tail() == "first line\nsecond"
