"""Staging: what a replay begins with, and what the stream's ledger takes over from it."""

from __future__ import annotations

import gzip
from typing import Any

from reprocessing.replay import staging
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from tests.conftest import SettingsFactory
from tests.support.life import STREAM, Life
from tests.support.reports import plan_of
from tests.support.rewind import planned, replay


def test_a_replay_that_starts_over_replaces_everything(life: Life) -> None:
    plan = planned(life, None)
    staging.prepare(life.settings, STREAM, plan, life.record, None)
    staging.sync_all(life.settings, plan)  # as the stage does; the replay has yet to make the tables
    replay_settings = staging.settings_of(life.settings, plan)
    record = stream_record.load(replay_settings, STREAM.name)
    assert record is not None and record.generation == 2 and record.tables == () and record.topics == life.record.topics
    assert not StreamFolder.of(replay_settings, STREAM.name).checkpoint(2).folder.exists()


def test_a_replay_keeps_fresh_snapshots_of_its_state_unless_the_user_says_otherwise(
    life: Life, settings: SettingsFactory
) -> None:
    plan, name = planned(life, None), "spark.sql.streaming.stateStore.minDeltasForSnapshot"
    assert staging.settings_of(settings(), plan).spark.extra[name] == "2"
    users = settings({"spark.extra": {name: "7", "spark.app": "x"}})
    assert staging.settings_of(users, plan).spark.extra.items() >= {(name, "7"), ("spark.app", "x")}
    assert name not in life.settings.spark.extra


def test_a_replay_runs_code_that_nobody_has_deployed(life: Life) -> None:
    settings = life.settings.with_stream(STREAM.name, require_deploy=True, max_restarts=2)
    own = staging.settings_of(settings, planned(life, None)).for_stream(STREAM.name)
    assert not own.require_deploy and own.max_restarts == 2


def test_only_on_a_store_no_staged_table_is_compacted(
    settings: SettingsFactory, tables_on_a_store: dict[str, Any]
) -> None:
    """There it shares files of the published table, and deltalake rewrites none outside of a table's prefix."""
    plan = plan_of().streams[0]
    assert staging.settings_of(settings(tables_on_a_store), plan).table.compact_after_files == 0
    assert staging.settings_of(settings(), plan).table == settings().table


def test_the_ledger_adopts_lines_once_and_those_of_packed_days_too(life: Life) -> None:
    plan = planned(life)
    base = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    staging.prepare(life.settings, STREAM, plan, life.record, base)
    replay(life, plan)
    replay_settings = staging.settings_of(life.settings, plan)
    mine, other = ledger_file(life.settings, STREAM.name), ledger_file(replay_settings, STREAM.name)
    today = next(other.folder.glob("*.jsonl"))
    text = today.read_text().splitlines()
    with gzip.open(other.folder / "2026-01-01.jsonl.gz", "wt") as packed:
        packed.write("\n".join(text[:2]) + "\n")
    today.write_text("\n".join(text[2:]) + "\n")
    mine.adopt(other)
    mine.adopt(other)
    lines = [raw.read() for day in reversed(list(mine.days(STREAM.name))) for raw in day]
    assert [line.entry.txn for line in lines] == [*(Txn(1, n) for n in range(6)), *(Txn(2, n) for n in range(3, 6))]
    assert [bool(line.versions) for line in lines] == [True] * 6 + [False] * 3, "staging's versions are not the table's"
