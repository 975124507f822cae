"""`recourse recover`: put a stream right. Plan, look, apply, resume, abort, undo."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.invocation import invocation
from orchestration.cli.output import Output, OutputOption, print_json, print_table, say, show
from orchestration.cli.recovery_events import recovery_events
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from reprocessing.plan.plan import RecoveryPlan, StreamPlan
    from reprocessing.stages.recovery import Recovery
    from streaming_jobs.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Put a stream right after a bug.", rich_markup_mode=None)

WOULD_CHANGE = 10
PlanName = Annotated[str, typer.Argument(metavar="PLAN", help="A plan.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", help="Publish, or skip, without asking.")]


@app.callback()
def recover() -> None:
    """Put a stream right after a bug: rewind, rebuild beside the old rows, check, publish; and take it back."""


@app.command(short_help="Show what a recovery would do.")
def plan(
    context: typer.Context,
    streams: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STREAM...]", help="One stream or several; those that read their topics go along."),
    ] = None,
    to_earliest: Annotated[
        bool, typer.Option("--to-earliest", help="The first record that the topic still has.")
    ] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="The topic's end: skip what is not read.")] = False,
    to_offsets: Annotated[str | None, typer.Option(metavar="0:120,1:98", help="Offsets by partition.")] = None,
    from_file: Annotated[str | None, typer.Option(metavar="FILE", help="CSV: topic,partition,offset.")] = None,
    shift_by: Annotated[int | None, typer.Option(metavar="N", help="Records in each partition; back: -1000.")] = None,
    by_duration: Annotated[str | None, typer.Option(metavar="'2 hours'", help="That long before now.")] = None,
    to_datetime: Annotated[str | None, typer.Option(metavar="TIME", help="ISO time with its zone.")] = None,
    to_batch: Annotated[int | None, typer.Option(metavar="N", help="The end of a batch; -1: before the first.")] = None,
    to_table_version: Annotated[int | None, typer.Option(metavar="V", help="A version of the primary table.")] = None,
    savepoint: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A savepoint; one of several streams: each to its own, without STREAM all."),
    ] = None,
    before_code: Annotated[str | None, typer.Option(metavar="HASH", help="Before a version of the code.")] = None,
    before_first_bad: Annotated[
        str | None, typer.Option(metavar="SQL", help="Before the code that made the first row for which this holds.")
    ] = None,
    before_first_broken: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="The same for a rule that has to hold for every row: SQL, or the name of a row rule or of a suite's "
            "expectation. It is then required.",
        ),
    ] = None,
    allow_bad: Annotated[
        bool,
        typer.Option("--allow-bad", help="With these: publish even if rebuilt rows are bad."),
    ] = False,
    same_code: Annotated[
        bool, typer.Option("--same-code", help="Replay with today's code although it is what wrote the bad rows.")
    ] = False,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="'batch N'",
            help="Correct only up to the end of this batch, and leave later rows as they are; also 'datetime TIME', "
            "'code HASH' and other kinds of targets.",
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="With these: only before the row's own batch.")] = False,
    discard_state: Annotated[
        bool, typer.Option("--discard-state", help="Begin with empty state; the plan says what will be wrong.")
    ] = False,
    discard_state_of: Annotated[
        list[str] | None,
        typer.Option(metavar="STREAM", help="The same for a stream that goes along; may be given again."),
    ] = None,
    rebuild: Annotated[
        list[str] | None,
        typer.Option(metavar="STREAM", help="A stream that goes along reads everything anew; may be given again."),
    ] = None,
    leave: Annotated[
        list[str] | None,
        typer.Option(metavar="STREAM", help="A stream does not go along, and stays wrong; may be given again."),
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(metavar="SQL", help="Must hold for every rebuilt row; may be given again.")
    ] = None,
    suites: Annotated[
        bool, typer.Option("--suites/--no-suites", help="The stream's suites must pass before it is published.")
    ] = True,
    max_changed: Annotated[
        str | None, typer.Option(metavar="5%", help="More rows than this may not change, come or go.")
    ] = None,
    detailed_exitcode: Annotated[bool, typer.Option("--detailed-exitcode", help="10: something would change.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Show what a recovery would do, and keep that as a plan. Nothing of the stream is changed, and it may run on."""
    from orchestration.recoveries.carry_out import topics_of
    from orchestration.recoveries.plan_request import TARGETS, PlanRequest, make_requested
    from reprocessing.explainer import explain

    call = invocation(context)
    given: dict[str, Any] = {
        "to-earliest": "" if to_earliest else None,
        "to-latest": "" if to_latest else None,
        "to-offsets": to_offsets,
        "from-file": from_file,
        "shift-by": shift_by,
        "by-duration": by_duration,
        "to-datetime": to_datetime,
        "to-batch": to_batch,
        "to-table-version": to_table_version,
        "savepoint": savepoint,
        "before-code": before_code,
        "before-first-bad": before_first_bad,
        "before-first-broken": before_first_broken,
    }
    request = PlanRequest(
        streams=tuple(dict.fromkeys(streams or ())),
        targets={TARGETS[option]: str(value) for option, value in given.items() if value is not None},
        require=tuple(require or ()),
        max_changed=max_changed,
        suites=suites,
        allow_bad=allow_bad,
        exact=exact,
        same_code=same_code,
        discard_state=discard_state,
        until=until,
        discard_state_of=tuple(discard_state_of or ()),
        rebuild=tuple(rebuild or ()),
        leave=tuple(leave or ()),
    )
    made = make_requested(call.settings, call.topology, lambda: topics_of(call.settings), request)
    show(output, _value(made), lambda: print(explain(made), end=""))
    if detailed_exitcode and (made.records or made.skips):
        raise typer.Exit(WOULD_CHANGE)


