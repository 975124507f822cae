"""`recourse adopt`: a stream goes on where another job has stopped, in the job's own table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.inspect import location
from orchestration.cli.options import StreamName, invocation
from orchestration.cli.text import FAILED, Output, OutputOption, print_json, say
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from streaming_jobs.inspection.adoption import AdoptionPlan, AdoptionUndo, CarriedState, TryState
    from streaming_jobs.inspection.checkpoint_history import CheckpointHistory
    from streaming_jobs.settings import Settings
    from streaming_jobs.sources.base import TopicReader
    from streaming_jobs.stream import Stream


def adopt(
    context: typer.Context,
    stream: StreamName,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="The checkpoint of the job, which is only read.")
    ] = None,
    after_batch: Annotated[
        int | None, typer.Option(help="Go on after this batch, if the job's last one was planned and not committed.")
    ] = None,
    despite_findings: Annotated[
        bool, typer.Option("--despite-findings", help="Also where findings say that the table may end elsewhere.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Take an adoption back, as long as the stream has committed nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Adopt, or undo, without asking.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Show what would be written, ask, and take the job's table over. Stop the job before; start the stream after.

    The table has to lie where the stream's table lies: in the folder of tables, under its name. The state of a job is
    tried in Spark before, and taken over if it fits.
    """
    from streaming_jobs.inspection import adoption

    call = invocation(context)
    selected = call.topology[stream]
    if undo == (checkpoint is not None):
        raise UsageError("an adoption needs --checkpoint, its undo has none", f"see `{commands.adopt(stream)} --help`")
    if undo:
        taken_back = adoption.plan_undo(call.settings, selected)
        if output is Output.text:
            _print_undo(call.settings, taken_back)
        _confirm(taken_back.as_json(), "undone", "take the adoption back?", yes, output)
        adoption.undo(call.settings, selected, taken_back)
        if output is Output.json:
            print_json({**taken_back.as_json(), "undone": True})
        say("undone: the job can go on from its checkpoint, and can be adopted again")
        return
    with _state_trial(call.settings, selected) as (topics, try_state):
        plan = adoption.plan_adoption(
            call.settings,
            selected,
            location(call, str(checkpoint)),
            topics,
            try_state,
            after=after_batch,
            despite_findings=despite_findings,
        )
    if output is Output.text:
        _print(call.settings, plan)
    _confirm(plan.as_json(), "adopted", "the job is stopped; adopt its table?", yes, output)
    fresh = adoption.adopt(call.settings, selected, plan)
    if output is Output.json:
        print_json({**plan.as_json(), "adopted": True})
    say(f"{'adopted' if fresh else 'was adopted before'}: start it with `{commands.run(stream)}`")
    if fresh:
        say(f"until it has committed a batch, this takes the adoption back: `{commands.adopt(stream, undo=True)}`")


def _confirm(plan: dict[str, Any], done: str, question: str, yes: bool, output: Output) -> None:
    if yes:
        return
    if not sys.stdin.isatty() or output is Output.json:
        if output is Output.json:
            print_json({**plan, done: False})
        say(f"not {done}: nobody is here to answer; --yes goes ahead without a question")
        raise typer.Exit(FAILED)
    typer.confirm(question, abort=True, err=True)


@contextmanager
def _state_trial(settings: Settings, stream: Stream) -> Iterator[tuple[TopicReader, TryState]]:
    """The topics, and a trial of state, which starts Spark only if the job has state; both until the end."""
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.platform.runtime import spark_on_demand
    from streaming_jobs.sources.topics import Topics

    servers = bootstrap_servers(settings)
    topics = Topics.of(settings.kafka, servers)
    with spark_on_demand(settings, "adopt") as session:

        def try_state(history: CheckpointHistory, batch: int) -> CarriedState:
            from streaming_jobs.inspection.carried_state import StateTrial
            from streaming_jobs.sources.connection import Connection, client_file, remove_client_file

            say("the job keeps state: Spark computes one of its batches again, to see if the state fits")
            client = client_file(settings, servers)
            try:
                return StateTrial(settings, stream, topics, Connection(client, topics, topics), session)(history, batch)
            finally:
                remove_client_file(client)

        yield topics, try_state


def _print(settings: Settings, plan: AdoptionPlan) -> None:
    from streaming_jobs.state.stream_folder import StreamFolder

    print(f"stream {plan.stream} adopts table {plan.table} ({plan.location}, version {plan.version})")
    print(f"  where query {plan.query_id} has stopped, after its batch {plan.batch}: {plan.inspection.verdict}")
    for topic, each in sorted(plan.starts.items()):
        print(f"  begins at {topic} " + " ".join(f"{partition}:{offset}" for partition, offset in sorted(each.items())))
    for finding in plan.inspection.findings:
        print(f"  {finding.kind.replace('_', ' ')} ({finding.certainty}): {finding.words}")
    if plan.state is not None:
        keys = counted(plan.state.keys, "key")
        print(f"  its state fits: batch {plan.state.batch}, computed again by the stream, left the same {keys}")
    print("writes")
    record = StreamFolder.of(settings, plan.stream).path / "stream.json"
    there = " (is there, by an adoption that was interrupted)" if plan.recorded else ""
    print(f"  {record}: the beginning, and {len(plan.accepted)} commits of the job as accepted{there}")
    if plan.state is not None:
        print(f"  {record.parent / 'g0001'}: the job's checkpoint after batch {plan.batch}, with a copy of its state")
    print(f"  {plan.location}/_delta_log: one commit without rows, by which the table belongs to the stream")
    print("does not write")
    print(f"  {plan.checkpoint}: the job can go on from it until the stream has written a batch")
    print("does not see")
    print(
        "  a topic that was created again, and has grown beyond these offsets since: its first records would be passed"
    )
    print("does not take over")
    print(
        "  rows from before in the ledger: a recovery can go back to the stream's savepoints, not to before the first"
    )


def _print_undo(settings: Settings, plan: AdoptionUndo) -> None:
    from streaming_jobs.state.stream_folder import StreamFolder

    folder = StreamFolder.of(settings, plan.stream).path
    print(f"stream {plan.stream} gives table {plan.table} back ({plan.location}, version {plan.version})")
    print(f"  {plan.reason}; it has committed nothing since")
    print("writes")
    if plan.before is None:
        print(f"  nothing to {plan.location}: the table does not belong to the stream")
    else:
        print(f"  {plan.location}/_delta_log: one commit without rows, with the properties of version {plan.before}")
    print("removes")
    print(f"  {folder}: stream.json, g0001, savepoints")
    print("keeps")
    print("  all rows, and the checkpoint of the job: the job can go on from it, or be adopted again")
    print("  the stream's log of sessions, and its table of dead letters, if it was started: they are empty of records")
