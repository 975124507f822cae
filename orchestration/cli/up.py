"""`recourse up`: starts everything with one command, until Ctrl-C; with --once it ends by itself. `recourse feed`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

import typer

from orchestration.cli.options import Invocation, environment_name, invocation
from orchestration.cli.text import (
    FAILED,
    INTERRUPTED,
    Output,
    OutputOption,
    number,
    print_table,
    progress_bar,
    say,
    show,
)
from orchestration.sessions.bounded_log import BoundedLog
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from orchestration.cli.children import Steps
    from streaming_jobs.examples.flights.feeder import FeedReport
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.settings import Settings


ShareOption = Annotated[
    float, typer.Option(min=0.0001, max=1.0, help="Share of the flights, the earliest first; 1 is all.")
]
RateOption = Annotated[
    float | None, typer.Option(min=1, help="Records per second; default: full speed.", show_default=False)
]
LIVE_RATE = 2000.0
"""Records per second of the feeder while a person watches: about three minutes for the year."""
FED_TOPIC = "flights"
TRUTH_OF = "streaming_jobs.examples.flights.streams"
"""The module whose streams can be compared with the truth of the flights."""
BATCH = 40_000
"""Records per batch, unless the setting names another number."""
_CHECK_FIELDS = ("table", "ok", "expected_rows", "found_rows", "detail")

_Result = TypeVar("_Result")


class Attempt(Protocol):
    """Calls an action that the start needs, and decides what follows a failure."""

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
    from orchestration.cli.children import Steps, awaited, stop_signals_interrupt
    from orchestration.cli.preparations import fetch_jars, quick_checks, sole_use, warm_up_once
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

    attempt: Attempt = _at_once if once else awaited
    with stop_signals_interrupt(), ExitStack() as held:
        attempt("home", lambda: held.enter_context(sole_use(settings)), settings)
        attempt("preparations", prepare, settings)
        if not settings.kafka.bootstrap_servers:
            warm_up_once(settings)
        with Steps() as steps:
            broker = _start_broker(settings, steps, attempt)
            attempt("topics", lambda: _topics(call), settings)
            if once:
                raise typer.Exit(run_once(call, share=share, output=output))
            try:
                _run(call, steps, broker, rate=rate, share=share)
            except KeyboardInterrupt:
                say("ending: streams stop at their next batch border; Ctrl-C again ends at once")


def _run(call: Invocation, steps: Steps, broker: Broker | None, *, rate: float, share: float) -> None:
    """Run Dagster, feeder and screen; once all of them run, only KeyboardInterrupt or a bug ends them."""
    from orchestration.cli.children import Retried, awaited
    from orchestration.cli.metrics import export
    from orchestration.cli.preparations import restart_if_dead
    from orchestration.cli.progress import Screen, observe_all
    from orchestration.local_dagster.processes import DagsterProcesses

    settings = call.settings
    names = list(call.topology.streams)
    if settings.metrics.port:
        exports = ExitStack()
        steps.add("figures", exports.close)
        export(settings, exports, settings.metrics.host, settings.metrics.port)
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
    return [
        f"Dagster    {url}",
        f"           {url}/asset-groups    topics, tables, lineage; open a table for its plots",
        f"           {url}/runs            a run is a session; Stop stops it at a batch border",
        f"tables     {settings.tables}",
        f"logs       {settings.logs}",
        f"commands   {commands.status()} | ledger NAME | stop NAME",
        "           the streams start within half a minute; the first batch takes longest",
    ]


def _at_once(name: str, action: Callable[[], _Result], settings: Settings) -> _Result:  # noqa: ARG001 - see Attempt
    """Like `awaited`, but the first failure ends the command."""
    return action()


def _start_broker(settings: Settings, steps: Steps, attempt: Attempt) -> Broker | None:
    from streaming_jobs.platform.broker import Broker

    if settings.kafka.bootstrap_servers:
        say(f"broker {settings.kafka.bootstrap_servers} (configured)")
        return None
    broker = Broker(settings)
    steps.add("broker", broker.stop, broker.kill)
    say(f"broker {attempt('broker', broker.start, settings)} (embedded)")
    return broker


def _topics(call: Invocation) -> None:
    from orchestration.cli.preparations import create_topics
    from streaming_jobs.platform.broker import bootstrap_servers

    ours = not call.settings.kafka.bootstrap_servers or call.demonstration
    created = create_topics(call.settings, call.topology, bootstrap_servers(call.settings), ours=ours)
    if created:
        say(f"created topics: {', '.join(created)}")


def run_once(call: Invocation, *, share: float, output: Output) -> int:
    """Feed unless the topic is complete, process, compare; returns the exit code. The broker has to run."""
    from streaming_jobs.examples.flights.streams import STREAMS
    from streaming_jobs.examples.flights.truth import compare

    if TRUTH_OF not in call.settings.flows:
        raise UsageError(
            f"--once compares the streams of {TRUTH_OF} with the truth, and they are not among your flows",
            f"leave --once out, or add {TRUTH_OF} to the setting `flows`",
        )
    begun = time.monotonic()
    feed_once(call.settings, share)
    process(call, [stream.name for stream in STREAMS])
    say("comparing the tables with the truth")
    checks = compare(call.settings, STREAMS, share)
    seconds = time.monotonic() - begun
    ok = all(check.ok for check in checks)

    def text() -> None:
        rows = [
            [c.table, number(c.expected_rows), number(c.found_rows), "ok" if c.ok else "wrong", c.detail]
            for c in checks
        ]
        print_table(["table", "expected", "found", "verdict", "detail"], rows, right=["expected", "found"])
        say(f"{'every table equals the truth' if ok else 'the tables are wrong'}; {seconds:.0f} s")

    tables = [{name: getattr(check, name) for name in _CHECK_FIELDS} for check in checks]
    show(output, {"ok": ok, "seconds": round(seconds, 1), "share": share, "tables": tables}, text)
    return 0 if ok else FAILED


def feed_once(settings: Settings, share: float) -> None:
    """Bring the topic to exactly the first `share` of the flights; raises UsageError if it holds more than that."""
    from streaming_jobs.examples.flights.dataset import TOTAL
    from streaming_jobs.examples.flights.feeder import survey

    there = survey(settings, share)
    if there.records > there.total:
        next_step = "use another home: recourse --set home=FOLDER up --once"
        if there.records <= TOTAL:
            next_step = f"ask for as much, with --share {share_of(there.records, TOTAL)}, or {next_step}"
        raise UsageError(
            f"the topic holds {there.records:,} records, and --share {share:g} is {there.total:,} flights: the tables"
            " would differ from the truth",
            next_step,
        )
    if there.complete:
        say(f"the topic has these {number(there.total)} flights already; nothing is sent")
        return
    report = feed_with_bar(settings, rate=None, share=share)
    say(summary(report))
    if report.stopped:
        raise KeyboardInterrupt


def process(call: Invocation, streams: list[str]) -> None:
    """Run the streams in one session until they have read everything; raises RecourseError if it fails."""
    from orchestration.cli.children import end, session_driver, stop_patience
    from orchestration.cli.progress import Bars, catching_up, observe_all

    settings = call.settings
    log = BoundedLog(settings.logs / "session-once.log")
    command = session_driver(streams, {**_smaller_batches(call), **call.environment()}, trigger="available-now")
    ahead = catching_up(settings, call.topology.select(streams))
    with Bars() as bars, log.open() as output:
        driver = command.start(output)
        try:
            bars.show(ahead.look(time.monotonic()))
            while (code := driver.wait(0.5)) is None:
                bars.show(ahead.look(time.monotonic()))
                log.trim()
            bars.show(ahead.look(time.monotonic()), last=True)
        finally:
            end(driver, stop_patience(settings, streams))
    if code != 0:
        errors = [note for seen in observe_all(settings, streams) for note in seen.notes()]
        raise SessionFailed(
            "\n  ".join([f"the session ended with exit code {code}", *errors]), f"its log is {log.path}"
        )


def _smaller_batches(call: Invocation) -> dict[str, str]:
    """The environment for batches small enough to show progress: the default puts nearly all flights into one."""
    key = "stream.max_offsets_per_trigger"
    set_by_user = any(origin.key == key and origin.origin != "default" for origin in call.loaded.origins)
    return {} if set_by_user else {environment_name(key): str(BATCH)}


class SessionFailed(RecourseError):
    """The session of `recourse up --once` did not reach the end of its topics.

    The lines above the error say which stream failed and why. Correct the cause, then run the command again.
    """

    code = "REC-033"


def share_of(records: int, total: int) -> str:
    """The share with the fewest digits that gives exactly this number of records."""
    from streaming_jobs.examples.flights.dataset import flights_in

    for digits in range(1, 12):
        # Rounded up, as a share is rounded down to whole records.
        share = min(math.ceil(records / total * 10**digits) / 10**digits, 1.0)
        if flights_in(share) == records:
            break
    return f"{share:.{digits}f}"


def feed(
    context: typer.Context,
    rate: RateOption = None,
    share: ShareOption = 1.0,
    again: Annotated[bool, typer.Option("--again", help="Send them even if the topic has them already.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Send the flights of 2013 to the topic `flights`, in the order of their departure."""
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import broker_for_command

    settings = invocation(context).settings
    with stop_signals_interrupt(), broker_for_command(settings):
        report = feed_with_bar(settings, rate=rate, share=share, again=again)
    value = {**asdict(report), "seconds": round(report.seconds, 3)}
    show(output, value, lambda: say(summary(report)))
    if report.stopped:
        raise typer.Exit(INTERRUPTED)


