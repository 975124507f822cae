"""Reading YAML files as declared fields, so that every error names the file, the line, the key and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.text.spelling import nearest

_PART = re.compile(r"[^.\[\]]+")
"""A key or an index in the path of a field."""


class _Loader(yaml.SafeLoader):
    """The safe loader. It refuses a key written twice (YAML would silently take the last), and names the line of a
    value that cannot be converted."""

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
    """The file's content; raises ConfigurationError, with the line if it is known, for a file that cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506  (a SafeLoader)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}", "correct its path") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}" if mark else str(path)
        texts = [getattr(error, "context", None), getattr(error, "problem", None)]  # str(error) repeats the location
        what = ", ".join(text for text in texts if text) or " ".join(str(error).split())
        if isinstance(error, RecursionError):
            what = "is nested too deeply"
        raise ConfigurationError(
            f"{location}: {what}", "look at that line and the one above: indent with spaces, `key: value`, close quotes"
        ) from error


def location_of(file: Path, path: str) -> str:
    """File and line of a field, such as `databricks.yml:12`; only the file if the line is unknown."""
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


class Fields(BaseModel):
    """A mapping of the file. Its fields are declared; others are refused, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _a_mapping(cls, value: Any) -> Any:
        if value is None:  # written, with nothing below it
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise refusal("is not a mapping of fields")
        for key in value:
            if key not in cls.model_fields:
                raise refusal("is not known here", _instead(key, cls.model_fields), below=key)
        return value


def refusal(found: str, next_step: str = "", *, below: str = "") -> PydanticCustomError:
    """An error of a validator about the field that it validates, or a field `below` that."""
    context = {"found": found, "next": next_step, "below": below}
    return PydanticCustomError("refused", "{found}", context)


def _scalar(value: Any) -> str:
    """A scalar as text; true and false as YAML writes them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, date):
        raise refusal(f"'{value}' is a date to YAML", "put it in quotes")
    if value is None:
        raise refusal("is missing")
    if not isinstance(value, (str, int, float)):
        raise refusal("is not a single value")
    return str(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise refusal(f"'{value}' is not a whole number, 0 or more")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise refusal(f"'{value}' is not true or false")
    return value


Text = Annotated[str, BeforeValidator(_scalar)]
Count = Annotated[int, BeforeValidator(_count)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Scalar = BeforeValidator(_scalar)
"""For a choice of words, which YAML may take for something else: OFF is false."""

Section = BeforeValidator(lambda value: {} if value is None else value)
"""For optional fields: a field that is written with nothing below it is present."""

T = TypeVar("T")


def validated(kind: type[T], value: Any, file: Path, path: str = "") -> T:
    """The value at `path` of a file as this type; raises ConfigurationError for its first error."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = path
        for part in first["loc"]:
            if part != "[key]":
                where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else part
        context = first.get("ctx", {})
        if below := context.get("below"):
            where += f".{below}" if where else below
        found, next_step = _FOUND.get(first["type"], first["msg"]), str(context.get("next", ""))
        if first["type"] == "literal_error":
            found = f"'{first['input']}' is not allowed"
            next_step = _instead(first["input"], re.findall(r"'([^']*)'", context["expected"]))
        raise refused(file, where, found, next_step) from None


def refused(file: Path, path: str, found: str, next_step: str = "") -> ConfigurationError:
    """An error that names file, line and field."""
    return ConfigurationError(f"{location_of(file, path)}: {path + ': ' if path else ''}{found}", next_step)


_FOUND = {"missing": "is missing", "list_type": "is not a list", "dict_type": "is not a mapping of fields"}
"""Texts for the kinds of pydantic's errors."""


def _instead(name: str, allowed: Iterable[str]) -> str:
    near = nearest(name, allowed)
    meant = f"did you mean '{near}'? " if near else ""
    return f"{meant}allowed are: {', '.join(allowed)}"
