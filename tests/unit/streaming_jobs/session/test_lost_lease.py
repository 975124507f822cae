"""A session that has lost the lease of a stream ends, interrupts a batch that runs, and leaves the status alone."""

from __future__ import annotations

import pytest

from streaming_jobs.errors import LeaseLost
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.stream_queries import QueryHooks
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import read_status
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryLeases, MemoryQuery, MemoryRuntime
from tests.support.sessions import Queries, session_of, state
from tests.support.worlds import parity, plain


class Running(Queries):
    """Queries that run on; one of them is in the middle of a batch."""

    def query(self, stream: Stream) -> MemoryQuery:
        return MemoryQuery()

    def pipeline(self, stream: Stream, hooks: QueryHooks) -> BatchPipeline:
        pipeline = super().pipeline(stream, hooks)
        pipeline.in_batch = stream is plain
        return pipeline


class LosesOne(MemoryRuntime):
    """A runtime under which a lease is lost once the streams run: another session writes the status by then."""

    leases: MemoryLeases
    home: Settings

    def failure(self, patience: float = 0.0) -> None:
        lease = self.leases.held.get("plain")
        if lease is not None and state(self.home, "plain") in ("starting", "running"):
            lease.lost = True


def test_it_ends_with_its_jvm_and_leaves_the_status_to_the_next_session(home: Settings) -> None:
    runtime, leases, queries = LosesOne(), MemoryLeases(), Running(home)
    runtime.leases, runtime.home = leases, home
    session = session_of(home, [plain, parity], runtime=runtime, queries=queries, leases=leases)
    with pytest.raises(LeaseLost):
        session.run()
    assert runtime.ends == ["kill"], "an orderly stop would let the batch commit"
    assert state(home, "parity") == "failed"
    status = read_status(home, "plain")
    assert status is not None and status.state in ("starting", "running"), "the next session writes it"
    assert queries.hooks["plain"].lease is session.running[0].lease
