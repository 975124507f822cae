"""`recourse savepoints` and `recourse generations`: the states that a stream can go back to, and their cost on disk."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import Invocation, StreamName, invocation
from orchestration.cli.text import Output, OutputOption, number, say, show, show_table
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from streaming_jobs.state.savepoint_retention import NamedSavepoint
    from streaming_jobs.state.savepoints import Savepoint

app = typer.Typer(no_args_is_help=True, help="Savepoints, to which a stream can go back.", rich_markup_mode=None)
generations_app = typer.Typer(no_args_is_help=True, help="Generations of a stream's checkpoint.", rich_markup_mode=None)


@app.callback()
def savepoints() -> None:
    """Savepoints, to which a stream can go back: taken on a timer, before each change of code, and by command."""


@app.command(short_help="Take a savepoint of the last finished batch.")
def create(
    context: typer.Context,
    streams: Annotated[list[str] | None, typer.Argument(metavar="[STREAM...]", help="Streams.")] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One name for all; without STREAM: all streams that have run."),
    ] = None,
    downstream_of: Annotated[
        str | None, typer.Option(metavar="STREAM", help="With --name: this stream, and all that its records reach.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="'90 days'", help="With --name: how long the name holds them; '0 s': until dropped."),
    ] = None,
    note: Annotated[str, typer.Option(help="The reason.")] = "",
    output: OutputOption = Output.text,
) -> None:
    """Take a savepoint of the last finished batch; the stream may run. The savepoint stays until it is dropped.

    With --name, take one of each of several streams, under one name: each after its stream's last batch.
    """
    from streaming_jobs.state import savepoints
    from streaming_jobs.state.savepoint_retention import take_last

    call = invocation(context)
    if name is not None:
        _create_named(call, streams or [], name, downstream_of, keep, note, output)
        return
    if streams is None or len(streams) != 1 or downstream_of is not None or keep is not None:
        raise UsageError("a savepoint of several streams needs a name", "name one stream, or give --name NAME")
    declared = call.topology[streams[0]]
    taken = take_last(call.settings, declared, "purpose", note)
    value = {"savepoint": taken.id, **dataclasses.asdict(savepoints.cost(call.settings, declared, taken))}
    show(output, value, lambda: say(f"savepoint {taken.id} of stream {declared.name}"))


def _create_named(
    call: Invocation,
    names: list[str],
    name: str,
    downstream_of: str | None,
    keep: str | None,
    note: str,
    output: Output,
) -> None:
    from reprocessing.plan.affected_streams import downstream, through_tables
    from reprocessing.plan.registry import under_way
    from streaming_jobs.catalog.archive import is_archive
    from streaming_jobs.runtime.crash_points import crash_point
    from streaming_jobs.state.savepoint_retention import last_batch, take_named
    from streaming_jobs.text.durations import parse_duration

    if names and downstream_of is not None:
        raise UsageError("STREAM and --downstream-of were given", "give one of the two")
    every = {each.name: each for each in call.topology.select([])}
    if downstream_of is not None:
        root = call.topology[downstream_of].name
        reached = {*downstream(every, [root]), *through_tables(every, [root])}
        chosen = [each for each in every.values() if each.name in reached]
    else:
        chosen = call.topology.select(list(dict.fromkeys(names)))
    if not names:
        chosen = [each for each in chosen if not is_archive(each)]
        for stream in [each.name for each in chosen if last_batch(call.settings, each.name) is None]:
            say(f"stream {stream} has not finished a batch yet: it is left out")
        chosen = [each for each in chosen if last_batch(call.settings, each.name) is not None]
        if not chosen:
            raise UsageError("no stream has finished a batch yet", "run them first")

    def check() -> None:
        for stream in chosen:
            if (plan := under_way(call.settings, stream.name)) is not None:
                raise UsageError(
                    f"plan {plan.id} of stream {stream.name} is under way", f"finish it, or abort {plan.id}"
                )

    def report(taken: Savepoint) -> None:
        say(f"savepoint {taken.id} of stream {taken.stream}")
        crash_point("savepoint_of_name", taken.stream, 0)

    length = None if keep is None else parse_duration(keep)
    made = take_named(call.settings, chosen, name, note, length, check=check, each=report)
    show(output, _named_value(call, made), lambda: say(f"{name} is a savepoint of {counted(len(chosen), 'stream')}"))


@app.command("list", short_help="Print savepoints and what they cost.")
def list_savepoints(
    context: typer.Context,
    stream: Annotated[str | None, typer.Argument(metavar="[STREAM]", help="A stream; none: named ones.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print a stream's savepoints, oldest first: when and why each was taken, and the disk space it uses.

    Without a stream, print the savepoints that have a name, with their streams.
    """
    from streaming_jobs.state import savepoint_retention, savepoints
    from streaming_jobs.text.spelling import instant_words

    call = invocation(context)
    if stream is None:
        _list_named(call, output)
        return
    declared = call.topology[stream]
    names: dict[str, list[str]] = {}
    for each in savepoint_retention.of_stream(call.settings, declared.name).values():
        names.setdefault(each.streams[declared.name], []).append(each.name)
    taken = savepoints.savepoints(call.settings, declared.name)
    savepoints_and_costs = [(s, savepoints.cost(call.settings, declared, s)) for s in taken]
    value: list[dict[str, Any]] = [
        {"savepoint": s.id, "names": names.get(s.id, []), **dataclasses.asdict(s), **dataclasses.asdict(c)}
        for s, c in savepoints_and_costs
    ]
    rows = [
        [
            s.id,
            instant_words(s.taken_at),
            s.reason,
            ", ".join(names.get(s.id, [])) or s.note,
            number(c.files),
            number(c.size),
            number(c.alone),
        ]
        for s, c in savepoints_and_costs
    ]
    columns = ["savepoint", "taken", "reason", "names or note", "files", "bytes", "held by it alone"]
    show_table(output, value, columns, rows, right=columns[4:])


