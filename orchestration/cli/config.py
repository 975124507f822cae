"""`recourse config`: the settings in effect, and the origin of each value."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import Output, OutputOption, say, show_table
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands

app = typer.Typer(no_args_is_help=True, help="Settings and their origins.", rich_markup_mode=None)


@app.callback()
def config() -> None:
    """Settings and their origins."""


@app.command("show")
def show_settings(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(help="Only keys with this beginning, such as 'stream.'.")] = "",
    changed: Annotated[bool, typer.Option("--changed", help="Only values that are not the default.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print each setting: key, value, origin. Secrets are hidden."""
    origins = [
        origin
        for origin in invocation(context).loaded.origins
        if origin.key.startswith(prefix) and not (changed and origin.origin == "default")
    ]
    if not origins and not changed:
        raise UsageError(f"no setting begins with '{prefix}'", f"`{commands.settings()}` prints every setting")
    if not origins and output is Output.text:
        say("every setting has its default")
    value = [{"key": o.key, "value": o.value, "origin": o.origin} for o in origins]
    show_table(output, value, ["setting", "value", "origin"], [[o.key, o.value, o.origin] for o in origins])
