"""The endpoint: what each path answers, within a deadline, at a bounded cost, and by OTLP from the same list."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from orchestration.metrics import scrape as scrapes_module
from orchestration.metrics.endpoint import MetricsServer
from orchestration.metrics.figures import FIGURES
from orchestration.metrics.otlp import otlp_name, start_otlp
from orchestration.metrics.scrape import ScrapedHome, Scrapes, scrape
from streaming_jobs.errors import ConfigurationError, TransientError, UsageError
from streaming_jobs.platform import extras
from streaming_jobs.settings import Settings, load
from streaming_jobs.state.status import TableAge, write_status
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.waiting import wait_for
from tests.unit.orchestration.metrics.test_figures import STATUS, torn

pytestmark = pytest.mark.slow


@contextmanager
def serving(settings: Settings, read: Callable[[Settings], ScrapedHome] = scrape, **options: Any) -> Iterator[str]:
    server = MetricsServer(Scrapes(settings, read, **options), "127.0.0.1", 0).start()
    try:
        yield server.url
    finally:
        server.close()


def get(url: str, **headers: str) -> tuple[int, str, str]:
    try:
        with urlopen(Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    made = settings({"quality.free_disk_mb": 0})
    now = time.time()  # the statuses of other tests are as old as their module
    tables = {"orders": TableAge(now - 999, now - 30, 300.0)}
    write_status(made, replace(STATUS, state="stopped", trigger="available-now", heartbeat=now, tables=tables))
    return made


def test_metrics_are_text_or_openmetrics_as_the_scraper_asks(home: Settings) -> None:
    with serving(home) as url:
        status, kind, text = get(f"{url}/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        families = {family.name for family in text_string_to_metric_families(text)}
        assert families == {figure.name.removesuffix("_total") for figure in FIGURES}
        _, kind, text = get(f"{url}/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n")


def test_health_is_503_with_the_reasons_of_what_is_red_and_the_process_lives_all_the_same(home: Settings) -> None:
    with serving(home) as url:
        status, kind, text = get(f"{url}/health")
        assert (status, kind, json.loads(text)) == (
            200, "application/json", {"well": True, "age_seconds": 0.0, "streams_well": 1, "streams": {}}
        )  # fmt: skip
    write_status(home, replace(STATUS, stream="dead"))
    torn(home, "torn", b"{")
    with serving(home) as url:
        status, _, text = get(f"{url}/health")
        ill = json.loads(text)
        assert (status, ill["well"], ill["streams_well"]) == (503, False, 1)
        assert ill["streams"]["dead"]["verdict"] == "red"
        assert ill["streams"]["dead"]["reasons"][0]["word"] == "dead"
        assert ill["streams"]["torn"]["verdict"] == "unreadable"
        assert get(f"{url}/healthz")[::2] == (200, "ok\n")
        assert get(f"{url}/else")[0] == 404


def test_files_that_hang_end_a_scrape_at_its_deadline_with_one_thread_and_the_next_scrape_works(home: Settings) -> None:
    hangs, begun = threading.Event(), []

    def read(settings: Settings) -> ScrapedHome:
        begun.append(1)
        assert hangs.wait(30)
        return scrape(settings)

    with serving(home, read, deadline=0.3) as url:
        assert [get(f"{url}{path}")[0] for path in ("/metrics", "/health", "/metrics")] == [503] * 3
        assert get(f"{url}/healthz")[0] == 200 and len(begun) == 1
        hangs.set()
        wait_for(lambda: get(f"{url}/metrics")[0] == 200, "a scrape of files that can be read again")


def test_a_home_that_takes_longer_to_read_than_the_deadline_is_served_with_the_age_of_its_figures(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request would begin a new reading, and throw the late one away."""
    monkeypatch.setattr(scrapes_module, "SHARED_FOR", 0.1)
    begun: list[float] = []
    may_end = threading.Event()

    def read(settings: Settings) -> ScrapedHome:
        begun.append(time.monotonic())
        assert may_end.wait(30)
        return scrape(settings)

    scrapes = Scrapes(home, read, deadline=0.2)
    with pytest.raises(TransientError, match=r"not read within 0\.2 s"):
        scrapes.newest()
    may_end.set()
    scrapes.deadline = 30.0
    first = scrapes.newest()
    assert len(begun) == 1 and first.age < 0.1, "the one that was late is the answer"
    may_end.clear()
    scrapes.deadline = 0.2
    time.sleep(0.15)
    again = scrapes.newest()
    assert len(begun) == 2 and again.at == first.at
    may_end.set()
    assert again.age >= 0.3 and dict(
        next(each for each in FIGURES if each.name == "recourse_collection_age_seconds").samples(again)
    ) == {(): again.age}
    wait_for(lambda: scrapes.newest().at > first.at, "the next reading")


def test_figures_of_files_that_have_hung_for_too_long_are_not_served(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrapes_module, "SHARED_FOR", 0.0)
    monkeypatch.setattr(scrapes_module, "SERVED_FOR", 0.3)
    hangs = threading.Event()
    hangs.set()

    def read(settings: Settings) -> ScrapedHome:
        assert hangs.wait(30)
        return replace(scrape(settings), seconds=0.0)

    scrapes = Scrapes(home, read)
    scrapes.newest()
    hangs.clear()
    scrapes.deadline = 0.05
    assert scrapes.newest().age > 0
    time.sleep(0.4)
    with pytest.raises(TransientError):
        scrapes.newest()
    hangs.set()


