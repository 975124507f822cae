"""A real driver, its figures in a real Prometheus, and the alert of its death."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from orchestration.metrics.endpoint import MetricsServer, exposition
from orchestration.metrics.figures import FIGURES
from orchestration.metrics.monitoring import dashboard, rules
from orchestration.metrics.scrape import Scrapes, scrape
from streaming_jobs.platform.broker import Broker
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.status import PHASES, read_status
from tests.conftest import SettingsFactory
from tests.support.driver import driver, finished, produce
from tests.support.prometheus import prometheus
from tests.support.things import thing
from tests.support.waiting import wait_for


def test_the_figures_of_a_real_driver_and_the_alert_of_its_death(
    settings: SettingsFactory, broker: Broker, tmp_path: Path
) -> None:
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap, "quality.free_disk_mb": 0})
    topics = Topics.of(made.kafka, bootstrap)
    if topics.describe("things"):
        topics.delete("things")
    topics.create("things", 2)
    produce(bootstrap, "things", map(thing, range(500)))
    first = driver(made, bootstrap, "--streams", "totals,windows")
    server = MetricsServer(Scrapes(made), "127.0.0.1", 0).start()
    try:
        wait_for(lambda: (s := read_status(made, "windows")) and s.totals and s.totals.records == 500, "the rows")
        wait_for(
            lambda: (s := read_status(made, "windows")) and s.phase_s["plan"] > 0 and s.watermark, "Spark's report"
        )
        text = exposition(scrape(made))[1].decode()
        with_values = set(re.findall(r"^(recourse_\w+)\{?.*\bstream=\"windows\"", text, re.M))
        of_streams = {figure.name for figure in FIGURES if "stream" in figure.labels}
        assert of_streams - with_values == {
            "recourse_table_fresh_within_seconds",
            "recourse_foreign_transaction_age_seconds",
            "recourse_broken_rule_rows_total",
        } | ({"recourse_state_skew"} - with_values), "nothing of the kind is declared or has happened"
        seen = read_status(made, "totals")
        assert seen is not None and seen.batch_ms is not None
        phases = {**seen.phase_s}
        assert phases.keys() == set(PHASES) and min(phases.values()) > 0, "each is measured, also of a small batch"
        assert sum(phases.values()) - phases["plan"] <= seen.batches * 60
        assert seen.tables["totals"].rows_at is not None
        with prometheus(tmp_path, urlsplit(server.url).netloc, rules()) as monitor:
            wait_for(lambda: monitor.values("recourse_session_live == 1") == [1.0, 1.0], "both streams")
            nothing = {
                "Reasons why streams are red or yellow": ["{{stream}}: {{reason}}"],
                "Open transactions of other programs": ["{{stream}}: {{topic}}"],
                "Age of the newest rows, by share of the objective": ["{{table}}"],
                "Rows by broken rule": ["{{table}}: {{rule}}"],
            }
            wait_for(lambda: monitor.without_data(dashboard()) == nothing, "every other query of the dashboard")
            first.kill()
            finished(first)
            down = {"RecourseStreamDown": {"totals", "windows"}}
            wait_for(lambda: monitor.firing() == down, "the alert")
            first = driver(made, bootstrap, "--streams", "totals,windows")
            wait_for(lambda: monitor.firing() == {}, "the end of the alert")
    finally:
        server.close()
        first.kill()
        finished(first)
