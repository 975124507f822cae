"""`recourse streams`: inspect, run and stop streams."""

from __future__ import annotations

import contextlib
import getpass
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, Invocation, StreamName, StreamNames, invocation
from orchestration.cli.progress import declared_or_known, observed_now, print_state, print_unread, unread_now
from orchestration.cli.text import (
    FAILED,
    Output,
    OutputOption,
    make_table,
    number,
    offsets_text,
    print_table,
    say,
    show,
    show_lines,
    show_table,
)
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from orchestration.cli.progress import ObservedStream
    from streaming_jobs.ledger.entry import LedgerEntry
    from streaming_jobs.settings import Settings
    from streaming_jobs.sinks.stored import Commit
    from streaming_jobs.stream import Stream


app = typer.Typer(no_args_is_help=True, help="Inspect, run and stop streams.", rich_markup_mode=None)

Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait until the streams run.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Leave the request without waiting.")]


@app.callback()
def streams() -> None:
    """Inspect, run and stop streams."""


@app.command("list", short_help="Print the declared streams.")
def list_streams(context: typer.Context, output: OutputOption = Output.text) -> None:
    """Print the declared streams with the topics and tables that they read and write, and the trigger."""
    call = invocation(context)
    summaries = [_summary(stream, call.settings) for stream in call.topology.streams.values()]
    columns = ["stream", "reads", "writes", "trigger", "description"]
    rows = [
        [
            f["stream"],
            ", ".join([*f["topics"], *(f"table {name}" for name in f["tables_read"])]),
            ", ".join([*f["tables"], *(f"topic {name}" for name in f["writes_topics"])]),
            f["trigger"],
            f["description"].partition("\n")[0],
        ]
        for f in summaries
    ]
    show_table(output, summaries, columns, rows)


@app.command(short_help="Run streams in one session in the foreground.")
def run(
    context: typer.Context,
    names: StreamNames,
    trigger: Annotated[
        str | None, typer.Option(help="continuous, available-now, or 'every 10 seconds'; default: as configured.")
    ] = None,
) -> None:
    """Run streams in one session in the foreground; Ctrl-C stops them at a batch border, a second Ctrl-C at once.

    Exit codes are the session's: 0 stopped or finished, 1 failed, may work later, 2 usage, 75 another driver holds
    the stream, 78 failed, and a person has to act.
    """
    from orchestration.cli.children import attend, session_driver, stop_patience
    from orchestration.cli.preparations import broker_for_command
    from streaming_jobs.errors import LeaseBusy
    from streaming_jobs.state.lease import busy, holder

    asked_at = time.time()
    call = invocation(context)
    selected = call.names(names)
    with broker_for_command(call.settings):
        command = session_driver(selected, call.environment(), trigger=trigger, asked_at=asked_at)
        code = attend(command.start(sys.stderr.fileno()), stop_patience(call.settings, selected), say)
    if code == LeaseBusy.exit_code:
        for name in selected:
            if (owner := holder(call.settings, name)) is not None:
                say(str(busy(name, owner)))
    if code < 0:
        say(f"the driver was killed by {signal.Signals(-code).name}")
    raise typer.Exit(code if code >= 0 else FAILED)


