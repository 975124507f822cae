"""`recourse bundle`: the bundle for a Databricks workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import say
from streaming_jobs.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="The bundle for a Databricks workspace.", rich_markup_mode=None)


@app.callback()
def bundle() -> None:
    """The bundle for a Databricks workspace."""


@app.command(short_help="Write the bundle as `databricks bundle deploy` needs it.")
def export(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.", show_default=False)],
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="A bundle.", show_default=False)] = None,
    wheels: Annotated[
        list[Path] | None,
        typer.Option("--wheel", metavar="FILE", help="A built wheel to ship; may be given again.", show_default=False),
    ] = None,
    home: Annotated[
        str, typer.Option("--home", metavar="PATH", help="Folder of tables and state there, on a volume.")
    ] = "",
) -> None:
    """Write databricks.yml, the jobs and the wheels to DIR: with artifacts, environments, `home` and `flows` added.

    Prints each written file. Run `databricks bundle validate` and `databricks bundle deploy` in DIR.
    """
    from importlib.metadata import version

    from orchestration.bundle import job_yaml
    from orchestration.bundle.export import Project
    from orchestration.bundle.export import export as exported
    from streaming_jobs.settings import DEMONSTRATION

    settings = invocation(context).settings
    missing = [wheel for wheel in wheels or [] if not wheel.is_file() or wheel.suffix != ".whl"]
    if missing:
        raise UsageError(f"--wheel {missing[0]}: there is no such wheel", "build it: python -m pip wheel --no-deps .")
    path = file or job_yaml.find(settings)
    project = Project.of(path, version("recourse-streams"), wheels or [])
    flows = settings.flows or (DEMONSTRATION if job_yaml.is_shipped(path) else [])
    made = exported(path, folder, project, home, flows)
    if not flows:
        say("nothing names `flows`: set it in recourse.toml, or sessions there find no streams")
    for written in made.write(folder):
        print(written)
    for text in made.said:
        say(text)
