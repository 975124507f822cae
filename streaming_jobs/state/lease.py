"""The lease: one driver per stream, also when its JVM outlives it.

The contract of every kind of lease (`Lease`, `Leases`; tests/unit/streaming_jobs/state/test_lease_contract.py):

- one holder per stream; a second taker waits for its `wait` seconds, and then gets LeaseBusy with the holder's name;
- a look at a lease (`holder`) does not take it;
- `record_jvm` names the JVM of the holder. After the driver's `release`, or its kill, the lease stays held as long as
  that JVM runs, since a query in it may still write;
- `unlock` releases the lease for the JVM too, because its query of this stream has ended; `lock_again` takes it back,
  unless another process has taken it or it was released; on a lease that is still held it changes nothing but `since`;
- this process recorded as the JVM (Spark that was there before) holds nothing after `release`;
- each acquisition, also by `lock_again`, has an epoch greater than all before it (`epoch`). Commits carry the epoch, so
  that tables refuse a driver that believes in a lease which another driver has taken over (`sinks/base.py`). `exceed`
  makes the epoch greater than that of a table, unless another process holds the lease;
- the lease of one stream is independent of all others.

`FileLease` is an exclusive `flock` on `<state>/<stream>/lease`. The descriptor is inherited by the driver's JVM, which
runs on for about two seconds after a kill -9 of Python: the lock is free only when both are gone. Where the JVM is not
our child (spark-submit starts Python, not the other way round), the lease names the JVM's pid and the next taker waits
until that process has ended. Leases that several machines take expire (`store_lease.py`). `streaming_jobs.testing` has
leases in memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from streaming_jobs.errors import LeaseBusy, LeaseLost
from streaming_jobs.platform.processes.identity import Mark, is_alive, machine, mark
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_folder import StreamFolder, files_at
from streaming_jobs.storage.locations import Location
from streaming_jobs.storage.locks import lock, open_lock
from streaming_jobs.text import commands

SETTLE = 1.0
"""Seconds after which a taker in a folder reads its lease again: another machine's lock of a folder may not be seen."""
_CLOSED = -1
"""In place of a descriptor that was closed: its number may be another file's by now."""


@dataclass(frozen=True)
class Owner:
    """The holder of a lease, or its last one; `since` in seconds since 1970, marks as of processes/identity.py."""

    pid: int
    pid_started: Mark
    jvm: int | None
    jvm_started: Mark | None
    since: float
    purpose: str
    epoch: int = 0
    """The number of this acquisition; files of earlier versions of this package have none."""
    host: str = ""
    machine: str = ""
    """The machine and its namespace of pids (`processes/identity.py`)."""

    @property
    def here(self) -> bool:
        """True if the owner's pids mean processes that this one sees."""
        return bool(self.machine) and self.machine == machine()

    def alive(self) -> str | None:
        """The part of the owner that still runs: `driver`, `jvm`, or None; `driver` for an owner on another machine."""
        if self.machine and not self.here:
            return "driver"
        if is_alive(self.pid, self.pid_started):
            return "driver"
        return "jvm" if self.jvm_alive() else None

    def jvm_alive(self) -> bool:
        """True if the JVM runs, in a process other than this one, whether or not the driver does."""
        if self.jvm is None or self.jvm_started is None or self.jvm == os.getpid():
            return False
        return is_alive(self.jvm, self.jvm_started)


def this_process(purpose: str, epoch: int) -> Owner:
    """This process as the owner of a lease."""
    pid = os.getpid()
    return Owner(pid, mark(), None, None, time.time(), purpose, epoch, socket.gethostname(), machine())


