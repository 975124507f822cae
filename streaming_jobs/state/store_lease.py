"""Leases that expire: objects that their holders renew, for state that several machines share.

    <state>/<stream>/lease     the holder, the epoch, a counter of renewals (`beat`), the ttl, whether it was released

- A taker creates the object, or replaces just the content that it has read: if that content says `released`, or if it
  stayed the same for 1.25 ttl by the taker's own monotonic clock. No machine compares its clock with that of another
  one: only the speed of clocks matters, by a margin of a quarter.
- The holder renews it every ttl / 4. Its lease ends one ttl after the last renewal, counted from before the request was
  sent. From then on the holder writes nothing (`check`), and its session ends.
- On a store the replacement is exclusive. In a folder it holds a lock that other machines may not see (NFS), so that of
  two takers the later one overwrites the earlier one. So a taker there waits a moment, and reads its own write again.
- A refused write is read back: the object may hold an earlier write of the same holder, whose answer was lost. Each
  write has a new beat, so no two are equal.
- A holder whose process, and JVM, have ended on this very machine holds nothing; other machines wait.

A holder can wake after its lease has ended and believe for a moment that it holds it: the tables refuse its commits by
the epoch (`expires`, `sinks/base.py`). A monotonic clock stands still while a machine is suspended.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from uuid import uuid4

import structlog

from streaming_jobs.declare.names import checked_name
from streaming_jobs.errors import LeaseLost, RecourseError
from streaming_jobs.platform.processes.identity import is_alive, mark
from streaming_jobs.state.lease import Owner, busy, owner_of, this_process
from streaming_jobs.storage.object_files import AlreadyThere, Changed, Found, ObjectFiles

log = structlog.get_logger()

_BEATS, _PATIENCE, _MISSED = 4, 1.25, 0.5
"""Renewals per ttl; how many ttl without a renewal end a lease; after what part of a ttl a taker waits for its end."""
_POLL = 0.5


@dataclass(frozen=True)
class LeaseRecord:
    """The content of a lease's object. `left`: the driver has released it, and its JVM may still run."""

    owner: Owner
    nonce: str
    ttl: float
    beat: int = 0
    released: bool = False
    left: bool = False

    def encode(self) -> bytes:
        own = {name: getattr(self, name) for name in ("nonce", "ttl", "beat", "released", "left")}
        return json.dumps({**asdict(self.owner), **own}).encode()

    @classmethod
    def decode(cls, found: Found) -> LeaseRecord | None:
        """None for a content that is no such record, such as that of a lease by `flock`."""
        try:
            value = json.loads(found.data)
            own: dict[str, Any] = {name: value[name] for name in ("nonce", "ttl", "beat", "released", "left")}
            return cls(owner_of(value), **own)
        except (ValueError, TypeError, AttributeError, KeyError):
            return None

    @property
    def given_up(self) -> bool:
        """True if it was released, or nothing of its holder is left on this machine, where its processes are known."""
        if self.released:
            return True
        owner = self.owner
        driver = not self.left and is_alive(owner.pid, owner.pid_started)
        return owner.here and not driver and not owner.jvm_alive()


def _epoch_in(found: Found) -> int:
    """The epoch of any content of a lease; 0 if it names none."""
    with suppress(ValueError, TypeError, AttributeError, KeyError):
        return int(json.loads(found.data)["epoch"])
    return 0


@dataclass
class StoreLeases:
    """The leases below `files`; `clock` and `sleep` are in seconds of this process."""

    files: ObjectFiles
    ttl: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    settle: float = 0.0
    """Seconds after which a taker reads again what it has replaced; 0 where `replace` is exclusive among machines."""
    _seen: dict[str, tuple[str, float]] = field(default_factory=dict, init=False)
    """stream -> the tag that was read last, and when it was first read."""

    def acquire(self, stream: str, *, purpose: str, wait: float = 10.0) -> StoreLease:
        """Take the stream's lease; raises LeaseBusy after `wait` seconds.

        A holder that has missed two renewals by then is waited for until its lease ends.
        """
        lease = StoreLease(checked_name("stream", stream), self, purpose)
        began = self.clock()
        while not lease.take():
            owner = self.holder(stream)
            if owner is not None and self.clock() - began >= wait and not self._may_be_dead(stream):
                raise busy(stream, owner)
            self.sleep(min(_POLL, self.ttl / _BEATS / 2))
        return lease

    def holder(self, stream: str) -> Owner | None:
        """The holder of the stream's lease; a killed one counts as long as its lease may not have ended."""
        found = self.files.read(name_of(stream))
        if found is None or self.is_free(stream, found):
            return None
        record = LeaseRecord.decode(found)
        return Owner(0, 0.0, None, None, 0.0, "unknown") if record is None else record.owner

    def is_free(self, stream: str, found: Found) -> bool:
        """True if a taker may replace this content of the stream's lease."""
        record, now = LeaseRecord.decode(found), self.clock()
        tag, since = self._seen.get(stream, ("", now))
        if tag != found.tag:
            since = now
            self._seen[stream] = found.tag, now
        if record is not None and record.given_up:
            return True
        return now - since >= _PATIENCE * (self.ttl if record is None else record.ttl)

    def _may_be_dead(self, stream: str) -> bool:
        _, since = self._seen[stream]
        return self.clock() - since >= _MISSED * self.ttl


def name_of(stream: str) -> str:
    return f"{checked_name('stream', stream)}/lease"


