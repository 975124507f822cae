"""Rows that row rules have taken out, as the verifier sees them: each batch's equation, and records without a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from streaming_jobs.verification.subject import StreamTable, Subject
from streaming_jobs.verification.verifier import StreamVerdict, verify
from tests.support import proofs
from tests.support.placed import note_places
from tests.support.proofs import CLEAN, Spoiler

ASIDE = f"{CLEAN}_quarantine"


def judged(tables: Path, keys: tuple[str, ...] = ()) -> StreamVerdict:
    aside = StreamTable(ASIDE, f"quarantined:{CLEAN}")
    subject = Subject(CLEAN, CLEAN, proofs.TOPIC, tables=(StreamTable(CLEAN, "written", keys, ASIDE), aside))
    return verify((subject,), tables, proofs.topic(), state=tables.parent / "state").streams[0]


def told(verdict: StreamVerdict, what: str, table: str = CLEAN) -> tuple[str, str]:
    return next((one.verdict, one.text) for one in verdict.comparisons if (one.table, one.what) == (table, what))


def take_out(tables: Path, *offsets: int, **rows: int) -> None:
    """Rows of the newest batch in partition 0 (30 to 39) taken away; `rows` are further counts of its entry."""
    spoiler = Spoiler(tables / CLEAN)
    spoiler.rows(lambda all_rows: [r for r in all_rows if r["source_partition"] or r["source_offset"] not in offsets])
    counts = {f"{name}:{CLEAN}": number for name, number in rows.items()}
    spoiler.entry(4, lambda entry: {**entry, "rows": {"written": 15 - len(offsets), **counts}})


def set_aside(tables: Path, *offsets: int) -> None:
    """The quarantine with rows of the newest batch."""
    rows = pa.table(
        {
            "source_partition": pa.array([0] * len(offsets), pa.int32()),
            "source_offset": pa.array(offsets, pa.int64()),
            "_rules": pa.array([["r"]] * len(offsets), pa.list_(pa.string())),
        }
    )
    entry: dict[str, Any] = {**proofs.entry(ASIDE, 3, len(offsets)), "stream": CLEAN}
    write_deltalake(tables / ASIDE, rows, mode="append", commit_properties=proofs.properties(entry))


def test_each_batch_adds_up_and_the_sum_is_told(placed: Path) -> None:
    take_out(placed, 30, 31, 32, quarantined=2, dropped=1)
    set_aside(placed, 30, 31)
    verdict = judged(placed)
    assert verdict.whole, verdict.comparisons
    assert told(verdict, "equation") == (
        "ok",
        "in each of 4 batches; in all 60 records = 57 written + 2 quarantined + 1 dropped + 0 dead letters",
    )
    assert told(verdict, "row counts", ASIDE)[0] == "ok"
    outcome, text = told(verdict, "records")
    assert outcome == "ok" and "57 records are each in exactly one row" in text
    assert "without a row are 2 (in the quarantine) and 1 (dropped)" in text


def test_a_record_that_nothing_explains_is_lost(placed: Path) -> None:
    take_out(placed, 30, 31, 32, 33, quarantined=2, dropped=1)
    set_aside(placed, 30, 31)
    verdict = judged(placed)
    assert told(verdict, "equation") == (
        "wrong",
        "batch g0001 batch 3: 15 records, 11 written + 2 quarantined + 1 dropped + 0 dead letters",
    )
    assert [str(span) for span in verdict.lost] == ["flights-0 32..33"]


@pytest.mark.parametrize(
    ("aside", "lost"), [((30,), ["flights-0 31..31"]), ((30, 31, 30, 31), [])], ids=["fewer", "twice"]
)
def test_a_quarantine_with_other_rows_than_its_entries_say_is_wrong(
    placed: Path, aside: tuple[int, ...], lost: list[str]
) -> None:
    take_out(placed, 30, 31, quarantined=2)
    set_aside(placed, *aside)
    verdict = judged(placed)
    assert told(verdict, "row counts", ASIDE)[0] == "wrong" and told(verdict, "equation")[0] == "ok"
    assert [str(span) for span in verdict.lost] == lost


def test_a_quarantine_that_has_gone_is_wrong_and_one_that_was_never_needed_is_not(placed: Path) -> None:
    assert judged(placed).whole
    take_out(placed, 30, quarantined=1)
    assert told(judged(placed), "rows", ASIDE) == ("wrong", "there is no such table")


@pytest.mark.parametrize("why", ["a filter", "an upsert", "state"])
def test_where_rows_are_not_records_there_is_no_equation(placed: Path, why: str) -> None:
    if why != "an upsert":
        note_places(placed.parent, ["Filter" if why == "a filter" else "Aggregate", "Project"])
    verdict = judged(placed, keys=("source_offset", "source_partition") if why == "an upsert" else ())
    assert not [one for one in verdict.comparisons if one.what == "equation"]
