"""The state of a stream in an object store: every module of it, against an S3 server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from reprocessing.plan import plan_file
from reprocessing.plan.journal import journal_of
from streaming_jobs import session as session_module
from streaming_jobs.errors import ConfigurationError, Fenced, TransientError
from streaming_jobs.ledger.entry import NO_CODE, LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime import output_plans
from streaming_jobs.session import Session, StatusFiles
from streaming_jobs.settings import Settings
from streaming_jobs.state import savepoint_retention, savepoints, stream_history, stream_record
from streaming_jobs.state.checkpoint import copy, is_made
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.requests import START, STOP
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.status import Status, first_status, read_status, streams_with_status, write_status
from streaming_jobs.state.stream_folder import StreamFolder, state_files
from streaming_jobs.state.topic_records import VoidRange, declare_void, under_way_of
from streaming_jobs.state.topic_records import load as topic_record
from streaming_jobs.storage.locations import Location, files_below
from streaming_jobs.storage.object_files import Found
from streaming_jobs.storage.object_store import POLLED_EVERY, PolledFiles, StoreFiles
from streaming_jobs.verification.state_evidence import StateEvidence
from tests.conftest import SettingsFactory
from tests.support.memory_files import MemoryFiles
from tests.support.store_server import Fault, StoreServer


@pytest.fixture
def server(object_store: StoreServer) -> StoreServer:
    return object_store


@pytest.fixture
def home(settings: SettingsFactory, tables_on_a_store: dict[str, Any]) -> Settings:
    """State is on the store; nothing of it is in the home."""
    return settings({**tables_on_a_store, "state_dir": f"{tables_on_a_store['tables_dir']}-state"})


@pytest.fixture
def store(home: Settings) -> Iterator[StoreFiles]:
    files = state_files(home)
    assert isinstance(files, StoreFiles)
    yield files
    assert not (home.home / "state").exists()


def test_a_record_is_replaced_by_whoever_has_read_it_last(
    home: Settings, server: StoreServer, store: StoreFiles
) -> None:
    first = stream_record.save(home, stream_record.first("plain"))
    second = stream_record.save(home, replace(first, void_ranges=({"topic": "t"},)))
    for stale in (stream_record.first("plain"), first):
        with pytest.raises(Fenced):
            stream_record.save(home, stale)
    server.inject(Fault("answer lost"))
    third = stream_record.save(home, replace(second, void_ranges=()))
    assert stream_record.load(home, "plain") == third
    assert server.unconditional_writes("stream.json") == []


def test_a_request_is_removed_by_whoever_has_seen_it_and_no_newer_one(
    home: Settings, server: StoreServer, store: StoreFiles
) -> None:
    seen = STOP.ask(home, "plain", "anna")
    newer = STOP.ask(home, "plain", "anna")
    STOP.clear(home, "plain", seen)
    assert STOP.requests(home) == {"plain": newer}
    STOP.clear(home, "plain", newer)
    assert not STOP.asked(home, "plain")
    STOP.ask_for(home, "plain", "plain-0001")
    START.ask_for(home, "plain", "plain-0001")
    STOP.ask_for(home, "plain", "plain-0002")
    assert STOP.for_recovery(home, "plain")
    STOP.clear_for(home, "plain", "plain-0002")
    assert STOP.asked(home, "plain")
    STOP.clear_for(home, "plain", "plain-0001")
    assert not STOP.asked(home, "plain") and START.asked(home, "plain")


def test_reports_and_history_come_back(home: Settings, server: StoreServer, store: StoreFiles) -> None:
    status = Status("plain", batch=3)
    write_status(home, status)
    assert read_status(home, "plain") == status and streams_with_status(home) == ["plain"]
    stream_history.record_deploy(home, "plain", "a", "b", "anna")
    stream_history.record_deploy(home, "plain", "b", "c", "anna")
    assert [each.after for each in stream_history.deploys(home, "plain")] == ["b", "c"]
    stream_history.note_session_event(home, status, "started")
    server.inject(Fault("denied", key="sessions"))
    stream_history.note_session_event(home, status, "stopped")
    assert [each.what for each in stream_history.session_events(home, "plain")] == ["started"]
    plans = StreamFolder.of(home, "plain").output_plans
    output_plans.write(plans, {"a": {"t": {"nodes": ["Project"], "position": None}}})
    assert output_plans.nodes(plans, ["a"]) == {"Project"}
    assert server.unconditional_writes(r"\.jsonl") == []


def test_a_plan_has_a_name_of_its_own_and_its_journal_one_writer(
    home: Settings, server: StoreServer, store: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plan_file, "_ids", lambda _: [])  # two planners at the same moment
        assert [plan_file.next_id(home, "plain") for _ in range(2)] == ["plain-0001", "plain-0002"]
    assert plan_file.next_id(home, "plain") == "plain-0003"
    journal = journal_of(home, "plain-0001")
    journal.write("take_savepoint", "begun")
    journal.write("take_savepoint", "done", {"savepoint": "x"})
    server.clear()
    assert journal.done("take_savepoint") == {"savepoint": "x"}
    assert [each.method for each in server.requests()] == ["GET"], "a journal is read with one request"
    assert server.unconditional_writes("journal|about") == []


def test_void_ranges_savepoints_and_slices_come_back(home: Settings, server: StoreServer, store: StoreFiles) -> None:
    void = VoidRange(0, 3, 7, "plain-0001", 2, 1.0)
    declare_void(home, "things", "id", writer="plain", path=(1, 2), ranges=[void], under_way="plain-0001")
    declare_void(home, "things", "id", writer="plain", path=(1, 2), ranges=[void], under_way="plain-0001")
    assert server.unconditional_writes("_topics") == []
    declare_void(home, ".hidden", "id", writer="plain", path=(1, 2), ranges=[void])
    (under_way,) = under_way_of(home, "plain-0001")
    assert under_way.void == (void,) and topic_record(home, ".hidden") is not None

    taken = Savepoint("plain", 1, 8, 1.0, "time", "", {"things": {0: 7}}, {"things": "id"}, NO_CODE, {}, ())
    savepoints._write(home, taken)
    server.clear()
    kept = savepoints.keep_for(home, taken, "recovery", "of a plan")
    assert server.unconditional_writes("savepoints") == []
    assert savepoints.savepoints(home, "plain") == [kept] and savepoint_retention.named(home) == []
    savepoints.forget(home, "plain", taken.id)
    with pytest.raises(FileNotFoundError):
        savepoints.keep_for(home, taken, "recovery", "of a plan")

    requests = SliceRequests.of(home, "plain")
    for name in ("a", "b"):
        requests.ask(SliceCommitRequest(name, "plain", "t", "{}", {}, 1.0))
    a, b = requests.waiting()
    assert requests.claim(a)
    for each in (a, b):
        requests.withdraw(each, "late")
    assert [each.id for each in requests.waiting()] == ["a"] and [each.id for each in requests.history()] == ["b"]


def entry(batch: int) -> LedgerEntry:
    read = OffsetRange("t", "id", {0: batch}, {0: batch + 1})
    return LedgerEntry("batch", "plain", "plain", 1, batch, (read,), {"written": 1})


def test_the_ledger_is_objects_of_many_lines_and_loses_those_that_wait_to_a_kill_alone(
    home: Settings, server: StoreServer, store: StoreFiles
) -> None:
    """The first line is an object at once, then a hundred are; the driver's end writes the rest."""
    folder = StreamFolder.of(home, "plain").ledger
    driver, reader = LedgerFile(folder), LedgerFile(folder)
    for batch in range(150):
        driver.append(entry(batch), {"plain": batch})
    assert len(store.names("plain/ledger")) == 2
    assert reader.newest("plain") == (entry(100), {"plain": 100})
    server.inject(Fault("denied", key=r"\.jsonl", times=2))
    driver.flush()
    with pytest.raises(ConfigurationError):
        driver.append(entry(150), {"plain": 150}, durable=True)
    driver.flush()
    assert [line.entry.batch for line in reader.after("plain", Txn(1, 146), at_most=9)] == [150, 149, 148, 147]
    assert [raw.txn.batch for raw in next(iter(reader.days("plain")))] == list(range(151))
    other = LedgerFile(StreamFolder.of(home, "other").ledger)
    other.adopt(reader)
    other.adopt(reader)
    assert [raw.txn.batch for raw in next(iter(other.days("plain")))] == list(range(151))