class StoreLease:
    """One driver's lease; a thread renews it from `take` to `unlock` or `release`."""

    def __init__(self, stream: str, leases: StoreLeases, purpose: str) -> None:
        self.stream = stream
        self._leases = leases
        self._name = name_of(stream)
        self._purpose = purpose
        self.fenced: set[tuple[str, int]] = set()
        self._record = self._new_record(0)
        self._tag = ""
        self._deadline = 0.0
        self._held = self._closed = False
        self._why = "it was released"
        self._alone = threading.RLock()
        self._beating: threading.Event | None = None

    @property
    def owner(self) -> Owner:
        return self._record.owner

    @property
    def epoch(self) -> int:
        return self.owner.epoch

    @property
    def expires(self) -> bool:
        return True

    @property
    def inherited(self) -> tuple[int, ...]:
        """Empty: no descriptor holds it."""
        return ()

    def check(self) -> None:
        """Raise LeaseLost from the end of the lease on, which is one ttl after the last renewal began."""
        if self._held and self._leases.clock() < self._deadline:
            return
        why = self._why if not self._held else f"it was not renewed for {self._record.ttl:g} s"
        raise LeaseLost(
            f"the lease of stream {self.stream} has ended: {why}",
            "nothing: the next session repeats the batch. If it happens again, check the store of the state folder",
        )

    def take(self) -> bool:
        """One attempt to take the lease; False while another holder has it."""
        files = self._leases.files
        with self._alone:
            began = self._leases.clock()
            found = files.read(self._name)
            if found is not None and not self._leases.is_free(self.stream, found):
                return False
            record = self._new_record(0 if found is None else _epoch_in(found))
            data = record.encode()
            try:
                tag = files.create(self._name, data) if found is None else files.replace(self._name, data, found.tag)
            except (AlreadyThere, Changed):
                tag = ""
            if tag and found is not None and self._leases.settle:
                self._leases.sleep(self._leases.settle)
                tag = ""
            if not tag:
                there = files.read(self._name)
                if there is None or there.data != data:
                    return False
                tag = there.tag
            self._taken(record, tag, began)
            if self._beating is not None:  # the thread of a lease that was lost
                self._beating.set()
            self._beating = threading.Event()
            threading.Thread(target=self._beat, args=(self._beating,), name="lease", daemon=True).start()
            return True

    def renew(self) -> None:
        """Write the next beat; a store that does not answer leaves the end of the lease where it is."""
        with self._alone:
            if not self._held:
                return
            began = self._leases.clock()
            try:
                self._write(self._record)
            except LeaseLost as lost:
                log.error("lease lost", stream=self.stream, reason=lost.found)
            except (RecourseError, OSError) as error:
                log.warning("lease not renewed", stream=self.stream, reason=str(error)[:200])
            else:
                self._deadline = began + self._record.ttl

    def exceed(self, epoch: int) -> None:
        with self._alone:
            self.check()
            self._write(replace(self._record, owner=replace(self.owner, epoch=epoch + 1)))

    def record_jvm(self, pid: int) -> None:
        """Name the JVM, so that this machine knows when nothing of the driver is left."""
        with self._alone:
            self._record = replace(self._record, owner=replace(self.owner, jvm=pid, jvm_started=mark(pid)))
            self.renew()

    def unlock(self) -> None:
        with self._alone:
            self._record = replace(self._record, owner=replace(self.owner, jvm=None, jvm_started=None))
            self._give_up(released=True)

    def lock_again(self) -> bool:
        with self._alone:
            if self._closed:
                return False
            if not self._held:
                return self.take()
            self._record = replace(self._record, owner=replace(self.owner, since=time.time()))
            self.renew()
            return self._held

    def release(self) -> None:
        """Release it. While a JVM of the driver runs, it is left to expire, or to the end of the JVM."""
        with self._alone:
            self._give_up(released=not self.owner.jvm_alive())
            self._closed = True

    def _give_up(self, *, released: bool) -> None:
        """Write that the driver has let go, and renew no more."""
        if self._beating is not None:
            self._beating.set()
        if self._held:
            try:
                self._write(replace(self._record, released=released, left=True))
            except (RecourseError, OSError) as error:  # lost, or no answer: it expires
                log.warning("lease not released", stream=self.stream, reason=str(error)[:200])
            self._held, self._why = False, "it was released"

    def _write(self, record: LeaseRecord) -> None:
        """Replace the content by this one with a new beat; raises LeaseLost if the object is another holder's."""
        files = self._leases.files
        self._record = replace(self._record, beat=self._record.beat + 1)
        record = replace(record, beat=self._record.beat)
        try:
            try:
                self._tag = files.replace(self._name, record.encode(), self._tag)
            except Changed:
                found = files.read(self._name)
                there = None if found is None else LeaseRecord.decode(found)
                if found is None or there is None or there.nonce != record.nonce:
                    raise
                self._tag = files.replace(self._name, record.encode(), found.tag)  # after a write without an answer
        except Changed as error:
            self._held, self._why = False, "another session has taken it over"
            raise LeaseLost(
                f"the lease of stream {self.stream} has ended: {self._why}", "let this driver end"
            ) from error
        self._record = record

    def _taken(self, record: LeaseRecord, tag: str, began: float) -> None:
        self._record, self._tag, self._deadline, self._held = record, tag, began + record.ttl, True

    def _new_record(self, epoch_before: int) -> LeaseRecord:
        return LeaseRecord(this_process(self._purpose, epoch_before + 1), uuid4().hex, self._leases.ttl)

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(self._leases.ttl / _BEATS):
            self.renew()
