"""Reading a YAML mapping field by field, so that every error can name the file, the key and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.text.spelling import nearest

_PART = re.compile(r"[^.\[\]]+")
"""A key or an index in the path of a field."""


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses a key written twice (YAML would silently take the last), and names the line
    of a value that it cannot make."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            problem = f"'{node.value}' cannot be read: {error}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "found unhashable key", key_node.start_mark)
            if key in seen:
                twice = f"key '{key}' is written twice"
                raise yaml.constructor.ConstructorError(None, None, twice, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The file's content; raises ConfigurationError, with the line where there is one, for all that cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506  (a SafeLoader)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}", "correct its path") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        told = [getattr(error, "context", None), getattr(error, "problem", None)]  # str(error) repeats the place
        what = ", ".join(each for each in told if each) or " ".join(str(error).split())
        if isinstance(error, RecursionError):
            what = "is nested too deeply"
        raise ConfigurationError(
            f"{place}: {what}", "look at that line and the one above: indent with spaces, `key: value`, close quotes"
        ) from error


def place(file: Path, path: str) -> str:
    """File and line of a field, such as `databricks.yml:12`; the file alone where it has no such line."""
    line = _line(file, path)
    return f"{file}:{line}" if line else str(file)


def _line(file: Path, path: str) -> int | None:
    """The line of a field such as `resources.jobs.orders.tasks[0]`, or of the nearest field above that is written."""
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    line = None
    for part in _PART.findall(path):
        if isinstance(node, yaml.MappingNode):
            match = next(((key, value) for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            match = (node.value[int(part)], node.value[int(part)])
        else:
            match = None
        if match is None:
            break
        line, node = match[0].start_mark.line + 1, match[1]
    return line


@dataclass(frozen=True)
class Section:
    """A mapping at `path` of `file`; reading a field checks its type."""

    file: Path
    path: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, value: Any, file: Path, path: str = "", *, allowed: Sequence[str] = ()) -> Section:
        """Check that `value` is a mapping of text keys, and, with `allowed`, has no other key."""
        section = cls(file, path, {})
        if value is None:
            return section
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise section.error("is not a mapping of fields")
        section = cls(file, path, value)
        for key in value:
            if allowed and key not in allowed:
                raise section._at(key).error("is not known here", _instead(key, allowed))
        return section

    def error(self, found: str, next_step: str = "") -> ConfigurationError:
        """An error that names this place: file, line and field."""
        where = f"{place(self.file, self.path)}: {self.path + ': ' if self.path else ''}"
        return ConfigurationError(f"{where}{found}", next_step)

    def has(self, key: str) -> bool:
        """True if the field is written."""
        return key in self.values

    def section(self, key: str, *, allowed: Sequence[str] = (), required: bool = False) -> Section:
        """The mapping under `key`; an empty one if it is missing and not required."""
        if required and key not in self.values:
            raise self._at(key).error("is missing")
        return Section.of(self.values.get(key), self.file, self._below(key), allowed=allowed)

    def sections(self, allowed: Sequence[str]) -> Iterator[tuple[str, Section]]:
        """Every field as a section with the same allowed fields."""
        for key in self.values:
            yield key, self.section(key, allowed=allowed)

    def items(self, key: str, default: list[Any] | None = None) -> list[Any]:
        """The list under `key`."""
        value = self.values.get(key, default)
        if not isinstance(value, list):
            raise self._at(key).error("is missing" if value is None else "is not a list")
        return value

    def item(self, key: str, position: int, *, allowed: Sequence[str] = ()) -> Section:
        """One mapping of the list under `key`."""
        return Section.of(self.items(key)[position], self.file, f"{self._below(key)}[{position}]", allowed=allowed)

    def text(self, key: str, default: str | None = None) -> str:
        """A scalar as text; true and false as YAML writes them. A missing field without a default is an error."""
        value = self.values.get(key, default)
        if value is None:
            raise self._at(key).error("is missing")
        return self._scalar(key, value)

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """A list of scalars as text."""
        return [self._scalar(f"{key}[{i}]", value) for i, value in enumerate(self.items(key, default))]

    def number(self, key: str, default: int) -> int:
        """A whole number, 0 or more."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._at(key).error(f"'{value}' is not a whole number, 0 or more")
        return value

    def flag(self, key: str) -> bool:
        """true or false; false when missing."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self._at(key).error(f"'{value}' is not true or false")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        """One of the allowed words."""
        value = self.text(key, default)
        if value not in allowed:
            raise self._at(key).error(f"'{value}' is not allowed", _instead(value, allowed))
        return value

    def resolved(self, resolve: Callable[[str, Section], str], *, only: str) -> Section:
        """A copy with `resolve` applied to every text below the field `only`."""
        if only not in self.values:
            return self
        below = self._resolved(self.values[only], resolve, self._below(only))
        return Section(self.file, self.path, {**self.values, only: below})

    def _resolved(self, value: Any, resolve: Callable[[str, Section], str], path: str) -> Any:
        if isinstance(value, str):
            return resolve(value, Section(self.file, path, {}))
        if isinstance(value, list):
            return [self._resolved(item, resolve, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, Mapping):
            return {key: self._resolved(item, resolve, f"{path}.{key}") for key, item in value.items()}
        return value

    def _scalar(self, key: str, value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, date):
            raise self._at(key).error(f"'{value}' is a date to YAML", "put it in quotes")
        if not isinstance(value, (str, int, float)):
            raise self._at(key).error("is not a single value")
        return str(value)

    def _at(self, key: str) -> Section:
        return Section(self.file, self._below(key), {})

    def _below(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _instead(name: str, allowed: Sequence[str]) -> str:
    near = nearest(name, allowed)
    meant = f"did you mean '{near}'? " if near else ""
    return f"{meant}allowed are: {', '.join(allowed)}"
