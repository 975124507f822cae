"""Objects of the state as files, for tests that damage them."""

from __future__ import annotations

from pathlib import Path

from streaming_jobs.storage.object_files import ObjectHandle


def path_of(handle: ObjectHandle) -> Path:
    """The file of an object in a folder."""
    return Path(str(handle))
