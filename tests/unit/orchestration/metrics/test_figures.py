"""The figures of a home: names that Prometheus and OpenTelemetry agree on, values from files, few labels."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import fields, replace

import pytest

from orchestration.metrics import scrape as scrapes_module
from orchestration.metrics.endpoint import exposition
from orchestration.metrics.figures import FIGURES, MOST_PARTITIONS, STATES, VERDICTS
from orchestration.metrics.scrape import ScrapedHome, ScrapedStream, scrape
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import Health, Reason
from streaming_jobs.state.status import Status, TableAge, Totals, write_status
from streaming_jobs.state.stream_folder import StreamFolder
from tests.conftest import SettingsFactory

NOW = time.time()
STATUS = Status(
    "orders",
    "running",
    1,
    generation=3,
    batch=7,
    heartbeat=NOW - 2,
    started_at=NOW - 4000,
    committed_at=NOW - 3,
    batch_ms=250,
    batch_records=40,
    batches=12,
    phase_s={"plan": 1.0, "function": 5.5, "commit": 2.5},
    tables={"orders": TableAge(NOW - 999, NOW - 30, 300.0), "extras": TableAge(NOW - 999)},
    input_rows_per_s=20.0,
    processed_rows_per_s=160.0,
    lag_at=NOW - 1,
    lag_records=10,
    lag_s=1.5,
    lag_partitions={"in": {"0": 4, "1": 6}, "wide": {str(p): 0 for p in range(MOST_PARTITIONS + 1)}},
    blocked={"in": {"0": NOW - 700, "1": NOW - 20}},
    read_up_to=NOW - 2.5,
    watermark="2026-01-01T00:00:00.000Z",
    state_rows=5,
    state_mb=1.5,
    state_skew=2.5,
    totals=Totals(NOW - 9000, 3, 7, 1000, 900, 1, 2, 3, 4, {"orders.price_between": 7}),
    restarts=2,
    failures=1,
    code_version="v3:abc (0.1.0)",
)
WELL = Health("orders", NOW, "running")


def home(*streams: ScrapedStream) -> ScrapedHome:
    return ScrapedHome(NOW, streams, {"home": 5 << 30}, 2 << 30, 0.01)


def values(seen: ScrapedHome, name: str) -> dict[tuple[str, ...], float]:
    (figure,) = [each for each in FIGURES if each.name == f"recourse_{name}"]
    return dict(figure.samples(seen))


LIVE = ScrapedStream("orders", NOW, STATUS, WELL, live=True)
DEAD = replace(LIVE, at=NOW + 600, live=False, health=replace(WELL, state="dead", reasons=(Reason("dead", "..."),)))


def test_names_follow_prometheus_and_labels_are_few() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    allowed = {"stream", "table", "topic", "partition", "rule", "reason", "state", "verdict", "phase", "folder", "code"}
    for figure in FIGURES:
        assert re.fullmatch(r"recourse_[a-z][a-z_]*[a-z]", figure.name), figure.name
        assert (figure.kind == "counter") == figure.name.endswith("_total"), figure.name
        assert not re.search(r"_(ms|mb|kb|minutes|percent)(_|$)", figure.name), "base units"
        assert set(figure.labels) <= allowed | {"version", "python"}, figure.name
        assert figure.help.endswith("."), figure.name


def test_every_figure_of_a_running_stream_has_a_value() -> None:
    assert {figure.name for figure in FIGURES if not list(figure.samples(home(LIVE)))} == set()


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("lag_records", (), 10),
        ("lag_seconds", (), 1.5),
        ("partition_lag_records", ("in", "1"), 6),
        ("topic_lag_records", ("wide",), 0),
        ("foreign_transactions_open", ("in",), 2),
        ("foreign_transactions_open", ("wide",), 0),
        ("foreign_transaction_age_seconds", ("in",), 700),
        ("batch_phase_seconds_total", ("function",), 5.5),
        ("last_batch_duration_seconds", (), 0.25),
        ("state_bytes", (), 1.5 * 2**20),
        ("state_skew", (), 2.5),
        ("records_total", (), 1000),
        ("broken_rule_rows_total", ("orders", "price_between"), 7),
        ("table_age_seconds", ("orders",), 30),
        ("table_age_seconds", ("extras",), 999),
        ("table_fresh_within_seconds", ("orders",), 300),
        ("recoveries_total", (), 2),
        ("stream_verdict", ("well",), 1),
        ("stream_verdict", ("red",), 0),
        ("code_info", ("v3:abc",), 1),
    ],
)
def test_a_figure_has_the_value_of_the_status(name: str, labels: tuple[str, ...], value: float) -> None:
    assert values(home(LIVE), name)["orders", *labels] == pytest.approx(value)


def test_partitions_of_a_wide_topic_have_no_series_and_a_table_without_objective_has_none() -> None:
    assert {topic for _, topic, _ in values(home(LIVE), "partition_lag_records")} == {"in"}
    assert list(values(home(LIVE), "table_fresh_within_seconds")) == [("orders", "orders")]


def test_while_nothing_runs_ages_grow_and_rates_have_no_value() -> None:
    assert values(home(DEAD), "lag_seconds") == {("orders",): pytest.approx(602.5)}
    assert values(home(DEAD), "heartbeat_age_seconds") == {("orders",): pytest.approx(602)}
    assert values(home(DEAD), "processed_records_per_second") == {}
    assert values(home(DEAD), "stream_reason")["orders", "dead"] == 1
    assert values(home(DEAD), "stream_state")["orders", "dead"] == 1
    assert values(home(DEAD), "session_live") == {("orders",): 0}


def test_a_transaction_of_a_stream_that_nobody_runs_or_that_sees_no_broker_is_not_known() -> None:
    """It may have ended since: an age that grows for ever would be a false alert."""
    blind = replace(LIVE, at=NOW + 60)
    for seen in (DEAD, blind, replace(LIVE, live=False)):
        assert values(home(seen), "foreign_transaction_age_seconds") == {}
        assert values(home(seen), "foreign_transactions_open") == {}


def test_a_session_that_a_schedule_starts_is_not_continuous() -> None:
    scheduled = replace(LIVE, status=replace(STATUS, trigger="available-now"))
    assert values(home(LIVE), "session_continuous") == {("orders",): 1}
    assert values(home(scheduled), "session_continuous") == {("orders",): 0}


def test_streams_on_a_store_are_read_beside_each_other_up_to_a_bound(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings()
    names = [f"s{number:02}" for number in range(20)]
    at_once, most, together = 0, 0, threading.Event()
    lock = threading.Lock()

    def scraped(_: Settings, name: str) -> ScrapedStream:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            if at_once == 4:
                together.set()
        assert together.wait(10)
        with lock:
            at_once -= 1
        return ScrapedStream(name, NOW)

    monkeypatch.setattr(scrapes_module, "_scraped", scraped)
    seen = scrapes_module._scraped_streams(made, names, 4)
    assert [each.name for each in seen] == names and most == 4


def test_each_state_and_verdict_of_a_stream_is_one_of_those_that_have_a_series() -> None:
    assert {"well", "yellow", "red", "never started"} <= set(VERDICTS)
    assert {"running", "idle", "dead", "silent", "recovering", "never started"} <= set(STATES)
    assert len(set(STATES)) == len(STATES)


def test_the_number_of_series_does_not_follow_batches_and_time() -> None:
    def series(seen: ScrapedStream) -> set[tuple[str, tuple[str, ...]]]:
        return {(figure.name, labels) for figure in FIGURES for labels, _ in figure.samples(home(seen))}

    later = replace(STATUS, batch=99, batches=44, committed_at=NOW + 500, heartbeat=NOW + 500, lag_at=NOW + 500)
    assert series(replace(LIVE, at=NOW + 501, status=later)) == series(LIVE)


def torn(home: Settings, stream: str, content: bytes) -> None:
    StreamFolder.of(home, stream).make().status.put(content)


def test_a_torn_missing_or_foreign_status_costs_its_own_figures_only(settings: SettingsFactory) -> None:
    made = settings()
    write_status(made, STATUS)
    torn(made, "torn", b'{"stream": "to')
    torn(made, "listed", b"[1]")
    torn(made, "typed", b'{"stream": "typed", "lag_partitions": 7, "lag_records": "many", "batches": 3}')
    (made.state_folder / "nothing").mkdir()
    seen = scrape(made)
    text = exposition(seen)[1].decode()
    readable = values(seen, "stream_readable")
    assert readable[("orders",)] == 1 and readable[("torn",)] == readable[("listed",)] == 0
    assert ("nothing",) not in readable
    assert 'recourse_lag_records{stream="orders"} 10.0' in text
    assert 'recourse_batches_total{stream="typed"} 3.0' in text and 'recourse_lag_records{stream="typed"' not in text


def test_a_status_of_an_earlier_version_lacks_only_what_is_new(settings: SettingsFactory) -> None:
    made = settings()
    old = {f.name: getattr(STATUS, f.name) for f in fields(Status) if f.name in ("stream", "state", "lag_records")}
    torn(made, "orders", json.dumps({**old, "of_another_version": 1}).encode())
    seen = scrape(made)
    assert values(seen, "lag_records") == {("orders",): 10}
    assert values(seen, "table_age_seconds") == {}
