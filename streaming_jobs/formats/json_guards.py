"""Faults of a JSON record that msgspec does not see: bytes in what it skips, depth. And the words of those it sees."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from streaming_jobs.formats.utf8 import joined, not_utf8, utf8_refusal
from streaming_jobs.record_format import Refusal

MAX_DEPTH = 200
"""Objects and arrays within each other; a deeper record is refused."""

_SPACE = b" \t\n\r"
_DEEP_BYTES = 2 * (MAX_DEPTH + 1)  # the shortest record that can be too deep
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_OTHER_THAN_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_TOO_DEEP = Refusal("malformed_json", f"objects and arrays are nested deeper than {MAX_DEPTH}")
_HALF = Refusal("malformed_json", "JSON is malformed: an escape is half of a surrogate pair")
_EMPTY = Refusal("empty_value", "the value is null, empty or blank")


def unseen_faults(values: Sequence[bytes | None]) -> dict[int, Refusal]:
    """The refusals of values that msgspec has decoded although they are bad, by index; None for those it has refused.

    The block is looked at as a whole first; for a good one this costs a few nanoseconds per record.
    """
    refusals = not_utf8(values, joined(values))
    if max(map(len, filter(None, values)), default=0) >= _DEEP_BYTES:
        long = ((i, value) for i, value in enumerate(values) if value is not None and len(value) >= _DEEP_BYTES)
        refusals |= {i: _TOO_DEEP for i, value in long if too_deep(value)}
    return refusals


def refusal_of(value: bytes | None, error: Exception) -> Refusal:
    """The refusal of a value that msgspec has not decoded, from what it raised."""
    if not value or not value.strip(_SPACE):
        return _EMPTY
    if isinstance(error, RecursionError):
        return utf8_refusal(value) or _TOO_DEEP
    words = str(error)
    if words.startswith("Input data was truncated") and half_of_a_pair(value):
        return utf8_refusal(value) or _HALF  # msgspec misses the second half, not the end of the record
    return utf8_refusal(value) or Refusal(_reason(words), words)


def half_of_a_pair(value: bytes) -> bool:
    r"""True for a value with an escape such as `\ud83d` without its second half."""
    return _SURROGATE.search(_PAIR.sub(b" ", value.replace(rb"\\", b"  "))) is not None


def too_deep(value: bytes) -> bool:
    """True for a record, otherwise well-formed, that is nested deeper than allowed."""
    if value.count(b"[") + value.count(b"{") <= MAX_DEPTH:
        return False
    brackets = np.frombuffer(_STRING.sub(b"", value).translate(None, _OTHER_THAN_BRACKETS), np.uint8)
    opening = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.where(opening, 1, -1).cumsum().max()) > MAX_DEPTH


def _reason(words: str) -> str:
    """The reason in msgspec's words; these are pinned by tests, as is its version by the project."""
    if words.startswith("JSON is malformed: trailing characters"):
        return "trailing_data"
    if words.startswith(("JSON is malformed", "Input data was truncated")):
        return "malformed_json"
    if words.startswith("Object missing required field"):
        return "missing_field"
    if " - at `$" not in words:
        return "not_an_object"
    return "missing_field" if re.match("Expected `[^`]*`, got `null`", words) else "wrong_type"