def feed_with_bar(settings: Settings, *, rate: float | None, share: float, again: bool = False) -> FeedReport:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from streaming_jobs.examples.flights.feeder import feed as send

    columns = (TextColumn("feeding"), BarColumn(), MofNCompleteColumn(), TextColumn("records,"), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("feeding", total=None)
        return send(
            settings,
            rate=rate,
            share=share,
            again=again,
            progress=lambda held, total: bar.update(task, completed=held, total=total),
        )


def summary(report: FeedReport) -> str:
    line = f"sent {number(report.records)} records in {report.seconds:.1f} s"
    if report.stopped:
        return (
            f"{line}; interrupted at {number(report.held)} of {number(report.total)}: the same command continues there"
        )
    return f"{line}, {number(round(report.rate))} a second" if report.rate else line


@dataclass(frozen=True)
class FeederState:
    """The progress of the feeder; `rate` in records per second."""

    state: str
    sent: int
    total: int
    rate: float = 0.0
    message: str = ""

    def __str__(self) -> str:
        if self.state == "feeding":
            share = 100 * self.sent / self.total if self.total else 0
            return f"feeding {number(self.sent)} of {number(self.total)} ({share:.0f} %), {number(self.rate)} records/s"
        return self.message or self.state


class FeederThread:
    """Feeds in the background at a rate; `state` is its progress, or its error."""

    def __init__(self, settings: Settings, *, rate: float | None, share: float) -> None:
        self._settings, self._rate, self._share = settings, rate, share
        self._ended = threading.Event()
        self._begun: tuple[float, int] | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self.state = FeederState("starting", 0, 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline: float = 10.0) -> None:
        """End between two chunks, within `deadline` seconds; the next start continues after the last record sent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(deadline)

    def _run(self) -> None:
        from streaming_jobs.examples.flights import dataset

        try:
            self._feed_all()
        finally:
            dataset.release()

    def _feed_all(self) -> None:
        from streaming_jobs.errors import TransientError

        while not self._ended.is_set():
            self._begun = None
            try:
                self.state = self._feed()
                return
            except TransientError as error:
                self.state = replace(self.state, state="waiting", message=f"waits for the broker: {error.found}")
                self._ended.wait(5)
            except Exception as error:  # noqa: BLE001 - shown on the screen; no caller waits for the thread
                self.state = replace(self.state, state="failed", message=f"failed: {error}")
                return

    def _feed(self) -> FeederState:
        from streaming_jobs.examples.flights.feeder import feed as send
        from streaming_jobs.examples.flights.feeder import survey

        there = survey(self._settings, self._share)
        if not there.complete:
            send(self._settings, rate=self._rate, share=self._share, progress=self._progressed, stop=self._ended)
        return FeederState(
            "done", there.total, there.total, message=f"done: {number(there.total)} flights are in the topic"
        )

    def _progressed(self, held: int, total: int) -> None:
        now = time.monotonic()
        at, before = self._begun = self._begun or (now, held)
        self.state = FeederState("feeding", held, total, (held - before) / (now - at) if now - at > 0.5 else 0.0)