class Lease(Protocol):
    """A lease that is held, by the contract above."""

    fenced: set[tuple[str, int]]
    """Ids of tables, each with an epoch that it is in by a fence of this lease (`sinks/base.py`)."""

    @property
    def stream(self) -> str:
        """The stream's name."""

    @property
    def owner(self) -> Owner:
        """This process, and its JVM once that is recorded."""

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that the JVM has to inherit (`pass_fds`), so that it holds the lease too."""

    @property
    def epoch(self) -> int:
        """The number of the acquisition."""

    @property
    def expires(self) -> bool:
        """True if the lease ends by time, so that an earlier holder may still run."""

    def check(self) -> None:
        """Raise LeaseLost if the lease has run out, or another process has it. Reads no file."""

    def exceed(self, epoch: int) -> None:
        """Make the epoch greater than this one; raises LeaseLost if another process holds the lease."""

    def record_jvm(self, pid: int) -> None:
        """Name the JVM in the lease."""

    def unlock(self) -> None:
        """Release it for the JVM too: its query has ended. `lock_again` and `release` remain possible."""

    def lock_again(self) -> bool:
        """Take the lease back after `unlock`; False while another process holds it, and after `release`.

        Raises LeaseBusy if other takers use another lease by now (its file was replaced).
        """

    def release(self) -> None:
        """Release it; a JVM that holds it too keeps it until its end."""


class Leases(Protocol):
    def acquire(self, stream: str, *, purpose: str, wait: float = 10.0) -> Lease:
        """Take the stream's lease and keep it until `release`; raises LeaseBusy after `wait` seconds."""

    def holder(self, stream: str) -> Owner | None:
        """The holder of the stream's lease now; None when it is free. Takes nothing for longer than a moment."""


@dataclass
class FileLease:
    """A lease by `flock`; `descriptor` is the open file."""

    stream: str
    path: Path
    descriptor: int
    owner: Owner
    _unlocked: bool = False
    fenced: set[tuple[str, int]] = field(default_factory=set)

    @property
    def inherited(self) -> tuple[int, ...]:
        """The open file: the lock belongs to all who have it open."""
        return (self.descriptor,)

    @property
    def epoch(self) -> int:
        return self.owner.epoch

    @property
    def expires(self) -> bool:
        """False: the lock ends with the processes that hold it."""
        return False

    def check(self) -> None:
        """The lock is held until it is released."""

    def exceed(self, epoch: int) -> None:
        """Write a greater epoch; raises LeaseLost if the file names another holder: its lock was not exclusive."""
        if (written := _read(self.descriptor)) is None or not self._is_ours(written):
            raise LeaseLost(
                f"the lease of stream {self.stream} names another holder, although this process has locked it",
                "keep the state folder on a file system whose locks all machines see, or set lease.kind = 'expiring'",
            )
        self.owner = replace(self.owner, epoch=epoch + 1)
        _write(self.descriptor, self.owner)

    def record_jvm(self, pid: int) -> None:
        self.owner = replace(self.owner, jvm=pid, jvm_started=mark(pid))
        _write(self.descriptor, self.owner)

    def unlock(self) -> None:
        """Release it for the JVM too: its query has ended. The descriptor stays open until `release`."""
        self.owner = replace(self.owner, jvm=None, jvm_started=None)
        with suppress(OSError):  # a full disk; the next taker then waits until the JVM has ended
            _write(self.descriptor, self.owner)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self._unlocked = True

    def lock_again(self) -> bool:
        """Take the lease back after `unlock`, for the JVM too; False while another process holds it.

        Raises LeaseBusy if the stream's folder was moved or recreated: a lock on the old file excludes no process.
        """
        if self.descriptor == _CLOSED or not lock(self.descriptor, wait=0):
            return False
        if not self._in_place():
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            raise LeaseBusy(f"the lease of stream {self.stream} is another file by now", "start the stream anew")
        written = _read(self.descriptor)
        if written is not None and not self._is_ours(written) and written.jvm_alive():
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            return False
        epoch = max(self.epoch, written.epoch if written is not None else 0) + self._unlocked
        self.owner, self._unlocked = replace(self.owner, since=time.time(), epoch=epoch), False
        _write(self.descriptor, self.owner)
        return True

    def _is_ours(self, written: Owner) -> bool:
        """True for this lease's own name; its JVM is still in it if `unlock` could not write."""
        ours = self.owner
        return (written.pid, written.pid_started, written.since) == (ours.pid, ours.pid_started, ours.since)

    def _in_place(self) -> bool:
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False
        mine = os.fstat(self.descriptor)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Close the file; the lock stays held while a JVM that inherited the descriptor runs."""
        descriptor, self.descriptor = self.descriptor, _CLOSED
        os.close(descriptor)


@dataclass(frozen=True)
class FileLeases:
    """The leases in the state folder that the settings name."""

    settings: Settings

    def acquire(self, stream: str, *, purpose: str, wait: float = 10.0) -> FileLease:
        return _acquire(self.settings, stream, purpose, wait)

    def holder(self, stream: str) -> Owner | None:
        return _holder(self.settings, stream)


def _acquire(settings: Settings, stream: str, purpose: str, wait: float) -> FileLease:
    path = StreamFolder.of(settings, stream).make().lease
    deadline = time.monotonic() + wait
    descriptor = open_lock(path)
    try:
        while not lock(descriptor, wait=0) or _previous_jvm_lives(descriptor):
            if time.monotonic() > deadline:
                raise busy(stream, _read(descriptor))
            time.sleep(0.05)
        previous = _read(descriptor)
        owner = this_process(purpose, 1 if previous is None else previous.epoch + 1)
        _write(descriptor, owner)
    except BaseException:
        os.close(descriptor)
        raise
    return FileLease(stream, path, descriptor, owner)


def _holder(settings: Settings, stream: str) -> Owner | None:
    path = StreamFolder.of(settings, stream).lease
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        try:
            # A shared lock shows if the lease is held, and disturbs a taker for microseconds only.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _named(descriptor)
        owner = _read(descriptor)
        return owner if owner is not None and owner.jvm_alive() else None
    finally:
        os.close(descriptor)


def _previous_jvm_lives(descriptor: int) -> bool:
    owner = _read(descriptor)
    return owner is not None and owner.jvm_alive()


def busy(stream: str, owner: Owner | None) -> LeaseBusy:
    """The error for a taker that has waited long enough."""
    words = "another process"
    if owner is not None:
        what = "the JVM of a driver that was killed" if owner.alive() == "jvm" else f"process {owner.pid}"
        if not owner.here and owner.host:
            what += f" on {owner.host}"
        since = time.strftime("%H:%M:%S", time.localtime(owner.since))
        words = f"{what} ({owner.purpose}, since {since})"
    return LeaseBusy(f"stream {stream} is held by {words}", f"stop it first: {commands.stop(stream)}")


def owner_of(fields: Mapping[str, Any]) -> Owner:
    """The owner that a lease names; fields of later versions of this package are left out. Raises TypeError."""
    return Owner(**{name: value for name, value in fields.items() if name in Owner.__dataclass_fields__})


def _named(descriptor: int) -> Owner | None:
    """The owner of a lease that is held; it may be writing its name at this very moment."""
    deadline = time.monotonic() + 1.0
    while (owner := _read(descriptor)) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return owner


def _read(descriptor: int) -> Owner | None:
    text = os.pread(descriptor, 4096, 0)
    try:
        return owner_of(json.loads(text))
    except (ValueError, TypeError, AttributeError):  # empty, or being written
        return None


def _write(descriptor: int, owner: Owner) -> None:
    data = json.dumps(asdict(owner)).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


# The leases that the settings ask for.


def leases_of(settings: Settings) -> Leases:
    """The leases of the streams in the settings' state folder."""
    if settings.lease.kind == "file" and isinstance(settings.state, Path):
        return FileLeases(settings)
    return _expiring(settings.state, settings.lease.ttl.total_seconds())


