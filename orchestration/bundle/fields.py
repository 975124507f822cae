"""Reading YAML files as declared fields, so that every error names the file, the line, the key and what is allowed.

A mapping or list that was read remembers where each of its values is written; these positions survive the merge of
targets and the resolution of references.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.text.spelling import nearest

_PART = re.compile(r"[^.\[\]]+")
"""A key or an index in the path of a field."""

Steps = tuple[str | int, ...]
"""The path of a field: keys and indexes."""


class Position(NamedTuple):
    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else str(self.file)


class YamlMap(dict[Any, Any]):
    """A mapping of a file, with the position of each key."""

    positions: dict[Any, Position]


class YamlList(list[Any]):
    """A list of a file, with the position of each item."""

    positions: list[Position]


class _Loader(yaml.SafeLoader):
    """The safe loader. It refuses a key written twice (YAML would silently take the last), and names the line of a
    value that cannot be converted."""

    file: Path

    def _position(self, node: yaml.Node) -> Position:
        return Position(self.file, node.start_mark.line + 1)

    def _map(self, node: yaml.MappingNode) -> Iterable[YamlMap]:
        value = YamlMap()
        yield value
        value.update(self.construct_mapping(node, deep=True))
        value.positions = {self.construct_object(key, deep=True): self._position(key) for key, _ in node.value}

    def _list(self, node: yaml.SequenceNode) -> Iterable[YamlList]:
        value = YamlList()
        yield value
        value.extend(self.construct_sequence(node, deep=True))
        value.positions = [self._position(item) for item in node.value]

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


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader._map)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader._list)


def read_yaml(path: Path) -> Any:
    """The file's content; raises ConfigurationError, with the line if it is known, for a file that cannot be read."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        loader.file = path
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
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
    """File and line of a field, such as `databricks.yml:12`, or of the nearest field above it; else the file."""
    try:
        tree = read_yaml(file)
    except ConfigurationError:
        return str(file)
    steps = tuple(int(part) if part.isdigit() else part for part in _PART.findall(path))
    return str(position_of(tree, steps, Position(file, 0)))


def position_of(tree: Any, steps: Steps, default: Position) -> Position:
    """Where a field is written, or the nearest field above it that is written."""
    for step in steps:
        at: Any = step
        known = tree.positions if isinstance(tree, (YamlMap, YamlList)) else {}
        if at not in (known if isinstance(known, dict) else range(len(known))):
            break
        default, tree = known[at], tree[at]
    return default


def spelled(steps: Steps) -> str:
    """A path as text, such as `resources.jobs.orders.tasks[0]`."""
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


@dataclass(frozen=True)
class Problem:
    """A field that cannot be used, or (`note`) one that means nothing on this machine."""

    position: Position
    path: str
    found: str
    next_step: str = ""

    @property
    def text(self) -> str:
        return f"{self.position}: {self.path + ': ' if self.path else ''}{self.found}"

    def error(self) -> ConfigurationError:
        return ConfigurationError(self.text, self.next_step)


class Fields(BaseModel):
    """A mapping of the file. Its fields are declared; others are refused, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _of_declared_fields(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """All unknown fields are reported, together with the errors of the known ones."""
        if value is None:  # written, with nothing below it
            value = {}
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise refusal("is not a mapping of fields")
        names = {field.alias or name for name, field in cls.model_fields.items()}
        errors = [
            InitErrorDetails(type=refusal("is not known here", _instead(key, sorted(names))), loc=(key,), input=None)
            for key in value
            if key not in names
        ]
        try:
            made = handler({key: item for key, item in value.items() if key in names})
        except ValidationError as error:
            errors += [_again(detail) for detail in error.errors(include_url=False)]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return made


def _again(detail: Any) -> InitErrorDetails:
    """An error of pydantic's as the details of a new one."""
    context = detail.get("ctx", {})
    kind: Any = PydanticCustomError("refused", "{found}", context) if detail["type"] == "refused" else detail["type"]
    return InitErrorDetails(type=kind, loc=detail["loc"], input=detail["input"], ctx=context)


@dataclass(frozen=True)
class Noted:
    """Marks a field that is checked for its shape, and means nothing on this machine for this reason."""

    reason: str


@dataclass(frozen=True)
class Shape:
    """Validates a field of type Any by a model that was made by `shape`."""

    model: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.model)


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
    if isinstance(value, str) and (reference := UNRESOLVED.search(value)):
        raise refusal(f"{reference[0]} is not known on this machine", "only Databricks resolves it: write a value here")
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

UNRESOLVED = re.compile(r"\$\{[^}]*\}")
"""A reference that is left because only Databricks knows its value, such as `${resources.clusters.x.id}`."""

T = TypeVar("T")


def checked(kind: type[T], value: Any, default: Position, above: Steps = ()) -> tuple[T | None, list[Problem]]:
    """The value at `above` as this type, or every reason why it is not one."""
    try:
        return TypeAdapter(kind).validate_python(value), []
    except ValidationError as error:
        return None, [_problem(detail, value, default, above) for detail in error.errors(include_url=False)]


def _problem(detail: Any, value: Any, default: Position, above: Steps) -> Problem:
    steps: Steps = tuple(step for step in detail["loc"] if step != "[key]")
    context = detail.get("ctx", {})
    if below := context.get("below"):
        steps += tuple(int(part) if part.isdigit() else part for part in _PART.findall(below))
    found, next_step = _FOUND.get(detail["type"], detail["msg"]), str(context.get("next", ""))
    if detail["type"] == "literal_error":
        found = f"'{detail['input']}' is not allowed"
        next_step = _instead(detail["input"], re.findall(r"'([^']*)'", context["expected"]))
    return Problem(position_of(value, steps, default), spelled(above + steps), found, next_step)


_FOUND = {"missing": "is missing", "list_type": "is not a list", "dict_type": "is not a mapping of fields"}
"""Texts for the kinds of pydantic's errors."""


def _instead(name: str, allowed: Iterable[str]) -> str:
    names = list(allowed)
    near = nearest(name, names)
    if near and len(names) > _FEW:
        return f"did you mean '{near}'?"
    meant = f"did you mean '{near}'? " if near else ""
    return f"{meant}allowed are: {', '.join(names)}"


_FEW = 12
"""Names up to which all are listed beside the nearest one."""
