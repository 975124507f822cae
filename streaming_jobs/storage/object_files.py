"""Small objects under names, in a folder of this machine or in an object store: the seam of all state but Spark's.

An object is whole or absent, and durable once a write has returned. A writer that relies on what it has read gives the
`tag` of its read back to `replace`, which refuses if another write came between. There is no rename, no append, no
folder and no lock: stores have none of them.

A store may lose the answer to a write, and its client then repeats the request. A refusal is therefore checked: if the
object holds exactly the written bytes, the write has succeeded. So two writers that compete for a name never write the
same bytes: competing contents hold a nonce or a counter. Nobody writes an empty object: stores have no conditional
delete, and there an empty object is one that was deleted under its tag.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.storage.files import overwritten, private_folder, sync
from streaming_jobs.storage.locks import lock
from streaming_jobs.storage.log_stream import disk_is_full


class AlreadyThere(TransientError):
    """An object of that name exists."""


class Changed(TransientError):
    """The object was written or deleted after the read whose tag was given."""


class Unreadable(PermissionError):
    """A file that this user may not read, though perhaps remove: it has a tag and a time, as in `Found`."""

    tag: str
    at: float


@dataclass(frozen=True)
class Found:
    """The content of an object, the tag of the write that made it, and its time, seconds since 1970.

    The time is by the clock of the store, or of this machine for a folder.
    """

    data: bytes
    tag: str
    at: float


class ObjectFiles(Protocol):
    """Objects below one root. Names have segments between slashes; a name is valid if `checked` returns it.

    Each method raises TransientError if the store does not answer, and ConfigurationError if it refuses access; in a
    folder, an OSError.
    """

    def read(self, name: str) -> Found | None:
        """The object, if there is one; raises Unreadable for another user's file."""
        ...

    def create(self, name: str, data: bytes) -> str:
        """Write an object that does not exist yet, and return its tag; raises AlreadyThere."""
        ...

    def replace(self, name: str, data: bytes, tag: str) -> str:
        """Write the object if `tag` is still that of its content, and return the new tag; raises Changed."""
        ...

    def put(self, name: str, data: bytes, *, durable: bool = True) -> str:
        """Write the object whatever it holds, and return its tag.

        Without `durable`, a folder's file may not survive a power cut; and on a full disk it is overwritten in the
        blocks that it has, so that a reader may see a mixture.
        """
        ...

    def delete(self, name: str, tag: str | None = None) -> None:
        """Remove the object if it exists; with `tag`, only that content: raises Changed if there is another."""
        ...

    def folders(self, prefix: str = "") -> list[str]:
        """The first segment, after the prefix, of the names that have further ones; sorted."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects in the folder `prefix` and below it, sorted; each name includes the prefix."""
        ...

    def below(self, prefix: str) -> ObjectFiles:
        """The objects in the folder `prefix` and below it, under names without the prefix."""
        ...

    def where(self, name: str = "") -> str:
        """The path or URL of an object, or of the root, for messages."""
        ...


