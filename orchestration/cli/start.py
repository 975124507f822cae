"""`recourse streams start` and `restart`: one stream, while the others of its session run on."""

from __future__ import annotations

import getpass
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli import FAILED
from orchestration.cli.invocation import Invocation, invocation
from orchestration.cli.output import Output, OutputOption, print_json, say

if TYPE_CHECKING:
    from orchestration.deploys.starting import Begin, Started

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Streams.", show_default=False)]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait until the streams run.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Leave the request, and do not wait.")]


def start(
    context: typer.Context,
    names: Names,
    timeout: Timeout = 180.0,
    no_wait: NoWait = False,
    output: OutputOption = Output.text,
) -> None:
    """Start streams that are stopped or have failed, and wait until they run.

    Their running session starts them, or Dagster does; other streams are not touched. If neither is there, this says
    what would start them. They run the code that is on disk.
    """
    _begin(invocation(context), names, timeout, no_wait, output, again=False)


def restart(
    context: typer.Context,
    names: Names,
    timeout: Timeout = 180.0,
    no_wait: NoWait = False,
    output: OutputOption = Output.text,
) -> None:
    """Stop streams at a batch border, start them again, and wait until they run; other streams are not touched.

    They run the code that is on disk; `recourse deploy` shows before what is new in it.
    """
    _begin(invocation(context), names, timeout, no_wait, output, again=True)


def _begin(call: Invocation, names: list[str], timeout: float, no_wait: bool, output: Output, *, again: bool) -> None:
    from orchestration.deploys.starting import ask, wait

    selected = call.names(names)
    command = "restart" if again else "start"
    begun = [ask(call.settings, name, f"recourse streams {command} ({user()})", again=again) for name in selected]
    if no_wait:
        _print_requests(begun, output)
        return
    outcomes = wait(call.settings, begun, timeout, say)
    print_outcomes(outcomes, output)
    if not all(each.ok for each in outcomes):
        raise typer.Exit(FAILED)


def print_outcomes(outcomes: list[Started], output: Output) -> None:
    """Print the outcome of each start."""
    if output is Output.json:
        print_json([{**asdict(each), "ok": each.ok} for each in outcomes])
        return
    for each in outcomes:
        took = f" after {each.seconds:g} s" if each.seconds is not None else ""
        print(f"{each.stream}: {each.outcome}{took}: {each.text}")


def _print_requests(begun: list[Begin], output: Output) -> None:
    values: list[dict[str, Any]] = [{"stream": b.stream, "asked": b.asked, "recovery": b.was.plan} for b in begun]
    if output is Output.json:
        print_json(values)
        return
    for each in begun:
        print(f"{each.stream}: {'asked to start' if each.asked else 'nothing to do: it runs, or a recovery has it'}")


def user() -> str:
    """The name of the user who runs the command; the user id where it has no name."""
    import os

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry for this user, as in some containers
        return f"user {os.getuid()}"
