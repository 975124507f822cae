"""A session's reports to Dagster, and their times; and the log that stays small. No Dagster process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.reporting import Reporter, figures
from streaming_jobs.settings import DagsterSettings
from streaming_jobs.state.status import Status, Totals
from tests.dagster.fakes.flows import customers, orders

WALL = 1_700_000_000.0
STATUS = Status(
    "orders",
    state="running",
    generation=1,
    batch=4,
    started_at=WALL - 500,
    committed_at=WALL,
    batch_ms=12,
    progress_at=WALL,
    input_rows_per_s=1.5,
    processed_rows_per_s=3.0,
    lag_at=WALL,
    lag_records=9,
    watermark="2013-05-01T10:00:00.000Z",
    state_rows=0,
    state_mb=0.25,
    state_skew=1.5,
)


class Desk:
    """A reporter with a clock that is set by hand, and what it has said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[dg.AssetObservation | dg.AssetMaterialization] = []
        self.errors: list[str] = []
        self.settings = DagsterSettings()
        self.reporter = Reporter(
            [orders, customers],
            self.settings,
            self.events.append,
            self.errors.append,
            clock=lambda: self.now,
            now=lambda: WALL + self.now,
        )

    def status(self, **changes: object) -> Status:
        return replace(STATUS, **{"heartbeat": WALL + self.now, "committed_at": WALL + self.now, **changes})  # type: ignore[arg-type]

    def tell(self, now: float, **changes: object) -> list[str]:
        """Report at a time; what was said, such as `observed orders`."""
        self.now = now
        self.reporter.report({"orders": self.status(**changes), "customers": None})
        return self.said()

    def finish(self, **changes: object) -> list[str]:
        self.reporter.finish({"orders": self.status(**changes), "customers": None})
        return self.said()

    def said(self) -> list[str]:
        events = [
            f"{'observed' if isinstance(e, dg.AssetObservation) else 'materialised'} {e.asset_key.to_user_string()}"
            for e in self.events
        ]
        self.events.clear()
        return events


@pytest.fixture
def desk() -> Desk:
    return Desk()


FIRST = ["materialised orders", "materialised orders_dead_letters"]


def test_the_first_committed_batch_is_materialised(desk: Desk) -> None:
    assert desk.tell(0, batch=None, committed_at=None, state="starting") == []
    assert desk.tell(1) == FIRST


def test_the_overview_is_a_minute_old_at_most_and_plots_go_on_without_new_batches(desk: Desk) -> None:
    """An asset's overview shows its newest materialisation and no observation."""
    desk.tell(0)
    assert desk.tell(59, batch=5) == []
    assert desk.tell(60, batch=6) == ["materialised orders"]
    assert desk.tell(120, batch=6, state="idle") == ["observed orders"]
    assert desk.tell(180, batch=7) == ["materialised orders"]


def test_a_batch_of_the_session_before_is_no_materialisation_of_this_one(desk: Desk) -> None:
    """The status names the last committed batch, also while the first one of this session runs."""
    assert desk.tell(0, committed_at=STATUS.started_at - 60) == ["observed orders"]


def test_dead_letters_are_told_when_there_are_new_ones_with_their_own_figures(desk: Desk) -> None:
    desk.tell(0)
    assert desk.tell(60, batch=6) == ["materialised orders"]
    desk.now = 120
    totals = Totals(since=0.0, dead_letters=8)
    desk.reporter.report({"orders": desk.status(batch=7, rows_written=500, dead_letters=3, totals=totals)})
    table, letters = desk.events
    assert letters.asset_key == dg.AssetKey(["orders_dead_letters"])
    assert letters.metadata["dead_letters_since_session_start"].value == 3
    assert letters.metadata["dead_letters_in_all"].value == 8
    assert "rows_since_session_start" not in letters.metadata
    assert table.metadata["rows_since_session_start"].value == 500


@pytest.mark.parametrize("state", ["starting", "failing", "stopping", "stopped", "failed"])
def test_a_stream_that_is_not_at_work_has_no_figures(desk: Desk, state: str) -> None:
    desk.tell(0)
    assert desk.tell(60, batch=5, state=state, lag_records=0) == []


def test_a_stream_that_has_fallen_silent_has_no_figures(desk: Desk) -> None:
    desk.tell(0)
    assert desk.tell(120, batch=5, heartbeat=WALL + 30) == []


def test_figures_that_are_old_are_left_out() -> None:
    old = figures(STATUS, WALL + 61)
    assert not {"lag_records", "input_rows_per_s", "processed_rows_per_s", "batch_ms"} & old.keys()
    assert old["last_committed_batch"] == dg.MetadataValue.text("4")


@pytest.mark.parametrize("state", ["running", "idle", "failed", "stopping"])
def test_the_end_of_a_session_that_was_killed_or_failed_materialises_nothing(desk: Desk, state: str) -> None:
    desk.tell(0)
    assert desk.finish(batch=9, state=state) == []


