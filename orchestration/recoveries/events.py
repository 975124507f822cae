"""What the process of a recovery reports: one event per line of JSON on its standard output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reprocessing.stages.recovery import StageBegun


@dataclass(frozen=True)
class PlanShown:
    """The plan that the process made, or works on: its text, its target, its streams, and its folder."""

    plan: str
    text: str
    target: str
    streams: list[str]
    folder: str
    records: int = 0
    undoes: str | None = None


@dataclass(frozen=True)
class Progress:
    """Records that the replay of a stream has read, of all that it will read."""

    stream: str | None
    done: int
    total: int


@dataclass(frozen=True)
class Said:
    text: str


@dataclass(frozen=True)
class ChangedTable:
    """What the recovery changes in a table, in rows; `lines` say it in words, with some of the rows."""

    table: str
    published: int
    rebuilt: int
    corrected: int
    new: int
    gone: int
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OffsetSpan:
    """Offsets of a partition that were replayed or skipped: `end` is the offset after the last one."""

    stream: str
    topic: str
    partition: int
    begin: int
    end: int


@dataclass(frozen=True)
class Ended:
    """The end in order: the plan's outcome, the streams' generations, and the offsets that were replayed or skipped."""

    plan: str
    outcome: str
    generations: dict[str, int] = field(default_factory=dict)
    spans: list[OffsetSpan] = field(default_factory=list)
    skips: bool = False


@dataclass(frozen=True)
class Failed:
    """The end by an error: its code, the fact, the next step."""

    code: str
    found: str
    next: str = ""


Event = PlanShown | StageBegun | Progress | Said | ChangedTable | Ended | Failed

_KINDS: Mapping[str, type[Any]] = {
    "plan": PlanShown,
    "stage": StageBegun,
    "progress": Progress,
    "text": Said,
    "change": ChangedTable,
    "ended": Ended,
    "failed": Failed,
}


def encode(event: Event) -> bytes:
    name = next(name for name, kind in _KINDS.items() if isinstance(event, kind))
    return json.dumps({"event": name, **asdict(event)}, default=str).encode() + b"\n"


def decode(line: bytes) -> Event:
    """The event of a line; a line that is none, of a library for example, is text."""
    try:
        value = json.loads(line)
        kind = _KINDS[value.pop("event")]
        if kind is Ended:
            value["spans"] = [OffsetSpan(**span) for span in value["spans"]]
        event: Event = kind(**value)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Said(line.decode("utf-8", "replace").strip())
    return event
