"""`recourse streams history`: from files alone, as text, data and pictures."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from orchestration import cli
from streaming_jobs.settings import Settings
from tests.support.timelines import NEW, OLD, lay_deploys, lay_ledger, lay_sessions, ledger_line


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """A home in which stream `parity` has run for the last two hours, with a deploy after the first one."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RECOURSE_") and name != "RECOURSE_DEMO"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RECOURSE_FLOWS", '["tests.support.worlds"]')
    settings, begin = Settings.load(), time.time() - 7_200
    lines = (ledger_line(n, begin + 10 + n * 60, code=OLD if n < 60 else NEW) for n in range(119))
    lay_ledger(settings, lines)
    lay_deploys(settings, (begin + 3_600, OLD, NEW))
    lay_sessions(settings, (begin, "started"), (begin + 3_590, "stopped"), (begin + 3_605, "started"))
    return begin


def history(*arguments: str, code: int = 0) -> None:
    assert cli.main(["streams", "history", "parity", *arguments]) == code


def test_text_has_groups_and_marks(begin: float, capsys: pytest.CaptureFixture[str]) -> None:
    history()
    text = capsys.readouterr().out
    assert "== deploy fd2f87f7 -> 0a1b2c3d by anna" in text
    assert text.index("== stopped") < text.index("== deploy") < text.index("process 4713")
    assert "rows/min" in text and "g0001, 0a1b2c3d" in text
    assert len(text.splitlines()) < 60
    history("--batches", "--last", "2")
    text = capsys.readouterr().out
    assert "things 0:1180-1190 1:590-595" in text and "things 0:1170-1180" in text and "0:1160-1170" not in text


def test_json_counts_every_batch(begin: float, capsys: pytest.CaptureFixture[str]) -> None:
    history("-o", "json")
    value = json.loads(capsys.readouterr().out)
    assert value["stream"] == "parity" and value["batches"] == 119
    assert sum(line["batches"] for line in value["lines"] if line["kind"] == "batches") == 119
    assert {line["kind"] for line in value["lines"]} == {"batches", "deploy", "session"}
    history("-o", "json", "--batches", "--since", "30 minutes")
    value = json.loads(capsys.readouterr().out)
    assert len(value["lines"]) == value["batches"] == 29
    assert value["lines"][0]["offsets"]["things"]["start"]["0"] == 900


def test_since_is_a_duration_a_time_or_the_last_deploy(begin: float, capsys: pytest.CaptureFixture[str]) -> None:
    history("--since", "deploy", "-o", "json")
    value = json.loads(capsys.readouterr().out)
    assert value["since"] == begin + 3_600 and value["batches"] == 59
    history("--since", "2013-01-01 00:00", "-o", "json")
    assert json.loads(capsys.readouterr().out)["since"] == 1_356_998_400
    history("--since", "yesterday", code=2)
    assert "neither a duration nor a time" in capsys.readouterr().err


def test_a_picture_is_written_and_another_ending_is_refused(
    begin: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history("--plot", "a.svg")
    history("--plot", "a.html")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "<h1>Timeline of stream parity</h1>" in (tmp_path / "a.html").read_text()
    history("--plot", "a.png", code=2)
    assert "name a file .svg or .html" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
    history("--plot", "no/such/a.svg", code=2)


def test_a_stream_without_batches_says_so(begin: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["streams", "history", "plain"]) == 0
    assert "no batch is on file" in capsys.readouterr().err
    assert cli.main(["streams", "history", "nobody"]) == 2
