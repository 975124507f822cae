"""Which file has the settings of a project, and what is written in it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from streaming_jobs.errors import ConfigurationError

CONFIG_FILE = "recourse.toml"
PYPROJECT = "pyproject.toml"
FILES = f"{CONFIG_FILE} or [tool.recourse] in {PYPROJECT}"
"""Where settings of a project are, in the words of a message."""
PROJECT_VARIABLE = "RECOURSE_PROJECT"
"""The folder of the project, for a process that is started elsewhere."""


def configuration(named: Path | None) -> Path:
    """The configuration file in use, as `load` chooses it; without a file, the path where `load` would find it."""
    variable = os.environ.get("RECOURSE_CONFIG")
    return named or (Path(variable) if variable else found_file() or Path.cwd() / CONFIG_FILE)


def project_folder() -> Path:
    """The folder of the configuration file that is found upwards; the working directory if there is none.

    RECOURSE_PROJECT names another folder.
    """
    here = Path.cwd()
    if named := os.environ.get(PROJECT_VARIABLE):
        return Path(named)
    found = [] if "RECOURSE_CONFIG" in os.environ else _nearest_files()
    return found[0].parent if found else here


def named_file(flag: Path | None) -> Path | None:
    """The requested file; raises ConfigurationError if it does not exist, or is a pyproject.toml without settings."""
    variable = os.environ.get("RECOURSE_CONFIG")
    path, named_by = (flag, "--config") if flag else (Path(variable) if variable else None, "RECOURSE_CONFIG")
    if path is not None and not path.is_file():
        raise ConfigurationError(f"no configuration file at {path.absolute()}", f"check {named_by}, or leave it out")
    if path is not None and path.name == PYPROJECT and not _has_table(path):
        raise ConfigurationError(f"{path.absolute()} has no table [tool.recourse]", f"add one, or correct {named_by}")
    return path


def found_file() -> Path | None:
    """The configuration file that is found upwards, if there is one; raises ConfigurationError if a folder has both."""
    found = _nearest_files()
    if len(found) > 1:
        raise ConfigurationError(
            f"{found[0].parent} has settings in {CONFIG_FILE} and in [tool.recourse] of {PYPROJECT}",
            f"move the table into {CONFIG_FILE}, or the file's values into the table, or name one with --config",
        )
    return found[0] if found else None


def _nearest_files() -> list[Path]:
    """The configuration files of the working directory or the nearest folder above that has one.

    In a folder above, such as /tmp, others may be able to write: there only those of this user or of root.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        files = [file for file in (folder / CONFIG_FILE, folder / PYPROJECT) if file.is_file()]
        own = [file for file in files if folder == here or file.stat().st_uid in (os.geteuid(), 0)]
        if found := [file for file in own if file.name == CONFIG_FILE or _has_table(file)]:
            return found
    return []


def _has_table(pyproject: Path) -> bool:
    """True if the file has a table [tool.recourse], or names it and cannot be read, which `_from_file` then reports."""
    try:
        text = pyproject.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False  # other tools report it; nothing shows that Recourse is concerned
    if "recourse" not in text:
        return False
    try:
        return "recourse" in tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError:
        return "tool.recourse" in text


def shown_path(path: Path) -> Path:
    return Path(path.name) if path.parent == Path.cwd() else path


def written(path: Path) -> dict[str, Any]:
    """The values in a file as they are written, of a pyproject.toml its table; raises ConfigurationError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also a text that is not UTF-8
        raise ConfigurationError(f"{shown_path(path)} is not TOML: {error}", "correct the line named above") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", "check its rights") from error
    if path.name == PYPROJECT:
        values = values["tool"]["recourse"]
        if not isinstance(values, dict):
            raise ConfigurationError(f"tool.recourse in {shown_path(path)} is no table", "write [tool.recourse]")
    return values
