"""Dead letters of the stream of `days.py`, and redrives of them whose rows are made by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta

import pyarrow as pa
from deltalake import write_deltalake

from reprocessing.slices.quarantine import staged_quarantine
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.runtime.redrive_commits import carry_out_redrives
from streaming_jobs.sinks.delta.log import noted
from streaming_jobs.sinks.redriven import RedrivenRecord
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.state.redrive_requests import RedrivePart, RedriveRequest, RedriveRequests
from streaming_jobs.state.slice_requests import SliceCommitRequest
from tests.support.days import BEGIN, KINDS, Days, range_of

LETTERS = "days_dead_letters"
REASON = "malformed_json"
_PLACE = (
    ("_reason", pa.string()),
    ("_topic", pa.string()),
    ("_partition", pa.int32()),
    ("_offset", pa.int64()),
    ("_generation", pa.int32()),
    ("_batch", pa.int64()),
)


def requests_of(life: Days) -> RedriveRequests:
    return RedriveRequests.of(life.settings, "days")


def with_letters(life: Days, *offsets: int, reason: str = REASON, at: datetime = BEGIN) -> Days:
    """The stream with dead letters at these offsets; the commit has an entry that moves no position."""
    count = len(offsets)
    columns = {
        "topic": pa.array(["days"] * count),
        "partition": pa.array([0] * count, pa.int32()),
        "offset": pa.array(offsets, pa.int64()),
        "timestamp": pa.array([at] * count, pa.timestamp("us", "UTC")),
        "value": pa.array([b"{"] * count),
        "reason": pa.array([reason] * count),
        "detail": pa.array(["x"] * count),
    }
    entry = LedgerEntry("upkeep", "days", LETTERS, 1, -1, note="letters of the test")
    table = life.settings.tables / LETTERS
    write_deltalake(str(table), pa.table(columns), mode="append", schema_mode="merge", commit_properties=noted(entry))
    return life


def record(offset: int, outcome: str = "row", **now: str) -> RedrivenRecord:
    return RedrivenRecord("days", 0, offset, REASON, outcome, **now)  # type: ignore[arg-type]


def asked(life: Days, name: str, records: Sequence[RedrivenRecord], *, seconds: float = 60.0) -> RedriveRequest:
    """A redrive that waits: a row for each record with the outcome `row`, whose number is the offset."""
    entry = LedgerEntry("redrive", "days", "days", life.record.generation, 0, plan=name, note="letters")
    numbers = [each.offset for each in records if each.outcome == "row"]
    rows = pa.table({"at": [BEGIN] * len(numbers), "n": numbers}, schema=KINDS)
    request = RedriveRequest(name, "days", "dead letters", LETTERS, tuple(records), (), time.time() + seconds, {})
    out = request.taken_out
    add = replace(entry, rows={"before": 0, "after": len(numbers)}).encode()
    stay = sum(1 for each in out if each.reason_now)
    take = replace(entry, table=LETTERS, rows={"before": len(out), "after": stay}).encode()
    parts = (RedrivePart("days", "add", add), RedrivePart(LETTERS, "take_out", take))
    request = replace(request, parts=parts)
    requests_of(life).keep_rows(name, "days", rows)
    requests_of(life).ask(request)
    return request


QUARANTINE = "days_quarantine"


def with_quarantined(life: Days, *hours: int, batch: int = 0) -> Days:
    """The stream with quarantined rows at these hours; the commit has an entry that moves no position."""
    entry = LedgerEntry("upkeep", "days", QUARANTINE, 1, -1, note="rows of the test")
    table, rows = life.settings.tables / QUARANTINE, quarantine_rows(*hours, batch=batch)
    write_deltalake(str(table), rows, mode="append", schema_mode="merge", commit_properties=noted(entry))
    return life


def with_quarantine(request: SliceCommitRequest, life: Days, day: int, *today: int) -> SliceCommitRequest:
    """The request with its quarantine's slice: these hours are set aside today, of the records up to batch 4."""
    name = f"{QUARANTINE}-{request.id}"
    made = staged_quarantine(life.stored(QUARANTINE), name, range_of(day), quarantine_rows(*today), Txn(1, 4))
    rows = {"before": made.rows.before.num_rows, "after": made.rows.after.num_rows}
    entry = LedgerEntry("slice", "days", QUARANTINE, 1, 0, rows=rows, plan=request.id).encode()
    aside = SliceCommitRequest(name, "days", QUARANTINE, entry, made.staged.change(), request.expires)
    return replace(request, quarantine=asdict(aside))


def quarantine_rows(*hours: int, batch: int = 0) -> pa.Table:
    """Quarantined rows of windows, which name no record, at these hours; an hour is its row's number too."""
    values = {
        "at": pa.array([BEGIN + timedelta(hours=hour) for hour in hours], KINDS.field("at").type),
        "n": pa.array(hours, pa.int64()),
        "_rules": pa.array([["small"]] * len(hours), pa.list_(pa.string())),
        **{name: pa.nulls(len(hours), kind) for name, kind in _PLACE},
        "_generation": pa.array([1] * len(hours), pa.int32()),
        "_batch": pa.array([batch] * len(hours), pa.int64()),
    }
    return pa.table(values)


def quarantined(life: Days) -> list[int]:
    """The hours of the quarantined rows."""
    return sorted(life.stored(QUARANTINE).readable().to_pyarrow_table()["n"].to_pylist())


def carry_out(life: Days) -> None:
    carry_out_redrives(requests_of(life), open_tables(life.settings, life.stream))


def letters(life: Days) -> dict[int, str]:
    """The dead letters by offset, with their reasons; each is there once."""
    rows = life.stored(LETTERS).readable().to_pyarrow_table().to_pylist()
    found = {row["offset"]: row["reason"] for row in rows}
    assert len(found) == len(rows)
    return found


def redriven(life: Days) -> list[int]:
    """The numbers of the rows that redrives have added."""
    rows = life.stored().readable().to_pyarrow_table().to_pylist()
    return sorted(row["n"] for row in rows if row["n"] >= 100)
