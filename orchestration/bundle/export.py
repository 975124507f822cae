"""A bundle as `databricks bundle deploy` needs it: what this machine does not need is added, and nothing is resolved.

Added, where the bundle has none: an artifact that builds the project's wheel; for each task that runs a wheel of ours,
an environment with the wheels; `queue.enabled: false` and `max_concurrent_runs: 1`, with which a tick is skipped there
as it is here; for sessions, the settings `home` and `flows`, which no recourse.toml gives them there.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestration.bundle.fields import read_yaml
from orchestration.bundle.job import ENTRY_POINT, PACKAGE, is_ours
from orchestration.bundle.job_yaml import FILE_NAME, files_of
from streaming_jobs.errors import UsageError

HEADER = "# Written by an export of Recourse: change the bundle that was exported, and export it again.\n"
KEY = "recourse"
"""Name of the artifact and of the environment that are added."""
HOME = "recourse_home"
"""Name of the variable with the folder of tables and state."""
COMPUTE = ("environment_key", "job_cluster_key", "new_cluster", "existing_cluster_id")


@dataclass(frozen=True)
class Project:
    """What the bundle's wheels are made of: `folder` has the pyproject.toml, if there is one; `wheels` are built."""

    folder: Path | None
    name: str
    version: str
    wheels: tuple[Path, ...] = ()

    @classmethod
    def of(cls, bundle: Path, version: str, wheels: Sequence[Path]) -> Project:
        """The project around a bundle file; `version` is the installed one of Recourse."""
        for folder in bundle.resolve().parents:
            file = folder / "pyproject.toml"
            if file.is_file():
                found = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
                return cls(folder, str(found.get("name", "")), version, tuple(wheels))
        return cls(None, "", version, tuple(wheels))


@dataclass
class Export:
    """The files of an export by their paths in the new folder; `said` is what a person has to know or to do."""

    files: dict[str, Any] = field(default_factory=dict)
    wheels: tuple[Path, ...] = ()
    said: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> list[Path]:
        """Write all files; raises UsageError where the folder has a bundle that was not exported."""
        there = folder / FILE_NAME
        if there.exists() and not there.read_text(encoding="utf-8").startswith(HEADER):
            raise UsageError(f"{there} was not written by an export", "name another folder")
        written = []
        for name, tree in self.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(
                HEADER + yaml.dump(tree, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110), "utf-8"
            )
            written.append(file)
        for wheel in self.wheels:
            file = folder / "dist" / wheel.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(wheel.read_bytes())
            written.append(file)
        return written


class _Plain(yaml.SafeDumper):
    """Writes each value where it is used: without anchors."""

    def ignore_aliases(self, _: Any) -> bool:
        return True


def export(bundle: Path, folder: Path, project: Project, home: str, flows: Sequence[str]) -> Export:
    """The export of a bundle file into a folder; raises ConfigurationError where the bundle cannot be read."""
    made = Export(wheels=project.wheels)
    files = files_of(bundle)
    names = {file: FILE_NAME if file == bundle else f"jobs/{_unique(file, files)}" for file in files}
    trees = {file: _plain(read_yaml(file)) or {} for file in files}
    root = trees[bundle]
    # By name, since a folder may have files of an earlier export.
    root["include"] = [names[file] for file in files if file != bundle]
    _add_wheels(root, folder, project, made)
    root.setdefault("variables", {})[HOME] = {
        "description": "folder of tables and state, such as /Volumes/<catalog>/<schema>/<volume>/recourse",
        **({"default": home} if home else {}),
    }
    if not home:
        made.said.append(f"set the variable {HOME}: databricks bundle deploy --var {HOME}=/Volumes/...")
    added = _Added(project, flows, _with_compute(root), made.said)
    for file, tree in trees.items():
        for key, job in _jobs(tree):
            added.complete(key, job, "." if file == bundle else "..")
        made.files[names[file]] = tree
    if not root["include"]:
        del root["include"]
    return made


