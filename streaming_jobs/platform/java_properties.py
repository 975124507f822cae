"""Text of Java's properties files, for any value: paths with accents, backslashes, several lines."""

from __future__ import annotations

from collections.abc import Mapping

_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}


def as_properties(values: Mapping[str, str]) -> str:
    """The text of a Java properties file."""
    return "".join(f"{_escaped_key(key)}={_escaped(value)}\n" for key, value in values.items())


def _escaped_key(key: str) -> str:
    return "".join(f"\\{c}" if c in " \t=:#!" else c for c in _escaped(key))


def _escaped(value: str) -> str:
    # Java reads a properties file as Latin-1; a home folder may have any name. Blanks in front would be skipped.
    text = "".join(_ESCAPES.get(c, c) for c in value)
    indent = "\\" if text[:1].isspace() else ""
    return indent + "".join(c if c.isascii() else "".join(f"\\u{unit:04x}" for unit in _utf16(c)) for c in text)


def _utf16(character: str) -> list[int]:
    data = character.encode("utf-16-be")
    return [int.from_bytes(data[i : i + 2]) for i in range(0, len(data), 2)]
