"""The contract of a lease: one driver per stream, also when its JVM outlives it."""

from __future__ import annotations

import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from streaming_jobs.errors import LeaseBusy, LeaseLost
from streaming_jobs.state import lease as lease_module
from streaming_jobs.state.lease import FileLeases, Lease, Leases, leases_of
from streaming_jobs.state.store_lease import StoreLeases
from streaming_jobs.storage.object_store import StoreFiles, open_store
from streaming_jobs.testing import MemoryLeases
from tests.conftest import SettingsFactory
from tests.support.memory_files import MemoryFiles
from tests.support.store_server import StoreServer

STREAM = "orders"
TTL = 20.0


@pytest.fixture(
    params=[
        *("flock", "memory", "expiring", "expiring in memory"),
        pytest.param("expiring on a store", marks=pytest.mark.long),
    ]
)
def leases(request: pytest.FixtureRequest, settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch) -> Leases:
    monkeypatch.setattr(lease_module, "SETTLE", 0.0)  # the lock of this folder excludes all takers
    kinds: dict[str, Callable[[], Leases]] = {
        "flock": lambda: FileLeases(settings()),
        "memory": MemoryLeases,
        "expiring": lambda: leases_of(settings({"lease.kind": "expiring"})),
        "expiring in memory": lambda: StoreLeases(MemoryFiles(), TTL),
        "expiring on a store": lambda: StoreLeases(_store(request.getfixturevalue("versity")), TTL),
    }
    return kinds[request.param]()


def _store(server: StoreServer) -> StoreFiles:
    return open_store(f"{server.url}/{uuid.uuid4().hex}", server.options)


@pytest.fixture
def jvms() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(10)


def with_jvm(lease: Lease, jvms: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """A process that stands for the JVM of the lease's holder."""
    jvms.append(subprocess.Popen(["sleep", "60"], pass_fds=lease.inherited))
    lease.record_jvm(jvms[-1].pid)
    return jvms[-1]


def refused(leases: Leases, stream: str = STREAM) -> bool:
    """True if another driver does not get the lease now."""
    try:
        leases.acquire(stream, purpose="recovery", wait=0).release()
    except LeaseBusy as busy:
        assert f"stream {stream} is held by" in busy.found
        return True
    return False


def test_a_stream_has_one_holder_and_any_other_stream_is_free(leases: Leases) -> None:
    assert leases.holder(STREAM) is None
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    assert lease.stream == STREAM and lease.owner.purpose == "session"
    for _ in range(3):
        assert refused(leases)
        assert leases.holder(STREAM) == lease.owner, "looking, and trying in vain, takes nothing"
    assert not refused(leases, "prices")
    lease.release()
    assert leases.holder(STREAM) is None and not refused(leases)


def test_of_takers_at_the_same_time_one_gets_the_lease(leases: Leases) -> None:
    def take(number: int) -> Lease | None:
        with suppress(LeaseBusy):
            return leases.acquire(f"s{number // 4}", purpose="session", wait=0)
        return None

    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(take, range(40)))
    assert [sum(lease is not None for lease in taken[4 * n : 4 * n + 4]) for n in range(10)] == [1] * 10
    for lease in taken:
        if lease is not None:
            lease.check()
            lease.release()


def test_a_taker_waits_for_the_holder(leases: Leases) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    with pytest.raises(LeaseBusy):
        leases.acquire(STREAM, purpose="recovery", wait=0.1)
    soon = threading.Timer(0.2, lease.release)
    soon.start()
    second = leases.acquire(STREAM, purpose="recovery", wait=10)
    assert leases.holder(STREAM) == second.owner
    soon.join()
    second.release()


def test_a_jvm_that_outlives_its_driver_holds_the_lease_to_its_end(
    leases: Leases, jvms: list[subprocess.Popen[bytes]]
) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    jvm = with_jvm(lease, jvms)
    assert lease.owner.jvm == jvm.pid
    lease.release()
    assert refused(leases)
    owner = leases.holder(STREAM)
    assert owner is not None and owner.jvm == jvm.pid
    jvm.kill()
    jvm.wait(10)
    leases.acquire(STREAM, purpose="session", wait=10).release()


