"""Named savepoints: one savepoint of each of several streams, under a name that a person has given them.

    <state>/_savepoints/before-release.json      the streams, and the savepoint that each of them has

The file is written when all of its savepoints exist, and it alone makes the name: a kill before it leaves savepoints
without a name, which are dropped with age. As long as the name holds them, nothing drops them: retention decides under
the same lock (`only_one`) under which a name is written.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from streaming_jobs.errors import PreflightRefused, TransientError, UsageError
from streaming_jobs.platform.files import private_folder, remove_files, write_json
from streaming_jobs.settings import Settings

FORMAT = 1
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")
_OF_ONE = re.compile(r"g\d+-b\d+")


@dataclass(frozen=True)
class NamedSavepoint:
    """The savepoint of each stream, by the stream's name; times in seconds since 1970.

    Its savepoints are retained until `until`, or, if that is None, until the name is dropped.
    """

    name: str
    note: str
    taken_at: float
    until: float | None
    streams: Mapping[str, str]

    def holds(self, now: float) -> bool:
        """True if it still retains its savepoints."""
        return self.until is None or now < self.until


def checked(name: str) -> str:
    """The name; raises UsageError if it cannot be one of several streams' savepoints."""
    if not _NAME.fullmatch(name) or _OF_ONE.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot name a savepoint of several streams",
            "use a letter, then letters, digits, '.', '_' and '-', 63 at most, and not the form g0001-b000000041",
        )
    return name


def named(settings: Settings) -> list[NamedSavepoint]:
    """All of them, oldest first; raises PreflightRefused for a damaged file."""
    found = (_load(path) for path in _folder(settings).glob("[!.]*.json"))
    return sorted((each for each in found if each is not None), key=lambda each: (each.taken_at, each.name))


def find(settings: Settings, name: str) -> NamedSavepoint | None:
    return _load(_path(settings, name)) if _NAME.fullmatch(name) else None


def of_stream(settings: Settings, stream: str) -> dict[str, NamedSavepoint]:
    """Those that have a savepoint of the stream, by name."""
    return {each.name: each for each in named(settings) if stream in each.streams}


def held(settings: Settings, stream: str) -> set[str]:
    """The savepoints of one stream that names retain now."""
    now = time.time()
    return {each.streams[stream] for each in named(settings) if stream in each.streams and each.holds(now)}


def save(settings: Settings, made: NamedSavepoint) -> None:
    """Write a name; on disk when this returns. The caller holds `only_one`."""
    private_folder(_folder(settings))
    write_json(_path(settings, made.name), {"format": FORMAT, **asdict(made)})


def remove(settings: Settings, name: str) -> None:
    """Remove a name; on disk when this returns. Its savepoints are no longer retained."""
    list(remove_files(_path(settings, name)))


@contextmanager
def only_one(settings: Settings, wait: float = 60.0) -> Iterator[None]:
    """Hold the lock of names and retention; it ends with us. Raises TransientError after `wait` seconds."""
    descriptor = os.open(private_folder(settings.state), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until = time.monotonic() + wait
    try:
        while not _locked(descriptor):
            if time.monotonic() > until:
                raise TransientError("another process holds the names of savepoints", "try again when it is done")
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder(settings: Settings) -> Path:
    return settings.state / "_savepoints"


def _path(settings: Settings, name: str) -> Path:
    return _folder(settings) / f"{name}.json"


def _load(path: Path) -> NamedSavepoint | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.pop("format") != FORMAT:
            raise UsageError(f"{path} was written by a newer version", "use the newer recourse-streams")
        return NamedSavepoint(**value)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightRefused(
            f"{path} cannot be read: {error}", "put it back from a copy, or remove it: the name is then gone"
        ) from error
