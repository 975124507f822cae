"""`recourse init`: a new project, from the files in `orchestration/new_project`."""

from __future__ import annotations

import keyword
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import typer

from orchestration.cli.text import say
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.entry import PACKAGES
from streaming_jobs.text import commands

_TEMPLATES = Path(__file__).parents[1] / "new_project"
_SUFFIX = ".tmpl"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_LONGEST = 50
_TAKEN = (*PACKAGES, "tests", "samples", "deploy")
_PLACEHOLDER = re.compile("my([-_])project")


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project.", show_default=False)],
    here: Annotated[
        bool, typer.Option("--here", help="Write into the working directory, in place of a new folder.")
    ] = False,
) -> None:
    """Write a project: a stream, a suite, jobs, sample records, a test, CI, an image and a unit for systemd.

    The folder has the name of the project, the Python package the same with `_` for `-`. No file is overwritten.
    """
    files = project_files(checked(name))
    if here:
        folder = Path.cwd()
        _write_beside(folder, files)
    else:
        folder = Path.cwd() / name
        _write_new(folder, files)
    say(f"{len(files)} files of project {name} in {folder}")
    say("next:")
    if not here:
        say(f"  cd {name}")
    say(f"  {commands.send('orders', 'samples/orders.jsonl')}")
    say(f"  {commands.up(once=True)}")
    say(f"  {commands.sample('priced_orders')}")


def checked(name: str) -> str:
    """The name, if project, folder and package can have it; raises UsageError otherwise."""
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise UsageError(
            f"'{name}' is not the name of a project",
            f"use lower-case letters and digits, a letter first, '-' or '_' between words, {_LONGEST} at most",
        )
    if keyword.iskeyword(package) or keyword.issoftkeyword(package) or package in _TAKEN:
        raise UsageError(f"'{name}' cannot be the name of a package", "choose another name")
    if package in sys.stdlib_module_names or _installed(package):
        raise UsageError(f"the package '{package}' would hide an installed one of that name", "choose another name")
    return name


def _installed(package: str) -> bool:
    """True if a package of that name is installed in this environment."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return PathFinder.find_spec(package, [*folders]) is not None


def project_files(name: str) -> Mapping[Path, str]:
    """The text of each file of a project, by its path in the project's folder."""
    return dict(sorted(_files(_TEMPLATES, name, name.replace("-", "_"))))


def _files(folder: Path, name: str, package: str) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob(f"*{_SUFFIX}"):
        place = str(path.relative_to(folder)).removesuffix(_SUFFIX)
        yield Path(_named(place, name, package)), _named(path.read_text(encoding="utf-8"), name, package)


def _named(text: str, name: str, package: str) -> str:
    return _PLACEHOLDER.sub(lambda match: name if match[1] == "-" else package, text)


def _write_new(folder: Path, files: Mapping[Path, str]) -> None:
    """Make the folder with all files or none, also if the command is killed; an empty folder may be there."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        _write(temporary, files)
        try:
            temporary.rename(folder)
        except OSError as error:
            if not folder.exists():
                raise
            raise UsageError(
                f"{folder} exists, and is not an empty folder: {error.strerror}",
                "choose another name, or write into an existing folder with --here",
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_beside(folder: Path, files: Mapping[Path, str]) -> None:
    """Write what is missing; raises UsageError, before the first write, if one of the files exists with other text."""
    taken = [str(path) for path, text in files.items() if _differs(folder / path, text)]
    if taken:
        raise UsageError(f"{', '.join(taken)} would be overwritten in {folder}", "move them, or use an empty folder")
    _write(folder, {path: text for path, text in files.items() if not (folder / path).exists()})


def _differs(path: Path, text: str) -> bool:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return True
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") != text


def _write(folder: Path, files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("x", encoding="utf-8") as file:
            file.write(text)
