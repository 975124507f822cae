"""`recourse deadletters` and `recourse quarantine`: what a stream has set aside, and its way through today's code."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, StreamName, invocation
from orchestration.cli.slices import as_json as slice_as_json
from orchestration.cli.text import Output, OutputOption, number, print_table, say, show, show_table

if TYPE_CHECKING:
    from reprocessing.redrive.redrive import RedriveReport
    from reprocessing.redrive.selection import Choice, SetAside
    from streaming_jobs.sinks.redriven import Kind, RedrivenRecord, RedrivenRow

app = typer.Typer(no_args_is_help=True, help="Dead letters: print them, send them through today's code.")
quarantine_app = typer.Typer(no_args_is_help=True, help="Quarantined rows: print them, send them through today's code.")

_SHOWN = 20
Older = Annotated[str | None, typer.Option("--older-than", metavar="DURATION", help="Records of before that long ago.")]
Newer = Annotated[str | None, typer.Option("--newer-than", metavar="DURATION", help="Records of since that long ago.")]
Reason = Annotated[str | None, typer.Option(metavar="WORD", help="Of this reason, such as malformed_json.")]
Error = Annotated[str | None, typer.Option(metavar="TEXT", help="With this text in reason or detail, in any case.")]
Offsets = Annotated[
    list[str] | None,
    typer.Option(metavar="RANGE", help="TOPIC, TOPIC/PARTITION or TOPIC/0:100-199; may be given again."),
]
RuleName = Annotated[str | None, typer.Option("--rule", metavar="RULE", help="That break this rule.")]
Table = Annotated[str | None, typer.Option(metavar="TABLE", help="The table whose quarantine it is.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Records at most.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would become of each; nothing is changed.")]
WaitCommit = Annotated[str, typer.Option(metavar="DURATION", help="The longest wait for the running stream.")]


@app.callback()
def deadletters() -> None:
    """Dead letters: records that a format refused, on which a function raised, or whose row no table holds."""


@quarantine_app.callback()
def quarantine() -> None:
    """Quarantined rows: rows that a row rule has set aside."""


@app.command("list", short_help="Print how many there are, by reason; or the redrives so far.")
def list_letters(
    context: typer.Context,
    names: AnyStreams = None,
    redrives: Annotated[bool, typer.Option("--redrives", help="The redrives, oldest first.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print the dead letters of each stream by reason and topic. Reads only; needs neither Spark nor a broker."""
    _list(context, names, "dead letters", redrives=redrives, output=output)


