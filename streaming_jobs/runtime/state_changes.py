"""The difference of two states, in words: `window of at: 5 minutes -> 15 minutes; new: max(amount) AS m`.

Works on fingerprints (`query_plan.state_fingerprint`), which are the text of Spark's plan: thousands of characters for
a window, in which perhaps one number has changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.runtime.spark_plan import EMIT, INPUT, MULTIPLIED, comparable, parts
from streaming_jobs.text import commands

_AGGREGATE = re.compile(r"(\w+) \[(.*?)\], \[(.*)\]", re.DOTALL)
_NAMED = re.compile(r"(.*) AS (\S+)", re.DOTALL)
_LITERAL = re.compile(r"cast\((-?[\d.]+) as \w+\)")
_CONVERTED = re.compile(r"precisetimestampconversion\(([^(),]+), TimestampType, LongType\)")
_SLIDE, _LENGTH = re.compile(r"% (\d+)\)"), re.compile(r"- \d+\) \+ (\d+)")
_GAP = re.compile(r"\+ cast\(([^()]+) as interval\)")
_LONGEST, _LONGEST_OF_ALL = 80, 600
_UNITS = (("day", 86_400_000_000), ("hour", 3_600_000_000), ("minute", 60_000_000), ("second", 1_000_000))


ChangeKind = Literal["harmless", "state fits", "state has to be rebuilt", "known after a preview"]


@dataclass(frozen=True)
class StateChange:
    """The class of a change of a stream's code, by what it means for the state that the stream has, and why.

    | class | the state |
    |---|---|
    | harmless | there is none, or the new code builds the same one from the same values |
    | state fits | the new code continues it; what earlier records have put there stays as earlier code computed it |
    | state has to be rebuilt | Spark refuses it for the new code, or would give it, or a position, another meaning |
    | known after a preview | Spark did not plan the new code beforehand |
    """

    kind: ChangeKind
    why: str


OTHER_STATE = "the state of stream "


def other_state(stream: str, changes: str, rebuild: str = "") -> PreflightRefused:
    """The refusal of a start whose state does not fit; its text begins with `OTHER_STATE`.

    `rebuild` is the step that rebuilds the tables; empty: a recovery.
    """
    return PreflightRefused(
        f"{OTHER_STATE}{stream} was built by another aggregation: {changes}",
        f"take the change back, or rebuild the tables: {rebuild or commands.plan(stream, to_batch=-1)}",
    )


def classified(before: Mapping[str, str], after: Mapping[str, str], refusal: str) -> StateChange:
    """The class of the change between two fingerprints; `refusal`: why Spark refuses the state, if it does."""
    if words := differences(before, after) or refusal:
        return StateChange("state has to be rebuilt", words)
    if not after:
        return StateChange("harmless", "the stream keeps no state; earlier rows stay as they are")
    if INPUT in before and before[INPUT] == after.get(INPUT):
        return StateChange("harmless", "the state is built from the same values as before")
    reason = "what the state is made of has changed" if INPUT in before else "how it was made is not recorded"
    return StateChange("state fits", f"{reason}: earlier records stay in it as the earlier code computed them")


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The changes from the first state to the second, in one line; empty if the states are the same.

    A fact that only one of two fingerprint schemes records is not a change.
    """
    before, after = comparable(before, after)
    if before == after:
        return ""
    if not before or not after:
        return "there was no state, and now there is" if after else "there was state, and now there is none"
    old, new = _labelled(before), _labelled(after)
    changes = [_changed(label, old[label], new[label]) for label in old if label in new and old[label] != new[label]]
    changes += [f"gone: {_alone(label, old[label])}" for label in old if label not in new]
    changes += [f"new: {_alone(label, new[label])}" for label in new if label not in old]
    words = "; ".join(dict.fromkeys(changes)) or _first_difference(before, after)
    return words if len(words) <= _LONGEST_OF_ALL else words[:_LONGEST_OF_ALL] + " ..."


def _labelled(state: Mapping[str, str]) -> dict[tuple[str, str, str], str]:
    """The parts of a state: (operator, kind of part, its name) -> its definition."""
    by_label: dict[tuple[str, str, str], str] = {}
    for index, text in state.items():
        if index == EMIT:
            by_label[(EMIT, EMIT, "")] = text
            continue
        if index == MULTIPLIED:
            by_label |= {(index, kind, name): value for kind, name, value in map(_definition, text.split("; "))}
            continue
        node, *definitions = text.split("; ")
        for kind, name, value in (*_node(node), *map(_definition, definitions)):
            by_label[(index, kind, name)] = value
    return by_label


def _node(text: str) -> Iterator[tuple[str, str, str]]:
    if (match := _AGGREGATE.fullmatch(text)) and match[1] == "Aggregate":
        keys = match[2]
        yield "operator", "", "Aggregate"
        yield "keys", "", keys
        for part in (part.strip() for part in parts(match[3])):
            if named := _NAMED.fullmatch(part):
                yield "output", named[2], part
        return
    name, _, rest = text.partition(" ")
    yield "operator", "", name
    if rest:
        yield "of", "", rest


def _definition(text: str) -> tuple[str, str, str]:
    named = _NAMED.fullmatch(text)
    if named is None:
        return "part", text, text
    value, name = named[1], named[2]
    if name in ("window", "session_window") and (column := _CONVERTED.search(value)):
        return "window", f"{name} of {column[1]}", _window(value)
    value = _LITERAL.sub(r"\1", value)
    return "made of", name, value[1:-1] if value.startswith("(") and value.endswith(")") else value


def _window(text: str) -> str:
    if gap := _GAP.search(text):
        return gap[1]
    slide, length = _SLIDE.search(text), _LENGTH.search(text)
    if slide is None:
        return "of another kind"
    each = _span(int(slide[1]))
    return each if length is None or length[1] == slide[1] else f"{_span(int(length[1]))} each {each}"


def _span(microseconds: int) -> str:
    for unit, size in _UNITS:
        if microseconds % size == 0:
            number = microseconds // size
            return f"{number} {unit}{'' if number == 1 else 's'}"
    return f"{microseconds / 1_000_000:g} seconds"


def _changed(label: tuple[str, str, str], old: str, new: str) -> str:
    _, kind, name = label
    old, new = _around(old, new)
    start = {"keys": "grouped by ", "window": f"{name}: ", "made of": f"{name}: ", EMIT: "emit: "}.get(kind, "")
    return f"{start}{old} -> {new}"


def _alone(label: tuple[str, str, str], value: str) -> str:
    _, kind, name = label
    if kind == "window":
        return f"{name}, {value}"
    text = {"made of": f"{name} = {value}", "keys": f"grouped by {value}"}.get(kind, value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _around(old: str, new: str) -> tuple[str, str]:
    """Both texts; of long ones only the part in which they begin to differ."""
    if max(len(old), len(new)) <= _LONGEST:
        return old, new
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    first = max(same - _LONGEST // 2, 0)
    cut = [
        ("... " if first else "") + text[first : first + _LONGEST] + (" ..." if len(text) > first + _LONGEST else "")
        for text in (old, new)
    ]
    return cut[0], cut[1]


def _first_difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The place where the texts begin to differ, for states whose parts read the same."""
    old, new = ("; ".join(f"{key}: {text}" for key, text in state.items()) for state in (before, after))
    return " -> ".join(_around(old, new))
