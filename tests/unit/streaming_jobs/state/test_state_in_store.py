"""The state of a stream in an object store: every module of it, against an S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reprocessing.plan import plan_file
from reprocessing.plan.journal import journal_of
from streaming_jobs.errors import Fenced
from streaming_jobs.ledger.entry import NO_CODE
from streaming_jobs.platform.object_store import StoreFiles, open_store
from streaming_jobs.runtime import output_plans
from streaming_jobs.settings import Settings
from streaming_jobs.state import savepoint_retention, savepoints, stream_folder, stream_history, stream_record
from streaming_jobs.state.requests import START, STOP
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.status import Status, read_status, streams_with_status, write_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.topic_records import VoidRange, declare_void, under_way_of
from streaming_jobs.state.topic_records import load as topic_record
from tests.support.store_server import Fault, StoreServer, store_server


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture
def store(server: StoreServer, home: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreFiles]:
    """The store that has the state of `home`; nothing of it is on the disk afterwards."""
    server.clear()
    files = open_store(f"{server.url}/{uuid.uuid4().hex}", server.options)

    def below(path: Path) -> StoreFiles:
        inside = path.relative_to(home.state).as_posix()
        return files if inside == "." else files.below(inside)

    monkeypatch.setattr(stream_folder, "LocalFiles", below)
    yield files
    assert not home.state.exists()


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
    home: Settings, server: StoreServer, store: StoreFiles
) -> None:
    assert [plan_file.next_id(home, "plain") for _ in range(2)] == ["plain-0001", "plain-0002"]
    journal = journal_of(home, "plain-0001")
    journal.write("take_savepoint", "begun")
    journal.write("take_savepoint", "done", {"savepoint": "x"})
    server.clear()
    assert journal.done("take_savepoint") == {"savepoint": "x"}
    assert [each.method for each in server.requests()] == ["GET"], "a journal is read with one request"
    assert server.unconditional_writes("journal|about") == []


def test_void_ranges_savepoints_and_slices_come_back(home: Settings, store: StoreFiles) -> None:
    void = VoidRange(0, 3, 7, "plain-0001", 2, 1.0)
    declare_void(home, "things", "id", writer="plain", path=(1, 2), ranges=[void], under_way="plain-0001")
    declare_void(home, ".hidden", "id", writer="plain", path=(1, 2), ranges=[void])
    (under_way,) = under_way_of(home, "plain-0001")
    assert under_way.void == (void,) and topic_record(home, ".hidden") is not None

    taken = Savepoint("plain", 1, 8, 1.0, "time", "", {"things": {0: 7}}, {"things": "id"}, NO_CODE, {}, ())
    savepoints._write(home, taken)
    kept = savepoints.keep_for(home, taken, "recovery", "of a plan")
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
