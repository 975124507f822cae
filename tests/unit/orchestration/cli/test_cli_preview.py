"""`recourse preview` as it is typed, on a stream's life on disk: without Kafka or Spark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from reprocessing.preview import run as preview_run
from reprocessing.preview.folders import Folders, hold_previews
from reprocessing.preview.run import ReplayFailure
from streaming_jobs.state import savepoints
from tests.support.life import STREAM, Life
from tests.unit.orchestration.cli.conftest import Declare, Run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declare: Declare) -> Life:
    """Six batches, and a savepoint after the third; the stream is declared, and the broker is the one of `Topics`."""
    declare(STREAM)
    monkeypatch.setattr("streaming_jobs.platform.processes.child.lower_priority", lambda: None)
    life = Life.of_batches(tmp_path, 6)
    savepoints.take(life.settings, STREAM, life.record, 2, "purpose")
    return life


def replay_is(monkeypatch: pytest.MonkeyPatch, *, wrong: bool = False, failure: ReplayFailure | None = None) -> None:
    """The replay of the command is this one."""

    def replay(folders: Folders, *_: Any) -> ReplayFailure | None:
        for number in (3, 4, 5) if failure is None else ():
            Life(folders.replay_settings()).batch(number, generation=2, code="b", wrong=wrong)
        return failure

    asked = preview_run.PreviewRequest
    monkeypatch.setattr(preview_run, "PreviewRequest", lambda *given: asked(*given, replay=replay))


@pytest.mark.parametrize(
    ("how", "code", "verdict"),
    [
        ({}, 0, "equal"),
        ({"wrong": True}, 10, "different"),
        ({"failure": ReplayFailure("REC-027", "it raised", "correct it")}, 1, "broken"),
        ({"failure": ReplayFailure("REC-021", "another aggregation", "take it back", starts=False)}, 1, "cannot start"),
    ],
)
def test_the_exit_code_is_the_verdict(
    how: dict[str, Any],
    code: int,
    verdict: str,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_is(monkeypatch, **how)
    ended, out, err = run("preview", "things", "-o", "json", "--json", "kept.json")
    value = json.loads(out)
    assert (ended, value["verdict"], value["exit_code"]) == (code, verdict, code)
    assert json.loads((tmp_path / "kept.json").read_text()) == value
    assert "replays 30 records from savepoint g0001-b000000002" in err
    report = Path(value["report"])
    assert report.is_relative_to(tmp_path / "state" / "_previews" / "things") and verdict in report.read_text()
    ended, out, _ = run("preview", "things")
    assert ended == code and out.startswith(f"stream things: {verdict}") and "report: " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "nothing"),
        (["things", "--last", "soon"], "soon"),
        (["things", "--last", "2 hours", "--from-savepoint", "g0001-b000000002"], "were both given"),
        (["things", "--from-savepoint", "g0001-b000000001"], "has no savepoint g0001-b000000001"),
        (["things", "--from-savepoint", "../../elsewhere"], "has no savepoint"),
    ],
)
def test_a_wrong_request_is_usage_and_replays_nothing(arguments: list[str], words: str, run: Run) -> None:
    code, out, err = run("preview", *arguments)
    assert code == 2 and words in err and not out


def test_a_second_preview_of_the_stream_is_refused(life: Life, run: Run) -> None:
    with hold_previews(Folders(life.settings, "things")):
        assert f"another preview of stream things is running (process {os.getpid()})" in run.said("preview", "things")
