"""The HTTP endpoint of the figures.

| path | answer |
|---|---|
| `/metrics` | the figures for Prometheus, as text or OpenMetrics; 503 if the files are not read in time |
| `/healthz` | 200 as long as this process lives; reads nothing |
| `/health` | 200 if no stream is red, else 503; JSON with the streams that are not well |

It asks for no password, and answers GET alone. A request that sends nothing ends after ten seconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import structlog

from orchestration.metrics.figures import FIGURES
from orchestration.metrics.scrape import ScrapedHome, Scrapes
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.extras import require

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

log = structlog.get_logger()

DEFAULT_PORT = 9464
"""The port that the registry of Prometheus's exporters has for OpenTelemetry's."""


def exposition(home: ScrapedHome, accept: str = "") -> tuple[str, bytes]:
    """The content type, and the figures in the form that a scraper accepts."""
    from prometheus_client.exposition import choose_encoder

    encoder, content_type = choose_encoder(accept)
    return content_type, encoder(registry(home))


def registry(home: ScrapedHome) -> CollectorRegistry:
    """A registry of `prometheus_client` with all figures of a scrape."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry

    class FiguresCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            for figure in FIGURES:
                family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
                metric = family(figure.name, figure.help, labels=figure.labels)
                for labels, value in figure.samples(home):
                    metric.add_metric(labels, value)
                yield metric

    registry = CollectorRegistry(auto_describe=False)
    registry.register(FiguresCollector())
    return registry


def _health(home: ScrapedHome) -> tuple[int, str, bytes]:
    body = json.dumps(home.as_json(), indent=2).encode()
    return 200 if home.well else 503, "application/json", body + b"\n"


class MetricsServer(ThreadingHTTPServer):
    """Answers from `start` to `close`, in threads that do not keep the process."""

    daemon_threads = True

    def __init__(self, scrapes: Scrapes, host: str, port: int) -> None:
        """Listen; raises UsageError if the address is taken or unknown, or the extra `metrics` is not installed."""
        require("metrics", "the endpoint of the figures")
        self.scrapes = scrapes
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"the endpoint of the figures cannot listen on {host}:{port}: {error.strerror or error}",
                "choose others with --host and --port, or the settings metrics.host and metrics.port",
            ) from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> MetricsServer:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening; a request in progress is not awaited."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = 10.0

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", b"ok\n")
        elif path == "/metrics":
            self._answer_from(lambda home: (200, *exposition(home, self.headers.get("Accept", ""))))
        elif path == "/health":
            self._answer_from(_health)
        else:
            self._answer(404, "text/plain; charset=utf-8", b"paths: /metrics /health /healthz\n")

    def _answer_from(self, of: Callable[[ScrapedHome], tuple[int, str, bytes]]) -> None:
        """Answer from the newest scrape; 503 if there is none in time."""
        try:
            status, content_type, body = of(self.server.scrapes.newest())
        except Exception as error:  # noqa: BLE001 - the next scrape tries again; the scraper sees that this one failed
            log.warning("the figures could not be read", reason=repr(error)[:200])
            status, content_type, body = 503, "text/plain; charset=utf-8", f"{type(error).__name__}\n".encode()
        self._answer(status, content_type, body)

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "recourse"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of http.server
        """A request is not logged: there is one every few seconds."""