@app.command("show", short_help="Show a plan, and how far it has come.")
def show_plan(
    context: typer.Context,
    name: PlanName,
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Only where the replay begins: lines topic,partition,offset.")
    ] = False,
    output: OutputOption = Output.text,
) -> None:
    """Show a plan, and how far it has come."""
    from reprocessing.explainer import explain
    from reprocessing.plan.journal import journal_of
    from reprocessing.plan.plan_file import load
    from reprocessing.plan.targets import write_offsets
    from reprocessing.report.page import report_of

    settings = invocation(context).settings
    plan, journal = load(settings, name), journal_of(settings, name)
    if offsets:
        for each in plan.streams:
            print(write_offsets(each.wanted if each.skips else each.base.ends), end="")
        return
    outcome = _outcome(settings, plan)
    value = {**_value(plan), "outcome": outcome}
    value["journal"] = [dataclasses.asdict(line) for line in journal.lines()]
    several = len(plan.streams) > 1
    done = [
        f"{line.stage} {line.stream}" if several and line.stream else line.stage
        for line in journal.lines()
        if line.state == "done"
    ]

    def text() -> None:
        print(explain(plan), end="")
        print(
            f"\n  It {outcome if outcome.startswith('waits') else f'is {outcome}'}"
            + (f": {', '.join(done)} done" if done else "")
        )
        if (report := report_of(settings, name)).is_file():
            print(f"  Report: {report}")

    show(output, value, text)


@app.command("list", short_help="Print all plans.")
def list_plans(context: typer.Context, output: OutputOption = Output.text) -> None:
    """Print all plans, oldest first."""
    from reprocessing.plan.plan_file import load, names
    from streaming_jobs.text.spelling import instant_words

    settings = invocation(context).settings
    plans = []
    for name in names(settings):
        try:
            plan = load(settings, name)
            plans.append((plan, _outcome(settings, plan)))
        except UsageError as error:
            say(f"{name}: {error.found}")
    columns = ["plan", "stream", "target", "made_at", "outcome"]
    rows = [[p.id, ", ".join(p.names), p.target, p.made_at, outcome] for p, outcome in plans]
    value = [dict(zip(columns, row, strict=True)) for row in rows]
    shown = [[p.id, ", ".join(p.names), p.target, instant_words(p.made_at), outcome] for p, outcome in plans]
    show(output, value, lambda: print_table(["plan", "stream", "target", "made", "outcome"], shown))