def _list_named(call: Invocation, output: Output) -> None:
    from streaming_jobs.state import savepoint_retention
    from streaming_jobs.text.durations import format_duration
    from streaming_jobs.text.spelling import instant_words

    values = [_named_value(call, each) for each in savepoint_retention.named(call.settings)]
    now = time.time()
    rows = [
        [
            value["name"],
            instant_words(value["taken_at"]),
            format_duration(timedelta(seconds=int(now - value["taken_at"]))),
            ", ".join(f"{s} {each['savepoint']}" + ("" if each["exists"] else " (gone)") for s, each in of.items()),
            number(value["size"]),
            number(value["alone"]),
            "dropped" if value["until"] is None else instant_words(value["until"]),
            value["note"],
        ]
        for value in values
        for of in [value["streams"]]
    ]
    columns = ["name", "taken", "age", "streams", "bytes", "held by it alone", "stays until", "note"]
    show_table(output, values, columns, rows, right=columns[4:6])


def _named_value(call: Invocation, made: NamedSavepoint) -> dict[str, Any]:
    """The fields of a named savepoint, each of its streams, and the bytes of all of them."""
    from streaming_jobs.state import savepoints

    streams: dict[str, dict[str, Any]] = {}
    for stream, name in made.streams.items():
        saved, declared = savepoints.find(call.settings, stream, name), call.topology.streams.get(stream)
        cost = savepoints.Cost(0, 0, 0)
        if saved is not None and declared is not None:
            cost = savepoints.cost(call.settings, declared, saved)
        streams[stream] = {"savepoint": name, "exists": saved is not None, **dataclasses.asdict(cost)}
    sizes = {key: sum(each[key] for each in streams.values()) for key in ("files", "size", "alone")}
    return {**dataclasses.asdict(made), **sizes, "streams": streams}


