"""The table of events: it has each event once, whoever looks how often, and anybody can read it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from orchestration.event_table import KINDS, TABLE, rows, synchronise
from orchestration.quality.told_alerts import note_alerts
from orchestration.quality.transitions import Alerts, ObservedCheck
from quality import history
from quality.validation import CheckOutcome
from reprocessing.timeline.marks import KINDS as MARKS
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_history import note_slice
from tests.conftest import SettingsFactory
from tests.support import validations
from tests.support.timelines import NEW, OLD, lay_deploys, lay_sessions
from tests.support.worlds import STREAM

pytestmark = pytest.mark.slow

NOW = float(int(time.time()))
ALWAYS = datetime.fromtimestamp(0, UTC)


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    return settings()


def words(home: Settings) -> list[tuple[str, str, str]]:
    return [(event.stream, event.kind, event.what) for event in rows(home, since=ALWAYS)]


def test_each_event_is_in_it_once_in_the_order_of_time(home: Settings) -> None:
    assert synchronise(home, [STREAM]) == 0 and rows(home, since=ALWAYS) == []
    lay_sessions(home, (NOW - 100, "started"), (NOW - 20, "failed"))
    lay_deploys(home, (NOW - 60, OLD, NEW))
    assert synchronise(home, [STREAM]) == 3
    lay_sessions(home, (NOW - 100, "started"), (NOW - 20, "failed"), (NOW - 5, "started"))
    assert [synchronise(home, [STREAM]) for _ in range(2)] == [1, 0]
    expected = [("session", "started"), ("deploy", NEW), ("session", "failed"), ("session", "started")]
    assert words(home) == [(STREAM, kind, what) for kind, what in expected]


def test_an_event_whose_line_comes_late_is_added_too(home: Settings) -> None:
    lay_sessions(home, (NOW, "started"))
    synchronise(home, [STREAM])
    lay_deploys(home, (NOW - 3600, OLD, NEW))
    assert synchronise(home, [STREAM]) == 1
    assert [kind for _, kind, _ in words(home)] == ["deploy", "session"]


def test_of_several_at_once_each_event_is_added_by_one(home: Settings) -> None:
    lay_sessions(home, *((NOW + number, "restarted") for number in range(20)))
    start, added = threading.Barrier(4), []

    def look() -> None:
        start.wait(10)
        added.append(synchronise(home, [STREAM]))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(added) == 20 and len(added) == 4
    assert len(words(home)) == 20


def test_a_table_that_was_removed_is_made_again(home: Settings) -> None:
    lay_sessions(home, (NOW, "started"))
    synchronise(home, [STREAM])
    (home.tables_folder / TABLE).rename(home.tables_folder / "moved")
    assert synchronise(home, [STREAM]) == 1 and len(words(home)) == 1


def test_a_check_is_an_event_when_its_result_changes(home: Settings) -> None:
    for number, passed in enumerate((True, True, False, False, True)):
        outcome = CheckOutcome("id_not_null", "expect_column_values_to_not_be_null", passed=passed, severity="critical")
        made = replace(validations.validation(outcome, suite="orders_rows"), id=f"v{number}", started_at=NOW + number)
        history.record(home, made)
    assert synchronise(home, []) == 2
    first, second = rows(home, since=ALWAYS)
    assert (first.kind, first.what, first.table) == ("check", "failed", "orders") and second.what == "ok"
    assert "ok -> failed" in first.text


def test_a_check_that_runs_once_a_week_is_an_event_too(home: Settings) -> None:
    for number, passed in enumerate((True, False, False)):
        outcome = CheckOutcome("id_not_null", "not_null", passed=passed, severity="critical")
        at = NOW - (2 - number) * 7 * 86_400
        history.record(home, replace(validations.validation(outcome), id=f"v{number}", started_at=at))
        lay_sessions(home, (at, "started"))
        synchronise(home, [STREAM])
    assert [event.what for event in rows(home, since=ALWAYS) if event.kind == "check"] == ["failed"]


def test_a_slice_is_an_event(home: Settings) -> None:
    note_slice(home, STREAM, 1, "slice 2013-03-01 of table hours rebuilt as version 7: 24 rows before, 25 after")
    synchronise(home, [STREAM])
    (event,) = rows(home, since=ALWAYS)
    assert (event.kind, event.what) == ("slice", "rebuilt") and "version 7" in event.text


def test_an_alert_is_an_event_once_although_a_tick_that_was_killed_tells_of_it_again(home: Settings) -> None:
    red = [ObservedCheck("health", "orders", 7, "failed", "orders is dead", NOW - 86_400 * 9, stream=STREAM)]
    alerts = Alerts()
    for _ in range(2):  # the cursor of the first one is lost
        _, found = alerts.look(red, {}, NOW)
        note_alerts(home, found)
    alerts, _ = alerts.look(red, {}, NOW)
    lay_sessions(home, (NOW, "failed"))
    assert [synchronise(home, [STREAM]) for _ in range(2)] == [2, 0], "however old the outcome of the check is"
    (alert,) = (event for event in rows(home, since=ALWAYS) if event.kind == "alert")
    assert (alert.stream, alert.table, alert.what) == (STREAM, "orders", "health failed")
    assert alert.text == "orders: check health is red: orders is dead"
    _, found = alerts.look([replace(red[0], id=8, state="passed", text="orders is running")], {}, NOW)
    note_alerts(home, found)
    assert synchronise(home, [STREAM]) == 1


def test_two_runs_that_failed_between_two_ticks_are_two_events(home: Settings) -> None:
    (red,) = Alerts().look([ObservedCheck("run", "job nightly", 1, "failed", "", NOW)], {}, NOW)[1]
    note_alerts(home, [replace(red, id="one:on_failure"), replace(red, id="two:on_failure")])
    assert synchronise(home, []) == 2


def test_a_file_of_alerts_that_cannot_be_written_or_read_stops_nothing(home: Settings) -> None:
    _, found = Alerts().look([ObservedCheck("health", "orders", 7, "failed", "dead", NOW)], {}, NOW)
    file = home.state_folder / "alerts.jsonl"
    file.mkdir(parents=True)
    note_alerts(home, found)
    file.rmdir()
    file.write_text('{"at": "x"}\n{"id": 1}\n{')
    assert synchronise(home, []) == 0
    note_alerts(home, found)
    assert synchronise(home, []) == 1


def test_anybody_can_query_it(home: Settings) -> None:
    lay_sessions(home, (NOW, "started"))
    synchronise(home, [STREAM])
    table = DeltaTable(home.tables_folder / TABLE).to_pyarrow_table()
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert set(table.column_names) == {"id", "at", "kind", "stream", "what", "text", "table", "plan"}
    assert table["at"].to_pylist() == [datetime.fromtimestamp(NOW, UTC)]


def test_every_kind_of_mark_has_its_kind_of_event() -> None:
    assert set(MARKS) < set(KINDS)
