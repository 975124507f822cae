"""Suites in a recovery: the conditions that their names stand for, and their run on the rebuilt tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from orchestration.recoveries.suite_gate import condition_named, suite_runner, suites_of
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import Settings

ROWS = {
    "carrier": ["AA", "UA"],
    "flights": pa.array([100, 200], pa.int64()),
    "dep_delay_minutes": pa.array([5, 7], pa.int64()),
    "cancelled": pa.array([101, 3], pa.int64()),
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load({"home": tmp_path})


@pytest.fixture
def topology(settings: Settings) -> Topology:
    return Topology.of_settings(settings)


def named(settings: Settings, topology: Topology, text: str) -> str:
    return condition_named(settings, topology, topology["flights_clean"], text)


def test_a_plan_asks_for_the_suites_of_its_own_stream(settings: Settings, topology: Topology) -> None:
    assert [suite.name for suite in suites_of(settings, topology, topology["flights_clean"])] == ["flights_rows"]


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("dep_delay > 3", "dep_delay > 3"),
        ("cancelled", "cancelled"),
        ("tailnum_not_null", '"tailnum" IS NOT NULL'),
        ("dest_is_a_code", '"dest" IS NULL OR regexp_like("dest", \'^[A-Z]{3}$\')'),
        ("departed_has_arrival", '(("cancelled" = false) IS NOT TRUE) OR ("arr_delay" IS NOT NULL)'),
    ],
)
def test_a_name_stands_for_the_condition_of_a_rule_or_of_an_expectation(
    settings: Settings, topology: Topology, text: str, condition: str
) -> None:
    assert named(settings, topology, text) == condition


def test_names_that_stand_for_no_row_are_refused(settings: Settings, topology: Topology) -> None:
    with pytest.raises(UsageError, match="rule arrived_or_cancelled is in Spark's SQL"):
        named(settings, topology, "arrived_or_cancelled")
    with pytest.raises(UsageError, match="flight_comes_once of suite flights_rows is not about single rows"):
        named(settings, topology, "flight_comes_once")
    with pytest.raises(UsageError) as refused:
        named(settings, topology, "departed_has_arival")
    assert refused.value.next_step == "did you mean 'departed_has_arrival'?"


def refusals(settings: Settings, topology: Topology, rows: Mapping[str, Any] | None = None) -> list[str]:
    """What the suite of `carrier_totals` says against a rebuilt table with these rows; without rows there is none."""
    staged = settings.home / "staging"
    staging = settings.model_copy(update={"tables_dir": staged, "state_dir": settings.home / "staged"})
    if rows is not None:
        write_deltalake(staging.tables / "carrier_totals", pa.table(dict(rows)))
    context = cast("Any", SimpleNamespace(replay_settings=staging, stream=topology["carrier_totals"]))
    with suite_runner(settings, topology) as run:
        return list(run(context, "carrier_totals_rows"))


def test_critical_expectations_that_fail_on_the_rebuilt_table_are_told_with_rows(
    settings: Settings, topology: Topology
) -> None:
    told = refusals(settings, topology, ROWS)
    assert any("no_more_cancelled_than_flights fails, 1 row of 2" in each and "carrier AA" in each for each in told)
    assert not any("enough_flights" in each for each in told), "what only warns refuses nothing"
    assert not (settings.home / "quality").exists(), "rebuilt rows are no part of the history"


def test_a_rebuilt_table_that_is_not_there_is_a_refusal(settings: Settings, topology: Topology) -> None:
    assert "could not be run" in refusals(settings, topology)[0]


def test_an_expectation_that_cannot_be_evaluated_refuses_whatever_its_severity(
    settings: Settings, topology: Topology
) -> None:
    told = refusals(settings, topology, {name: values for name, values in ROWS.items() if name != "flights"})
    assert any(each.startswith("enough_flights_for_a_mean could not be evaluated") for each in told)


def test_a_suite_of_which_nothing_runs_on_rebuilt_rows_is_not_in_the_plan(
    settings: Settings, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quality import Suite
    from quality.suite_set import SuiteSet
    from quality.table_checks import UniqueKey, UsualRows

    declared = [
        Suite("late", "flights_clean", lambda: (), checks=[UsualRows()]),
        Suite("keys", "flights_clean", lambda: (), checks=[UsualRows(), UniqueKey(["flight"])]),
        Suite("nothing", "flights_clean", lambda: ()),
    ]
    monkeypatch.setattr(SuiteSet, "of_settings", lambda *_: SuiteSet.of(declared, topology))
    assert [suite.name for suite in suites_of(settings, topology, topology["flights_clean"])] == ["keys", "nothing"]
