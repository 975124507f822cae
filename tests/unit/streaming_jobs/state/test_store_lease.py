"""Leases that expire: the table of cases in docs/fencing.md, with clocks that the tests set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from deltalake import DeltaTable

from streaming_jobs.errors import Fenced, LeaseBusy, LeaseLost, TransientError
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import LeaseSettings
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.state import lease as lease_module
from streaming_jobs.state.lease import FileLeases, Owner, leases_of
from streaming_jobs.state.store_lease import StoreLease, StoreLeases
from streaming_jobs.storage.object_files import Changed, LocalFiles, ObjectFiles
from streaming_jobs.storage.object_store import open_store
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.delta_table import ROWS
from tests.support.memory_files import MemoryFiles
from tests.support.store_server import Fault, StoreServer, store_server
from tests.support.worlds import OUTPUT, STREAM, append, entry

NAME = f"{STREAM}/lease"


@dataclass
class Clock:
    """A clock of one machine; `meanwhile` is called during each sleep."""

    now: float = 0.0
    meanwhile: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@dataclass
class Faults:
    """The store does not answer, `mute` writes lose their answer, functions are called before the next writes."""

    down: bool = False
    mute: int = 0
    before: list[Callable[[], object]] = field(default_factory=list)


@dataclass(frozen=True)
class Unreliable(MemoryFiles):
    faults: Faults = field(default_factory=Faults)

    def replace(self, name: str, data: bytes, tag: str) -> str:
        if self.faults.before:
            self.faults.before.pop()()
        if self.faults.down:
            raise TransientError("the store does not answer")
        written = super().replace(name, data, tag)
        if self.faults.mute:
            self.faults.mute -= 1
            raise TransientError("the answer is lost")
        return written


def machine(files: ObjectFiles, now: float = 0.0, ttl: float = 20.0) -> tuple[StoreLeases, Clock]:
    """A machine with a clock of its own."""
    clock = Clock(now)
    return StoreLeases(files, ttl, clock, clock.sleep), clock


def taken(leases: StoreLeases, wait: float = 0.0) -> StoreLease:
    return leases.acquire(STREAM, purpose="session", wait=wait)


def written(files: ObjectFiles) -> dict[str, Any]:
    found = files.read(NAME)
    assert found is not None
    value: dict[str, Any] = json.loads(found.data)
    return value


def test_a_killed_or_paused_driver_is_waited_for_until_its_lease_has_ended_by_both_clocks() -> None:
    files = MemoryFiles()
    (here, mine), (there, theirs) = machine(files), machine(files, now=1e9)
    old = taken(here)
    with pytest.raises(LeaseBusy, match=f"process {os.getpid()}"):
        taken(there)
    new = taken(there, wait=10)
    assert 25 <= theirs.now - 1e9 <= 26 and new.epoch == 2, "1.25 ttl since the taker's first look"
    old.check()
    mine.now = 19.9
    old.check()
    mine.now = 20.0
    with pytest.raises(LeaseLost, match="was not renewed for 20 s"):
        old.check()
    with pytest.raises(LeaseLost):
        old.exceed(7)
    old.renew()
    with pytest.raises(LeaseLost, match="another session has taken it over"):
        old.check()
    old.release()
    assert written(files)["epoch"] == 2 and not written(files)["released"], "what it wakes to is not its own any more"
    new.check()


def test_a_holder_that_renews_keeps_its_lease_and_each_renewal_counts_from_before_its_request() -> None:
    files = Unreliable()
    (here, mine), (there, theirs) = machine(files), machine(files)
    lease = taken(here)

    def renews() -> None:
        mine.now = theirs.now
        lease.renew()

    theirs.meanwhile = renews
    with pytest.raises(LeaseBusy):
        taken(there, wait=60)
    assert theirs.now < 61
    mine.now = 100.0
    files.faults.before.append(lambda: setattr(mine, "now", 115.0))  # the request takes 15 s
    lease.renew()
    mine.now = 119.9
    lease.check()
    mine.now = 120.0
    with pytest.raises(LeaseLost):
        lease.check()


def test_an_orderly_end_frees_the_lease_at_once() -> None:
    files = MemoryFiles()
    lease = taken(machine(files)[0])
    lease.release()
    assert machine(files)[0].holder(STREAM) is None and taken(machine(files)[0]).epoch == 2
    with pytest.raises(LeaseLost):
        lease.check()


def test_of_two_takers_at_once_one_gets_the_lease() -> None:
    files = Unreliable()
    (one, clock), (other, theirs) = machine(files), machine(files)
    taken(one).release()
    winners = [taken(one)]
    for leases in (one, other):
        assert leases.holder(STREAM) is not None
    clock.now = theirs.now = 25.0
    files.faults.before.append(lambda: winners.append(taken(other)))
    with pytest.raises(LeaseBusy):
        taken(one)
    assert winners[-1].epoch == written(files)["epoch"] == 3
    winners[-1].check()


def test_of_two_takers_in_a_folder_whose_lock_each_machine_has_for_itself_the_later_write_wins() -> None:
    """The other one has compared before this one wrote, and writes afterwards."""
    files, clock = MemoryFiles(), Clock()
    taken(machine(files)[0]).release()
    rival = json.dumps({**written(files), "nonce": "of the other", "released": False, "left": False}).encode()
    clock.meanwhile = lambda: files.put(NAME, rival)
    with pytest.raises(LeaseBusy):
        taken(StoreLeases(files, 20.0, clock, clock.sleep, settle=1.0))
    assert written(files)["nonce"] == "of the other"


def test_a_taker_in_a_folder_waits_before_it_reads_its_lease_again(home: Settings) -> None:
    folder = home.model_copy(update={"lease": LeaseSettings(kind="expiring")})
    for purpose in ("session", "another session"):
        began = time.monotonic()
        leases_of(folder).acquire(STREAM, purpose=purpose, wait=0).release()
    assert time.monotonic() - began >= lease_module.SETTLE


def test_a_table_in_the_epoch_of_a_lease_that_another_session_has_too_is_taken_into_the_next_one(
    home: Settings,
) -> None:
    first, second = (ensure_sink(home, Declared("evens"), STREAM, OUTPUT, generation=1) for _ in range(2))
    holder, rival = taken(machine(MemoryFiles())[0]), taken(machine(files := MemoryFiles())[0])
    first.under(rival, 1)
    append(first, entry(0), ROWS)
    second.under(holder, 1)
    assert holder.epoch == second.epoch == 2
    with pytest.raises(Fenced):
        append(first, entry(1), ROWS)
    files.put(NAME, json.dumps({**written(files), "nonce": "of another"}).encode())
    with pytest.raises(LeaseLost):
        ensure_sink(home, Declared("evens"), STREAM, OUTPUT, generation=1).under(rival, 1)


def test_a_store_that_is_slow_has_a_quarter_of_the_ttl_for_a_request(
    settings: SettingsFactory, tables_on_a_store: dict[str, Any], object_store: StoreServer
) -> None:
    place = f"{tables_on_a_store.pop('tables_dir')}/state"
    leases = leases_of(settings({**tables_on_a_store, "state_dir": place, "lease.ttl": "2 seconds"}))
    object_store.inject(Fault("slow", "GET", seconds=4))
    began = time.monotonic()
    assert leases.holder(STREAM) is None and time.monotonic() - began < 2


def test_a_renewal_whose_answer_is_lost_does_not_lengthen_the_lease_and_the_next_one_finds_its_own_write() -> None:
    files = Unreliable()
    leases, clock = machine(files)
    lease = taken(leases)
    clock.now, files.faults.mute = 5.0, 1
    lease.renew()
    assert written(files)["beat"] == 1
    clock.now = 20.0
    with pytest.raises(LeaseLost):
        lease.check()
    lease.renew()
    lease.check()
    assert written(files)["beat"] == 2
    lease.release()
    assert written(files)["released"]


def test_a_taker_finds_its_own_write_after_a_refusal() -> None:
    class Repeats(MemoryFiles):
        """A client that repeats a request whose answer was lost: the store refuses the second one."""

        def replace(self, name: str, data: bytes, tag: str) -> str:
            super().replace(name, data, tag)
            raise Changed(name)

    files = Repeats()
    taken(machine(files)[0]).release()
    lease = taken(machine(files)[0])
    assert lease.epoch == written(files)["epoch"] == 2
    lease.check()


def test_while_the_store_is_down_the_holder_stops_at_its_deadline_and_continues_if_nobody_took_the_lease() -> None:
    files = Unreliable()
    leases, clock = machine(files)
    lease = taken(leases)
    files.faults.down = True
    for clock.now in (5.0, 10.0, 15.0, 20.0):
        lease.renew()
    with pytest.raises(LeaseLost):
        lease.check()
    files.faults.down = False
    lease.renew()
    lease.check()


def test_a_suspended_machine_whose_clock_stood_still_believes_in_its_lease_and_the_table_refuses_it(
    home: Settings,
) -> None:
    files = MemoryFiles()
    (here, _), (there, _) = machine(files), machine(files)
    old, new = (ensure_sink(home, Declared("evens"), STREAM, OUTPUT, generation=1) for _ in range(2))
    suspended = taken(here)
    old.under(suspended, 1)
    new.under(taken(there, wait=10), 1)
    suspended.check()
    with pytest.raises(Fenced, match="is in epoch 2"):
        append(old, entry(0), ROWS)
    append(new, entry(0), ROWS)
    suspended.renew()
    with pytest.raises(LeaseLost):
        suspended.check()


@pytest.mark.parametrize("text", ["{", "[]", '{"epoch": 7}', '{"epoch": "x"}'])
def test_a_lease_that_says_nothing_is_free_after_a_while_and_its_epoch_counts(text: str) -> None:
    files = MemoryFiles()
    files.put(NAME, text.encode())
    leases, _ = machine(files)
    with pytest.raises(LeaseBusy):
        taken(leases)
    assert taken(leases, wait=10).epoch == (8 if "7" in text else 1)


def test_an_empty_file_of_a_power_cut_is_no_obstacle(home: Settings) -> None:
    FileLeases(home).acquire(STREAM, purpose="session", wait=0).release()
    (home.state / NAME).write_bytes(b"")
    assert taken(machine(LocalFiles(home.state))[0], wait=10).epoch == 1


def test_after_a_change_of_the_kind_of_leases_epochs_go_on(home: Settings) -> None:
    lease = FileLeases(home).acquire(STREAM, purpose="session", wait=0)
    lease.exceed(8)
    lease.release()
    expiring, _ = machine(LocalFiles(home.state))
    other = taken(expiring, wait=10)
    assert other.epoch == 10
    other.release()
    assert FileLeases(home).acquire(STREAM, purpose="session", wait=0).epoch == 11


def test_a_holder_on_another_machine_is_named_with_it_and_its_pid_says_nothing_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = MemoryFiles()
    monkeypatch.setattr(lease_module, "machine", lambda: "another boot/pid:[1]")
    monkeypatch.setattr(lease_module.socket, "gethostname", lambda: "node-7")
    taken(machine(files)[0])
    monkeypatch.undo()
    value = written(files)
    files.put(NAME, json.dumps({**value, "pid": 2**22 - 7}).encode())
    there, clock = machine(files)
    owner = there.holder(STREAM)
    assert isinstance(owner, Owner) and not owner.here and owner.alive() == "driver"
    with pytest.raises(LeaseBusy, match="on node-7"):
        taken(there)
    taken(there, wait=10)
    assert clock.now >= 25


# A real process, which is killed or stopped.

DRIVER = """
import sys
from pathlib import Path
import structlog
from deltalake import write_deltalake
from streaming_jobs.errors import RecourseError
from streaming_jobs.storage.object_files import LocalFiles
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.state.store_lease import StoreLeases
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.delta_table import ROWS
from tests.support.worlds import OUTPUT, STREAM, entry

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
home = Settings.load({"home": Path(sys.argv[1])})
lease = StoreLeases(LocalFiles(home.state), ttl=2.0).acquire(STREAM, purpose="session", wait=0)
sink = ensure_sink(home, Declared("evens"), STREAM, OUTPUT, generation=1)
sink.under(lease, 1)