@app.command(short_help="Carry a plan out.")
def apply(context: typer.Context, name: PlanName, yes: Yes = False, output: OutputOption = Output.text) -> None:
    """Carry a plan out. It asks before it publishes; a plan whose world has moved is refused."""
    from reprocessing import executor

    _refuse_nobody(context, name, yes, f"recourse recover apply {name} --yes")
    _carry_out(context, name, yes, output, executor.apply)


@app.command(short_help="Go on with a plan that was cut off.")
def resume(context: typer.Context, name: PlanName, yes: Yes = False, output: OutputOption = Output.text) -> None:
    """Go on with the first stage that is not done."""
    from reprocessing import executor

    _refuse_nobody(context, name, yes, f"recourse recover resume {name} --yes")
    _carry_out(context, name, yes, output, executor.resume)


@app.command(short_help="Give a plan up before it publishes.")
def abort(
    context: typer.Context,
    name: PlanName,
    yes: Annotated[bool, typer.Option("--yes", help="As for the other commands; nothing is asked.")] = False,  # noqa: ARG001
    output: OutputOption = Output.text,
) -> None:
    """Give a plan up before it has published: the stream goes on as it was, one generation later."""
    from reprocessing import executor

    _carry_out(context, name, True, output, executor.give_up)


@app.command(short_help="Take a published plan back.")
def undo(context: typer.Context, name: PlanName, yes: Yes = False, output: OutputOption = Output.text) -> None:
    """Take a published plan back: a plan of its own, shown and then applied. Records that came since stay."""
    from orchestration.recoveries.carry_out import make_undo
    from reprocessing import executor
    from reprocessing.explainer import explain

    call = invocation(context)
    _refuse_nobody(context, name, yes, f"recourse recover undo {name} --yes")
    made = make_undo(call.settings, call.topology, name)
    if output is Output.text:
        print(explain(made), end="")
    _carry_out(context, made.id, yes, output, executor.apply)


def _refuse_nobody(context: typer.Context, plan: str, yes: bool, command: str) -> None:
    """Before anything is done: a question at the end of a replay that nobody can answer makes it useless.

    Raises UsageError, first of all for a plan that does not exist.
    """
    from reprocessing.plan.plan_file import load

    load(invocation(context).settings, plan)
    if not yes and not sys.stdin.isatty():
        raise UsageError("nobody to ask: there is no terminal, and --yes was not given", f"run {command}")


def _outcome(settings: Settings, plan: RecoveryPlan) -> str:
    """How far a plan has come, in words; of a published one also that it was taken back."""
    from reprocessing.plan.journal import journal_of
    from reprocessing.plan.registry import undone_by

    outcome = journal_of(settings, plan.id).outcome
    undo = undone_by(settings, plan) if outcome == "published" else None
    return outcome if undo is None else f"undone by {undo}"


def _value(plan: RecoveryPlan) -> dict[str, Any]:
    """The plan, each of its streams; beside that the fields of the only stream, or of the first one."""
    streams = [_stream_value(each) for each in plan.streams]
    whole = {"target": plan.target, "skips": plan.skips, "records": plan.records}
    return {**streams[0], **dataclasses.asdict(plan), **whole, "streams": streams}


def _stream_value(plan: StreamPlan) -> dict[str, Any]:
    return {
        **dataclasses.asdict(plan),
        "skips": plan.skips,
        "generation": plan.generation,
        "records": plan.records,
        "seconds": plan.seconds,
        "ranges": [list(each) for each in plan.ranges()],
        "skipped": [list(each) for each in plan.skipped()],
    }


def _carry_out(context: typer.Context, name: str, yes: bool, output: Output, act: Callable[[Recovery], None]) -> None:
    from orchestration.recoveries.carry_out import carry_out, generations
    from reprocessing.plan.plan_file import load

    call = invocation(context)
    plan = load(call.settings, name)
    recovery = carry_out(call.settings, call.topology, plan, recovery_events(yes), act)
    outcome, opened = recovery.journal.outcome, generations(recovery)
    if output is Output.json:
        first = opened[plan.names[0]]
        print_json({"plan": name, "outcome": outcome, "generation": first, "generations": opened})
    else:
        where = ", ".join(f"stream {stream} is in generation {number}" for stream, number in opened.items())
        say(f"plan {name} is {outcome}; {where}")
