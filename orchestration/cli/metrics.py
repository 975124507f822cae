"""`recourse metrics`: the figures of all streams of a home, for Prometheus and OpenTelemetry."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import say
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings


def metrics(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0: a free one.", show_default="9464")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the figures and end, for a textfile collector.")] = False,
    rules: Annotated[bool, typer.Option("--rules", help="Print alert rules for Prometheus and end.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Print a dashboard for Grafana and end.")] = False,
    runbooks: Annotated[
        str | None, typer.Option(metavar="URL", help="With --rules: the page that has the runbooks.")
    ] = None,
) -> None:
    """Serve the figures of all streams at /metrics, and a verdict at /health, until Ctrl-C.

    Reads files alone: no Spark, no broker, no code of streams. With the setting metrics.otlp_endpoint, the figures are
    delivered there too.
    """
    if sum((once, rules, dashboard)) > 1:
        raise UsageError("--once, --rules and --dashboard exclude each other", "choose one of them")
    settings = invocation(context).settings
    if rules or dashboard:
        from orchestration.metrics import monitoring

        sys.stdout.write(monitoring.rules(runbooks) if rules else monitoring.dashboard())
        return
    if once:
        from orchestration.metrics.endpoint import exposition
        from orchestration.metrics.scrape import Scrapes
        from streaming_jobs.platform.extras import require

        require("metrics", commands.metrics())
        sys.stdout.write(exposition(Scrapes(settings).newest())[1].decode())
        return
    _serve(settings, host, port)


def _serve(settings: Settings, host: str | None, port: int | None) -> None:
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.metrics.endpoint import DEFAULT_PORT

    chosen = port if port is not None else settings.metrics.port or DEFAULT_PORT
    with stop_signals_interrupt(), ExitStack() as held:
        try:
            export(settings, held, host or settings.metrics.host, chosen)
            threading.Event().wait()
        except KeyboardInterrupt:
            say("ending")


def export(settings: Settings, held: ExitStack, host: str, port: int) -> None:
    """Serve and deliver the figures until `held` is closed."""
    from orchestration.metrics.endpoint import MetricsServer
    from orchestration.metrics.scrape import Scrapes

    scrapes = Scrapes(settings)
    server = MetricsServer(scrapes, host, port)
    held.callback(server.close)
    server.start()
    say(f"figures {server.url}/metrics, verdict {server.url}/health, home {settings.home}")
    if settings.metrics.otlp_endpoint:
        from orchestration.metrics.otlp import start_otlp

        held.callback(start_otlp(scrapes))
        say(f"figures are also delivered to {settings.metrics.otlp_endpoint}")
