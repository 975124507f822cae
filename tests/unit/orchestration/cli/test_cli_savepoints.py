"""`recourse savepoints` as it is typed: of one stream, and of several under one name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reprocessing import executor
from streaming_jobs.state import savepoint_retention, savepoints
from tests.support.life import Life
from tests.support.life_flows import OTHERS, STREAM
from tests.unit.orchestration.cli.conftest import Declare, Run

pytestmark = pytest.mark.slow

NEVER_RAN = replace(OTHERS, name="never_ran", sinks={"never_ran": replace(OTHERS.primary, name="never_ran")})


@pytest.fixture(autouse=True)
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declare: Declare) -> list[Life]:
    """Two streams that have run, and one that has not."""
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
    declare(STREAM, OTHERS, NEVER_RAN)
    return [Life.of_batches(tmp_path, count, stream.name) for stream, count in ((STREAM, 6), (OTHERS, 4))]


def named(run: Run) -> dict[str, dict[str, str]]:
    """By name, the streams and their savepoints, as listed."""
    listed = run.json("savepoints", "list")
    return {each["name"]: {s: of["savepoint"] for s, of in each["streams"].items()} for each in listed}


def test_all_streams_that_have_run_get_one_under_the_name(run: Run) -> None:
    code, _, said = run("savepoints", "create", "--name", "before-release", "--note", "v2")
    assert code == 0 and "never_ran has not finished a batch yet: it is left out" in said
    assert named(run) == {"before-release": {"things": "g0001-b000000005", "others": "g0001-b000000003"}}
    text = run("savepoints", "list")[1]
    assert "before-release" in text and "others g0001-b000000003" in text and "v2" in text
    listed = run.json("savepoints", "list", "things")
    assert [each["names"] for each in listed] == [["before-release"]]


def test_named_streams_and_those_downstream_of_one(run: Run) -> None:
    assert run("savepoints", "create", "others", "--name", "one", "--keep", "0 s")[0] == 0
    assert run("savepoints", "create", "--name", "down", "--downstream-of", "things")[0] == 0
    assert named(run) == {"one": {"others": "g0001-b000000003"}, "down": {"things": "g0001-b000000005"}}
    assert run("savepoints", "create", "never_ran", "--name", "two")[0] == 2
    assert run("savepoints", "create", "things", "others")[0] == 2
    assert run("savepoints", "create", "things", "--name", "x", "--downstream-of", "things")[0] == 2


def test_one_of_one_stream_needs_no_name(lives: list[Life], run: Run) -> None:
    assert run("savepoints", "create", "things")[0] == 0
    assert [s.reason for s in savepoints.savepoints(lives[0].settings, "things")] == ["purpose"]


def test_it_is_dropped_as_one_and_only_as_one(lives: list[Life], run: Run) -> None:
    run("savepoints", "create", "--name", "before-release")
    assert "belongs to 'before-release'" in run.said("savepoints", "drop", "things", "g0001-b000000005")
    assert run("savepoints", "drop", "things", "g0001-b000000005", "--name", "before-release")[0] == 2
    assert run("savepoints", "drop", "things")[0] == 2
    assert run("savepoints", "drop", "--name", "before-release")[0] == 0
    assert named(run) == {} and not savepoints.savepoints(lives[0].settings, "things")
    assert run("savepoints", "drop", "--name", "before-release")[0] == 2


def test_a_recovery_under_way_lets_nobody_take_one(
    lives: list[Life], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = run.json("recover", "plan", "things", "--to-batch", "3")["id"]
    executor.journal_of(lives[0].settings, plan).write("take_savepoint", "begun")
    assert f"plan {plan} of stream things is under way" in run.said("savepoints", "create", "--name", "before-release")
    assert savepoint_retention.named(lives[0].settings) == []


def test_a_plan_goes_back_to_each_streams_own(lives: list[Life], run: Run) -> None:
    run("savepoints", "create", "--name", "before-release")
    lives[0].batch(6)
    lives[1].batch(4)
    every = run.json("recover", "plan", "--savepoint", "before-release")
    bases = {each["stream"]: each["base"]["savepoint"] for each in every["streams"]}
    assert bases == {"things": "g0001-b000000005", "others": "g0001-b000000003"}
    one = run.json("recover", "plan", "others", "--savepoint", "before-release")
    assert [each["base"]["savepoint"] for each in one["streams"]] == ["g0001-b000000003"]
    both = ("recover", "plan", "things", "others")
    assert run(*both, "--savepoint", "before-release")[0] == 0
    assert "is about one stream" in run.said(*both, "--savepoint", "g0001-b000000003")
    assert "no stream was given" in run.said("recover", "plan", "--to-batch", "3")


def test_killed_between_two_streams_nothing_has_the_name(lives: list[Life], run: Run, tmp_path: Path) -> None:
    """The command is a process of its own, which the crash point kills after its first savepoint."""
    (tmp_path / "killed_flows.py").write_text("from tests.support.life_flows import OTHERS, STREAM")
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    environment = {"RECOURSE_FLOWS": '["killed_flows"]', "RECOURSE_CRASH": "things:savepoint_of_name:0"}
    arguments = ["savepoints", "create", "--name", "before-release"]
    command = f"from orchestration import cli; cli.main({arguments!r})"
    child = subprocess.run(
        [sys.executable, "-c", command], env={**os.environ, "PYTHONPATH": paths, **environment}, check=False, timeout=60
    )
    assert child.returncode == -signal.SIGKILL
    assert named(run) == {} and savepoints.savepoints(lives[0].settings, "things")
    assert run("savepoints", "create", "--name", "before-release")[0] == 0
    assert named(run)["before-release"].keys() == {"things", "others"}
