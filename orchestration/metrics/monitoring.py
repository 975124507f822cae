"""What Prometheus and Grafana take: the alert rules of `alerts.yml`, and a dashboard over the figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

RUNBOOKS = "docs/alerts.md"
"""The page with the runbooks, as a path in the repository; an organisation has it at a URL of its own."""
_WIDTH, _HEIGHT = 12, 8
_BY = "stream"
_OF_THE_CHOICE = '{job=~"$job", instance=~"$instance"}'
_OF_THE_STREAMS = '{job=~"$job", instance=~"$instance", stream=~"$stream"}'


def rules(runbooks: str | None = None) -> str:
    """The alert rules as YAML, each with the `runbook_url` of its section in the page `runbooks`."""
    value = yaml.safe_load(resources.files("orchestration.metrics").joinpath("alerts.yml").read_text("utf-8"))
    for group in value["groups"]:
        for rule in group["rules"]:
            rule["annotations"]["runbook_url"] = f"{runbooks or RUNBOOKS}#{rule['alert'].lower()}"
    return yaml.safe_dump(value, sort_keys=False, width=120)


@dataclass(frozen=True)
class Panel:
    """A plot of queries (`figure`, with `{}` where its labels are chosen) by legend; `unit` is Grafana's."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    text: str = ""


def _rate(figure: str) -> str:
    return f"rate({figure}{{}}[$__rate_interval])"


_PHASES, _BATCHES = _rate("recourse_batch_phase_seconds_total"), _rate("recourse_batches_total")
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Health",
        (
            Panel("Streams by verdict", [("sum by (verdict) (recourse_stream_verdict{})", "{{verdict}}")], kind="stat"),
            Panel(
                "Reasons why streams are red or yellow",
                [("recourse_stream_reason{} == 1", "{{stream}}: {{reason}}")],
                kind="state-timeline",
            ),
            Panel("Age of the last sign of life", [("recourse_heartbeat_age_seconds{}", "{{stream}}")], "s"),
            Panel(
                "Restarts and sessions in an hour",
                [
                    ("increase(recourse_restarts_total{}[1h])", "{{stream}}: query"),
                    ("changes(recourse_session_start_timestamp_seconds{}[1h])", "{{stream}}: session"),
                ],
            ),
        ),
    ),
    (
        "Lag",
        (
            Panel("Lag", [("recourse_lag_seconds{}", "{{stream}}")], "s", text="Everything older has been read."),
            Panel("Unread records", [("recourse_lag_records{}", "{{stream}}")]),
            Panel(
                "Unread records by partition",
                [("topk(20, recourse_partition_lag_records{})", "{{stream}}: {{topic}} {{partition}}")],
            ),
            Panel(
                "Open transactions of other programs",
                [("recourse_foreign_transaction_age_seconds{}", "{{stream}}: {{topic}}")],
                "s",
            ),
        ),
    ),
    (
        "Tables",
        (
            Panel(
                "Age of the newest rows, by share of the objective",
                [("recourse_table_age_seconds{} / recourse_table_fresh_within_seconds{}", "{{table}}")],
                "percentunit",
                text="Above 100 % the table is stale.",
            ),
            Panel("Age of the newest rows", [("recourse_table_age_seconds{}", "{{table}}")], "s"),
        ),
    ),
    (
        "Batches",
        (
            Panel("Records per second", [(_rate("recourse_records_total"), "{{stream}}")], "cps"),
            Panel("Rows per second", [(_rate("recourse_rows_written_total"), "{{stream}}")], "cps"),
            Panel(
                "Time of a batch by phase",
                [
                    (f"sum by (phase) ({_PHASES}) / on () group_left () sum ({_BATCHES})", "{{phase}}"),
                ],
                "s",
                stacked=True,
                text="The mean of all chosen streams.",
            ),
            Panel("Last batch", [("recourse_last_batch_duration_seconds{}", "{{stream}}")], "s"),
        ),
    ),
    (
        "State",
        (
            Panel("Delay of the watermark", [("recourse_watermark_delay_seconds{}", "{{stream}}")], "s"),
            Panel("Rows of the state", [("recourse_state_rows{}", "{{stream}}")]),
            Panel("Memory of the state", [("recourse_state_bytes{}", "{{stream}}")], "bytes"),
            Panel("Recoveries", [("recourse_recoveries_total{}", "{{stream}}")]),
        ),
    ),
    (
        "Quality",
        (
            Panel("Dead letters", [(_rate("recourse_dead_letters_total"), "{{stream}}")], "cps"),
            Panel("Late records", [(_rate("recourse_late_records_total"), "{{stream}}")], "cps"),
            Panel("Rows by broken rule", [(_rate("recourse_broken_rule_rows_total"), "{{table}}: {{rule}}")], "cps"),
            Panel(
                "Rows that rules took out",
                [
                    (_rate("recourse_quarantined_rows_total"), "{{stream}}: quarantined"),
                    (_rate("recourse_dropped_rows_total"), "{{stream}}: dropped"),
                ],
                "cps",
            ),
        ),
    ),
    (
        "Home",
        (
            Panel(
                "Free space of the disks",
                [
                    ("recourse_disk_free_bytes{}", "{{instance}}: {{folder}}"),
                    ("recourse_disk_free_objective_bytes{}", "{{instance}}: yellow below"),
                ],
                "bytes",
            ),
            Panel(
                "Time to read the files",
                [
                    ("recourse_collection_duration_seconds{}", "{{instance}}"),
                    ("recourse_collection_age_seconds{}", "{{instance}}: age"),
                ],
                "s",
            ),
        ),
    ),
)


def dashboard() -> str:
    """The dashboard as JSON in the model of Grafana 11 and later, to import by hand or by provisioning."""
    names = [("job", "", "recourse_build_info"), ("instance", '{job=~"$job"}', "recourse_build_info")]
    names += [(_BY, _OF_THE_CHOICE, "recourse_stream_readable")]
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    value = {
        "title": "Recourse",
        "uid": "recourse-streams",
        "description": "Streams of Recourse; docs/metrics.md explains each figure.",
        "tags": ["recourse", "kafka", "delta"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *(_variable(*each) for each in names)]},
        "panels": list(_panels()),
    }
    return json.dumps(value, indent=2) + "\n"


def _variable(name: str, chosen: str, figure: str) -> dict[str, Any]:
    query = f"label_values({figure}{chosen}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": _source(),
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> Iterator[dict[str, Any]]:
    y, number = 0, 1
    for title, panels in ROWS:
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, y, 24, 1),
        }
        y, number = y + 1, number + 1
        for place, panel in enumerate(panels):
            x = _WIDTH * (place % 2)
            yield _panel(panel, number, _at(x, y + _HEIGHT * (place // 2), _WIDTH, _HEIGHT), home=title == "Home")
            number += 1
        y += _HEIGHT * ((len(panels) + 1) // 2)


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: dict[str, int], *, home: bool) -> dict[str, Any]:
    chosen = _OF_THE_CHOICE if home else _OF_THE_STREAMS
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _source(),
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
        if panel.kind != "stat"
        else {"textMode": "value_and_name", "colorMode": "none"},
        "targets": [
            {
                "refId": chr(ord("A") + place_of_query),
                "datasource": _source(),
                "expr": expression.replace("{}", chosen),
                "legendFormat": legend,
                "range": True,
            }
            for place_of_query, (expression, legend) in enumerate(panel.queries)
        ],
    }