def test_a_verifier_finds_the_ledgers_lines(home: Settings, store: StoreFiles) -> None:
    stream_record.save(home, stream_record.first("plain"))
    driver = LedgerFile(StreamFolder.of(home, "plain").ledger)
    for batch in range(3):
        driver.append(entry(batch), {"plain": batch})
    driver.flush()
    evidence = StateEvidence.read(home.state, "plain")
    assert evidence is not None and sorted(evidence.lines) == [(1, 0), (1, 1), (1, 2)]


def lay(folder: Location, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"{}")  # type: ignore[union-attr]


def test_a_checkpoint_that_was_copied_by_half_is_copied_again(
    home: Settings, server: StoreServer, store: StoreFiles
) -> None:
    """It is whole once it has its metadata, which comes last, and nothing of the first attempt."""
    source, target = (home.state / "plain" / name for name in ("savepoint", "g0002"))
    lay(source, "metadata", "offsets/3", "commits/3", "sources/0/0", "state/0/0/1.changelog")
    lay(target, "offsets/9")
    server.inject(Fault("denied", key="g0002/state"))
    with pytest.raises(ConfigurationError):
        copy(source, target)
    assert not is_made(target)
    copy(source, target)
    assert is_made(target)
    assert {name for name, _ in files_below(target)} == {name for name, _ in files_below(source)}


