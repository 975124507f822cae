"""What tests of suites share: a table of orders."""

from __future__ import annotations

import pytest

from tests.conftest import SettingsFactory
from tests.support.checked_orders import OrdersTable


@pytest.fixture
def table(settings: SettingsFactory) -> OrdersTable:
    return OrdersTable(settings())
