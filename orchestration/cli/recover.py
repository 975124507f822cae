"""`recourse recover`: recover a stream after a bug. Plan, show, apply, resume, abort, undo."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import Output, OutputOption, say, show, show_table
from orchestration.recoveries.progress_text import ReplayPace
from orchestration.recoveries.request import (
    OPTIONS,
    PlanRequest,
    carry_out,
    generations,
    make_requested,
    make_undo,
    topics_of,
)
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from reprocessing.plan.plan import RecoveryPlan, StreamRecoveryPlan
    from reprocessing.stages.recovery import Recovery, RecoveryEvents
    from streaming_jobs.settings import Settings


app = typer.Typer(no_args_is_help=True, help="Recover a stream after a bug.", rich_markup_mode=None)

WOULD_CHANGE = 10
_OFFSETS = {"void": "are void", "replaced_by": "have the corrected records"}
_DOING = {"rewind": "publish the rebuilt rows", "skip": "skip these records"}
PlanName = Annotated[str, typer.Argument(metavar="PLAN", help="A plan.", show_default=False)]
StopFirst = Annotated[bool, typer.Option("--stop-first", help="Stop the stream before the replay instead of after it.")]
Yes = Annotated[bool, typer.Option("--yes", help="Publish, or skip, without asking.")]


@app.callback()
def recover() -> None:
    """Recover a stream after a bug: rewind, rebuild beside the old rows, check, publish; and undo it."""


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options` of a command by the options of a request for a plan."""
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name != "options":
            parameters.append(parameter)
            continue
        for option in OPTIONS:
            kind = option.type if option.type is bool else option.type | None
            declared = typer.Option(option.declaration, metavar=option.metavar, help=option.help)
            default = option.default if option.type is bool else None
            parameters.append(
                parameter.replace(name=option.name, default=default, annotation=Annotated[kind, declared])
            )

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        options = {option.name: values.pop(option.name) for option in OPTIONS}
        command(**values, options=options)

    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


@app.command(short_help="Show what a recovery would do.")
@_with_options
def plan(
    context: typer.Context,
    streams: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STREAM...]", help="Streams; streams that read their topics are included."),
    ] = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    detailed_exitcode: Annotated[bool, typer.Option("--detailed-exitcode", help="10: something would change.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Show what a recovery would do, and save it as a plan. The stream is not changed, and may keep running."""
    from reprocessing.executor import explained

    call = invocation(context)
    request = PlanRequest.of_options(streams or (), options)
    made = make_requested(call.settings, call.topology, lambda: topics_of(call.settings), request)
    show(output, _value(made), lambda: print(explained(call.settings, made), end=""))
    if detailed_exitcode and (made.records or made.skips):
        raise typer.Exit(WOULD_CHANGE)


@app.command("show", short_help="Show a plan and its progress.")
def show_plan(
    context: typer.Context,
    name: PlanName,
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Only the start of the replay, as lines topic,partition,offset.")
    ] = False,
    output: OutputOption = Output.text,
) -> None:
    """Show a plan and its progress."""
    from reprocessing.executor import explained
    from reprocessing.plan.journal import journal_of
    from reprocessing.plan.plan_file import load
    from reprocessing.plan.targets import write_offsets
    from reprocessing.report.page import report_of

    call = invocation(context)
    settings = call.settings
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
        print(explained(settings, plan), end="")
        print(
            f"\n  It {outcome if outcome.startswith('waits') else f'is {outcome}'}"
            + (f": {', '.join(done)} done" if done else "")
        )
        if (report := report_of(settings, name)).is_file():
            print(f"  Report: {report}")

    show(output, value, text)


@app.command(short_help="What a plan has corrected, for programs that have read the old rows.")
def corrections(context: typer.Context, name: PlanName, output: OutputOption = Output.text) -> None:
    """Print what a plan has corrected: versions of tables, keys and ranges, void offsets, generations.

    For programs outside that have read the old rows; -o json prints all of it, docs/recover.md describes the document.
    """
    from reprocessing.corrections import corrections as corrections_of
    from reprocessing.plan.plan_file import load

    settings = invocation(context).settings
    value = corrections_of(settings, load(settings, name))
    columns = ["table", "before", "after", "rows", "where"]
    rows = [
        [table["table"], *map(str, table["version"].values()), _rows_of(table), _where(table)]
        for stream in value["streams"]
        for table in stream["tables"]
    ]
    show_table(output, value, columns, rows)
    if output is Output.text:
        for stream in value["streams"]:
            for topic in stream["topics"]:
                for kind in ("void", "replaced_by"):
                    for each in topic[kind]:
                        words = f"offsets {each['begin']:,} to {each['end'] - 1:,}"
                        print(f"topic {topic['topic']}, partition {each['partition']}: {words} {_OFFSETS[kind]}")
        if not rows:
            say(f"plan {name} is {value['outcome']}, and has published nothing")


def _rows_of(table: Mapping[str, Any]) -> str:
    if table["rows"] is None:
        return "not compared"
    counts = {kind: table["rows"][kind] for kind in ("corrected", "new", "gone")}
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count) or "no difference"


