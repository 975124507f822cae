"""`recourse up`: starts everything with one command, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

import typer

from orchestration.cli.feed import ShareOption
from orchestration.cli.invocation import Invocation, invocation
from orchestration.cli.output import Output, OutputOption, say
from orchestration.cli.steps import Steps

if TYPE_CHECKING:
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.settings import Settings

LIVE_RATE = 2000.0
"""Records per second of the feeder while a person watches: about three minutes for the year."""
FED_TOPIC = "flights"

_Result = TypeVar("_Result")


class Wait(Protocol):
    """Calls an action that the start needs; it says what becomes of a failure."""

    def __call__(self, name: str, action: Callable[[], _Result], settings: Settings) -> _Result:
        """The result of the action."""


def up(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Feed at full speed, process, compare with the truth; exit code 0 or 1.")
    ] = False,
    share: ShareOption = 1.0,
    rate: Annotated[float, typer.Option(min=0, help="Records per second of the feeder; 0: no feeder.")] = LIVE_RATE,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the UI; 0: a free one.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Start broker, topics, feeder, Dagster and the streams; print the addresses to open; Ctrl-C ends all of it.

    With --once: no Dagster; feed, process, compare every table with the truth, end. In a home that has these
    flights already nothing is fed twice, and the tables are compared again. -o json is for --once.
    """
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.once import run_once
    from orchestration.cli.retried import awaited
    from orchestration.cli.setup import fetch_jars, quick_checks, sole_use, warm_up_once
    from streaming_jobs.settings import demonstrate

    call = invocation(context)
    call.demonstrate()
    if port is not None:
        call.values["dagster.port"] = str(port)
    call.export()
    settings = call.settings
    say(", ".join(f"{name} {value}" for name, value in call.loaded.sources.items()))

    def prepare() -> None:
        if call.demonstration:
            demonstrate(settings.home)  # commands after this one are about the same streams
        quick_checks(settings, ui=not once)
        fetch_jars(settings, broker=not settings.kafka.bootstrap_servers)

    wait: Wait = _at_once if once else awaited
    with stop_signals_interrupt(), ExitStack() as held:
        wait("home", lambda: held.enter_context(sole_use(settings)), settings)
        wait("preparations", prepare, settings)
        if not settings.kafka.bootstrap_servers:
            warm_up_once(settings)
        with Steps() as steps:
            broker = _start_broker(settings, steps, wait)
            wait("topics", lambda: _topics(call), settings)
            if once:
                raise typer.Exit(run_once(call, share=share, output=output))
            try:
                _run(call, steps, broker, rate=rate, share=share)
            except KeyboardInterrupt:
                say("ending: streams stop at their next batch border; Ctrl-C again ends at once")


def _run(call: Invocation, steps: Steps, broker: Broker | None, *, rate: float, share: float) -> None:
    """Run Dagster, feeder and screen; once all of it runs, only KeyboardInterrupt or a bug ends it."""
    from orchestration.cli.feed import FeederThread
    from orchestration.cli.kafka import restart_if_dead
    from orchestration.cli.observed import observe_all
    from orchestration.cli.retried import Retried, awaited
    from orchestration.cli.screen import Screen
    from orchestration.local_dagster.processes import DagsterProcesses

    settings = call.settings
    names = list(call.topology.streams)
    processes = DagsterProcesses(settings)
    steps.add("streams and Dagster", processes.stop, processes.kill)
    say("starting Dagster; it takes some ten seconds")
    url = awaited("Dagster", processes.start, settings)
    feeder = None
    if rate > 0 and FED_TOPIC in call.topology.topics:
        feeder = FeederThread(settings, rate=rate, share=share)
        steps.add("feeder", feeder.stop)
        feeder.start()
    with Screen(what_to_open(settings, url)) as screen:
        parts = [
            Retried("Dagster", processes.supervise, settings.home),
            Retried(
                "streams",
                lambda: screen.show(observe_all(settings, names), feeder.state if feeder else None),
                settings.home,
            ),
        ]
        if broker is not None:
            parts.insert(0, Retried("broker", lambda: restart_if_dead(broker), settings.home))
        while True:
            for part in parts:
                part()
            time.sleep(1.0)


def what_to_open(settings: Settings, url: str) -> list[str]:
    """The lines above the live screen: addresses, folders and commands."""
    return [
        f"Dagster    {url}",
        f"           {url}/asset-groups    topics, tables, lineage; open a table for its plots",
        f"           {url}/runs            a run is a session; Stop stops it at a batch border",
        f"tables     {settings.tables}",
        f"logs       {settings.logs}",
        "commands   recourse streams status | ledger NAME | stop NAME",
        "           the streams start within half a minute; the first batch takes longest",
    ]


def _at_once(name: str, action: Callable[[], _Result], settings: Settings) -> _Result:  # noqa: ARG001 - see Wait
    """Like `awaited`, but the first failure ends the command."""
    return action()


def _start_broker(settings: Settings, steps: Steps, wait: Wait) -> Broker | None:
    from streaming_jobs.platform.broker import Broker

    if settings.kafka.bootstrap_servers:
        say(f"broker {settings.kafka.bootstrap_servers} (configured)")
        return None
    broker = Broker(settings)
    steps.add("broker", broker.stop, broker.kill)
    say(f"broker {wait('broker', broker.start, settings)} (embedded)")
    return broker


def _topics(call: Invocation) -> None:
    from orchestration.cli.kafka import create_topics
    from streaming_jobs.platform.broker import bootstrap_servers

    own = not call.settings.kafka.bootstrap_servers or call.demonstration
    created = create_topics(call.settings, call.topology, bootstrap_servers(call.settings), ours=own)
    if created:
        say(f"created topics: {', '.join(created)}")