def _add_wheels(root: dict[str, Any], folder: Path, project: Project, made: Export) -> None:
    if project.wheels or "artifacts" in root:
        return
    if project.folder is None:
        made.said.append("no pyproject.toml above the bundle: give the wheel of your streams by --wheel")
        return
    path = os.path.relpath(project.folder, folder.resolve())
    root["artifacts"] = {
        KEY: {"type": "whl", "path": ".", "build": f"python -m pip wheel --no-deps --wheel-dir dist {path}"}
    }


@dataclass(frozen=True)
class _Added:
    project: Project
    flows: Sequence[str]
    with_compute: frozenset[tuple[str, str]]
    said: list[str]

    def complete(self, key: str, job: dict[str, Any], up: str) -> None:
        """Add to a job what it needs there; `up` leads from its file to the bundle's folder."""
        ours = [task for task in job.get("tasks") or [] if _is_ours(task)]
        for task in ours:
            wheel = task["python_wheel_task"]
            if any(task.get(name) for name in COMPUTE if name != "environment_key"):
                task.setdefault("libraries", self._libraries(up))
            elif (key, task.get("task_key")) in self.with_compute:
                self.said.append(
                    f"job {key}, task {task.get('task_key')}: give it the wheels beside its compute in the target"
                )
            elif "environment_key" not in task:
                task["environment_key"] = KEY
                environments = job.setdefault("environments", [])
                if not any(one.get("environment_key") == KEY for one in environments):
                    spec = {"environment_version": "4", "dependencies": self._dependencies(up)}
                    environments.append({"environment_key": KEY, "spec": spec})
            if wheel.get("entry_point") == ENTRY_POINT and "named_parameters" not in wheel:
                wheel["parameters"] = [*self._settings(wheel.get("parameters") or []), *(wheel.get("parameters") or [])]
        for parameter in job.get("parameters") or []:
            if isinstance(parameter, dict) and "default" in parameter:
                parameter["default"] = _as_text(parameter["default"])
        if ours:
            job.setdefault("max_concurrent_runs", 1)
            if "continuous" not in job:
                job.setdefault("queue", {"enabled": False})

    def _dependencies(self, up: str) -> list[str]:
        wheels = [f"{up}/dist/{wheel.name}" for wheel in self.project.wheels]
        if not wheels and self.project.folder is not None:
            wheels = [f"{up}/dist/*.whl"]
        has_recourse = any(wheel.name.startswith("recourse_streams-") for wheel in self.project.wheels)
        if not has_recourse and (self.project.wheels or self.project.name != PACKAGE):
            wheels.append(f"{PACKAGE}=={self.project.version}")
        return wheels

    def _libraries(self, up: str) -> list[dict[str, Any]]:
        return [
            {"whl": text} if text.endswith(".whl") else {"pypi": {"package": text}} for text in self._dependencies(up)
        ]

    def _settings(self, parameters: Sequence[Any]) -> list[str]:
        """The settings that a session needs there and that the job does not set."""
        given = [str(text) for text in parameters]
        wanted = {"home": f"${{var.{HOME}}}", **({"flows": json.dumps(list(self.flows))} if self.flows else {})}
        missing = {name: text for name, text in wanted.items() if not any(t.startswith(f"{name}=") for t in given)}
        return [word for name, text in missing.items() for word in ("--set", f"{name}={text}")]


def _with_compute(root: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Job and task of each task that a target gives its compute."""
    return frozenset(
        (key, str(task.get("task_key")))
        for target in (root.get("targets") or {}).values()
        for key, job in _jobs(target or {})
        for task in job.get("tasks") or []
        if isinstance(task, Mapping) and any(name in task for name in COMPUTE)
    )


def _jobs(tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, job in ((tree.get("resources") or {}).get("jobs") or {}).items():
        if isinstance(job, dict):
            yield key, job


def _is_ours(task: Any) -> bool:
    wheel = task.get("python_wheel_task") if isinstance(task, dict) else None
    return isinstance(wheel, dict) and is_ours(wheel.get("package_name"), wheel.get("entry_point"))


def _unique(file: Path, files: Sequence[Path]) -> str:
    """The file's name; with a number from the second file of this name on."""
    before = [other for other in files[: files.index(file)] if other.stem == file.stem]
    return f"{file.stem}{f'-{len(before) + 1}' if before else ''}.yml"


def _as_text(value: Any) -> Any:
    """A single value as the text that the Jobs API takes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
