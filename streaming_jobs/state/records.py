"""Records in the state folder: small objects of JSON with the number of their format, whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from streaming_jobs.errors import PreflightRefused, RecourseError
from streaming_jobs.storage.object_files import Found, ObjectHandle

_FORMAT = 1
_Record = TypeVar("_Record")


def read_record(
    handle: ObjectHandle,
    build: Callable[[dict[str, Any]], _Record],
    damaged: Callable[[Exception], RecourseError],
    newer: type[RecourseError] = PreflightRefused,
) -> _Record | None:
    """The record that `build` makes of an object's JSON, or None if there is no object.

    Raises `newer` for a record of a newer version, and the error `damaged` for one that cannot be read.
    """
    found = handle.read()
    return None if found is None else parsed_record(handle, found, build, damaged, newer)


def parsed_record(
    handle: ObjectHandle,
    found: Found,
    build: Callable[[dict[str, Any]], _Record],
    damaged: Callable[[Exception], RecourseError],
    newer: type[RecourseError] = PreflightRefused,
) -> _Record:
    """The record in an object that was read; raises as `read_record` does."""
    try:
        value = json.loads(found.data)
        if value.pop("format") != _FORMAT:
            raise newer(f"{handle} was written by a newer version", "use the newer recourse-streams")
        return build(value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(error) from error


def record_bytes(value: Mapping[str, Any], form: int = _FORMAT) -> bytes:
    """A record as the content of its object."""
    return json_bytes({"format": form, **value})


def json_bytes(value: Any) -> bytes:
    """A JSON value as the content of an object."""
    return json.dumps(value, indent=1).encode()
