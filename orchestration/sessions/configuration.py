"""Where settings are from, so that a child process of a run loads the same settings as its code location."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.text.durations import format_duration

if TYPE_CHECKING:  # the command line imports this module, and answers at once
    from streaming_jobs.settings import Loaded


@dataclass(frozen=True)
class Configuration:
    """A configuration file and single settings by dotted name, as `--config` and `--set` give them.

    Empty: the file that every command finds, and the environment.
    """

    file: Path | None = None
    values: Mapping[str, object] = field(default_factory=dict, repr=False)  # some are secret
    project: Path | None = None
    """The folder whose modules are imported; None: that of the file that is found, or the working directory."""

    def load(self) -> Loaded:
        """Raises ConfigurationError."""
        from streaming_jobs.settings import load

        return load(self.values, config_file=self.file)

    def environment(self) -> dict[str, str]:
        """The variables with which a child process loads the same settings, and imports the same modules.

        They are not arguments, which every user of a machine can read. The modules' folder is no entry of PYTHONPATH,
        which Python puts before its standard library. Raises ConfigurationError for a value that has no text.
        """
        variables = {environment_name(key): text_of(key, value) for key, value in self.values.items()}
        if self.file is not None:
            variables["RECOURSE_CONFIG"] = str(self.file)
        if self.project is not None:
            variables["RECOURSE_PROJECT"] = str(self.project)
        return variables


FOUND = Configuration()
"""The configuration that every command finds."""


def beside(file: Path, values: Mapping[str, object]) -> Configuration:
    """The configuration of a project in the folder of `file`, wherever this process was started.

    Its relative paths, its home if none is named, its job YAML and its modules are those of that folder, which also the
    environment does not change: two projects can be loaded by one process. Raises ConfigurationError.
    """
    from orchestration.bundle.job_yaml import FILE_NAME, OWN_NAME
    from streaming_jobs.catalog.topology import import_from
    from streaming_jobs.settings import HOME, PATHS
    from streaming_jobs.settings_files import written
    from streaming_jobs.settings_sections import is_remote

    file = file.expanduser().absolute()
    folder = file.parent
    import_from(folder)
    Configuration(file, values).load()  # refuses what cannot be read
    paths: dict[str, object] = {"home": str(folder / HOME)}
    if jobs := next((folder / name for name in (OWN_NAME, FILE_NAME) if (folder / name).is_file()), None):
        paths["jobs"] = str(jobs)
    own = written(file)  # a loaded setting is absolute: of the working directory
    paths |= {key: given[key] for given in (own, values) for key in PATHS if given.get(key)}
    places = {k: v if is_remote(v) else str(folder / Path(str(v)).expanduser()) for k, v in paths.items()}
    found = Configuration(file, {**values, **places}, folder)
    found.environment()  # refuses a value that no child could be given
    return found


def environment_name(key: str) -> str:
    """The variable of a setting with a dotted name."""
    return "RECOURSE_" + key.upper().replace(".", "__")


def text_of(key: str, value: object) -> str:
    """A value of a setting as its variable has it: texts, paths and durations as they are written, others as JSON.

    Raises ConfigurationError for a value of another type: its text could be read back as something else.
    """

    def text(value: object) -> str:
        if isinstance(value, timedelta):
            return format_duration(value)
        if isinstance(value, str | Path):
            return str(value)
        raise ConfigurationError(
            f"{key} cannot be given to another process: it has a {type(value).__name__}",
            "give a text, path, number, bool, timedelta, list or mapping, or leave it out",
        )

    if isinstance(value, bool | int | float | list | tuple | dict):
        return json.dumps(value, default=text)
    return text(value)
