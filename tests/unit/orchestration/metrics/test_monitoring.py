"""The shipped alert rules and the dashboard, by a real Prometheus: rules fire and resolve, names exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import pytest
import yaml

from orchestration.metrics import monitoring
from orchestration.metrics.endpoint import MetricsServer
from orchestration.metrics.figures import FIGURES
from orchestration.metrics.scrape import Scrapes
from streaming_jobs.settings import Settings, load
from streaming_jobs.state.health import Word
from streaming_jobs.state.lease import Lease, acquire
from streaming_jobs.state.requests import STOP
from streaming_jobs.state.status import Status, TableAge, write_status
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.prometheus import program, prometheus
from tests.support.waiting import wait_for
from tests.unit.orchestration.metrics.test_figures import STATUS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LABELS = {figure.name: set(figure.labels) for figure in FIGURES}
ADDED = {"job", "instance"}


def expressions() -> Iterator[tuple[str, str]]:
    """Every query of the rules and of the dashboard, with the name of its rule or panel."""
    for rule in yaml.safe_load(monitoring.rules())["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]
    value = json.loads(monitoring.dashboard())
    for panel in value["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
    yield from ((each["name"], each["query"]["query"]) for each in value["templating"]["list"][1:])


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_figure_and_label_of_a_query_is_exported(where: str, expression: str) -> None:
    names = re.findall(r"\brecourse_\w+", expression)
    assert names or expression == "vector(1)"
    assert set(names) <= LABELS.keys(), where
    known = set().union(*(LABELS[name] for name in names)) | ADDED
    grouped = re.findall(r"(?:by|on|ignoring) \(([^)]*)\)", expression)
    matched = re.findall(r"(\w+)\s*=~?\s*\"", expression)
    used = {label.strip() for group in grouped for label in group.split(",") if label.strip()} | set(matched)
    assert used <= known, where


def test_every_figure_that_an_operator_needs_first_is_on_the_dashboard() -> None:
    shown = {name for _, expression in expressions() for name in re.findall(r"\brecourse_\w+", expression)}
    hidden = {figure.name.removeprefix("recourse_") for figure in FIGURES} - {
        n.removeprefix("recourse_") for n in shown
    }
    assert hidden == {
        "streams", "stream_state", "session_live", "failures_in_a_row", "code_info", "code_on_disk_differs",
        "lag_measured_age_seconds", "topic_lag_records", "foreign_transactions_open", "last_batch_records",
        "last_commit_age_seconds", "input_records_per_second", "processed_records_per_second",
        "watermark_ahead_seconds", "state_skew",
    }  # fmt: skip


def test_the_dashboard_has_the_form_of_grafana_and_its_panels_do_not_overlap() -> None:
    value = json.loads(monitoring.dashboard())
    assert value["schemaVersion"] >= 39 and value["uid"] == "recourse-streams"
    panels = value["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= covered
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
    variables = {each["name"] for each in value["templating"]["list"]}
    asked = set(re.findall(r"\$(\w+)", " ".join(expression for _, expression in expressions())))
    assert asked - {"__rate_interval"} <= variables


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    rules = yaml.safe_load(monitoring.rules("https://wiki/alerts"))["groups"][0]["rules"]
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (Recourse\w+)$", page, re.M) == [rule["alert"] for rule in rules]
    assert rules[0]["annotations"]["runbook_url"] == "https://wiki/alerts#recoursestreamdown"
    assert {rule["labels"]["severity"] for rule in rules} == {"critical", "warning", "none"}


def test_promtool_accepts_the_rules_and_sees_each_of_them_fire_and_resolve(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(monitoring.rules())
    shutil.copy(HERE / "alerts_test.yml", tmp_path)
    for arguments in (["check", "rules", "rules.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [program("promtool"), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_name_no_reason_that_only_dagster_decides() -> None:
    rules = " ".join(expression for name, expression in expressions() if name.startswith("Recourse"))
    named = {word for each in re.findall(r'reason=~?"([^"]+)"', rules) for word in each.split("|")}
    assert {"dead", "late"} < named <= {*get_args(Word)} - {"run_failed", "overdue"}


def test_the_rule_tests_name_every_alert() -> None:
    tested = set(re.findall(r"Recourse\w+", (HERE / "alerts_test.yml").read_text()))
    assert tested == {name for name, _ in expressions() if name.startswith("Recourse")}


def test_promtool_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    queries = [each["targets"] for each in json.loads(monitoring.dashboard())["panels"] if "targets" in each]
    records = [
        {"record": f"q{n}", "expr": target["expr"].replace("$__rate_interval", "5m")}
        for n, target in enumerate(target for each in queries for target in each)
    ]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    done = subprocess.run(
        [program("promtool"), "check", "rules", "queries.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and f"{len(records)} rules found" in done.stdout, done.stdout + done.stderr


class Stream:
    """A stream of made files: this process holds its lease, and its status changes as a test wants."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self.lease: Lease | None = acquire(settings, name, purpose="session")
        self.changes: dict[str, Any] = {}

    def write(self) -> None:
        now = time.time()
        fresh = Status(
            **{
                **{f: getattr(STATUS, f) for f in ("state", "generation", "batch", "batch_ms", "totals", "phase_s")},
                **{f: getattr(STATUS, f) for f in ("watermark", "state_rows", "state_mb")},
                "stream": self.name, "pid": os.getpid(), "heartbeat": now, "started_at": STATUS.started_at,
                "committed_at": now, "lag_at": now, "lag_records": 10, "lag_s": 1.0, "read_up_to": now - 1,
                "lag_partitions": {"in": {"0": 10}}, "tables": {f"{self.name}_table": TableAge(now - 9, now, 300.0)},
            }
        )  # fmt: skip
        if self.lease is not None:
            write_status(self.settings, replace(fresh, **self.changes))

    def die(self) -> None:
        assert self.lease is not None
        self.lease.release()
        self.lease = None

    def live(self) -> None:
        self.lease, self.changes = acquire(self.settings, self.name, purpose="session"), {}