def write(handle, properties):
    print("between check and commit", flush=True)
    sys.stdin.readline()
    write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

try:
    print("committed", sink.commit(entry(0), write), flush=True)
except RecourseError as error:
    print(type(error).__name__, flush=True)
"""


@contextmanager
def driver(home: Settings) -> Iterator[subprocess.Popen[str]]:
    """A process with the lease, in the middle of a commit."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(home.home)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "between check and commit\n"
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def rows(home: Settings) -> int:
    return int(DeltaTable(home.tables / "evens").to_pyarrow_table().num_rows)


@pytest.mark.slow
def test_a_driver_that_is_stopped_in_the_middle_of_its_commit_and_woken_after_a_takeover_commits_nothing(
    home: Settings,
) -> None:
    with driver(home) as paused:
        assert paused.stdin is not None and paused.stdout is not None
        os.kill(paused.pid, signal.SIGSTOP)
        lease = StoreLeases(LocalFiles(home.state), ttl=2.0).acquire(STREAM, purpose="session", wait=2)
        sink = ensure_sink(home, Declared("evens"), STREAM, OUTPUT, generation=1)
        sink.under(lease, 1)
        os.kill(paused.pid, signal.SIGCONT)
        paused.stdin.write("\n")
        paused.stdin.flush()
        assert paused.stdout.readline() in ("LeaseLost\n", "Fenced\n") and rows(home) == 0
        append(sink, entry(0), ROWS)
        assert rows(home) == 2 and lease.epoch == sink.epoch == 2
        lease.release()