@quarantine_app.command("list", short_help="Print how many there are, by rule; or the redrives so far.")
def list_quarantined(
    context: typer.Context,
    names: AnyStreams = None,
    redrives: Annotated[bool, typer.Option("--redrives", help="The redrives, oldest first.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print the quarantined rows of each stream by rule and topic. Reads only; needs neither Spark nor a broker."""
    _list(context, names, "quarantine", redrives=redrives, output=output)


@app.command("show", short_help="Print single dead letters, or what became of the records of a redrive.")
def show_letters(
    context: typer.Context,
    stream: StreamName,
    redrive: Annotated[str | None, typer.Option(metavar="ID", help="What became of the records of a redrive.")] = None,
    older_than: Older = None,
    newer_than: Newer = None,
    reason: Reason = None,
    error: Error = None,
    offsets: Offsets = None,
    limit: Limit = _SHOWN,
    output: OutputOption = Output.text,
) -> None:
    """Print dead letters with reason, detail and value. Reads only; needs neither Spark nor a broker."""
    choice = _choice(older_than, newer_than, reason, None, error, offsets)
    _show(context, stream, "dead letters", choice, None, redrive, limit, output)


@quarantine_app.command("show", short_help="Print single quarantined rows, or what became of those of a redrive.")
def show_quarantined(
    context: typer.Context,
    stream: StreamName,
    table: Table = None,
    redrive: Annotated[str | None, typer.Option(metavar="ID", help="What became of the rows of a redrive.")] = None,
    older_than: Older = None,
    newer_than: Newer = None,
    rule: RuleName = None,
    error: Error = None,
    offsets: Offsets = None,
    limit: Limit = _SHOWN,
    output: OutputOption = Output.text,
) -> None:
    """Print quarantined rows with their rules. Reads only; needs neither Spark nor a broker."""
    choice = _choice(older_than, newer_than, None, rule, error, offsets)
    _show(context, stream, "quarantine", choice, table, redrive, limit, output)


@app.command("replay", short_help="Send dead letters through the code of today, exactly once.")
def replay_letters(
    context: typer.Context,
    stream: StreamName,
    older_than: Older = None,
    newer_than: Newer = None,
    reason: Reason = None,
    error: Error = None,
    offsets: Offsets = None,
    limit: Limit = 10_000,
    dry_run: DryRun = False,
    wait_commit: WaitCommit = "5 minutes",
    output: OutputOption = Output.text,
) -> None:
    """Send dead letters through decoder, function and rules of today, and add their rows to the tables.

    Without options: all of them. The stream may run or not; it is not disturbed. Needs a broker and Spark. A redrive
    that a killed command has left is finished first. Exit codes: 0 redriven, or nothing changes; 1 failed; 2 usage,
    also a stream whose records cannot be redriven.
    """
    choice = _choice(older_than, newer_than, reason, None, error, offsets)
    _replay(context, stream, "dead letters", choice, None, limit, wait_commit, output, dry_run=dry_run)


@quarantine_app.command("replay", short_help="Send the records of quarantined rows through the code of today.")
def replay_quarantined(
    context: typer.Context,
    stream: StreamName,
    table: Table = None,
    older_than: Older = None,
    newer_than: Newer = None,
    rule: RuleName = None,
    error: Error = None,
    offsets: Offsets = None,
    limit: Limit = 10_000,
    dry_run: DryRun = False,
    wait_commit: WaitCommit = "5 minutes",
    output: OutputOption = Output.text,
) -> None:
    """Send the records of quarantined rows through decoder, function and rules of today, and add the good rows.

    Needs a broker and Spark: the records are read from their topic, or its archive. Otherwise as `deadletters replay`.
    """
    choice = _choice(older_than, newer_than, None, rule, error, offsets)
    _replay(context, stream, "quarantine", choice, table, limit, wait_commit, output, dry_run=dry_run)


def _choice(*texts: Any) -> Choice:
    from reprocessing.redrive.selection import choice

    return choice(*texts)


def _list(context: typer.Context, names: list[str] | None, kind: Kind, *, redrives: bool, output: Output) -> None:
    call = invocation(context)
    streams = call.topology.select(dict.fromkeys(names or []))
    if redrives:
        _list_redrives(context, [stream.name for stream in streams], kind, output)
        return
    from reprocessing.redrive.selection import by_reason

    values = []
    for stream in streams:
        for table in [None] if kind == "dead letters" else list(stream.quarantines):
            found = by_reason(call.settings, stream, kind, table=table)
            name = stream.dead_letters if table is None else stream.quarantines[table]
            values += [{"stream": stream.name, "table": name, **each} for each in found]
    rows = [
        [
            each["stream"],
            each["reason"],
            each["topic"],
            number(each["number"]),
            each["oldest"],
            each["newest"],
            _one_line(each["example"]),
        ]
        for each in values
    ]
    columns = [
        "stream",
        "reason" if kind == "dead letters" else "rules",
        "topic",
        "number",
        "oldest",
        "newest",
        "example",
    ]
    show_table(output, values, columns, rows, right=["number"])


def _list_redrives(context: typer.Context, names: list[str], kind: Kind, output: Output) -> None:
    from collections import Counter

    from streaming_jobs.state.redrive_requests import RedriveRequests
    from streaming_jobs.text.spelling import instant_words

    values, rows = [], []
    for name in names:
        requests = RedriveRequests.of(invocation(context).settings, name)
        for each in (*requests.history(), *requests.waiting()):
            if each.kind != kind:
                continue
            counts = dict(Counter(one.outcome for one in each.redriven))
            values.append(
                {
                    "id": each.id,
                    "stream": each.stream,
                    "table": each.table,
                    "state": each.state,
                    "at": each.at,
                    "records": len(each.redriven),
                    "outcomes": counts,
                    "rows": dict(each.rows),
                    "reason": each.reason,
                }
            )
            at = instant_words(each.at) if each.at else ""
            rows.append(
                [each.id, each.state, at, number(len(each.redriven)), _words(counts), _words(each.rows), each.reason]
            )
    columns = ["redrive", "state", "at", "records", "outcomes", "rows", "reason"]
    show_table(output, values, columns, rows, right=["records"])


def _show(
    context: typer.Context,
    name: str,
    kind: Kind,
    choice: Choice,
    table: str | None,
    redrive: str | None,
    limit: int,
    output: Output,
) -> None:
    from orchestration.cli.sample import for_json
    from reprocessing.redrive.selection import set_aside
    from streaming_jobs.errors import UsageError
    from streaming_jobs.state.redrive_requests import RedriveRequests
    from streaming_jobs.text import commands

    call = invocation(context)
    stream = call.topology[name]
    if redrive is not None:
        requests = RedriveRequests.of(call.settings, stream.name)
        every = {each.id: each for each in (*requests.waiting(), *requests.history())}
        if redrive not in every:
            raise UsageError(f"stream {name} has no redrive {redrive}", f"they are: {commands.list_redrives(name)}")
        redriven = every[redrive].redriven
        values = [asdict(each) for each in redriven]
        show_table(output, values, ["record", "reason", "became", "reason now"], [_cells(each) for each in redriven])
        return
    found = set_aside(call.settings, stream, kind, choice, table=table)
    shown = found[:limit]
    json = [{name: for_json(value) for name, value in each.values.items()} for each in shown]
    show(output, json, lambda: _print_set_aside(shown, len(found)))


def _print_set_aside(rows: list[SetAside], found: int) -> None:
    from orchestration.cli.sample import for_people

    for row in rows:
        print(f"{_place(row)}  {row.reason}")
        print(f"  {_one_line(row.detail)}")
        for name in ("key", "value"):
            if row.values.get(name) is not None and not row.rules:
                print(f"  {name}: {_one_line(for_people(row.values[name]))}")
    say(f"{len(rows):,} of {found:,}")


def _replay(
    context: typer.Context,
    name: str,
    kind: Kind,
    choice: Choice,
    table: str | None,
    limit: int,
    wait_commit: str,
    output: Output,
    *,
    dry_run: bool,
) -> None:
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import broker_for_command
    from orchestration.redrives.runner import redrive_records
    from reprocessing.redrive.redrive import checked
    from reprocessing.redrive.selection import set_aside
    from reprocessing.slices.rebuild import Waits
    from streaming_jobs.text.durations import parse_duration

    call = invocation(context)
    declared = call.topology[name]
    # Before a broker is started.
    chosen = partial(set_aside, call.settings, declared, kind, choice, table=table)
    checked(call.settings, declared, kind, chosen, table=table)
    waits = replace(Waits(), commit=parse_duration(wait_commit).total_seconds())
    with (
        stop_signals_interrupt(),
        broker_for_command(call.settings, "records are read from their topic, and a broker is needed for that") as at,
    ):
        report = redrive_records(
            call.settings, at, declared, kind, choice, table=table, limit=limit, dry_run=dry_run, waits=waits, tell=say
        )
    show(output, as_json(report), lambda: _print(report))


def as_json(report: RedriveReport) -> dict[str, Any]:
    return {
        "id": report.id,
        "stream": report.stream,
        "table": report.table,
        "outcome": report.outcome,
        "outcomes": report.counts,
        "rows": dict(report.rows),
        "records": [asdict(each) for each in report.records],
        "windows": [asdict(each) for each in report.windows],
        "left": [{"record": _place(row), "reason": row.reason, "because": why} for row, why in report.left],
        "more": report.more,
        "known": report.known,
        "seconds": report.seconds,
        "slices": [slice_as_json(each) for each in report.slices],
    }


def _print(report: RedriveReport) -> None:
    if rows := [_cells(each) for each in report.redriven[:_SHOWN]]:
        of = "window" if report.windows else "record"
        print_table([of, "reason", "becomes" if report.id is None else "became", "reason now"], rows)
    for each in report.slices:
        rows_of = f"{number(each.difference.old_rows)} rows before, {number(each.difference.new_rows)} after"
        say(f"slice {each.words} of table {each.table}: {each.outcome}, {rows_of}{each.aside_text}")
    for row, why in report.left[:_SHOWN]:
        say(f"left: {_place(row)} ({row.reason}): {why}")
    more = f"; {number(report.more)} more are set aside: run it again" if report.more else ""
    more += f"; {number(report.known)} set aside by the code of today itself" if report.known else ""
    left = f"; {number(len(report.left))} left as they are" if report.left else ""
    redriven = f"{number(len(report.redriven))} {'rows' if report.windows else 'records'}"
    say(
        f"{report.table}: {report.outcome}, {redriven} ({_words(report.counts) or 'none'})"
        f"{', rows: ' + _words(report.rows) if report.rows else ''}{left}{more}; {report.seconds:.1f} s"
    )


def _place(row: SetAside) -> str:
    return "(no record)" if row.place is None else "{}/{}:{}".format(*row.place)


def _cells(one: RedrivenRecord | RedrivenRow) -> list[str]:
    """A row of a table of redriven records, or of quarantined rows of windows."""
    from streaming_jobs.sinks.redriven import RedrivenRow

    if isinstance(one, RedrivenRow):
        return [one.at, one.reason, one.outcome, ""]
    return [f"{one.topic}/{one.partition}:{one.offset}", one.reason, one.outcome, one.reason_now]


def _words(counts: Any) -> str:
    return ", ".join(f"{number(count)} {name}" for name, count in sorted(counts.items()))


def _one_line(text: str) -> str:
    from orchestration.cli.sample import plain

    return plain(text.splitlines()[0] if text else "")[:120]