def test_a_real_prometheus_sees_a_dead_driver_a_late_stream_a_hung_transaction_and_a_full_disk_come_and_go(
    settings: SettingsFactory, tmp_path: Path
) -> None:
    made = settings({"quality.free_disk_mb": 0, "dagster.stale_after": "30 seconds"})
    dead, late, hung, stale, well = (Stream(made, name) for name in ("dead", "late", "hung", "stale", "well"))
    streams = (dead, late, hung, stale, well)
    server = MetricsServer(Scrapes(made), "127.0.0.1", 0).start()
    try:
        for stream in streams:
            stream.write()
        with prometheus(tmp_path, urlsplit(server.url).netloc, monitoring.rules()) as seen:

            def shows(expected: dict[str, set[str]]) -> bool:
                for stream in streams:
                    stream.write()
                time.sleep(0.2)
                return seen.firing() == expected

            wait_for(lambda: seen.values('recourse_stream_verdict{verdict="well"} == 1') == [1.0] * 5, "well streams")
            wait_for(lambda: shows({}), "no alert")
            now = time.time()
            dead.die()
            late.changes = {"lag_s": 900.0}
            hung.changes = {"blocked": {"in": {"0": now - 900}}, "lag_partitions": {"in": {"0": 10}}}
            stale.changes = {"tables": {"slow": TableAge(now - 9999, now - 900, 300.0)}}
            full = load(
                {"home": made.home, "quality.free_disk_mb": 10**9, "dagster.stale_after": "30 seconds"}
            ).settings
            wait_for(
                lambda: shows(
                    {
                        "RecourseStreamDown": {"dead"},
                        "RecourseStreamLate": {"late"},
                        "RecourseForeignTransaction": {"in"},
                        "RecourseTableStale": {"slow"},
                    }
                ),
                "one alert for each cause",
            )
            assert seen.without_data(monitoring.dashboard()) == {}, "every query of the dashboard has data now"
            dead.live()
            late.changes = hung.changes = stale.changes = {}
            wait_for(lambda: shows({}), "every alert to resolve")
            server.scrapes.settings = full
            wait_for(lambda: shows({"RecourseDiskFull": {""}}), "the alert of a full disk")
            server.scrapes.settings = made
            well.die()
            STOP.ask(made, "well", "asked by recourse streams stop")
            wait_for(lambda: shows({}), "no alert of a stream that was stopped on purpose")
            assert seen.values('recourse_stream_verdict{stream="well", verdict="stopped"}') == [1.0]
            assert seen.values("count(recourse_table_age_seconds)") == [5.0]
    finally:
        server.close()
        for stream in streams:
            if stream.lease is not None:
                stream.lease.release()