def checked(name: str) -> str:
    """The name of an object; raises UsageError for one that could leave its root."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise UsageError(
            f"'{name}' is not the name of an object", "use segments between slashes, none empty, '.' or '..'"
        )
    return name


def content(data: bytes) -> bytes:
    """What a writer gives; raises ValueError if it is empty."""
    if not data:
        raise ValueError("an object is not empty")
    return data


@dataclass(frozen=True)
class ObjectHandle:
    """One object, under its name; the text is its path or URL."""

    files: ObjectFiles
    name: str

    def __str__(self) -> str:
        return self.files.where(self.name)

    def exists(self) -> bool:
        return self.read() is not None

    def read(self) -> Found | None:
        return self.files.read(self.name)

    def create(self, data: bytes) -> str:
        return self.files.create(self.name, data)

    def replace(self, data: bytes, tag: str) -> str:
        return self.files.replace(self.name, data, tag)

    def put(self, data: bytes, *, durable: bool = True) -> str:
        return self.files.put(self.name, data, durable=durable)

    def delete(self, tag: str | None = None) -> None:
        self.files.delete(self.name, tag)


_UNFINISHED = ".tmp~"
"""Ends the name of a file that is being written."""
_LOCKED_WITHIN = 60.0


@dataclass(frozen=True)
class LocalFiles:
    """Objects as files of a folder, for this user alone. Unfinished writes (`_UNFINISHED`) are no objects.

    Writes hold the lock of the file's folder while a complete file gets its name. They do not write in the meantime: a
    process that is suspended with the lock stops all writers of the folder.
    """

    root: Path

    def read(self, name: str) -> Found | None:
        path = self.root / checked(name)
        try:
            return _found(path)
        except PermissionError as error:
            refused = Unreadable(error.errno, error.strerror, str(path))
            status = path.stat()
            refused.tag, refused.at = _tag(status), status.st_mtime
            raise refused from error

    def create(self, name: str, data: bytes) -> str:
        path = self._path(name)
        with _written(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise AlreadyThere(f"{path} exists") from None
            tag = _tag(temporary.stat(), data)
        sync(path.parent)
        return tag

    def replace(self, name: str, data: bytes, tag: str) -> str:
        path = self.root / checked(name)
        with suppress(FileNotFoundError, NotADirectoryError), _written(path, data) as temporary:
            written = _tag(temporary.stat(), data)
            with _locked(path.parent):
                same = tag in _tags(path)
                if same:
                    temporary.replace(path)
            if same:
                sync(path.parent)
                return written
        raise Changed(f"{path} has changed, or it is gone")

    def put(self, name: str, data: bytes, *, durable: bool = True) -> str:
        path = self._path(name)
        try:
            with _written(path, data, durable=durable) as temporary:
                written = _tag(temporary.stat(), data)
                with _locked(path.parent):
                    temporary.replace(path)
        except OSError as error:
            if durable or not disk_is_full(error):
                raise
            with _locked(path.parent):
                if not overwritten(path, data):
                    raise
                return _tag(path.stat(), data)
        if durable:
            sync(path.parent)
        return written

    def delete(self, name: str, tag: str | None = None) -> None:
        path = self.root / checked(name)
        with suppress(FileNotFoundError, NotADirectoryError), _locked(path.parent):
            if tag is not None and tag not in _tags(path):
                raise Changed(f"{path} has changed")
            path.unlink()
            sync(path.parent)

    def folders(self, prefix: str = "") -> list[str]:
        top = self.root / checked(prefix) if prefix else self.root
        try:
            with os.scandir(top) as inside:
                return sorted(each.name for each in inside if each.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def names(self, prefix: str = "") -> list[str]:
        top = self.root / checked(prefix) if prefix else self.root
        found = []
        for folder, _, files in os.walk(top):
            inside = Path(folder).relative_to(self.root)
            found += [(inside / each).as_posix() for each in files if not each.endswith(_UNFINISHED)]
        return sorted(found)

    def below(self, prefix: str) -> LocalFiles:
        return LocalFiles(self.root / checked(prefix))

    def where(self, name: str = "") -> str:
        return str(self.root / name)

    def _path(self, name: str) -> Path:
        path = self.root / checked(name)
        private_folder(path.parent)
        return path


def _found(path: Path) -> Found | None:
    try:
        with path.open("rb") as file:
            data, status = file.read(), os.fstat(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Found(data, _tag(status, data), status.st_mtime)


def _tag(status: os.stat_result, data: bytes | None = None) -> str:
    """Inode and time tell writes of the same bytes apart; alone, as for an unreadable file, they could repeat soon."""
    content = "" if data is None else hashlib.blake2b(data, digest_size=12).hexdigest()
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{content}"


def _tags(path: Path) -> tuple[str, ...]:
    """The tags of a file; raises FileNotFoundError without one."""
    status = path.stat()
    try:
        return (_tag(status), _tag(status, path.read_bytes()))
    except PermissionError:
        return (_tag(status),)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raises FileNotFoundError or NotADirectoryError if there is none.

    Raises TransientError if another process has held the lock for `_LOCKED_WITHIN` seconds.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock(descriptor, _LOCKED_WITHIN):
            raise TransientError(
                f"another process has held the lock of {folder} for {_LOCKED_WITHIN:.0f} s",
                "continue or end the process that is suspended; `lslocks` names the processes that hold locks",
            )
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _written(path: Path, data: bytes, *, durable: bool = True) -> Iterator[Path]:
    """A hidden file beside `path` with the data (mode 0600); it is removed at the end if it still has that name."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content(data))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