def test_the_bound_of_savepoints_counts_each_object_once(home: Settings, store: StoreFiles) -> None:
    places = [home.state / "plain" / "savepoints" / name for name in ("a", "b")]
    for place in places:
        lay(place, "state/1.zip", "links/2.zip")
    files = [savepoints.files_of([place]) for place in places]
    assert [len(each) for each in files] == [2, 2]
    assert not {tuple(row[:2]) for row in files[0]} & {tuple(row[:2]) for row in files[1]}


def test_a_request_has_the_time_of_who_made_it(home: Settings, store: StoreFiles) -> None:
    """A store's clock has whole seconds, and may be another one."""
    before = time.time()
    STOP.ask(home, "plain", "me")
    pending = STOP.request(home, "plain")
    assert pending is not None and before <= pending.since <= time.time()


def test_what_is_left_of_a_forgotten_plan_is_removed(home: Settings, store: StoreFiles) -> None:
    name = plan_file.next_id(home, "plain")
    journal_of(home, name).write("take_savepoint", "begun")
    lay(plan_file.replay_state(home, name), "plain/stream.json")
    plan_file.remove(home, name)
    assert store.names("recoveries") == []


def test_a_status_that_the_store_does_not_take_stops_no_stream(
    home: Settings, server: StoreServer, store: StoreFiles
) -> None:
    files, status = StatusFiles(home), first_status(home, "plain")
    server.inject(Fault("denied", key="status.json"))
    assert not files.write(status)
    assert files.write(status) and read_status(home, "plain") is not None


def test_a_lease_elsewhere_is_asked_for_every_two_seconds_and_held_if_the_store_does_not_say(
    home: Settings, store: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, now = Session(home, []), [100.0]
    monkeypatch.setattr(session_module.time, "monotonic", lambda: now[0])

    def holder(_: str) -> None:
        raise TransientError("no answer")

    assert not session.held_elsewhere("plain")
    monkeypatch.setattr(session.leases, "holder", holder)
    assert not session.held_elsewhere("plain")
    now[0] += POLLED_EVERY
    assert session.held_elsewhere("plain")


def test_a_look_that_began_before_a_write_of_this_process_does_not_count() -> None:
    class Slow(MemoryFiles):
        def read(self, name: str) -> Found | None:
            found = super().read(name)
            if found is None:
                files.put(name, b"now")
            return found

    files = PolledFiles(Slow("slow/"), seconds=60)
    assert files.read("plain/stop") is None and files.read("plain/stop") is not None
