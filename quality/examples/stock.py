"""Suites on the tables of the stock of products."""

from __future__ import annotations

from typing import Any

from quality.suites import suite
from quality.table_checks import Reconciled, UniqueKey


@suite(table="inventory", key=["product"], slice="all", checks=[UniqueKey(), Reconciled()])
def inventory_rows() -> list[Any]:
    """No product has less than nothing in stock."""
    import great_expectations.expectations as gxe

    return [
        gxe.ExpectColumnValuesToNotBeNull(column="product"),
        gxe.ExpectColumnValuesToBeBetween(column="quantity", min_value=0, meta={"name": "quantity_not_negative"}),
        gxe.ExpectColumnValuesToBeBetween(column="movements", min_value=1),
        gxe.ExpectColumnValuesToNotBeNull(column="last_at"),
    ]
