"""`recourse tables snapshot`: what it prints, and the times that it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestration import cli
from streaming_jobs.stream import Stream
from tests.support.life import Life


@pytest.fixture
def life(tmp_path: Path, declare: Callable[[Stream], None]) -> Life:
    made = Life.begin(tmp_path)
    declare(made.stream)
    made.run(*range(3))
    return made


def test_the_versions_of_a_stream_are_printed_with_their_batch(life: Life, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tables", "snapshot"]) == 0
    assert "things_dead_letters" in capsys.readouterr().out
    assert cli.main(["tables", "snapshot", "things", "-o", "json"]) == 0
    primary, letters = json.loads(capsys.readouterr().out)
    assert (primary["table"], primary["stream"], primary["generation"], primary["batch"]) == ("things", "things", 1, 2)
    assert primary["location"] == str(life.settings.tables / "things") and letters["table"] == "things_dead_letters"


@pytest.mark.parametrize(("at", "words"), [("yesterday", "neither a duration nor a time"), ("2001-01-01", "no stream")])
def test_a_time_without_tables_and_one_that_is_none_are_refused(
    life: Life, capsys: pytest.CaptureFixture[str], at: str, words: str
) -> None:
    assert cli.main(["tables", "snapshot", "--at", at]) == 2
    assert words in capsys.readouterr().err
