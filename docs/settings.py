"""Writes docs/settings.md from the settings' own model: `python docs/settings.py`. A test compares the two."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from streaming_jobs.settings import ClusterSettings, Settings, StreamSettings
from streaming_jobs.text.durations import format_duration

PAGE = Path(__file__).with_suffix(".md")
FIRST = "0.1"
_OPENING = """# Settings

<!-- Written by docs/settings.py. Change streaming_jobs/settings_*.py, then run: python docs/settings.py -->

Every setting, with its allowed values. The last of these sources that sets a value wins:

1. the default;
2. `recourse.toml` in the working directory or the nearest folder above: `[stream]` and below it
   `trigger = "every 10 seconds"`. Relative paths in the file, and the default home, are relative to its folder.
   `pyproject.toml` is such a file if it has a table `[tool.recourse]`, with sections such as `[tool.recourse.stream]`;
   both in one folder are refused. `--config FILE` or the variable `RECOURSE_CONFIG` names another file, which has to
   exist;
3. the environment: `RECOURSE_` and the key in capitals, two underscores for a dot: `RECOURSE_STREAM__TRIGGER`;
4. the command line: `recourse --set stream.trigger='every 10 seconds' ...`.

`recourse config show` prints every setting, its value, and the source of the value. An unknown name is an error, which
suggests the nearest setting. A duration is one or more numbers with units: `500 ms`, `90 seconds`, `1 hour 30 minutes`,
`2 days`. A list from the environment or the command line is JSON; a text without brackets is its only item. Recourse
ignores the variables that Kubernetes sets for a service named `recourse` (`RECOURSE_PORT`, `RECOURSE_SERVICE_HOST`).
*Since* is the first version that has the setting.
"""
_OF_SECTION = {
    "stream": """
The section `[streams.NAME]` takes the same keys as `[stream]` for one stream: `streams.airport_hours.trigger`. Keys
that it leaves out come from `[stream]`. `NAME` has to be the name of a declared stream.
""",
    "kafka": """
The section `[kafka.clusters.NAME]` takes the same keys, without `group_prefix`, for a further cluster
([kafka.md](kafka.md#several-clusters)): `kafka.clusters.eu.bootstrap_servers`. Nothing comes from `[kafka]`.
""",
}
_TEXT_VALUES = {
    "start": "`earliest`, `latest`, a time with its zone",
    "trigger": "`continuous`, `available-now`, `every` and a duration",
    "home": "a path",
}


def page() -> str:
    """The whole page."""
    parts = [_OPENING, "\n## At the top\n\n", _table("", [s for s in _settings(Settings) if not _section(s[1])])]
    for name, field in _settings(Settings):
        if (section := _section(field)) is not None:
            parts.append(f"\n## `[{name}]`\n\n{' '.join((section.__doc__ or '').split())}\n\n")
            parts.append(_table(f"{name}.", list(_settings(section))))
            parts.append(_OF_SECTION.get(name, ""))
    return "".join(parts)


def _settings(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if field.annotation not in (dict[str, StreamSettings], dict[str, ClusterSettings]):  # `_OF_SECTION` has them
            yield name, field


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _table(prefix: str, settings: list[tuple[str, FieldInfo]]) -> str:
    rows = ["| setting | allowed | default | meaning | since |", "|---|---|---|---|---|"]
    for name, field in settings:
        extra = field.json_schema_extra
        since = str(extra.get("since", FIRST)) if isinstance(extra, dict) else FIRST
        cells = (
            f"`{prefix}{name}`",
            _allowed(name, field),
            _default(field),
            (field.description or "").replace("<", "&lt;"),
            since,
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _allowed(name: str, field: FieldInfo) -> str:
    if name in _TEXT_VALUES:
        return _TEXT_VALUES[name]
    kind = _without_none(field.annotation)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list and get_origin(item := get_args(kind)[0]) is Literal:
        return "a list of " + ", ".join(f"`{value}`" for value in get_args(item))
    words = {
        bool: "`true`, `false`",
        int: "a whole number",
        float: "a number",
        timedelta: "a duration",
        Path: "a path",
        str | Path: "a path or a URL",
        str: "text",
        SecretStr: "text",
        list[str]: "a list of texts",
        list[SecretStr]: "a list of texts",
        dict[str, str]: "names and texts",
    }[kind]
    bounds = []
    for rule in field.metadata:
        for sign, attribute in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
            if (bound := getattr(rule, attribute, None)) is not None:
                bounds.append(f"{sign} {bound:,}" if isinstance(bound, int) else f"{sign} {bound}")
    return ", ".join((words, *bounds))


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, timedelta):
        return f"`{format_duration(value)}`"
    if value is None or value in ("", {}, []) or isinstance(value, SecretStr):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`{json.dumps(value)}`"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
