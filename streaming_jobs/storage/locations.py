"""Locations of tables and state: a folder of a file system, or a prefix of an object store.

A `Location` is a `Path` or a `StorePath`. Both have the methods that reading a table needs, so most code takes either;
what only a file system has (links, locks, fsync, inodes) is behind `isinstance(location, Path)`. Delta tables are
opened by `delta_table`, which gives deltalake the options of the store.

`obstore` and deltalake are faces of one crate (object_store): they take the same options and find credentials in the
same way, in the environment of the process, so no location, plan or log has any.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast
from urllib.parse import urlsplit

from streaming_jobs.storage.files import link_as_new, private_folder, sync_tree

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from obstore.store import ObjectStore

Options: TypeAlias = tuple[tuple[str, str], ...]
"""Options of a store as pairs, none of them a secret (`StorageSettings.options`)."""


@dataclass(frozen=True)
class Status:
    """Bytes and time of change (seconds since 1970) of an object; the names are those of `os.stat_result`."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True)
class StorePath:
    """An object of a store, or a prefix of objects, by its URL. Picklable: an executor opens the store itself."""

    url: str
    options: Options = ()

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: object) -> StorePath:
        """The location below; the name takes the place of a `*`, as in `s3://lake/tables/*/staged`."""
        below = str(name).strip("/")
        if "*" in self.url:
            return StorePath(self.url.replace("*", below), self.options)
        return StorePath(f"{self.url}/{below}" if below else self.url, self.options)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> StorePath:
        return StorePath(self.url.rpartition("/")[0], self.options)

    def relative_to(self, other: object) -> PurePosixPath:
        """The path below another location; raises ValueError if this one is not below it."""
        above = f"{other}/"
        if not self.url.startswith(above):
            raise ValueError(f"{self.url} is not below {other}")
        return PurePosixPath(self.url.removeprefix(above))

    @property
    def key(self) -> str:
        """The name in the bucket."""
        return self.url.removeprefix(self.bucket).lstrip("/")

    @property
    def bucket(self) -> str:
        """The URL of the bucket or container."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def store(self) -> ObjectStore:
        return _store(self.bucket, self.options)

    def exists(self) -> bool:
        """True for an object, and for a prefix with an object below it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        return next(_listed(self, chunk=1), None) is not None

    def stat(self) -> Status:
        """Raises FileNotFoundError, as every read does."""
        import obstore

        with _asked(self):
            return _status(obstore.head(self.store, self.key))

    def read_bytes(self) -> bytes:
        import obstore

        with _asked(self):
            return bytes(obstore.get(self.store, self.key).bytes())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Write the object, in place of an older one."""
        import obstore

        with _asked(self):
            obstore.put(self.store, self.key, data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; stores do not say whether there was one, so without `missing_ok` it is looked for."""
        import obstore

        if not missing_ok:
            self.stat()
        with _asked(self):
            obstore.delete(self.store, self.key)

    def iterdir(self) -> Iterator[StorePath]:
        """The objects and prefixes one level below."""
        import obstore

        with _asked(self):
            found = obstore.list_with_delimiter(self.store, self.key or None)
        for key in (*found["common_prefixes"], *(each["path"] for each in found["objects"])):
            yield self / key.rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """The objects and prefixes one level below whose names match."""
        return (each for each in self.iterdir() if fnmatchcase(each.name, pattern))


_AT_A_TIME = 16
"""Copies that a store makes at a time."""
_PER_REQUEST = 1_000
"""Objects that S3 deletes in one request."""
Location: TypeAlias = Path | StorePath


def path_below(location: Location, root: Location) -> str:
    """The path of a location below another one."""
    return str(location).removeprefix(f"{root}/")


def at(text: str | Path, options: Mapping[str, str]) -> StorePath:
    """The location that a URL names, with the options of its store."""
    return StorePath(str(text).rstrip("/"), tuple(sorted(options.items())))


def delta_table(location: Location, version: int | None = None) -> DeltaTable:
    """Open a Delta table; raises deltalake's TableNotFoundError if there is none."""
    from deltalake import DeltaTable

    return DeltaTable(str(location), version, delta_options(location))


def delta_options(location: Location) -> dict[str, str] | None:
    """What deltalake takes as `storage_options`."""
    return None if isinstance(location, Path) else dict(location.options)


def files_below(location: Location) -> Iterator[tuple[str, Status | os.stat_result]]:
    """All files below a location, by their path relative to it; none if it does not exist.

    One that is removed meanwhile may be missing.
    """
    if isinstance(location, StorePath):
        for found in _listed(location):
            yield found["path"].removeprefix(f"{location.key}/"), _status(found)
        return
    for folder, _, names in os.walk(location):
        for name in names:
            path = Path(folder) / name
            try:
                yield path.relative_to(location).as_posix(), path.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue


def folders_beginning(location: Location, prefix: str) -> list[Location]:
    """The folders one level below whose names begin so; a store lists nothing that comes before them."""
    if isinstance(location, Path):
        return [*location.glob(f"{prefix}*")]
    import obstore

    names: dict[str, None] = {}
    with _asked(location):
        for found in obstore.list(location.store, f"{location.key}/", offset=f"{location.key}/{prefix}"):
            below = [each["path"].removeprefix(f"{location.key}/").partition("/")[0] for each in found]
            names |= dict.fromkeys(name for name in below if name.startswith(prefix))
            if not below[-1].startswith(prefix):
                break
    return [location / name for name in names]


