"""`recourse deploy`: new code for streams that run, shown first, then started stream by stream."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, Invocation, invocation
from orchestration.cli.streams import user
from orchestration.cli.text import FAILED, Output, OutputOption, print_json, print_table, say, show
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from orchestration.deploys.plan import DeployPlan, StreamDeploy
    from orchestration.deploys.starting import DeployOutcome
    from reprocessing.plan.plan import RecoveryPlan


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
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild", help="Rebuild state that does not fit the new code, beside the running stream."),
    ] = False,
    discard_state: Annotated[
        bool, typer.Option("--discard-state", help="With --rebuild: also where records are gone; totals begin later.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until the streams run the new code.")] = 300.0,
    output: OutputOption = Output.text,
) -> None:
    """Bring the code on disk to the streams that run, and to no others.

    Shows what has changed in each stream and what would refuse it. Then each touched stream stops at a batch border and
    starts with the new code, in a process of its own if others of its session run on; these do not stop. Killed
    anywhere, the same command finishes the deploy. With --yes a gate that gives no verdict refuses the deploy.

    A stream whose state does not fit the new code is refused, with the command that rebuilds the state. With --rebuild
    the deploy does that first: a recovery from the first record on, beside the running stream.

    Exit codes: 0 deployed, or nothing to deploy; 1 refused, failed or not done in time.
    """
    call = invocation(context)
    selected = call.names(names) if names else []
    if discard_state and not rebuild:
        raise UsageError("--discard-state goes with --rebuild only", "leave it out, or add --rebuild")
    plan = _planned(call, selected, trial=trial, required=yes, rebuild=rebuild, discard_state=discard_state)
    previews = _previews(call, plan) if preview or require else {}
    plan = plan.refusing(_not_passed(previews, require or (Require.not_broken if yes else None)))
    if output is Output.text:
        _print_plan(plan, previews)
    if plan.refused or dry_run or not (plan.due or plan.rebuilt):
        if output is Output.json:
            print_json(_document(plan, previews))
        if plan.refused and not dry_run:
            say("not deployed: correct what would be refused, or name the other streams")
            if any(each.rebuildable and not each.lost for each in plan.refused):
                say(f"or rebuild the state, beside the running stream: {commands.deploy(*selected, rebuild=True)}")
        raise typer.Exit(FAILED if plan.refused else 0)
    if not yes and (not sys.stdin.isatty() or output is Output.json):
        say("not deployed: nobody is here to answer; --yes deploys without a question")
        raise typer.Exit(FAILED)
    recoveries = _recoveries(call, plan, shown=output is Output.text)
    if not yes:
        typer.confirm("deploy?", abort=True, err=True)
    outcomes = _deployed(call, plan, recoveries, timeout, yes=yes)
    values = [{**asdict(each), "ok": each.ok} for each in outcomes]
    document = {**_document(plan, previews), "recoveries": [each.id for each in recoveries], "outcomes": values}
    show(output, document, lambda: _print_outcomes(outcomes, plan))
    if not all(each.ok for each in outcomes):
        raise typer.Exit(FAILED)


def _planned(
    call: Invocation, names: Sequence[str], *, trial: bool, required: bool, rebuild: bool, discard_state: bool
) -> DeployPlan:
    from orchestration.deploys.plan import make_plan, tried
    from orchestration.deploys.rebuild import rebuilding

    plan = make_plan(call.settings, call.topology, names)
    if trial:
        plan = tried(call.settings, call.topology, plan, call.environment(), say, required=required)
    return rebuilding(call.settings, plan, discard_state=discard_state) if rebuild else plan


def _recoveries(call: Invocation, plan: DeployPlan, *, shown: bool) -> list[RecoveryPlan]:
    """The plans that rebuild state, which are made here, and shown."""
    from orchestration.deploys.rebuild import recovery_plans
    from reprocessing.executor import explained

    recoveries = recovery_plans(call.settings, call.topology, plan) if plan.rebuilt else []
    for each in recoveries if shown else ():
        print(explained(call.settings, each))
    return recoveries


def _deployed(
    call: Invocation, plan: DeployPlan, recoveries: Sequence[RecoveryPlan], timeout: float, *, yes: bool
) -> list[DeployOutcome]:
    """Rebuild what has to be rebuilt, then let the other streams start with the new code."""
    from orchestration.deploys.starting import request, wait_for_code
    from streaming_jobs.state import stream_history

    newest, by = _newest_change(call, plan), user()
    rebuilt = [outcome for each in recoveries for outcome in _rebuilt(call, plan, each, by, timeout, yes=yes)]
    recovered = {outcome.stream for outcome in rebuilt}
    for each in plan.due:
        if each.stream not in recovered:
            stream_history.record_deploy(call.settings, each.stream, each.before, each.after, by)
    touched = [each for each in plan.touched if each.stream not in recovered]
    asked = {each.stream: request(call.settings, each.stream, by, newest) for each in touched}
    return [*rebuilt, *wait_for_code(call.settings, touched, asked, timeout, say)]


def _document(plan: DeployPlan, previews: dict[str, int]) -> dict[str, Any]:
    return {
        "streams": [{**asdict(each), "preview": previews.get(each.stream)} for each in plan.streams],
        "touched": [each.stream for each in plan.touched],
        "rebuilt": [each.stream for each in plan.rebuilt],
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
    if not (plan.due or plan.rebuilt):
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
    if stream.action in ("deploy", "rebuild") or stream.record:
        lines.append(f"the change is: {stream.change}{f' ({stream.why})' if stream.why else ''}")
        lines += stream.rebuild if stream.action == "rebuild" else [*stream.columns, *stream.rebuild]
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


def _rebuilt(
    call: Invocation, plan: DeployPlan, recovery: RecoveryPlan, by: str, timeout: float, *, yes: bool
) -> list[DeployOutcome]:
    """Apply a recovery that rebuilds state, and wait until its streams of the deploy run the new code."""
    from orchestration.cli.recover import recovery_events
    from orchestration.deploys.rebuild import rebuild
    from orchestration.deploys.starting import DeployOutcome, wait_for_code
    from streaming_jobs.state import stream_history

    since = time.time()
    streams = [each for each in (*plan.rebuilt, *plan.touched) if each.stream in recovery.names]
    if failure := rebuild(call.settings, call.topology, recovery, recovery_events(yes)):
        return [DeployOutcome(each.stream, "failed", failure, each.before, each.after) for each in streams]
    for each in streams:
        stream_history.record_deploy(call.settings, each.stream, each.before, each.after, by)
    outcomes = wait_for_code(call.settings, streams, {each.stream: since for each in streams}, timeout, say)
    words = f"plan {recovery.id} has rebuilt its state, and is taken back by {commands.undo(recovery.id)}"
    return [replace(each, text=f"{each.text}; {words}") for each in outcomes]


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
