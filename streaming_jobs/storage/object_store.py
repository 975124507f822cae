"""Objects in S3, Google Cloud Storage or Azure, through `obstore`: the crate with which deltalake commits.

Every write is one request. Conditions are the store's own (`If-None-Match`, `If-Match`, generations), and `obstore`
repeats requests that fail with 5xx, for a bounded time.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from errno import ENOENT
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from streaming_jobs.errors import ConfigurationError, PermanentError, RecourseError, TransientError
from streaming_jobs.storage.object_files import AlreadyThere, Changed, Found, ObjectFiles, checked, content
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import ObjectStore

_OF_THE_CLIENT = ("allow_http", "timeout", "connect_timeout")
_RETRIES, _FIRST_DELAY, _LONGEST_DELAY = 6, timedelta(milliseconds=100), timedelta(seconds=2)
_MISSING = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_NO_CREDENTIALS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "Account must be specified")
_MISCONFIGURED = ("without LOCATION", "AuthorizationHeaderMalformed", "PermanentRedirect")


def open_store(url: str, options: Mapping[str, str], *, retry_for: timedelta = timedelta(seconds=30)) -> StoreFiles:
    """The objects below a URL such as `s3://bucket/state`.

    `options` are those of `StorageSettings.options`; deltalake takes the same ones as `storage_options`. A request that
    the store answers with 5xx is not repeated after `retry_for`.
    """
    from obstore.store import from_url

    client = {key: value for key, value in options.items() if key in _OF_THE_CLIENT}
    config = {key: value for key, value in options.items() if key not in _OF_THE_CLIENT}
    with _errors(url):
        store = from_url(
            url,
            config=config,  # type: ignore[call-overload]
            client_options=client,
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": retry_for,
                "backoff": {"init_backoff": _FIRST_DELAY, "max_backoff": _LONGEST_DELAY},
            },
        )
    return StoreFiles(store, url.rstrip("/"))


@dataclass(frozen=True)
class StoreFiles:
    """Objects of a store. A tag has the content's ETag and version, of which each store compares one."""

    store: ObjectStore
    url: str
    root: str = ""

    def read(self, name: str) -> Found | None:
        there = self._get(name)
        return there if there is not None and there.data else None

    def create(self, name: str, data: bytes) -> str:
        return self._write(name, content(data), "create")

    def replace(self, name: str, data: bytes, tag: str) -> str:
        return self._write(name, content(data), json.loads(tag))

    def put(self, name: str, data: bytes, *, durable: bool = True) -> str:  # noqa: ARG002 - it always is
        return self._write(name, content(data), "overwrite")

    def delete(self, name: str, tag: str | None = None) -> None:
        import obstore

        if tag is not None:
            try:
                self._write(name, b"", json.loads(tag))
            except Changed:
                if self.read(name) is not None:
                    raise
            return
        with _errors(self.where(name)):
            try:
                obstore.delete(self.store, self._key(name))
            except FileNotFoundError as error:
                _refuse_missing(error)

    def folders(self, prefix: str = "") -> list[str]:
        import obstore

        start = self._key(prefix) if prefix else self.root.rstrip("/")
        with _errors(self.where(prefix)):
            inside = obstore.list_with_delimiter(self.store, start or None)["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in inside)

    def names(self, prefix: str = "") -> list[str]:
        import obstore

        start = self._key(prefix) if prefix else self.root.rstrip("/")
        with _errors(self.where(prefix)):
            every = (each for chunk in obstore.list(self.store, start or None) for each in chunk)
            return sorted(each["path"].removeprefix(self.root) for each in every if each["size"])

    def below(self, prefix: str) -> StoreFiles:
        return replace(self, root=f"{self._key(prefix)}/")

    def where(self, name: str = "") -> str:
        return f"{self.url}/{self.root}{name}"

    def _key(self, name: str) -> str:
        return self.root + checked(name)

    def _get(self, name: str) -> Found | None:
        """The object, also an empty one."""
        import obstore

        with _errors(self.where(name)):
            try:
                answer = obstore.get(self.store, self._key(name))
                return Found(bytes(answer.bytes()), _tag(answer.meta), answer.meta["last_modified"].timestamp())
            except FileNotFoundError as error:
                _refuse_missing(error)
                return None

    def _write(self, name: str, data: bytes, mode: PutMode) -> str:
        """Write the object; a write that has happened counts, also if its answer was lost or a repetition refused."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        where = self.where(name)
        try:
            with _errors(where):
                try:
                    # Several parts could hold no condition, and such a small object needs none.
                    return _tag(obstore.put(self.store, self._key(name), data, mode=mode, use_multipart=False))
                except AlreadyExistsError:
                    raise AlreadyThere(f"{where} exists") from None
                except PreconditionError:
                    raise Changed(f"{where} has changed, or it is gone") from None
                except FileNotFoundError as error:
                    _refuse_missing(error)
                    raise Changed(f"{where} is gone") from None
        except TransientError:
            there = self._get(name)
            if there is not None and there.data == data:
                return there.tag
            if mode == "create" and there is not None and not there.data:  # it was deleted under its tag
                with suppress(Changed):
                    return self._write(name, data, json.loads(there.tag))
            raise


ANOTHER_STORE = (
    "use a store, or a version of it, with conditional writes: two drivers could overwrite each other's commits"
)


def refuse_broken_promises(url: str, options: Mapping[str, str]) -> None:
    """Raise PermanentError for a store on which a commit could overwrite another one."""
    if broken := broken_promises(open_store(url, options)):
        raise PermanentError(
            f"the store of {url} does not keep what commits and leases rest on: {'; '.join(broken)}", ANOTHER_STORE
        )


def broken_promises(files: StoreFiles) -> list[str]:
    """The promises of a store that commits and leases rest on and that this one breaks; none if it keeps them all.

    It is asked for an object of its own, which is deleted afterwards, in a folder of its own, since tables are long to
    list. Raises as every method of the store does.
    """
    folder, broken = ".promises", []
    name = f"{folder}/{uuid.uuid4().hex}"
    try:
        first = files.create(name, b"1")
        with suppress(AlreadyThere):
            files.create(name, b"2")
            broken.append("it creates an object that exists")
        with suppress(Changed):
            files.replace(name, b"3", _other(first))
            broken.append("it replaces an object under a wrong tag")
        found = files.read(name)
        if not broken and (found is None or found.data != b"1"):
            broken.append("it does not read what was written")
        if not broken:
            try:
                files.replace(name, b"4", first)
            except Changed:
                broken.append("it refuses to replace an object under its tag")
        if name not in files.names(folder):
            broken.append("it does not list an object that was written")
    finally:
        files.delete(name)
    return broken


def _other(tag: str) -> str:
    """The tag of another content."""
    return json.dumps(
        {key: f'"{uuid.uuid4().hex}"' if key == "e_tag" else value for key, value in json.loads(tag).items()}
    )


POLLED_EVERY = 2.0
"""Seconds between two looks at what a session polls in a store."""
_LOOKS: dict[str, tuple[float, Any]] = {}
"""What this process has seen of objects that it polls: (time, content or names), by URL."""
_WRITES, _LOOKING = [0], threading.Lock()
"""The number of this process's writes of such objects, and the lock of both."""


@dataclass(frozen=True)
class PolledFiles:
    """Objects that a session asks for many times a second: what a look shows counts for `seconds`.

    A write or delete of this process counts at once.
    """

    files: ObjectFiles
    seconds: float = POLLED_EVERY

    def read(self, name: str) -> Found | None:
        return cast("Found | None", self._seen(self.where(name), partial(self.files.read, name)))

    def names(self, prefix: str = "") -> list[str]:
        return cast("list[str]", self._seen(f"{self.where(prefix)}/", partial(self.files.names, prefix)))

    def folders(self, prefix: str = "") -> list[str]:
        return self.files.folders(prefix)

    def create(self, name: str, data: bytes) -> str:
        with self._forgotten():
            return self.files.create(name, data)

    def replace(self, name: str, data: bytes, tag: str) -> str:
        with self._forgotten():
            return self.files.replace(name, data, tag)

    def put(self, name: str, data: bytes, *, durable: bool = True) -> str:
        with self._forgotten():
            return self.files.put(name, data, durable=durable)

    def delete(self, name: str, tag: str | None = None) -> None:
        with self._forgotten():
            self.files.delete(name, tag)

    def below(self, prefix: str) -> PolledFiles:
        return PolledFiles(self.files.below(prefix), self.seconds)

    def where(self, name: str = "") -> str:
        return self.files.where(name)

    def _seen(self, where: str, look: Callable[[], object]) -> object:
        seen = _LOOKS.get(where)
        if seen is not None and time.monotonic() - seen[0] < self.seconds:
            return seen[1]
        writes = _WRITES[0]
        try:
            found = look()
        except RecourseError:
            if seen is None:
                raise
            found = seen[1]  # the store does not answer, or refuses, at the moment
        with _LOOKING:
            if writes == _WRITES[0]:  # what was seen before a write of this process counts no more
                _LOOKS[where] = time.monotonic(), found
        return found

    @contextmanager
    def _forgotten(self) -> Iterator[None]:
        root = self.where()
        try:
            yield
        finally:
            with _LOOKING:
                _WRITES[0] += 1
                for where in [each for each in _LOOKS if each.startswith(root)]:
                    _LOOKS[where] = float("-inf"), _LOOKS[where][1]


def polled(files: ObjectFiles) -> ObjectFiles:
    """The objects for a session that polls them: of a store, they are looked at seldom."""
    return PolledFiles(files) if isinstance(files, StoreFiles) else files


def _tag(meta: Mapping[str, object]) -> str:
    return json.dumps({key: value for key in ("e_tag", "version") if (value := meta[key]) is not None})


def _refuse_missing(error: FileNotFoundError) -> None:
    """Raise the error again if the bucket is missing, not the object: an unknown bucket is no empty one."""
    if any(each in str(error) for each in _MISSING):
        raise error


@contextmanager
def _errors(where: str) -> Iterator[None]:
    """Raise errors of ours in place of the library's, without their cause: its text may hold a signed URL."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, FileNotFoundError, ValueError) as error:
        raise _ours(error, where) from None


@contextmanager
def asked(where: str) -> Iterator[None]:
    """`_errors`, but for a missing object: that is a FileNotFoundError, as of a file."""
    try:
        with _errors(where):
            try:
                yield
            except FileNotFoundError as error:
                _refuse_missing(error)
                raise _NoObject(where) from None
    except _NoObject:
        raise FileNotFoundError(ENOENT, "there is no such object", where) from None


class _NoObject(Exception):
    pass


def _ours(error: Exception, where: str) -> RecourseError:
    from obstore import exceptions

    text = str(error)
    cause = re.search(r"kind: (\w+),", text)
    words = re.sub(r"\?\S+", "", text.split("\n", 1)[0]) + (f" ({cause[1]})" if cause else "")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return ConfigurationError(
            f"the store refuses access to {where}: {words}",
            "check the credentials and the rights that they give on this bucket: list, read, write and delete",
        )
    if isinstance(error, FileNotFoundError) or any(each in text for each in _MISSING):
        return ConfigurationError(
            f"{where} is in a bucket that does not exist", "create the bucket, or correct the URL"
        )
    if any(each in text for each in _NO_CREDENTIALS):
        return ConfigurationError(
            f"no credentials for {where} were found",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or another store's variables, or give the machine a role",
        )
    if any(each in text for each in _MISCONFIGURED):
        return ConfigurationError(f"{where}: {words}", "correct storage.region or storage.endpoint")
    if isinstance(error, exceptions.UnknownConfigurationKeyError | ValueError):
        return ConfigurationError(f"{where}: {words}", f"correct it; see `{commands.settings()}`")
    return TransientError(
        f"the store did not answer for {where}: {words}",
        "check its address, and that it runs; nothing is lost, a later attempt continues",
    )
