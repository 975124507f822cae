"""The doctor proves that a store keeps the conditions of writes; a session refuses to start on one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from streaming_jobs.errors import PermanentError
from streaming_jobs.preflight.doctor import check_store
from streaming_jobs.storage.locations import StorePath, files_below
from streaming_jobs.storage.object_store import refuse_broken_promises
from tests.conftest import ON_BOTH_SERVERS, SettingsFactory
from tests.support.store_server import Fault, StoreServer


@pytest.fixture
def tables(settings: SettingsFactory, tables_on_a_store: dict[str, Any]) -> StorePath:
    place = settings(tables_on_a_store).tables
    assert isinstance(place, StorePath)
    return place


@ON_BOTH_SERVERS
def test_a_store_with_conditional_writes_is_right_and_keeps_nothing_of_the_probe(tables: StorePath) -> None:
    assert check_store("tables", tables).ok
    refuse_broken_promises(tables.url, dict(tables.options))
    assert list(files_below(tables)) == []


def test_a_store_that_lies_about_conditions_is_refused(tables: StorePath, object_store: StoreServer) -> None:
    object_store.inject(Fault("condition ignored", times=100))
    check = check_store("tables", tables)
    assert check.ok is False and "conditional writes" in check.fix
    assert check.found == f"{tables}: it creates an object that exists; it replaces an object under a wrong tag"
    with pytest.raises(PermanentError, match="rest on: it creates an object that exists"):
        refuse_broken_promises(tables.url, dict(tables.options))
    object_store.clear()
    assert list(files_below(tables)) == []


def test_a_store_that_cannot_be_reached_is_named_with_its_remedy(tables: StorePath, object_store: StoreServer) -> None:
    object_store.inject(Fault("denied", times=100))
    object_store.inject(Fault("denied", "DELETE", times=100))
    check = check_store("tables", tables)
    assert check.ok is False and "refuses access" in check.found and "credentials" in check.fix
    gone = check_store("tables", StorePath(f"s3://no-such-bucket/{tables.name}", tables.options))
    assert gone.ok is False and "bucket that does not exist" in gone.found
