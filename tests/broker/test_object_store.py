"""Streams whose tables are on an object store: a killed driver, the next one on another machine, and what was asked."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.platform.table_rows import rows as rows_of
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.driver import CRASH, assert_chained, command, driver, finished, ledger, produce
from tests.support.store_server import StoreServer
from tests.support.things import expected_totals, thing

COUNT = 4_000


@pytest.mark.parametrize(
    ("path", "state", "object_store"),
    [
        ("executor", "folder", "moto"),
        pytest.param("auto", "store", "moto", marks=pytest.mark.long),
        pytest.param("executor", "store", "versity", marks=pytest.mark.long),
    ],
    indirect=["object_store"],
)
def test_another_machine_goes_on_after_the_drivers_was_lost_and_every_record_is_there_once(
    settings: SettingsFactory,
    broker: Broker,
    tables_on_a_store: dict[str, Any],
    object_store: StoreServer,
    tmp_path: Path,
    path: str,
    state: str,
) -> None:
    """Tables are on the store, state is there too or in a folder that both machines have; the first home is gone."""
    bootstrap = broker.start()
    beside = f"{tables_on_a_store['tables_dir']}-state" if state == "store" else tmp_path / "shared"
    shared = {**tables_on_a_store, "state_dir": beside}
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
    if object_store.recorded:
        assert object_store.unconditional_writes(r"_delta_log/\d+\.json|/(offsets|commits)/\d+$|/lease$") == []


@pytest.mark.long
def test_a_bug_is_recovered_from_and_the_recovery_taken_back_with_nothing_in_a_folder(
    tables_on_a_store: dict[str, Any], tmp_path: Path
) -> None:
    """The demonstration: an upsert and an append table, plan, apply, undo, apply again, compared with the truth."""
    settings = {**tables_on_a_store, "state_dir": f"{tables_on_a_store['tables_dir']}-state"}
    flags = {f"RECOURSE_{key.upper().replace('.', '__')}": str(value) for key, value in settings.items()}
    done = command(tmp_path, {**os.environ, **flags, "PYTHONPATH": str(ROOT)}, "demo", "recovery")
    assert done.returncode == 0, done.stderr
    assert "; U: undone" in done.stderr and "done in" in done.stderr
