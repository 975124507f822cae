"""The recovery that a refused deploy names: its command, its cost, and what would be lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orchestration.deploys.rebuild import rebuild_words, words_of
from reprocessing.plan.snapshot import planning_snapshot
from streaming_jobs.declare.postgres_table import PUT_RIGHT, PostgresTable
from streaming_jobs.settings import Settings
from tests.support.life import Life, Topics
from tests.support.life_flows import STREAM


def test_with_all_records_the_command_has_their_number_and_without_the_first_ones_what_would_be_lost(
    tmp_path: Path,
) -> None:
    life = Life.begin(tmp_path)
    life.run(*range(6))
    [line] = words_of(planning_snapshot(life.settings, STREAM, Topics(end=60)))
    assert line.startswith("rebuild the state: recourse recover plan things --to-batch -1 (60 records")
    first, lost, command = words_of(planning_snapshot(life.settings, STREAM, Topics(first=25, end=60)))
    assert first.startswith("the state cannot be rebuilt from all records: ")
    assert lost == "lost would be things/0: offsets 0 to 24; totals begin at offset 25"
    assert "recourse recover plan things --to-batch -1 --discard-state (35 records" in command


def test_a_stream_that_writes_a_table_of_postgresql_is_not_advised_a_recovery(tmp_path: Path) -> None:
    writing = replace(STREAM, postgres_tables={"orders": PostgresTable("orders")})
    [line] = rebuild_words(Settings.load({"home": tmp_path}), writing)
    assert line == f"rebuild the state: {PUT_RIGHT}"


def test_a_stream_whose_cost_is_not_known_still_has_its_command(tmp_path: Path) -> None:
    command, why = rebuild_words(Settings.load({"home": tmp_path, "kafka.bootstrap_servers": "127.0.0.1:1"}), STREAM)
    assert command == "rebuild the state: recourse recover plan things --to-batch -1" and "not known" in why
