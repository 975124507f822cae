"""Rows of a difference as a table of text."""

from __future__ import annotations

from datetime import UTC, date, datetime

from reprocessing.report.page import sample_table


def test_of_both_sides_only_the_columns_that_differ_are_shown_after_the_keys() -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    rows = [
        {"id": 1, "n published": 1, "n rebuilt": 2, "at published": at, "at rebuilt": at},
        {"id": 2, "n published": None, "n rebuilt": 2, "at published": at, "at rebuilt": at},
    ]
    assert sample_table(rows) == (["id", "n published", "n rebuilt"], [["1", "1", "2"], ["2", "null", "2"]])


def test_rows_of_one_side_keep_all_columns_and_values_are_text() -> None:
    at = datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)
    rows = [{"side": "gone", "at": at, "day": date(2026, 3, 1), "text": "x" * 200}, {"side": "new"}]
    head, (gone, new) = sample_table(rows)
    assert head == ["side", "at", "day", "text"]
    assert gone == ["gone", "2026-03-01 12:00:00.000005", "2026-03-01", "x" * 120 + " ..."]
    assert new == ["new", "", "", ""]
    assert sample_table([]) == ([], [])


def test_a_column_that_only_ends_like_a_side_is_kept() -> None:
    assert sample_table([{"was published": 1}]) == (["was published"], [["1"]])
