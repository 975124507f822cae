"""`recourse adopt`: a stream goes on where another job has stopped, in the job's own table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.inspect import location
from orchestration.cli.options import StreamName, invocation
from orchestration.cli.text import FAILED, Output, OutputOption, print_json, say
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.inspection.adoption import AdoptionPlan
    from streaming_jobs.settings import Settings


def adopt(
    context: typer.Context,
    stream: StreamName,
    checkpoint: Annotated[str, typer.Option(metavar="PATH", help="The checkpoint of the job, which is only read.")],
    after_batch: Annotated[
        int | None, typer.Option(help="Go on after this batch, if the job's last one was planned and not committed.")
    ] = None,
    despite_findings: Annotated[
        bool, typer.Option("--despite-findings", help="Also where findings say that the table may end elsewhere.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Adopt without asking.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Show what would be written, ask, and take the job's table over. Stop the job before; start the stream after.

    The table has to lie where the stream's table lies: in the folder of tables, under its name. For jobs without state.
    """
    from streaming_jobs.inspection.adoption import adopt as carry_out
    from streaming_jobs.inspection.adoption import plan_adoption
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.sources.topics import Topics

    call = invocation(context)
    selected = call.topology[stream]
    topics = Topics.of(call.settings.kafka, bootstrap_servers(call.settings))
    plan = plan_adoption(
        call.settings,
        selected,
        location(call, checkpoint),
        topics,
        after=after_batch,
        despite_findings=despite_findings,
    )
    if output is Output.text:
        _print(call.settings, plan)
    if not yes:
        if not sys.stdin.isatty() or output is Output.json:
            if output is Output.json:
                print_json({**plan.as_json(), "adopted": False})
            say("not adopted: nobody is here to answer; --yes adopts without a question")
            raise typer.Exit(FAILED)
        typer.confirm("the job is stopped; adopt its table?", abort=True, err=True)
    fresh = carry_out(call.settings, selected, plan)
    if output is Output.json:
        print_json({**plan.as_json(), "adopted": True})
    say(f"{'adopted' if fresh else 'was adopted before'}: start it with `{commands.run(stream)}`")


def _print(settings: Settings, plan: AdoptionPlan) -> None:
    from streaming_jobs.state.stream_folder import StreamFolder

    print(f"stream {plan.stream} adopts table {plan.table} ({plan.location}, version {plan.version})")
    print(f"  where query {plan.query_id} has stopped, after its batch {plan.batch}: {plan.inspection.verdict}")
    for topic, each in sorted(plan.starts.items()):
        print(f"  begins at {topic} " + " ".join(f"{partition}:{offset}" for partition, offset in sorted(each.items())))
    for finding in plan.inspection.findings:
        print(f"  {finding.kind.replace('_', ' ')} ({finding.certainty}): {finding.words}")
    print("writes")
    record = StreamFolder.of(settings, plan.stream).path / "stream.json"
    there = " (is there, by an adoption that was interrupted)" if plan.recorded else ""
    print(f"  {record}: the beginning, and {len(plan.accepted)} commits of the job as accepted{there}")
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
