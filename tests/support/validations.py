"""Results of suites' runs, for tests of what is made of them."""

from __future__ import annotations

from quality.validation import CheckOutcome, Validation


def validation(*outcomes: CheckOutcome, suite: str = "orders_rows", table: str = "orders") -> Validation:
    """A run of a suite with these outcomes."""
    return Validation(
        id="v1",
        suite=suite,
        table=table,
        stream=table,
        table_id="t",
        version=44,
        since=40,
        slice="rows of versions 41 to 44",
        files=3,
        files_in_table=120,
        rows=3120,
        engine="pandas",
        started_at=1_000_000.0,
        seconds=1.5,
        outcomes=outcomes,
    )
