"""Where settings are from, so that a child process of a run loads the same settings as its code location."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this module, and answers at once
    from streaming_jobs.settings import Loaded

_PATHS = ("home", "state_dir", "tables_dir", "jobs")


@dataclass(frozen=True)
class Configuration:
    """A configuration file and single settings by dotted name, as `--config` and `--set` give them.

    Empty: the file that every command finds, and the environment.
    """

    file: Path | None = None
    values: Mapping[str, object] = field(default_factory=dict, repr=False)  # some are secret

    def load(self) -> Loaded:
        """Raises ConfigurationError."""
        from streaming_jobs.settings import load

        return load(self.values, config_file=self.file)

    def environment(self) -> dict[str, str]:
        """The variables with which a child process loads the same settings, and imports what is beside the file.

        They are not arguments, which every user of a machine can read.
        """
        variables = {environment_name(key): text_of(value) for key, value in self.values.items()}
        if self.file is not None:
            variables["RECOURSE_CONFIG"] = str(self.file)
            path = [str(self.file.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
        return variables


FOUND = Configuration()
"""The configuration that every command finds."""


def beside(file: Path, values: Mapping[str, object]) -> Configuration:
    """The configuration of a project in the folder of `file`, wherever this process was started.

    Its relative paths, its home if none is named, its job YAML and its modules are those of that folder, which also the
    environment does not change: two projects can be loaded by one process. Raises ConfigurationError.
    """
    from orchestration.bundle.job_yaml import FILE_NAME, OWN_NAME
    from streaming_jobs.settings import HOME, written
    from streaming_jobs.settings_sections import is_remote

    file = file.expanduser().absolute()
    folder = file.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    Configuration(file, values).load()  # refuses what cannot be read
    paths: dict[str, object] = {"home": str(folder / HOME)}
    if jobs := next((folder / name for name in (OWN_NAME, FILE_NAME) if (folder / name).is_file()), None):
        paths["jobs"] = str(jobs)
    own = written(file)  # a loaded setting is absolute: of the working directory
    paths |= {key: own[key] for key in _PATHS if key in own} | {k: v for k, v in values.items() if k in _PATHS}
    places = {k: v if is_remote(v) else str(folder / Path(str(v)).expanduser()) for k, v in paths.items()}
    return Configuration(file, {**values, **places})


def environment_name(key: str) -> str:
    """The variable of a setting with a dotted name."""
    return "RECOURSE_" + key.upper().replace(".", "__")


def text_of(value: object) -> str:
    """A value as a variable has it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
