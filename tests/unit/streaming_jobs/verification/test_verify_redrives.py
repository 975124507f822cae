"""The verifier on tables with redriven rows: nothing wrong is told, and what is wrong still is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.delta.log import noted
from streaming_jobs.verification.state_evidence import redriven as on_file
from tests.support.days import Days
from tests.support.redrives import asked, carry_out, record, requests_of, with_letters
from tests.unit.streaming_jobs.verification.test_verify_slices import BATCHES, judged, row_counts

pytestmark = pytest.mark.slow


@pytest.fixture
def life(tmp_path: Path) -> Days:
    return with_letters(Days.of(tmp_path, BATCHES), 100, 101, 102)


def test_redriven_rows_are_no_fault_and_are_counted(life: Days) -> None:
    asked(life, "a", [record(100), record(101, "dropped"), record(102, "redriven")])
    assert "a redrive waits" in row_counts(judged(life)).text
    carry_out(life)
    verdict = judged(life)
    assert not verdict.faults
    assert row_counts(verdict).verdict == "ok" and "with 1 redrive" in row_counts(verdict).text
    (one,) = on_file(requests_of(life).folder)
    assert one.without_row == (("days", 0, 101),) and one.unknown == (("days", 0, 102),)


def test_rows_that_no_redrive_explains_are_wrong(life: Days) -> None:
    asked(life, "a", [record(100)])
    carry_out(life)
    entry = LedgerEntry("redrive", "days", "days", 1, 0, plan="b")
    DeltaTable(life.sink().path).delete("n = 3", commit_properties=noted(entry))
    assert row_counts(judged(life)).verdict == "wrong"


def test_a_redrive_that_moves_the_stream_s_position_is_a_fault(life: Days) -> None:
    asked(life, "a", [record(100)])
    carry_out(life)
    newest = max((life.sink().path / "_delta_log").glob("*.json"))
    txn = {"txn": {"appId": "recourse:days:days", "version": 1 << 32 | 9, "lastUpdated": 1}}
    newest.write_text(newest.read_text().rstrip() + "\n" + json.dumps(txn) + "\n")
    assert any("under an entry of kind redrive" in str(fault) for fault in judged(life).faults)