def test_an_unlocked_lease_is_free_although_its_jvm_lives_and_is_taken_back_unless_somebody_else_has_it(
    leases: Leases, jvms: list[subprocess.Popen[bytes]]
) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    with_jvm(lease, jvms)
    lease.unlock()
    assert leases.holder(STREAM) is None
    second = leases.acquire(STREAM, purpose="recovery", wait=0)
    lease.release()
    assert leases.holder(STREAM) == second.owner, "the first one has nothing left to let go"
    second.release()
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    jvm = with_jvm(lease, jvms)
    lease.unlock()
    second = leases.acquire(STREAM, purpose="recovery", wait=0)
    assert not lease.lock_again() and leases.holder(STREAM) == second.owner
    second.release()
    assert lease.lock_again() and refused(leases)
    lease.record_jvm(jvm.pid)
    lease.release()
    assert refused(leases), "the JVM is in it again"


def test_a_lease_is_not_taken_back_from_the_jvm_of_somebody_else(
    leases: Leases, jvms: list[subprocess.Popen[bytes]]
) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    lease.unlock()
    second = leases.acquire(STREAM, purpose="session", wait=0)
    jvm = with_jvm(second, jvms)
    second.release()
    assert not lease.lock_again(), "the second one's JVM still runs"
    jvm.kill()
    jvm.wait(10)
    assert lease.lock_again()
    lease.release()


def test_a_jvm_that_inherits_nothing_holds_the_lease_too_while_the_driver_that_released_it_lives(
    leases: Leases, jvms: list[subprocess.Popen[bytes]]
) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    jvms.append(subprocess.Popen(["sleep", "60"]))
    lease.record_jvm(jvms[-1].pid)
    lease.release()
    owner = leases.holder(STREAM)
    assert owner is not None and owner.jvm == jvms[-1].pid and refused(leases)
    jvms[-1].kill()
    jvms[-1].wait(10)
    assert leases.holder(STREAM) is None and not refused(leases)


def test_this_process_in_place_of_the_jvm_holds_nothing_after_the_release(leases: Leases) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    lease.record_jvm(os.getpid())
    assert refused(leases)
    lease.release()
    assert leases.holder(STREAM) is None and not refused(leases)


def test_a_lease_that_is_still_held_is_taken_back_at_once_and_one_that_was_released_is_not(
    leases: Leases, jvms: list[subprocess.Popen[bytes]]
) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    lease.unlock()
    lease.release()
    assert not lease.lock_again()
    assert leases.holder(STREAM) is None and not refused(leases)
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    jvm = with_jvm(lease, jvms)
    assert lease.lock_again() and lease.lock_again()
    assert lease.owner.jvm == jvm.pid and refused(leases)
    lease.unlock()
    lease.release()


def test_each_acquisition_has_an_epoch_greater_than_all_before_it_also_after_a_release(leases: Leases) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    assert lease.epoch == 1 and leases.acquire("prices", purpose="session", wait=0).epoch == 1
    refused(leases)
    assert lease.lock_again() and lease.epoch == 1, "it was held all the time"
    lease.unlock()
    assert lease.lock_again() and lease.epoch == 2
    lease.unlock()
    second = leases.acquire(STREAM, purpose="recovery", wait=0)
    assert second.epoch == 3
    second.release()
    assert lease.lock_again() and lease.epoch == 4
    lease.release()
    assert leases.acquire(STREAM, purpose="session", wait=0).epoch == 5


def test_the_epoch_of_a_lease_exceeds_that_of_a_table_unless_another_holds_it(leases: Leases) -> None:
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    lease.exceed(40)
    lease.check()
    assert lease.epoch == 41
    lease.unlock()
    second = leases.acquire(STREAM, purpose="session", wait=0)
    assert second.epoch == 42
    with pytest.raises(LeaseLost):
        lease.exceed(50)
    assert second.epoch == 42
    second.release()
