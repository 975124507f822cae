"""Streams whose tables are on an object store: a killed driver, the next one on another machine, and what was asked."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.platform.table_rows import rows as rows_of
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import savepoints
from tests.conftest import SettingsFactory
from tests.support.driver import CRASH, assert_chained, driver, finished, ledger, produce
from tests.support.store_server import StoreServer
from tests.support.things import expected_totals, thing

COUNT = 4_000
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("path", ["executor", pytest.param("auto", marks=pytest.mark.long)])
def test_another_machine_goes_on_after_the_drivers_was_lost_and_every_record_is_there_once(
    settings: SettingsFactory,
    broker: Broker,
    tables_on_a_store: dict[str, Any],
    object_store: StoreServer,
    tmp_path: Path,
    path: str,
) -> None:
    """State is in a folder that both machines have, tables are on the store; the first home is gone."""
    bootstrap = broker.start()
    shared = {**tables_on_a_store, "state_dir": tmp_path / "shared"}
    first = settings(shared)
    topics = Topics.of(first.kafka, bootstrap)
    if topics.describe("things"):
        topics.delete("things")
    topics.create("things", 2)
    produce(bootstrap, "things", map(thing, range(COUNT)))
    environment = {
        **{f"RECOURSE_{key.upper().replace('.', '__')}": str(value) for key, value in shared.items()},
        "RECOURSE_STREAM__PATH": path,
        "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "1000",
    }
    arguments = ("--streams", "plain,totals", "--trigger", "available-now")
    process = driver(first, bootstrap, *arguments, environment={**environment, CRASH: "totals:staged:2"})
    code, output = finished(process)
    assert code == -signal.SIGKILL, output
    shutil.rmtree(first.home)
    second = Settings.load({**shared, "home": tmp_path / "another"})
    code, output = finished(driver(second, bootstrap, *arguments, environment=environment))
    assert code == 0, output
    assert_chained(ledger(second, "plain"))
    assert sorted((row["part"], row["off"]) for row in rows_of(second.tables / "plain").to_pylist()) == sorted(
        (part, offset) for part, last in topics.offsets("things").latest.items() for offset in range(last)
    )
    totals = {row["k"]: (row["c"], row["s"]) for row in rows_of(second.tables / "totals").to_pylist()}
    assert totals == expected_totals(range(COUNT))
    assert savepoints.savepoints(second, "plain") == savepoints.savepoints(first, "plain")
    assert object_store.unconditional_writes(r"_delta_log/\d+\.json") == []
