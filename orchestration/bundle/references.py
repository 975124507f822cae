"""Variables and the references `${...}` of a bundle.

A text that is nothing but a reference becomes the value itself, of whatever type; inside other text only single values
can stand. `${var.x.y}` and `${var.x[0]}` reach into complex variables. `${bundle.*}`, `${workspace.*}` and
`${resources.*}` name fields of the bundle; what only a workspace knows (ids, lookups) is left as it is.
"""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestration.bundle.fields import Position, Problem, Steps, YamlList, YamlMap, position_of, spelled
from orchestration.bundle.model import Variable
from streaming_jobs.text.spelling import instead

REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.\-\[\]]*)\}")
_PART = re.compile(r"[^.\[\]]+")
ENVIRONMENT = "BUNDLE_VAR_"
"""Prefix of the environment variables that set a variable, as for the Databricks CLI."""
_OF_RESOURCE = ("id", "url", "modified_status")
"""Fields that a resource has after its deployment."""


class Unresolved(Exception):
    """Only a workspace knows the value: the reference is left as it is."""


class Unknown(Exception):
    """The reference names nothing; the text says what, `next_step` what there is."""

    def __init__(self, found: str, next_step: str = "") -> None:
        super().__init__(found)
        self.next_step = next_step


def overrides(folder: Path, target: str, environ: Mapping[str, str], names: Mapping[str, Variable]) -> dict[str, Any]:
    """The values that `.databricks/bundle/<target>/variable-overrides.json` and the environment give variables.

    Raises ValueError for a file that is no object of variables, and for a complex variable in the environment.
    """
    file, values = folder / ".databricks" / "bundle" / target / "variable-overrides.json", {}
    if file.is_file():
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{file}: is not an object of variables")
    for name, variable in names.items():
        if (text := environ.get(ENVIRONMENT + name)) is not None:
            if variable.type == "complex":
                raise ValueError(f"{ENVIRONMENT}{name}: a complex variable cannot be set in the environment")
            values[name] = text
    return {name: value for name, value in values.items() if name in names}


def user() -> str:
    """The name for `${workspace.current_user.short_name}`: on this machine, the login name."""
    try:
        return re.sub(r"[^A-Za-z0-9_]", "_", getpass.getuser())
    except (OSError, KeyError):
        return "unknown"


@dataclass
class References:
    """Resolves references of one target; every reference that names nothing becomes a problem."""

    tree: Mapping[str, Any]
    target: str
    values: Mapping[str, Any]
    """The variables' values, before references in them are resolved."""
    lookups: frozenset[str] = frozenset()
    """The variables that Databricks looks up."""
    problems: list[Problem] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)

    def resolved(self, value: Any, at: Steps, default: Position) -> Any:
        """The value with every reference replaced; mappings and lists keep the positions of what they have."""
        if isinstance(value, str):
            try:
                return self._text(value)
            except Unknown as error:
                self.problems.append(Problem(default, spelled(at), str(error), error.next_step))
                return value
        if isinstance(value, Mapping):
            made = YamlMap()
            made.positions = getattr(value, "positions", {})
            for key, item in value.items():
                made[key] = self.resolved(item, (*at, key), position_of(value, (key,), default))
            return made
        if isinstance(value, list):
            items = YamlList()
            items.positions = getattr(value, "positions", [])
            for number, item in enumerate(value):
                items.append(self.resolved(item, (*at, number), position_of(value, (number,), default)))
            return items
        return value

    def _text(self, text: str) -> Any:
        if whole := REFERENCE.fullmatch(text):
            try:
                return self._value(whole[1])
            except Unresolved:
                return text

        def one(match: re.Match[str]) -> str:
            try:
                value = self._value(match[1])
            except Unresolved:
                return match[0]
            if isinstance(value, (list, Mapping)) or value is None:
                raise Unknown(f"{match[0]} is not a single value", "a text can only contain single values")
            return ("true" if value else "false") if isinstance(value, bool) else str(value)

        return REFERENCE.sub(one, text)

    def _value(self, name: str) -> Any:
        if name in self._open:
            raise Unknown(f"${{{name}}} refers to itself", " -> ".join([*self._open, name]))
        self._open.append(name)
        try:
            value = self._written(name)
            return self.resolved_inner(value)
        finally:
            self._open.pop()

    def resolved_inner(self, value: Any) -> Any:
        """References in the value of a reference; an unknown one is raised, because the outer one is to blame."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            made = YamlMap({key: self.resolved_inner(item) for key, item in value.items()})
            made.positions = getattr(value, "positions", {})
            return made
        if isinstance(value, list):
            items = YamlList(self.resolved_inner(item) for item in value)
            items.positions = getattr(value, "positions", [])
            return items
        return value

    def _written(self, name: str) -> Any:
        first, *rest = _PART.findall(name)
        if first in ("var", "variables") and rest:
            if first == "variables" and rest[1:] == ["value"]:
                rest = rest[:1]
            if rest[0] in self.lookups:
                raise Unresolved
            if rest[0] not in self.values:
                raise Unknown(f"${{{name}}} is not known", self._known(name))
            return _below(self.values[rest[0]], rest[1:], name)
        if (computed := self._computed().get(name)) is not None:
            return computed
        if first in ("workspace", "artifacts") or name.startswith("bundle.git") or name == "bundle.uuid":
            try:
                return _below(self.tree, [first, *rest], name)
            except Unknown:
                raise Unresolved from None
        if first == "resources" and len(rest) >= 2:
            resource = _below(self.tree, [first, *rest[:2]], name)
            if rest[2:3] and rest[2] in _OF_RESOURCE and rest[2] not in (resource or {}):
                raise Unresolved
            return _below(resource, rest[2:], name)
        if first == "bundle" and rest:
            return _below(self.tree, [first, *rest], name)
        raise Unknown(f"${{{name}}} is not known", self._known(name))

    def _known(self, name: str) -> str:
        return instead(name, [*self._computed(), *(f"var.{name}" for name in self.values)])

    def _computed(self) -> dict[str, Any]:
        bundle = self.tree.get("bundle") or {}
        return {
            "bundle.target": self.target,
            "bundle.environment": self.target,
            "bundle.name": bundle.get("name") if isinstance(bundle, Mapping) else None,
            "workspace.current_user.short_name": user(),
            "workspace.current_user.userName": user(),
        }


def _below(value: Any, steps: list[str], name: str) -> Any:
    for step in steps:
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            there = instead(step, value) if isinstance(value, Mapping) else ""
            raise Unknown(f"${{{name}}} is not known: there is no '{step}'", there)
    return value