@app.command(short_help="Remove a savepoint.")
def drop(
    context: typer.Context,
    stream: Annotated[str | None, typer.Argument(metavar="[STREAM]", help="A stream.")] = None,
    savepoint: Annotated[str | None, typer.Argument(metavar="[SAVEPOINT]", help="A savepoint of the stream.")] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Remove this name, and the savepoints taken for it."),
    ] = None,
) -> None:
    """Remove a savepoint; a recovery that needs it can then not be undone."""
    from reprocessing.plan.registry import needed_savepoints
    from streaming_jobs.state import savepoint_retention, savepoints
    from streaming_jobs.state.savepoint_retention import drop_named

    call = invocation(context)
    if (stream is None or savepoint is None) == (name is None) or (name is not None and stream is not None):
        raise UsageError("no savepoint was named, or two", "give STREAM SAVEPOINT, or --name NAME")
    if name is not None:
        declared_streams = call.topology.streams
        gone = drop_named(call.settings, declared_streams, name, lambda s: needed_savepoints(call.settings, s))
        say(f"savepoint {name} is gone" + (f", and {', '.join(gone)}" if gone else ""))
        return
    assert stream is not None and savepoint is not None
    declared = call.topology[stream]
    if savepoints.find(call.settings, declared.name, savepoint) is None:
        raise UsageError(
            f"stream {declared.name} has no savepoint '{savepoint}'", f"see `{commands.savepoints(declared.name)}`"
        )
    if plan := needed_savepoints(call.settings, declared.name).get(savepoint):
        raise UsageError(f"plan {plan} is under way and needs savepoint {savepoint}", f"finish it, or abort {plan}")
    with savepoint_retention.only_one(call.settings):
        for holder in savepoint_retention.of_stream(call.settings, declared.name).values():
            if holder.streams[declared.name] == savepoint and holder.holds(time.time()):
                raise UsageError(
                    f"savepoint {savepoint} belongs to '{holder.name}'",
                    f"drop that: {commands.drop_savepoint(name=holder.name)}",
                )
        savepoints.drop(call.settings, declared, savepoint)
    say(f"savepoint {savepoint} of stream {declared.name} is gone")


@generations_app.callback()
def generations() -> None:
    """Generations of a stream's checkpoint: each recovery opens one."""


@generations_app.command("list", short_help="Print a stream's generations.")
def list_generations(context: typer.Context, stream: StreamName, output: OutputOption = Output.text) -> None:
    """Print a stream's generations: when and why each was opened, the batch that it follows, and its size."""
    from streaming_jobs.state import stream_record
    from streaming_jobs.state.stream_folder import StreamFolder
    from streaming_jobs.storage.locations import files_below
    from streaming_jobs.text.spelling import instant_words

    call = invocation(context)
    name = call.topology[stream].name
    record = stream_record.load(call.settings, name)
    generations = []
    for each in record.generations if record else ():
        checkpoint = StreamFolder.of(call.settings, name).checkpoint(each.number).folder
        size = sum(status.st_size for _, status in files_below(checkpoint))
        generations.append({**dataclasses.asdict(each), "kept": checkpoint.is_dir(), "bytes": size})
    rows = [
        [
            f"g{f['number']:04d}",
            instant_words(f["opened_at"]),
            f["reason"],
            "" if f["from_generation"] is None else f"g{f['from_generation']:04d} batch {f['from_batch']}",
            number(f["bytes"]) if f["kept"] else "pruned",
        ]
        for f in generations
    ]
    show_table(output, generations, ["generation", "opened", "why", "from", "bytes"], rows)


@generations_app.command(short_help="Remove the checkpoints of earlier generations.")
def prune(context: typer.Context, stream: StreamName, output: OutputOption = Output.text) -> None:
    """Remove the checkpoints of earlier generations; savepoints hold what an undo needs."""
    from streaming_jobs.state import stream_record
    from streaming_jobs.state.lease import take

    call = invocation(context)
    name = call.topology[stream].name
    with take(call.settings, name, purpose="generations prune", wait=2.0):
        record = stream_record.load(call.settings, name)
        gone = stream_record.prune(call.settings, record, 0) if record else []
    show(output, gone, lambda: say(f"removed {', '.join(gone)}" if gone else "nothing to remove"))