@pytest.mark.slow
def test_a_driver_that_was_killed_on_this_machine_is_not_waited_for(home: Settings) -> None:
    leases = StoreLeases(LocalFiles(home.state), ttl=20.0)
    with driver(home) as killed:
        with pytest.raises(LeaseBusy):
            taken(leases)
        killed.kill()
        killed.wait(10)
        lease = taken(leases)
    assert lease.epoch == 2
    lease.release()


@pytest.mark.slow
def test_leases_in_an_object_store_outlive_its_faults() -> None:
    with store_server() as server:
        files = open_store(f"{server.url}/state", server.options)
        leases, other = StoreLeases(files, ttl=20.0), StoreLeases(files, ttl=20.0)
        server.inject(Fault("answer lost"))
        lease = taken(leases)
        for kind in ("answer lost", "unavailable", "slow"):
            server.inject(Fault(kind, seconds=0.2))  # type: ignore[arg-type]
            lease.renew()
            lease.check()
        with pytest.raises(LeaseBusy):
            taken(other)
        server.inject(Fault("answer lost"))
        lease.release()
        won = list[StoreLease]()

        def race(takes: StoreLeases) -> None:
            with suppress(LeaseBusy):
                won.append(taken(takes))

        racers = [threading.Thread(target=race, args=(each,)) for each in (leases, other)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        assert [each.epoch for each in won] == [2]
        assert server.requests() and not server.unconditional_writes("lease")
        won[0].release()
