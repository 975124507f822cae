"""The figures by OTLP over HTTP to a collector of OpenTelemetry, at an interval, in a thread of its SDK.

The variables of the SDK apply, such as OTEL_EXPORTER_OTLP_HEADERS (what logs in), OTEL_EXPORTER_OTLP_CERTIFICATE, and
OTEL_RESOURCE_ATTRIBUTES. A figure is named as for Prometheus, with dots: `recourse.lag_records`; a counter has no
`_total`, which collectors add.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from orchestration.metrics.figures import FIGURES, PREFIX, Figure
from orchestration.metrics.scrape import ScrapedHome, Scrapes
from streaming_jobs.platform.extras import require
from streaming_jobs.runtime.code_version import package_version

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

log = structlog.get_logger()

TIMEOUT = 10.0
"""Seconds for one delivery; the next one brings newer figures."""
LAST = 3.0
"""Seconds for the last delivery, at the end."""
_UNITS = {"seconds": "s", "bytes": "By", "": "1"}


def start_otlp(scrapes: Scrapes) -> Callable[[], None]:
    """Deliver the figures from now on, as the settings say; returns what ends that, with a last delivery."""
    require("otlp", "metrics.otlp_endpoint")
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    settings = scrapes.settings.metrics
    exporter = OTLPMetricExporter(endpoint=settings.otlp_endpoint, timeout=TIMEOUT)
    every = settings.otlp_every.total_seconds()
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=every * 1000)
    named = {
        "service.name": "recourse",
        "service.version": package_version(),
        "service.instance.id": f"{socket.gethostname()}:{scrapes.settings.home}",
    }
    provider = MeterProvider([reader], Resource.create(named), shutdown_on_exit=False)
    meter = provider.get_meter("recourse", package_version())
    exports = _Exports(scrapes)
    for figure in FIGURES:
        create = meter.create_observable_counter if figure.kind == "counter" else meter.create_observable_gauge
        create(otlp_name(figure), [partial(exports.observations, figure)], _UNITS[figure.unit], figure.help)
    return partial(provider.shutdown, timeout_millis=LAST * 1000)


def otlp_name(figure: Figure) -> str:
    """The name of a figure for OpenTelemetry."""
    return f"recourse.{figure.name.removeprefix(PREFIX).removesuffix('_total')}"


@dataclass
class _Exports:
    """One scrape for each export: the SDK calls the figures in their order, and the first one takes the scrape.

    If the files cannot be read, the export has no figures: a scrape for each figure would take 45 deadlines.
    """

    scrapes: Scrapes
    home: ScrapedHome | None = None

    def observations(self, figure: Figure, _: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        if figure is FIGURES[0]:
            self.home = self._newest()
        for labels, value in figure.samples(self.home) if self.home is not None else ():
            yield Observation(value, dict(zip(figure.labels, labels, strict=True)))

    def _newest(self) -> ScrapedHome | None:
        try:
            return self.scrapes.newest()
        except Exception as error:  # noqa: BLE001 - the next export tries again; the collector sees the gap
            log.warning("the figures could not be read", reason=repr(error)[:200])
            return None
