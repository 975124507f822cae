"""Leases in memory: among the drivers of one process (`state/lease.py`)."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field, replace

from streaming_jobs.platform.processes.identity import mark
from streaming_jobs.state.lease import Owner, busy


@dataclass
class MemoryLeases:
    """Leases among the drivers in this process. A JVM may be any process: it holds the lease as long as it runs."""

    held: dict[str, MemoryLease] = field(default_factory=dict)
    """stream -> the newest lease that was taken and not unlocked"""
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self, stream: str, *, purpose: str, wait: float = 10.0) -> MemoryLease:
        """Take the stream's lease; raises LeaseBusy after `wait` seconds."""
        deadline = time.monotonic() + wait
        lease = MemoryLease(stream, Owner(os.getpid(), mark(), None, None, time.time(), purpose), self)
        while not self.taken_by(lease):
            if time.monotonic() > deadline:
                raise busy(stream, self.holder(stream))
            time.sleep(0.01)
        return lease

    def taken_by(self, lease: MemoryLease) -> bool:
        """Give the stream to a lease if it is free; returns True on success."""
        with self._one_at_a_time:
            free = self.held.get(lease.stream) is lease or self.holder(lease.stream) is None
            if free:
                self.held[lease.stream] = lease
            return free

    def holder(self, stream: str) -> Owner | None:
        """The holder of the stream's lease now; None when it is free."""
        lease = self.held.get(stream)
        return lease.owner if lease is not None and lease.holds() else None


@dataclass(eq=False)
class MemoryLease:
    """A lease in this process's memory."""

    stream: str
    owner: Owner
    leases: MemoryLeases
    released: bool = False

    @property
    def inherited(self) -> tuple[int, ...]:
        """Empty: no descriptor holds it."""
        return ()

    def holds(self) -> bool:
        """True if its driver or its JVM holds it."""
        return not self.released or self.owner.jvm_alive()

    def record_jvm(self, pid: int) -> None:
        self.owner = replace(self.owner, jvm=pid, jvm_started=mark(pid))

    def unlock(self) -> None:
        """Release it for the JVM too."""
        self.owner = replace(self.owner, jvm=None, jvm_started=None)
        if self.leases.held.get(self.stream) is self:
            del self.leases.held[self.stream]

    def lock_again(self) -> bool:
        """Take it back after `unlock`; False while another lease holds the stream, and after `release`."""
        if self.released or not self.leases.taken_by(self):
            return False
        self.owner = replace(self.owner, since=time.time())
        return True

    def release(self) -> None:
        """Release it; the JVM, if it was recorded, holds it until it ends."""
        self.released = True