def test_an_end_in_order_materialises_what_was_committed_since(desk: Desk) -> None:
    desk.tell(0)
    assert desk.finish(batch=9, state="stopped") == ["materialised orders"]
    assert desk.finish(batch=9, state="stopped") == []


def test_a_failed_stream_is_told_once(desk: Desk) -> None:
    error = {"code": "REC-022", "found": "records are gone", "next": "see the docs"}
    for second in range(3):
        desk.tell(second, state="failed", error=error)
    assert desk.errors == ["stream orders failed: REC-022 records are gone\n  next: see the docs"]


def test_a_second_failure_is_told_again_also_when_the_session_began_anew_in_between(desk: Desk) -> None:
    """A session that starts itself again keeps its run, and with it the reporter."""
    error = {"code": "REC-022", "found": "records are gone"}
    desk.tell(0, state="failed", error=error)
    desk.tell(1, state="running")
    desk.tell(2, state="failed", error=error)
    desk.tell(3, state="failed", error=error, started_at=WALL + 3)
    desk.tell(4, state="failed", error=error, started_at=WALL + 3)
    assert len(desk.errors) == 3


def test_only_what_is_worth_a_plot_is_a_number() -> None:
    metadata = figures(replace(STATUS, watermark_delay_s=407_621_212.0, late_rows=5, late_rows_dropped=2), WALL)
    assert metadata["late_rows_since_session_start"] == dg.MetadataValue.int(5), "records, not Spark's count of groups"
    plotted = {
        key for key, value in metadata.items() if isinstance(value, (dg.IntMetadataValue, dg.FloatMetadataValue))
    }
    assert plotted == {
        *("input_rows_per_s", "processed_rows_per_s", "lag_records", "batch_ms", "state_rows", "state_mb"),
        "state_skew",
        *("rows_since_session_start", "dead_letters_since_session_start", "late_rows_since_session_start"),
        *("quarantined_since_session_start", "dropped_by_rules_since_session_start"),
    }
    assert metadata["last_committed_batch"] == dg.MetadataValue.text("4")
    assert metadata["recovery_number"] == dg.MetadataValue.text("1")
    assert metadata["watermark"] == dg.MetadataValue.timestamp(1367402400.0)
    assert metadata["watermark_delay"] == dg.MetadataValue.text("4717 days: the event times are of the past")
    live = figures(replace(STATUS, watermark_delay_s=3.5), WALL)
    assert live["watermark_delay_s"] == dg.MetadataValue.float(3.5)


def test_a_log_keeps_its_newest_half_while_others_still_write_to_it(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "logs" / "x.log", limit=1000)
    with log.open() as writer:
        for number in range(200):
            writer.write(f"line {number}\n".encode())
        log.trim()
        writer.write(b"after\n")
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


def test_the_oldest_unread_record_is_a_time_and_its_age_is_plotted_unless_it_is_historic() -> None:
    from streaming_jobs.runtime.lag import PartitionLag, Unread

    def shown(age: float, records: int = 30) -> dict[str, object]:
        unread = Unread(WALL, (PartitionLag("orders", 0, 20, 20 + records, WALL - age if records else None),))
        return {name: each.value for name, each in figures(STATUS, WALL, unread).items() if "oldest" in name}

    assert shown(60.0) == {"oldest_unread_record": WALL - 60, "oldest_unread_age_s": 60.0}
    assert shown(90_000.0) == {"oldest_unread_record": WALL - 90_000}
    assert shown(0.0, records=0) == {"oldest_unread_age_s": 0.0}


def test_the_lag_by_partition_is_shown_while_it_is_fresh_and_short() -> None:
    lag = {"orders": {"0": 9, "1": 0}}
    assert figures(replace(STATUS, lag_partitions=lag), WALL)["lag_by_partition"].value == lag
    assert "lag_by_partition" not in figures(replace(STATUS, lag_partitions=lag), WALL + 90)
    many = {"orders": {str(p): 1 for p in range(65)}}
    assert "lag_by_partition" not in figures(replace(STATUS, lag_partitions=many), WALL)


def test_materialisations_have_the_last_events_of_the_stream(tmp_path: Path) -> None:
    from orchestration.sessions.reporting import recent_events
    from streaming_jobs.settings import Settings
    from streaming_jobs.state import stream_history

    settings = Settings(home=tmp_path)
    for number in range(12):
        stream_history.note_session_event(
            settings, replace(STATUS, stream="orders", pid=100 + number), "failed", "a | b <i>"
        )
    text = str(recent_events(settings, orders)["timeline"].value)
    assert len(text.splitlines()) == 2 + 8 + 2
    assert "failed: a \\| b \\<i\\>" in text
    assert "recourse streams history orders" in text