def _where(table: Mapping[str, Any]) -> str:
    """The number of keys that a recovery has touched, and the ranges of key and time columns."""
    keys = [counted(len(table["keys"]), "key")] if table["keys"] is not None else []
    return "; ".join([*keys, *(f"{name} from {least} to {most}" for name, (least, most) in table["ranges"].items())])


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
    show_table(output, value, ["plan", "stream", "target", "made", "outcome"], shown)


@app.command(short_help="Carry a plan out.")
def apply(
    context: typer.Context,
    name: PlanName,
    yes: Yes = False,
    stop_first: StopFirst = False,
    output: OutputOption = Output.text,
) -> None:
    """Carry a plan out, beside the running stream. It asks before it publishes; an outdated plan is refused."""
    from reprocessing import executor

    _refuse_nobody(context, name, yes, commands.apply(name, yes=True))
    _carry_out(context, name, yes, output, functools.partial(executor.apply, stop_first=stop_first))


@app.command(short_help="Continue a plan that was interrupted.")
def resume(
    context: typer.Context,
    name: PlanName,
    yes: Yes = False,
    stop_first: StopFirst = False,
    output: OutputOption = Output.text,
) -> None:
    """Continue a plan with its first unfinished stage."""
    from reprocessing import executor

    _refuse_nobody(context, name, yes, commands.resume(name, yes=True))
    _carry_out(context, name, yes, output, functools.partial(executor.resume, stop_first=stop_first))


@app.command(short_help="Abandon a plan before it publishes.")
def abort(
    context: typer.Context,
    name: PlanName,
    yes: Annotated[bool, typer.Option("--yes", help="Accepted as for the other commands; abort asks nothing.")] = False,  # noqa: ARG001
    output: OutputOption = Output.text,
) -> None:
    """Abandon a plan before it has published: the stream continues with its old rows, one generation later."""
    from reprocessing import executor

    _carry_out(context, name, True, output, executor.give_up)


@app.command(short_help="Undo a published plan.")
def undo(context: typer.Context, name: PlanName, yes: Yes = False, output: OutputOption = Output.text) -> None:
    """Undo a published plan by a plan of its own, shown and then applied. Records that came since stay."""
    from reprocessing import executor

    call = invocation(context)
    _refuse_nobody(context, name, yes, commands.undo(name, yes=True))
    made = make_undo(call.settings, call.topology, name)
    if output is Output.text:
        print(executor.explained(call.settings, made), end="")
    _carry_out(context, made.id, yes, output, executor.apply)


def _refuse_nobody(context: typer.Context, plan: str, yes: bool, command: str) -> None:
    """Raise UsageError, before the replay, if nobody could confirm at its end, or there is no plan."""
    from reprocessing.plan.plan_file import load

    load(invocation(context).settings, plan)
    if not yes and not sys.stdin.isatty():
        raise UsageError("nobody to ask: there is no terminal, and --yes was not given", f"run {command}")


def _outcome(settings: Settings, plan: RecoveryPlan) -> str:
    """The outcome of a plan in words; of a published plan also the plan that undid it."""
    from reprocessing.plan.journal import journal_of
    from reprocessing.plan.registry import undone_by

    outcome = journal_of(settings, plan.id).outcome
    undo = undone_by(settings, plan) if outcome == "published" else None
    return outcome if undo is None else f"undone by {undo}"


def _value(plan: RecoveryPlan) -> dict[str, Any]:
    streams = [_stream_value(each) for each in plan.streams]
    whole = {"target": plan.target, "skips": plan.skips, "records": plan.records}
    return {**streams[0], **dataclasses.asdict(plan), **whole, "streams": streams}


def _stream_value(plan: StreamRecoveryPlan) -> dict[str, Any]:
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
    from reprocessing.plan.plan_file import load

    call = invocation(context)
    plan = load(call.settings, name)
    recovery = carry_out(call.settings, call.topology, plan, recovery_events(yes), act)
    outcome, opened = recovery.journal.outcome, generations(recovery)
    value = {"plan": name, "outcome": outcome, "generation": opened[plan.names[0]], "generations": opened}
    where = ", ".join(f"stream {stream} is in generation {number}" for stream, number in opened.items())
    show(output, value, lambda: say(f"plan {name} is {outcome}; {where}"))


def recovery_events(yes: bool) -> RecoveryEvents:
    """Progress is printed on stderr; with `yes`, nothing is asked."""
    from reprocessing.replay.words import difference_lines
    from reprocessing.stages.recovery import RecoveryEvents

    def confirm(recovery: Recovery) -> bool:
        for difference in recovery.differences:
            for line in difference_lines(difference):
                say(line)
        if yes:
            return True
        kinds = {each.kind for each in recovery.plan.streams}
        doing = [words for kind, words in _DOING.items() if kind in kinds]
        return typer.confirm(f"{' and '.join(doing)} (plan {recovery.plan.id})?", err=True)

    pace = ReplayPace()
    return RecoveryEvents(tell=say, progress=lambda *done: say(f"  replay: {pace.words(*done)}"), confirm=confirm)
