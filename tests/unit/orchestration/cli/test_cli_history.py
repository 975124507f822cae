"""`recourse streams history`: from files alone, as text, data and pictures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from streaming_jobs.settings import Settings
from tests.support.timelines import NEW, OLD, lay_deploys, lay_ledger, lay_sessions, ledger_line
from tests.unit.orchestration.cli.conftest import Run

HISTORY = ("streams", "history", "parity")


@pytest.fixture
def begin(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """A home in which stream `parity` has run for the last two hours, with a deploy after the first one."""
    monkeypatch.setenv("RECOURSE_FLOWS", '["tests.support.worlds"]')
    settings, begin = Settings.load(), time.time() - 7_200
    lines = (ledger_line(n, begin + 10 + n * 60, code=OLD if n < 60 else NEW) for n in range(119))
    lay_ledger(settings, lines)
    lay_deploys(settings, (begin + 3_600, OLD, NEW))
    lay_sessions(settings, (begin, "started"), (begin + 3_590, "stopped"), (begin + 3_605, "started"))
    return begin


def test_text_has_groups_and_marks(begin: float, run: Run) -> None:
    text = run(*HISTORY).out
    assert "== deploy fd2f87f7 -> 0a1b2c3d by anna" in text
    assert text.index("== stopped") < text.index("== deploy") < text.index("process 4713")
    assert "rows/min" in text and "g0001, 0a1b2c3d" in text
    assert len(text.splitlines()) < 60
    text = run(*HISTORY, "--batches", "--last", "2").out
    assert "things 0:1180-1190 1:590-595" in text and "things 0:1170-1180" in text and "0:1160-1170" not in text


def test_json_counts_every_batch(begin: float, run: Run) -> None:
    value = run.json(*HISTORY)
    assert value["stream"] == "parity" and value["batches"] == 119
    assert sum(line["batches"] for line in value["lines"] if line["kind"] == "batches") == 119
    assert {line["kind"] for line in value["lines"]} == {"batches", "deploy", "session"}
    value = run(*HISTORY, "-o", "json", "--batches", "--since", "30 minutes").value
    assert len(value["lines"]) == value["batches"] == 29
    assert value["lines"][0]["offsets"]["things"]["start"]["0"] == 900


def test_since_is_a_duration_a_time_or_the_last_deploy(begin: float, run: Run) -> None:
    value = run.json(*HISTORY, "--since", "deploy")
    assert value["since"] == begin + 3_600 and value["batches"] == 59
    assert run.json(*HISTORY, "--since", "2013-01-01 00:00")["since"] == 1_356_998_400
    assert "neither a duration nor a time" in run.said(*HISTORY, "--since", "yesterday")


def test_a_picture_is_written_and_another_ending_is_refused(begin: float, tmp_path: Path, run: Run) -> None:
    assert [run(*HISTORY, "--plot", name).code for name in ("a.svg", "a.html")] == [0, 0]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "<h1>Timeline of stream parity</h1>" in (tmp_path / "a.html").read_text()
    assert "name a file .svg or .html" in run.said(*HISTORY, "--plot", "a.png")
    assert not (tmp_path / "a.png").exists()
    assert run(*HISTORY, "--plot", "no/such/a.svg").code == 2


def test_a_stream_without_batches_says_so(begin: float, run: Run) -> None:
    assert "no batch is on file" in run.said("streams", "history", "plain", code=0)
    assert run("streams", "history", "nobody").code == 2
