"""A schema for `Json` from records that a topic has: a first draft for a person, since samples prove no rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from streaming_jobs.formats.json import Json
from streaming_jobs.formats.json_columns import date_column, timestamp_column
from streaming_jobs.formats.json_reader import unseen_faults
from streaming_jobs.formats.json_records import is_possible_name

_TEXTS = (("date", date_column().form), ("timestamp", timestamp_column().form))
_LONG = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class SampledSchema:
    """A schema as `Json` takes it, the number of samples, those that it refuses by reason, and remarks on fields."""

    schema: dict[str, object]
    samples: int
    refused: Mapping[str, int]
    remarks: tuple[str, ...]


def sampled_schema(values: Sequence[bytes | None]) -> SampledSchema:
    """The narrowest schema that the samples fit; where they disagree on a type, most of them decide.

    A field that each of its objects has, and never with null, is required.
    """
    whole = _Seen()
    unseen = unseen_faults(values)
    for index, value in enumerate(values):
        with suppress(ValueError, RecursionError):  # a dead letter, counted below by its reason
            decoded = msgspec.json.decode(value or b"")
            if isinstance(decoded, dict) and index not in unseen:
                whole.add(decoded)
    remarks: list[str] = []
    schema = whole.struct("", remarks)
    refused = Json(schema).reader().read(values).refused if schema else {}
    counts = Counter(refusal.reason for refusal in refused.values())
    return SampledSchema(schema, len(values), dict(counts.most_common()), tuple(remarks))


@dataclass
class _Seen:
    """What samples had in one place: kinds of values, the fields of objects, the elements of arrays."""

    kinds: Counter[str] = field(default_factory=Counter)
    fields: dict[str, _Seen] = field(default_factory=dict)
    elements: _Seen | None = None

    def add(self, value: Any) -> None:
        self.kinds[_kind(value)] += 1
        if isinstance(value, dict):
            for name, inner in value.items():
                self.fields.setdefault(name, _Seen()).add(inner)
        elif isinstance(value, list):
            self.elements = self.elements or _Seen()
            for inner in value:
                self.elements.add(inner)

    def struct(self, place: str, remarks: list[str]) -> dict[str, object]:
        """The declaration of an object's fields; appends a remark for each field that a person should look at."""
        declared: dict[str, object] = {}
        for name, seen in self.fields.items():
            where = f"{place}.{name}" if place else name
            if not is_possible_name(name) or name.lower() in (known.lower() for known in declared):
                remarks.append(f"{where!a} is left out: a name with a quote or backslash, or like another but for case")
                continue
            kind = seen.declaration(where, remarks)
            if kind == {}:
                remarks.append(f"{where!a} is left out: its objects have no fields")
                continue
            required = isinstance(kind, str) and seen.kinds.total() == self.kinds["object"] and "null" not in seen.kinds
            declared[name] = f"{kind} not null" if required else kind
        return declared

    def declaration(self, place: str, remarks: list[str]) -> object:
        kinds = _joined(self.kinds)
        if not kinds:
            remarks.append(f"{place!a} has no value in the samples: its type is a guess")
            return "string"
        (kind, _), *others = kinds.most_common()
        if others:
            found = ", ".join(f"{each} {count} times" for each, count in kinds.most_common())
            remarks.append(f"{place!a} has values of several types: {found}")
        if kind == "object":
            return self.struct(place, remarks)
        if kind == "array":
            element = (self.elements or _Seen()).declaration(f"{place}[]", remarks)
            return [element] if element != {} else ["string"]
        return kind


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "bigint" if value in _LONG else "decimal(38,0)"
        case float():
            return "double"
        case dict():
            return "object"
        case list():
            return "array"
    return next((kind for kind, form in _TEXTS if form.holds([value])), "string")


def _joined(kinds: Counter[str]) -> Counter[str]:
    """The kinds but null, each of numbers and texts by the one that includes the others: `double`, `string`."""
    found = Counter({kind: count for kind, count in kinds.items() if kind != "null"})
    for widening in (("double", "decimal(38,0)", "bigint"), ("string", "timestamp", "date")):
        present = [kind for kind in widening if kind in found]
        if len(present) > 1:
            wide = "string" if "date" in present else present[0]
            found[wide] = sum(found.pop(kind) for kind in present)
    return found
