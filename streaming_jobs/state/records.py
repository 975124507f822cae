"""Records in the state folder: small files of one JSON object with the number of their format, whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from streaming_jobs.errors import PreflightRefused, RecourseError
from streaming_jobs.platform.files import write_json

_FORMAT = 1
_Record = TypeVar("_Record")


def read_record(
    path: Path,
    build: Callable[[dict[str, Any]], _Record],
    damaged: Callable[[Exception], RecourseError],
    newer: type[RecourseError] = PreflightRefused,
) -> _Record | None:
    """The record that `build` makes of the object in a file, or None if there is no file.

    Raises `newer` for a record of a newer version, and the error `damaged` for one that cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.pop("format") != _FORMAT:
            raise newer(f"{path} was written by a newer version", "use the newer recourse-streams")
        return build(value)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(error) from error


def write_record(path: Path, value: Mapping[str, Any]) -> None:
    """Write the record into an existing folder; it is on disk when this returns."""
    write_json(path, {"format": _FORMAT, **value})