def remove_tree(location: Location) -> None:
    """Remove everything below a location; what cannot be removed stays."""
    if isinstance(location, Path):
        shutil.rmtree(location, ignore_errors=True)
        return
    assert "*" not in location.url, "of these tables each has a location of its own"
    remove_files([location / name for name, _ in files_below(location)])


def remove_files(files: Sequence[Location], check: Callable[[], object] = lambda: None) -> None:
    """Remove files of one folder or one bucket, also if some are gone; `check` comes before each thousand.

    In order, but on a store a thousand at a time: that is one request to S3.
    """
    for first in range(0, len(files), _PER_REQUEST):
        check()
        keys = []
        for file in files[first : first + _PER_REQUEST]:
            if isinstance(file, Path):
                file.unlink(missing_ok=True)
            else:
                keys.append(file.key)
        if keys and isinstance(place := files[first], StorePath):
            import obstore

            with _asked(place):
                obstore.delete(place.store, keys)


def shared_root(location: Location) -> Location:
    """The location that all tables of a location have in common: of `s3://lake/tables/*/staged`, `s3://lake/tables`.

    An object that is no table's, such as a probe, is written here: a name below the `*` would be a table's name.
    """
    if isinstance(location, Path) or "*" not in location.url:
        return location
    return StorePath(location.url.partition("*")[0].rstrip("/"), location.options)


def made_folder(location: Location) -> Location:
    """The location, made for this user alone if it is a folder that is not there (`private_folder`)."""
    return private_folder(location) if isinstance(location, Path) else location


def placed(source: Location, target: Location) -> None:
    """Give a file a second name that is as old as now (`link_as_new`); on a store the object is copied there."""
    if isinstance(source, Path) and isinstance(target, Path):
        link_as_new(source, target)
        return
    assert isinstance(source, StorePath)
    assert isinstance(target, StorePath)
    if source != target:
        copy_object(source, target)


def moved(source: Location, target: Location) -> Location:
    """Move a file, and make the folders above it; on a store, copy it and delete the old one. Returns `target`."""
    if isinstance(source, Path) and isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        return source.replace(target)
    assert isinstance(source, StorePath)
    assert isinstance(target, StorePath)
    copy_object(source, target)
    source.unlink(missing_ok=True)
    return target


@contextmanager
def local_scratch(location: Location) -> Iterator[Path]:
    """A folder for scratch files of a location: below it, or, since a store has no folders, a temporary one."""
    folder = location if isinstance(location, Path) else Path(mkdtemp(prefix="recourse-"))
    try:
        yield folder
    finally:
        if not isinstance(location, Path):
            remove_tree(folder)


def sync_location(location: Location) -> None:
    """Have everything below a location on disk; a store has it already."""
    if isinstance(location, Path):
        sync_tree(location)


def copy_objects(source: StorePath, target: StorePath, names: Iterable[str]) -> None:
    """Copy objects below one prefix to another one, several at a time."""
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="copies") as threads:
        list(threads.map(lambda name: copy_object(source / name, target / name), names))


def copy_object(source: StorePath, target: StorePath) -> None:
    """Copy an object within its bucket; the store does it itself."""
    import obstore

    with _asked(source):
        obstore.copy(source.store, source.key, target.key)


def opened_for_reading(location: Location) -> Path | BinaryIO:
    """What pyarrow reads a file from."""
    if isinstance(location, Path):
        return location
    import obstore

    with _asked(location):
        return cast("BinaryIO", _Reader(obstore.open_reader(location.store, location.key)))


def opened_for_writing(location: Location) -> Path | BinaryIO:
    """What pyarrow writes a new file to; the folders above are made.

    The caller closes what is no path: an object is there, whole, once it was closed.
    """
    if isinstance(location, Path):
        location.parent.mkdir(parents=True, exist_ok=True)
        return location
    import obstore

    return cast("BinaryIO", _Writer(obstore.open_writer(location.store, location.key)))


class _Reader(io.RawIOBase):
    """An object as pyarrow reads a file: obstore's reader lacks attributes that pyarrow looks for."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        return bytes(self._file.readall() if size < 0 else self._file.read(size))


class _Writer(io.RawIOBase):
    """A new object as pyarrow writes a file; whole once it was closed, absent if it never was."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        return len(memoryview(data).cast("B"))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def __del__(self) -> None:
        """An object that was not closed is given up: the base class would close it, and so make half of it visible."""


def _listed(location: StorePath, chunk: int = 1000) -> Iterator[Any]:
    import obstore

    with _asked(location):
        for found in obstore.list(location.store, (location.key and f"{location.key}/") or None, chunk_size=chunk):
            yield from found


@contextmanager
def _asked(location: StorePath) -> Iterator[None]:
    from streaming_jobs.storage.object_store import asked

    with asked(location.url):
        yield


def _status(found: Any) -> Status:
    return Status(int(found["size"]), found["last_modified"].timestamp())


@cache
def _store(bucket: str, options: Options) -> ObjectStore:
    from streaming_jobs.storage.object_store import open_store

    return open_store(bucket, dict(options)).store