@app.command(short_help="Stop streams at a batch border, and wait.")
def stop(
    context: typer.Context,
    names: StreamNames,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait; default: the stream's stop_deadline and 15 s.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Ask streams to stop at their next batch border, and wait until they have.

    A stopped stream stays stopped, also under Dagster's keepalive, until somebody starts it again.
    """
    from orchestration.cli.progress import observe
    from streaming_jobs.state.requests import STOP

    call = invocation(context)
    selected = call.names(names)
    was_live = {name: observe(call.settings, name).live for name in selected}
    for name in selected:
        STOP.ask(call.settings, name, "asked by recourse streams stop")
    results = [_stopped(call.settings, name, was_live[name], timeout) for name in selected]
    show_lines(output, results, [f"{result['stream']}: {result['result']}" for result in results])
    if not all(result["stopped"] for result in results):
        say(f"next: look at `{commands.status()}`, wait longer with --timeout, or end the session's process")
        raise typer.Exit(FAILED)


@app.command(short_help="Print what each stream is doing now.")
def status(
    context: typer.Context,
    names: AnyStreams = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat every two seconds, until Ctrl-C.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print what each stream is doing now, whether it is well, and how far it is behind its topics.

    With one STREAM, also the size of its state, its lag by partition, and how old its oldest unread record is.
    Exit codes: 0 nothing is red; 1 a stream is red (dead, silent, failed, failing, stuck, late, blocked, blind), or
    none of these streams has ever run in this home. Stopped on purpose and being recovered are not red.
    """
    call = invocation(context)
    selected = declared_or_known(call, names or [])
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(call, selected, output)
        return
    observed = observed_now(call, selected)
    home = str(call.settings.home)
    detailed = output is Output.json or len(names or ()) == 1
    unread = unread_now(call, observed) if detailed else {}
    details = {name: each.as_json() for name, each in unread.items()}
    values = [{**o.as_json(home), "unread": details.get(o.stream)} for o in observed]
    show(output, values, lambda: _print_status(observed, home))
    if detailed and output is Output.text:
        print_state(observed[0])
        print_unread(observed[0], unread.get(observed[0].stream))
    if any(o.health.red for o in observed) or all(o.state == "never started" for o in observed):
        raise typer.Exit(FAILED)


@app.command(short_help="Print what a table's commits record.")
def ledger(
    context: typer.Context,
    name: StreamName,
    limit: Annotated[int, typer.Option(min=1, help="Entries, newest first.")] = 20,
    sink: Annotated[str | None, typer.Option(help="A table of the stream other than its primary table.")] = None,
    changes: Annotated[
        bool, typer.Option("--code-changes", help="Only the first batch of each version of the code.")
    ] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print what a table's commits record: batch, offsets, rows, code. Needs no Spark.

    Reads the table's log, and for entries that the log no longer has the ledger file in the stream's state folder.
    """
    from streaming_jobs.errors import UsageError
    from streaming_jobs.preflight.snapshot import ledger_file
    from streaming_jobs.sinks.stored import entries
    from streaming_jobs.sinks.tables import all_tables, store_of
    from streaming_jobs.state.ledger_file import FROM_FILE, code_changes, newest_entries

    call = invocation(context)
    stream = call.topology[name]
    tables = stream.table_names
    table = sink or stream.primary.name
    if table not in tables:
        raise UsageError(f"stream {name} has no table '{table}'", f"its tables are: {', '.join(tables)}")
    declared = next(declared for declared, _ in all_tables(stream) if declared.name == table)
    commits, file = store_of(declared).commits(call.settings, declared), ledger_file(call.settings, name)
    primary = table == stream.primary.name
    if changes and not primary:
        raise UsageError("--code-changes is about the stream's primary table", "leave --sink out")
    if changes:
        ledger_entries = code_changes(commits, table, file, name)[:limit]
    else:
        ledger_entries = newest_entries(commits, table, file, name, limit) if primary else entries(commits, limit)
    if output is Output.text and any(commit.operation == FROM_FILE for commit, _ in ledger_entries):
        say(f"the log of {table} has been shortened; older entries are from {file.folder}")
    if not ledger_entries and output is Output.text:
        say(f"no batch is in the ledger of {table} yet")
        return
    columns = ["version", "at", "kind", "generation", "batch", "offsets", "records", "rows", "code"]
    value = [entry_json(commit, entry) for commit, entry in ledger_entries]
    rows = [entry_row(commit, entry) for commit, entry in ledger_entries]
    show_table(output, value, columns, rows, right=["version", "batch", "records"])


@app.command(short_help="Accept a foreign commit.")
def accept(
    context: typer.Context,
    name: StreamName,
    table: Annotated[str, typer.Option(help="The table with the foreign commit.")],
    version: Annotated[int, typer.Option(min=0, help="The commit's version, as preflight named it.")],
    why: Annotated[str, typer.Option(help="The reason, stored with the acceptance.")],
) -> None:
    """Accept a commit that another writer made to a table that the stream writes or reads."""
    from streaming_jobs.state import stream_record
    from streaming_jobs.table_sources.versions import TableVersions

    call = invocation(context)
    stream = call.topology[name]
    read = table in (source.name for source in stream.tables_read)
    others = TableVersions(call.settings.tables / table).commits_of_others() if read else None
    stream_record.accept(call.settings, stream, table, version, why, others)
    say(f"accepted: version {version} of {table}; {name} may start again")


@app.command("write-marker", short_help="Write a topic's lost marker again.")
def write_marker(context: typer.Context, name: StreamName) -> None:
    """Prove by table, ledger and topic which batches a topic has whose marker is lost, and write the marker again."""
    from orchestration.recoveries.request import topics_of
    from reprocessing.plan.written_topics import WrittenTopics, write_markers

    call = invocation(context)
    written = WrittenTopics(call.settings)
    for topic, at in write_markers(call.settings, call.topology[name], written, topics_of(call.settings)):
        say(f"written: topic {topic} has the batches of stream {name} up to {at}; {name} may start again")


def _stopped(settings: Settings, stream: str, was_live: bool, timeout: float | None) -> dict[str, Any]:
    from orchestration.cli.children import stop_patience
    from orchestration.cli.progress import observe
    from streaming_jobs.state.status import ENDED

    wait = timeout if timeout is not None else stop_patience(settings, [stream])
    deadline = time.monotonic() + wait
    while (seen := observe(settings, stream)).owner is not None and seen.state not in ENDED:
        if time.monotonic() > deadline:
            text = f"still {seen.state} after {wait:g} s (process {seen.owner.pid})"
            return {"stream": stream, "stopped": False, "result": text, "state": seen.state}
        time.sleep(0.1)
    result = "stopped" if was_live else "was not running; it stays stopped until somebody starts it"
    return {"stream": stream, "stopped": True, "result": result, "state": seen.state}


def _watch(call: Invocation, names: list[str], output: Output) -> None:
    from rich.live import Live

    from orchestration.cli.progress import COLUMNS, RIGHT
    from orchestration.cli.text import stdout_console

    console = stdout_console()
    if output is Output.json or not console.is_terminal:
        while True:
            observed = observed_now(call, names)
            show(output, [o.as_json() for o in observed], partial(_print_status, observed))
            time.sleep(2)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            observed = observed_now(call, names)
            live.update(make_table(COLUMNS, [o.row() for o in observed], right=RIGHT), refresh=True)
            time.sleep(2)


def _print_status(observed: list[ObservedStream], home: str = "") -> None:
    from orchestration.cli.progress import COLUMNS, RIGHT

    if home:
        nothing = all(o.state == "never started" for o in observed)
        say(f"home {home}{': none of these streams has ever run here' if nothing else ''}")
    print_table(COLUMNS, [o.row() for o in observed], right=RIGHT)
    for note in (note for o in observed for note in o.notes()):
        say(note)


def _summary(stream: Stream, settings: Settings) -> dict[str, Any]:
    return {
        "stream": stream.name,
        "topics": [topic.name for topic in stream.topics],
        "tables_read": [table.name for table in stream.tables_read],
        "tables": [table.name for table in stream.sinks.values()],
        "writes_topics": [sink.name for sink in stream.topic_sinks.values()],
        "writes_postgres_tables": [table.name for table in stream.postgres_tables.values()],
        "dead_letters": stream.dead_letters,
        "trigger": settings.for_stream(stream.name).trigger,
        "owners": list(stream.owners),
        "description": stream.description,
    }


def start(
    context: typer.Context,
    names: StreamNames,
    timeout: Timeout = 180.0,
    no_wait: NoWait = False,
    output: OutputOption = Output.text,
) -> None:
    """Start streams that are stopped or have failed, and wait until they run.

    Their running session starts them, or Dagster does; other streams are not touched. If neither is there, the
    command says what would start them. They run the code on disk.
    """
    _begin(invocation(context), names, timeout, no_wait, output, again=False)


def restart(
    context: typer.Context,
    names: StreamNames,
    timeout: Timeout = 180.0,
    no_wait: NoWait = False,
    output: OutputOption = Output.text,
) -> None:
    """Stop streams at a batch border, start them again, and wait until they run; other streams are not touched.

    They run the code on disk; `recourse deploy` shows its changes before.
    """
    _begin(invocation(context), names, timeout, no_wait, output, again=True)


def _begin(call: Invocation, names: list[str], timeout: float, no_wait: bool, output: Output, *, again: bool) -> None:
    from orchestration.deploys.starting import ask, wait

    selected = call.names(names)
    who = f"recourse streams {'restart' if again else 'start'} ({user()})"
    requested = [ask(call.settings, name, who, again=again) for name in selected]
    if no_wait:
        values = [{"stream": each.stream, "asked": each.asked, "recovery": each.was.plan} for each in requested]
        nothing = "nothing to do: it runs, or a recovery has it"
        show_lines(output, values, [f"{r.stream}: {'asked to start' if r.asked else nothing}" for r in requested])
        return
    outcomes = wait(call.settings, requested, timeout, say)
    lines = [
        f"{each.stream}: {each.outcome}{'' if each.seconds is None else f' after {each.seconds:g} s'}: {each.text}"
        for each in outcomes
    ]
    show_lines(output, [{**asdict(each), "ok": each.ok} for each in outcomes], lines)
    if not all(each.ok for each in outcomes):
        raise typer.Exit(FAILED)


def user() -> str:
    """The name of the user who runs the command; the user id where it has no name."""
    import os

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry for this user, as in some containers
        return f"user {os.getuid()}"


def entry_json(commit: Commit, entry: LedgerEntry) -> dict[str, Any]:
    return {
        "version": commit.version if commit.version >= 0 else None,
        "at": _iso(commit.at),
        "from": "ledger file" if commit.operation == "LEDGER FILE" else "table log",
        **{name: getattr(entry, name) for name in ("kind", "stream", "table", "generation", "batch")},
        "offsets": {
            r.topic: {"id": r.topic_id, "start": dict(r.start), "end": dict(r.end), "records": r.records}
            for r in entry.offsets
        },
        "rows": dict(entry.rows),
        "rules": {table: dict(broken) for table, broken in entry.rules.items()},
        "txns": dict(entry.txns),
        "code": {"hash": entry.code.hash, "package": entry.code.package},
        "plan": entry.plan,
        "note": entry.note,
    }


def entry_row(commit: Commit, entry: LedgerEntry) -> list[str]:
    return [
        str(commit.version) if commit.version >= 0 else "-",
        _iso(commit.at)[:19].replace("T", " "),
        entry.kind,
        f"g{entry.generation:04d}",
        str(entry.batch) if entry.batch >= 0 else "-",
        "; ".join(offsets_text(r.topic, r.start, r.end) for r in entry.offsets) or "-",
        number(entry.records),
        ", ".join(f"{name} {number(count)}" for name, count in entry.rows.items()) or "-",
        entry.code.hash[:8],
    ]


def _iso(milliseconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
