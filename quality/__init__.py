"""Checks outputs: suites of expectations on tables, their runs, their history. Read `suites.py` first.

    from quality import suite

    @suite(table="orders", key=["order_id"])
    def orders_rows():
        import great_expectations.expectations as gxe

        return [gxe.ExpectColumnValuesToNotBeNull(column="customer")]

Great Expectations takes five seconds to import, so it is imported inside the function, which runs only in a check.
Row rules, which each batch evaluates, belong to the declaration of the stream (`streaming_jobs/declare/rules.py`).
"""

from __future__ import annotations

from quality.suites import Suite, TableCheck, suite, suite_from_json

__all__ = ["Suite", "TableCheck", "suite", "suite_from_json"]
