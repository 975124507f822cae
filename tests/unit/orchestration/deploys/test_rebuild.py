"""The recovery that a refused deploy names: its command, its cost, and what would be lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestration.deploys.plan import Action, DeployPlan, StreamDeploy
from orchestration.deploys.rebuild import rebuild_of, rebuilding, recovery_plans, words_of
from reprocessing.plan.journal import journal_of
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.postgres_table import PUT_RIGHT, PostgresTable
from streaming_jobs.settings import Settings
from tests.support.life import Life, Topics, plan_one
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
    [line] = rebuild_of(Settings.load({"home": tmp_path}), writing).lines
    assert line == f"rebuild the state: {PUT_RIGHT}"


def test_a_stream_whose_cost_is_not_known_still_has_its_command(tmp_path: Path) -> None:
    command, why = rebuild_of(Settings.load({"home": tmp_path, "kafka.bootstrap_servers": "127.0.0.1:1"}), STREAM).lines
    assert command == "rebuild the state: recourse recover plan things --to-batch -1" and "not known" in why


@pytest.mark.parametrize("action", ["deploy", "recovering"])
def test_a_rebuild_that_was_interrupted_is_continued_if_its_code_is_still_that_on_disk(
    tmp_path: Path, action: Action
) -> None:
    life = Life.begin(tmp_path)
    life.run(*range(6))
    begun = plan_one(life.snapshot(Topics(end=60)), Target("batch", "-1"))
    journal_of(life.settings, begun.id).write("follow", "begun")
    topology = Topology.of([STREAM])

    def planned(code: str) -> DeployPlan:
        stream = StreamDeploy(STREAM.name, action, "a", code, refused=("other state",), rebuildable=action == "deploy")
        return rebuilding(life.settings, DeployPlan((stream,), 700), discard_state=False)

    continued = planned(begun.saw.code.hash)
    assert [each.stream for each in continued.rebuilt] == [STREAM.name] and not continued.refused
    assert [each.id for each in recovery_plans(life.settings, topology, continued)] == [begun.id]
    assert bool(planned("another").rebuilt) is (action == "deploy")
