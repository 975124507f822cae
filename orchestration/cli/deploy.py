"""`recourse deploy`: new code for streams that run, shown first, then started stream by stream."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, Invocation, invocation
from orchestration.cli.streams import user
from orchestration.cli.text import FAILED, Output, OutputOption, print_json, print_table, say, show
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from orchestration.deploys.plan import DeployPlan, StreamDeploy
    from orchestration.deploys.starting import DeployOutcome


class Require(StrEnum):
    """The verdict that a preview must reach before a deploy continues."""

    not_broken = "not-broken"
    equal = "equal"


def deploy(
    context: typer.Context,
    names: AnyStreams = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Deploy without asking.")] = False,
    preview: Annotated[
        bool,
        typer.Option("--preview", help="Run `recourse preview` for each stream first; with --yes, none may be broken."),
    ] = False,
    require: Annotated[
        Require | None,
        typer.Option(help="Run the previews, and deploy only if each reaches this verdict.", show_default=False),
    ] = None,
    trial: Annotated[
        bool,
        typer.Option("--trial/--no-trial", help="Have Spark analyse the new code first; --yes needs its verdict."),
    ] = True,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until the streams run the new code.")] = 300.0,
    output: OutputOption = Output.text,
) -> None:
    """Bring the code on disk to the streams that run, and to no others.

    Shows what has changed in each stream and what would refuse it. Then each touched stream stops at a batch border and
    starts with the new code, in a process of its own if others of its session run on; these do not stop. Killed
    anywhere, the same command finishes the deploy. With --yes a gate that gives no verdict refuses the deploy.

    Exit codes: 0 deployed, or nothing to deploy; 1 refused, failed or not done in time.
    """
    from orchestration.deploys.plan import make_plan, tried
    from orchestration.deploys.starting import request, wait_for_code
    from streaming_jobs.state import stream_history

    call = invocation(context)
    selected = call.names(names) if names else []
    plan = make_plan(call.settings, call.topology, selected)
    if trial:
        plan = tried(call.settings, call.topology, plan, call.environment(), say, required=yes)
    previews = _previews(call, plan) if preview or require else {}
    plan = plan.refusing(_not_passed(previews, require or (Require.not_broken if yes else None)))
    if output is Output.text:
        _print_plan(plan, previews)
    if plan.refused or dry_run or not plan.due:
        if output is Output.json:
            print_json(_document(plan, previews))
        if plan.refused and not dry_run:
            say("not deployed: correct what would be refused, or name the other streams")
        raise typer.Exit(FAILED if plan.refused else 0)
    if not yes:
        if not sys.stdin.isatty() or output is Output.json:
            say("not deployed: nobody is here to answer; --yes deploys without a question")
            raise typer.Exit(FAILED)
        typer.confirm("deploy?", abort=True, err=True)
    newest, by = _newest_change(call, plan), user()
    for each in plan.due:
        stream_history.record_deploy(call.settings, each.stream, each.before, each.after, by)
    asked = {each.stream: request(call.settings, each.stream, by, newest) for each in plan.touched}
    outcomes = wait_for_code(call.settings, plan.touched, asked, timeout, say)
    values = [{**asdict(each), "ok": each.ok} for each in outcomes]
    show(output, {**_document(plan, previews), "outcomes": values}, lambda: _print_outcomes(outcomes, plan))
    if not all(each.ok for each in outcomes):
        raise typer.Exit(FAILED)


def _document(plan: DeployPlan, previews: dict[str, int]) -> dict[str, Any]:
    return {
        "streams": [{**asdict(each), "preview": previews.get(each.stream)} for each in plan.streams],
        "touched": [each.stream for each in plan.touched],
        "refused": [each.stream for each in plan.refused],
        "further_processes": plan.further_processes,
        "heap_mb": plan.heap_mb,
    }


def _print_plan(plan: DeployPlan, previews: dict[str, int]) -> None:
    shown = [each for each in plan.streams if each.action != "same"]
    if shown:
        columns = ["stream", "action", "runs", "on disk", "since"]
        rows = [[s.stream, s.action, s.before or "-", s.after or "-", _time(s.since)] for s in shown]
        print_table(columns, rows)
    for each in shown:
        for line in _lines(each, previews, split=plan.split):
            print(f"{each.stream}: {line}")
    if same := len(plan.streams) - len(shown):
        print(f"{counted(same, 'stream', 'has', 'have')} the code on disk already")
    if not plan.due:
        print("nothing to deploy")
    elif plan.further_processes:
        count = plan.further_processes
        words = "one more process" if count == 1 else f"{count} more processes"
        print(
            f"needs {words}, each with a heap of up to {plan.heap_mb} MB, until the sessions restart as a whole "
            "(spark.split_sessions=false restarts them now, with every stream in them)"
        )


def _lines(stream: StreamDeploy, previews: dict[str, int], *, split: bool) -> list[str]:
    lines = [stream.note] if stream.note else []
    lines += stream.changes
    if stream.action == "deploy" or stream.record:
        lines.append(f"the change is: {stream.change}{f' ({stream.why})' if stream.why else ''}")
        lines += [*stream.columns, *stream.rebuild]
    lines += [f"WOULD BE REFUSED: {why}" for why in stream.refused]
    if stream.stream in previews:
        lines.append(f"preview: {_ending(previews[stream.stream])}")
    if stream.beside:
        what = (
            f"others run on in process {stream.pid}, not touched"
            if split
            else "others start again with it, in the same process"
        )
        lines.append(f"{what}: {', '.join(stream.beside)}")
    return lines


def _print_outcomes(outcomes: list[DeployOutcome], plan: DeployPlan) -> None:
    for stopped in plan.due:
        if stopped.record:
            print(f"{stopped.stream}: recorded: {stopped.before} -> {stopped.after}: its next start may run it")
    for each in outcomes:
        still = f"; stood still for {each.stood_still:g} s" if each.stood_still is not None else ""
        mark = f"; savepoint before it: {each.savepoint}" if each.savepoint is not None else ""
        print(f"{each.stream}: {each.result}: {each.before} -> {each.after}: {each.text}{still}{mark}")
    untouched = sorted({name for each in plan.touched for name in each.beside})
    if untouched and plan.split:
        print(f"not touched, ran on: {', '.join(untouched)}")


def _previews(call: Invocation, plan: DeployPlan) -> dict[str, int]:
    """The exit code of `recourse preview` of each touched stream: 0 equal, 10 different, 1 broken."""
    environment = {**os.environ, **call.environment()}
    codes = {}
    for each in plan.due:
        if each.refused:
            continue
        command = [sys.executable, "-m", "orchestration.cli", "preview", each.stream]
        codes[each.stream] = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
    return codes


def _not_passed(previews: dict[str, int], require: Require | None) -> dict[str, str]:
    """The streams whose preview lacks the required verdict, with the reason; an unknown end counts as no verdict."""
    if require is None:
        return {}
    passed = {0} if require is Require.equal else {0, 10}
    return {name: f"its preview: {_ending(code)}" for name, code in previews.items() if code not in passed}


def _ending(code: int) -> str:
    return {0: "equal", 10: "different", 1: "broken"}.get(code, f"no verdict (exit code {code})")


def _newest_change(call: Invocation, plan: DeployPlan) -> float:
    """The time of the newest change of a file behind the touched streams, seconds since 1970."""
    from pathlib import Path

    from streaming_jobs.runtime.code_version import imported_files
    from streaming_jobs.settings import configuration

    files = {str(configuration(call.config))}
    for each in plan.touched:
        stream = call.topology[each.stream]
        files.update([stream.function.__code__.co_filename, *imported_files(stream, call.settings.flows)])
    return max((path.stat().st_mtime for path in map(Path, files) if path.exists()), default=time.time())


def _time(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "-"
