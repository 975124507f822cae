"""Checks of a whole table, beyond expectations on single rows. Read `base.py`, and docs/table-checks.md.

    @suite(table="orders", checks=[Freshness("10 minutes"), UsualRows(), UniqueKey(), Reconciled()])

Importing this package needs neither Great Expectations nor Spark's JVM.
"""

from __future__ import annotations

from quality.table_checks.base import Check, CheckedTable, PastOutcomes
from quality.table_checks.freshness import Freshness, Lag
from quality.table_checks.keys import References, UniqueKey
from quality.table_checks.reconciled import Reconciled
from quality.table_checks.same_distribution import SameDistribution
from quality.table_checks.same_schema import SameSchema
from quality.table_checks.usual import UsualRows, UsualTotal
from quality.validation import Past

__all__ = [
    "Check",
    "CheckedTable",
    "Freshness",
    "Lag",
    "Past",
    "PastOutcomes",
    "Reconciled",
    "References",
    "SameDistribution",
    "SameSchema",
    "UniqueKey",
    "UsualRows",
    "UsualTotal",
]
