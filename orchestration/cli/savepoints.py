"""`recourse savepoints` and `recourse generations`: the states that a stream can go back to, and their cost on disk."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from orchestration.cli.invocation import invocation
from orchestration.cli.output import Output, OutputOption, number, print_table, say, show
from streaming_jobs.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Savepoints, to which a stream can go back.", rich_markup_mode=None)
generations_app = typer.Typer(no_args_is_help=True, help="Generations of a stream's checkpoint.", rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="STREAM", help="A stream.", show_default=False)]


@app.callback()
def savepoints() -> None:
    """Savepoints, to which a stream can go back: taken on a timer, before each change of code, and by command."""


@app.command(short_help="Take a savepoint of the last finished batch.")
def create(
    context: typer.Context,
    stream: Name,
    note: Annotated[str, typer.Option(help="Why.")] = "",
    output: OutputOption = Output.text,
) -> None:
    """Take a savepoint of the last finished batch; the stream may run. The savepoint stays until it is dropped."""
    from streaming_jobs.state import savepoints, stream_record
    from streaming_jobs.state.stream_folder import StreamFolder

    call = invocation(context)
    declared = call.topology.select([stream])[0]
    name = declared.name
    record = stream_record.load(call.settings, name)
    last = None if record is None else StreamFolder.of(call.settings, name).checkpoint(record.generation).last_committed
    if record is None or last is None:
        raise UsageError(f"stream {name} has not finished a batch yet", "run it first")
    taken = savepoints.take(call.settings, declared, record, last, "purpose", note)
    value = {"savepoint": taken.id, **dataclasses.asdict(savepoints.cost(call.settings, declared, taken))}
    show(output, value, lambda: say(f"savepoint {taken.id} of stream {name}"))


@app.command("list", short_help="Print a stream's savepoints and what they cost.")
def list_savepoints(context: typer.Context, stream: Name, output: OutputOption = Output.text) -> None:
    """Print a stream's savepoints, oldest first: when and why each was taken, and the disk space it uses."""
    from reprocessing.planning.targets import instant_words
    from streaming_jobs.state import savepoints

    call = invocation(context)
    declared = call.topology.select([stream])[0]
    taken = savepoints.savepoints(call.settings, declared.name)
    savepoints_and_costs = [(s, savepoints.cost(call.settings, declared, s)) for s in taken]
    value: list[dict[str, Any]] = [
        {"savepoint": s.id, **dataclasses.asdict(s), **dataclasses.asdict(c)} for s, c in savepoints_and_costs
    ]
    rows = [
        [s.id, instant_words(s.taken_at), s.reason, s.note, number(c.files), number(c.size), number(c.alone)]
        for s, c in savepoints_and_costs
    ]
    columns = ["savepoint", "taken", "reason", "note", "files", "bytes", "held by it alone"]
    show(output, value, lambda: print_table(columns, rows, right=columns[4:]))


@app.command(short_help="Remove a savepoint.")
def drop(
    context: typer.Context,
    stream: Name,
    savepoint: Annotated[str, typer.Argument(metavar="SAVEPOINT", help="Its name.", show_default=False)],
) -> None:
    """Remove a savepoint; a recovery that needs it can then not be undone."""
    from reprocessing.executor import needed_savepoints
    from streaming_jobs.state import savepoints

    call = invocation(context)
    declared = call.topology.select([stream])[0]
    name = declared.name
    if savepoints.find(call.settings, name, savepoint) is None:
        raise UsageError(f"stream {name} has no savepoint '{savepoint}'", f"see `recourse savepoints list {name}`")
    if plan := needed_savepoints(call.settings, name).get(savepoint):
        raise UsageError(f"plan {plan} is under way and needs savepoint {savepoint}", f"finish it, or abort {plan}")
    savepoints.drop(call.settings, declared, savepoint)
    say(f"savepoint {savepoint} of stream {name} is gone")


@generations_app.callback()
def generations() -> None:
    """Generations of a stream's checkpoint: each recovery opens one."""


@generations_app.command("list", short_help="Print a stream's generations.")
def list_generations(context: typer.Context, stream: Name, output: OutputOption = Output.text) -> None:
    """Print a stream's generations: when and why each was opened, the batch that it follows, and its size."""
    from reprocessing.planning.targets import instant_words
    from streaming_jobs.state import stream_record
    from streaming_jobs.state.stream_folder import StreamFolder

    call = invocation(context)
    name = call.topology.select([stream])[0].name
    record = stream_record.load(call.settings, name)
    generations = []
    for each in record.generations if record else ():
        place = StreamFolder.of(call.settings, name).checkpoint(each.number).folder
        size = sum(f.stat().st_size for f in place.rglob("*") if f.is_file()) if place.is_dir() else 0
        generations.append({**dataclasses.asdict(each), "kept": place.is_dir(), "bytes": size})
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
    show(output, generations, lambda: print_table(["generation", "opened", "why", "from", "bytes"], rows))


@generations_app.command(short_help="Remove the checkpoints of earlier generations.")
def prune(context: typer.Context, stream: Name, output: OutputOption = Output.text) -> None:
    """Remove the checkpoints of earlier generations; savepoints hold what an undo needs."""
    from streaming_jobs.state import stream_record
    from streaming_jobs.state.lease import take

    call = invocation(context)
    name = call.topology.select([stream])[0].name
    with take(call.settings, name, purpose="generations prune", wait=2.0):
        record = stream_record.load(call.settings, name)
        gone = stream_record.prune(call.settings, record, 0) if record else []
    show(output, gone, lambda: say(f"removed {', '.join(gone)}" if gone else "nothing to remove"))
