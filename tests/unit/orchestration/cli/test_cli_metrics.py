"""`recourse metrics`: what it prints and ends with; the endpoint itself is in tests/unit/orchestration/metrics."""

from __future__ import annotations

import json

import pytest
import yaml

from streaming_jobs.platform import extras
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import write_status
from tests.unit.orchestration.cli.conftest import Run
from tests.unit.orchestration.metrics.test_figures import STATUS


def test_once_prints_the_figures_of_the_home(run: Run) -> None:
    write_status(Settings.load(), STATUS)
    code, data, said = run("metrics", "--once")
    assert (code, said) == (0, "") and 'recourse_records_total{stream="orders"} 1000.0\n' in data


def test_rules_and_dashboard_are_printed_without_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "metrics", ("no_such_package",))
    printed = yaml.safe_load(run("metrics", "--rules", "--runbooks", "https://wiki/page").out)
    urls = [rule["annotations"]["runbook_url"] for rule in printed["groups"][0]["rules"]]
    assert "https://wiki/page#recoursetablestale" in urls
    assert json.loads(run("metrics", "--dashboard").out)["title"] == "Recourse"
    code, data, said = run("metrics", "--once")
    assert (code, data) == (1, "") and "recourse metrics needs recourse-streams[metrics]" in said


def test_what_excludes_each_other_is_a_usage_error(run: Run) -> None:
    code, _, said = run("metrics", "--once", "--rules")
    assert code == 2 and "--once, --rules and --dashboard exclude each other" in said