def test_what_reading_raises_is_told_by_its_kind_and_tried_again(home: Settings) -> None:
    def read(settings: Settings) -> ScrapedHome:
        raise TransientError("s3://bucket/key?token=s3cret is not there", "wait")

    with serving(home, read) as url:
        assert get(f"{url}/metrics")[::2] == (503, "TransientError\n")


def test_many_receivers_share_one_reading(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes_module, "SHARED_FOR", 60.0)
    counted: list[int] = []

    def read(settings: Settings) -> ScrapedHome:
        counted.append(1)
        return scrape(settings)

    with serving(home, read) as url:
        assert {get(f"{url}/metrics")[0] for _ in range(20)} == {200}
    assert len(counted) == 1


def test_a_client_that_sends_nothing_blocks_no_other(home: Settings) -> None:
    with serving(home) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
        assert get(f"{url}/metrics")[0] == 200


def test_an_address_that_is_taken_and_a_missing_extra_are_errors_with_a_next_step(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(home) as url, pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already"):
        MetricsServer(Scrapes(home), "127.0.0.1", int(url.rpartition(":")[2]))
    monkeypatch.setitem(extras.EXTRAS, "metrics", ("no_such_package",))
    with pytest.raises(extras.MissingExtra, match=r"recourse-streams\[metrics\]"):
        MetricsServer(Scrapes(home), "127.0.0.1", 0)
    monkeypatch.setitem(extras.EXTRAS, "otlp", ("no_such_package",))
    with pytest.raises(extras.MissingExtra, match=r"metrics\.otlp_endpoint needs recourse-streams\[otlp\]"):
        start_otlp(Scrapes(home))


@contextmanager
def collector() -> Iterator[tuple[str, list[Any], list[dict[str, str]]]]:
    """A collector of OpenTelemetry on loopback: its URL, the requests that it gets, and their headers."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    requests: list[Any] = []
    headers: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            headers.append(dict(self.headers))
            requests.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/metrics", requests, headers
        finally:
            server.shutdown()
            thread.join()


def test_otlp_delivers_the_figures_of_the_endpoint(
    home: Settings, settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret")
    with collector() as (url, requests, headers):
        made = load({"home": home.home, "metrics.otlp_endpoint": url, "metrics.otlp_every": "200 ms"}).settings
        stop = start_otlp(Scrapes(made))
        wait_for(lambda: len(requests) > 1, "a delivery by OTLP")
        stop()
        assert headers[0]["authorization"] == "Bearer s3cret"
    (resource,) = requests[0].resource_metrics
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == "recourse" and str(home.home) in named["service.instance.id"]
    sent = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    seen = scrape(made)
    assert sent.keys() == {otlp_name(figure) for figure in FIGURES if list(figure.samples(seen))}
    records = sent["recourse.records"].sum
    assert records.is_monotonic and records.data_points[0].as_double == 1000
    (phase, *_) = sent["recourse.batch_phase_seconds"].sum.data_points
    assert {each.key for each in phase.attributes} == {"stream", "phase"}
    assert (sent["recourse.lag_seconds"].unit, sent["recourse.state_bytes"].unit) == ("s", "By")


def test_an_export_reads_the_files_once_also_if_they_cannot_be_read(home: Settings) -> None:
    """A scrape for each figure would wait for 45 deadlines, and log as many errors."""
    begun: list[int] = []

    def read(settings: Settings) -> ScrapedHome:
        begun.append(1)
        if len(begun) == 1:
            raise TransientError("the disk is away", "wait")
        return scrape(settings)

    with collector() as (url, requests, _), structlog.testing.capture_logs() as logged:
        made = load({"home": home.home, "metrics.otlp_endpoint": url, "metrics.otlp_every": "200 ms"}).settings
        stop = start_otlp(Scrapes(made, read))
        wait_for(lambda: bool(requests), "a delivery by OTLP")
        stop()
    assert [entry["event"] for entry in logged].count("the figures could not be read") == 1
    assert all(len(each.resource_metrics[0].scope_metrics[0].metrics) > 30 for each in requests)


def test_a_collector_that_is_down_ends_neither_the_endpoint_nor_the_process(home: Settings) -> None:
    made = load(
        {"home": home.home, "metrics.otlp_endpoint": "http://127.0.0.1:1/v1/metrics", "metrics.otlp_every": "100 ms"}
    ).settings
    stop = start_otlp(Scrapes(made))
    with serving(made) as url:
        assert get(f"{url}/metrics")[0] == 200
    began = time.monotonic()
    stop()
    assert time.monotonic() - began < 12


def test_an_otlp_endpoint_has_no_user_in_it() -> None:
    with pytest.raises(ConfigurationError, match=r"metrics\.otlp_endpoint .*OTEL_EXPORTER_OTLP_HEADERS") as raised:
        load({"metrics.otlp_endpoint": "https://user:s3cret@host/v1/metrics"})
    assert "s3cret" not in str(raised.value)


def test_the_command_serves_until_sigterm_and_imports_nothing_heavy(home: Settings, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from orchestration import cli\n"
        f"code = cli.main(['--set', 'home={home.home}', 'metrics', '--port', '0'])\n"
        "heavy = {'dagster', 'pandas', 'pyarrow', 'deltalake', 'confluent_kafka', 'numpy', 'pyspark'}\n"
        "print(code, sorted(heavy & sys.modules.keys()))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        url = line.split()[1].removesuffix(",").removesuffix("/metrics")
        assert 'recourse_records_total{stream="orders"} 1000.0' in get(f"{url}/metrics")[2]
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=20)
        assert printed == "0 []\n"
    finally:
        process.kill()
