"""The leases of one session: all of them at the start, and each at the end as what still runs of its stream allows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from streaming_jobs.platform.runtime import Runtime
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.state.lease import Lease, Leases
from streaming_jobs.stream import Stream


def take_all(leases: Leases, streams: Sequence[Stream], wait: float) -> list[Lease]:
    """The leases of all streams, or none; raises LeaseBusy if one is not free within `wait` seconds."""
    taken: list[Lease] = []
    with ExitStack() as unless_all:
        for stream in streams:
            taken.append(leases.acquire(stream.name, purpose="session", wait=wait))
            unless_all.callback(taken[-1].release)
        unless_all.pop_all()
    return taken


def let_go_all(held: Sequence[Lease], running: Sequence[StreamRunner], runtime: Runtime) -> None:
    """Release every lease, even if the release of another one fails."""
    with ExitStack() as each_one:
        for lease in held:
            runner = next((runner for runner in running if runner.lease is lease), None)
            each_one.callback(_let_go, lease, runner, runtime)


def _let_go(lease: Lease, runner: StreamRunner | None, runtime: Runtime) -> None:
    """Release a lease, except one whose batch still runs: the end of this process releases that one."""
    if runner is not None and runner.in_batch:
        return
    if runner is not None and not runner.detached and runtime.jvm is None:
        lease.unlock()  # nothing of the stream is in a JVM any more, even if the JVM runs on
    lease.release()
