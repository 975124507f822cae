"""The status file: what is taken from Spark's reports; new ones have the form of now, and old ones are still read.

And the file of session events: append-only, bounded, and no reason for a stream to stop.
"""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf, nan
from typing import Any

import pytest

from streaming_jobs.errors import PermanentError, RecourseError, TransientError, UsageError
from streaming_jobs.platform.failures import report_of
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_history
from streaming_jobs.state.status import Status, first_status, late_rows, read_status, update, write_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_history import note_session_event as note
from tests.conftest import SettingsFactory
from tests.support.objects import path_of
from tests.support.runners import progress
from tests.support.worlds import STREAM, Disk, entry


@pytest.mark.parametrize(
    ("error", "permanent"),
    [(PermanentError("a", "b"), True), (UsageError("a", "b"), True), (TransientError("a", "b"), False)],
)
def test_whether_a_person_is_needed_is_a_boolean_in_the_file(
    settings: SettingsFactory, error: RecourseError, permanent: bool
) -> None:
    home, status = settings(), Status("orders")
    write_status(home, status)
    assert read_status(home, "orders") == status and status.error is None and status.last_error is None
    status.set_error({**report_of(error), "lasting": not permanent})
    write_status(home, status)
    written = json.loads(path_of(StreamFolder.of(home, "orders").status).read_text())
    for name in ("error", "last_error"):
        assert (written[name]["permanent"], written[name]["lasting"]) == (permanent, not permanent)
    assert read_status(home, "orders") == status


def updated(**changes: Any) -> Status:
    status = Status(STREAM)
    update(status, progress(**changes))
    return status


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, {"input_rows_per_s": 2000.0, "state_rows": 5, "state_mb": 1.0, "watermark": "2013-01-01T05:00:00.000Z"}),
        ({"stateOperators": []}, {"state_rows": None, "state_operators": []}),
        (
            {"stateOperators": [{"operatorName": "dedupe", "numRowsTotal": 3, "memoryUsedBytes": 2**19}]},
            {"state_mb": 0.5, "state_operators": [{"name": "dedupe", "rows": 3, "mb": 0.5}]},
        ),
        *(({"inputRowsPerSecond": rate}, {"input_rows_per_s": None}) for rate in (None, nan, inf, "NaN", 1e300)),
        *(
            ({"eventTime": unmoved}, {"watermark": None, "watermark_delay_s": None})
            for unmoved in ({}, None, {"watermark": "1970-01-01T00:00:00.000Z"})
        ),
    ],
)
def test_rates_state_and_watermark_are_taken_from_sparks_report_and_none_where_it_has_no_number(
    changes: dict[str, Any], taken: dict[str, Any]
) -> None:
    status = updated(**changes)
    assert {name: getattr(status, name) for name in taken} == taken


def test_the_watermark_delay_is_counted_from_now_and_late_rows_are_summed_over_the_operators() -> None:
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    mark = an_hour_ago.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert updated(eventTime={"watermark": mark}).watermark_delay_s == pytest.approx(3600, abs=5)
    operators = [{"numRowsDroppedByWatermark": 2}, {"numRowsDroppedByWatermark": 3}, {}]
    assert late_rows(progress(stateOperators=operators)) == 5
    assert late_rows({}) == 0


def test_a_status_comes_back_from_its_file_and_unknown_fields_are_passed_over(settings: SettingsFactory) -> None:
    status = replace(updated(), pid=17, warnings=["short retention"], error={"code": "REC-021"})
    write_status(settings(), status)
    assert read_status(settings(), STREAM) == status
    path = settings().state / STREAM / "status.json"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_a_newer_version": 1}))
    assert read_status(settings(), STREAM) == status


@pytest.mark.parametrize("text", [None, "", '{"stream": "par'])
def test_a_status_that_is_not_there_or_cut_off_is_none(settings: SettingsFactory, text: str | None) -> None:
    if text is not None:
        (settings().state / STREAM).mkdir(parents=True)
        (settings().state / STREAM / "status.json").write_text(text)
    assert read_status(settings(), STREAM) is None


def test_on_a_full_disk_the_reason_of_the_end_is_written_over_the_old_status(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = settings()
    write_status(here, Status("clean", state="running", warnings=["old " * 100]))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("streaming_jobs.storage.files.tempfile.mkstemp", full)
    failed = Status("clean", state="failed")
    failed.set_error({"code": "REC-010", "found": "no space is left", "next": "", "permanent": False})
    write_status(here, failed)
    assert read_status(here, "clean") == failed
    with pytest.raises(OSError, match="No space"):  # larger than the blocks of the file
        write_status(here, Status("clean", warnings=["long " * 5000]))
    assert read_status(here, "clean") == failed


def test_batches_whose_status_a_kill_took_are_counted_from_the_ledger(settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0, 1)
    write_status(disk.settings, first_status(disk.settings, STREAM))
    disk.run(2, 3)
    totals = first_status(disk.settings, STREAM).totals
    assert totals is not None and totals.batch == 3
    assert totals.records == sum(r.records for b in range(4) for r in entry(b, "evens").offsets)
    rules = {"evens": {"price_between": 3}}
    disk.ledger_file.append(replace(entry(4, "evens"), rules=rules, note="said"), {}, 0.1)
    totals = first_status(disk.settings, STREAM).totals
    assert totals is not None and totals.batch == 4
    assert totals.broken == {"evens.price_between": 3} and list(totals.broken_at) == ["evens.price_between"]


def test_a_ledger_file_that_cannot_be_read_costs_a_figure_and_no_stream(settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0)
    (disk.ledger_file.folder / "2020-01-01.jsonl.gz").write_bytes(b"\x1f\x8b cut off")
    totals = first_status(disk.settings, STREAM).totals
    assert totals is not None and totals.records == 0


def test_events_are_read_back_in_order_and_a_line_that_was_cut_off_takes_no_other_along(home: Settings) -> None:
    status = Status("s", pid=7, generation=2, batch=40, code_version="abc (0.1)", run_id="r")
    note(home, status, "started")
    note(home, status, "failed", "x" * 5_000)
    started, failed = stream_history.session_events(home, "s")
    assert (started.what, started.pid, started.run_id, started.generation, started.batch, started.code) == (
        ("started", 7, "r", 2, 40, "abc (0.1)")
    )
    assert failed.what == "failed" and len(failed.reason) == 300
    assert stream_history.session_events(home, "nobody") == []
    note(home, Status("s", pid=1), "started")
    path = path_of(StreamFolder.of(home, "s").sessions)
    path.write_text(path.read_text() + '\n{"at": 17')
    note(home, Status("s", pid=2), "started")
    assert [event.pid for event in stream_history.session_events(home, "s")] == [7, 7, 1, 2]


def test_the_file_stays_small_and_keeps_the_newest(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_history, "LIMIT", 4_000)
    for number in range(200):
        note(home, Status("s", pid=number + 1), "started")
    events = stream_history.session_events(home, "s")
    assert path_of(StreamFolder.of(home, "s").sessions).stat().st_size <= 4_000
    assert [event.pid for event in events] == list(range(201 - len(events), 201))
    assert len(events) > 10


def test_a_file_that_cannot_be_written_stops_nothing(home: Settings) -> None:
    path_of(StreamFolder.of(home, "s").make().sessions).mkdir()
    note(home, Status("s"), "started")