@cache
def _expiring(state: Location, ttl: float) -> Leases:
    """One object per process, since it learns by looking how long a lease has not been renewed."""
    from streaming_jobs.state.store_lease import StoreLeases  # it uses this module

    if isinstance(state, Path):
        return StoreLeases(files_at(state), ttl, settle=min(SETTLE, ttl / 4))
    from streaming_jobs.storage.object_store import open_store

    # A request, with its repetitions, ends well before the lease does.
    options = {**dict(state.options), "timeout": f"{round(ttl * 1000 / 4)}ms"}
    return StoreLeases(open_store(state.url, options, retry_for=timedelta(seconds=ttl / 2)), ttl)


@contextmanager
def take(settings: Settings, stream: str, *, purpose: str, wait: float = 10.0) -> Iterator[Lease]:
    """Hold the stream's lease; raises LeaseBusy when it is not free within `wait` seconds."""
    lease = acquire(settings, stream, purpose=purpose, wait=wait)
    try:
        yield lease
    finally:
        lease.release()


def acquire(settings: Settings, stream: str, *, purpose: str, wait: float = 10.0) -> Lease:
    """Take the stream's lease and keep it until `release`; raises LeaseBusy after `wait` seconds."""
    return leases_of(settings).acquire(stream, purpose=purpose, wait=wait)


def holder(settings: Settings, stream: str) -> Owner | None:
    """The holder of the stream's lease now; None when it is free. Takes nothing for longer than a moment."""
    return leases_of(settings).holder(stream)
