"""The figures by OTLP over HTTP to a collector of OpenTelemetry, at an interval, in a thread of its SDK.

The variables of the SDK apply, such as OTEL_EXPORTER_OTLP_HEADERS (what logs in), OTEL_EXPORTER_OTLP_CERTIFICATE, and
OTEL_RESOURCE_ATTRIBUTES. A figure is named as for Prometheus, with dots: `recourse.lag_records`; a counter has no
`_total`, which collectors add.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from orchestration.metrics.figures import FIGURES, PREFIX, Figure
from orchestration.metrics.scrape import Scrapes
from streaming_jobs.platform.extras import require
from streaming_jobs.runtime.code_version import package_version

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

TIMEOUT = 10.0
"""Seconds for one delivery; the next one brings newer figures."""
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
    for figure in FIGURES:
        create = meter.create_observable_counter if figure.kind == "counter" else meter.create_observable_gauge
        create(otlp_name(figure), [partial(_observations, scrapes, figure)], _UNITS[figure.unit], figure.help)
    return partial(provider.shutdown, timeout_millis=TIMEOUT * 1000)


def otlp_name(figure: Figure) -> str:
    """The name of a figure for OpenTelemetry."""
    return f"recourse.{figure.name.removeprefix(PREFIX).removesuffix('_total')}"


def _observations(scrapes: Scrapes, figure: Figure, _: CallbackOptions) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    for labels, value in figure.samples(scrapes.newest()):
        yield Observation(value, dict(zip(figure.labels, labels, strict=True)))
