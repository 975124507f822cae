"""`recourse late` as it is typed, without Kafka or Spark: the days that lack late records, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming_jobs.errors import UsageError
from tests.support.days import declared
from tests.unit.orchestration.cli.conftest import Declare, Run
from tests.unit.reprocessing.slices.test_late import LateDays


@pytest.fixture
def life(tmp_path: Path, declare: Declare) -> LateDays:
    declare(declared(late_rows="keep"))
    made = LateDays.of(tmp_path, 3, declared(late_rows="keep"))
    assert isinstance(made, LateDays)
    return made


def test_days_that_lack_late_records_are_listed_and_those_that_are_open_wait(life: LateDays, run: Run) -> None:
    life.keep(2, (60, [1]), (61, [1]), (62, [3]))
    listed = run.json("late", "list", "days")
    assert [(each["table"], each["day"], each["records"], each["state"]) for each in listed] == [
        ("days", "2013-03-02", 2, "to rebuild"),
        ("days", "2013-03-04", 1, "open"),
    ]
    assert "to rebuild" in run("late", "list").out
    life.slice("a", 1, 2, end=62)
    [report] = run.json("late", "rebuild", "days")
    assert not report["slices"] and [each["day"] for each in report["left"]] == ["2013-03-04"]
    assert "0 to rebuild, 1 open, 0 lost" in run("late", "rebuild", "days").err, "no broker is needed for an open day"


def test_a_table_that_keeps_none_is_refused_before_a_broker_is_looked_for(life: LateDays, run: Run) -> None:
    code, _, said = run("late", "rebuild", "days", "--table", "nights")
    assert code == UsageError.exit_code and "keeps no late records" in said
    assert not (life.settings.home / "broker").exists()


def test_a_stream_that_only_counts_them_is_refused(tmp_path: Path, declare: Declare, run: Run) -> None:
    declare(declared())
    LateDays.of(tmp_path, 1)
    code, _, said = run("late", "rebuild", "days")
    assert code == UsageError.exit_code and "late_rows='keep'" in said
    assert run.json("late", "list") == []
