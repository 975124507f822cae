"""The plan of a deploy and its record: what differs, what would be refused, who is touched."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from orchestration.deploys.plan import StreamDeploy, make_plan, refusals
from orchestration.deploys.starting import DeployOutcome, ask, request, wait, wait_for_code
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.runtime import declaration
from streaming_jobs.runtime.code_version import code_parts, loaded_code
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_history, stream_record
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.requests import START, STOP
from streaming_jobs.state.status import Status, write_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import DeltaTable
from tests.conftest import SettingsFactory
from tests.support.objects import path_of
from tests.support.worlds import parity, plain

TOPOLOGY = Topology.of([plain, parity])


def code(stream: object) -> str:
    return loaded_code(stream, []).hash  # type: ignore[arg-type]


@pytest.fixture
def home(settings: SettingsFactory) -> Iterator[Settings]:
    """A home in which this process runs both streams; `plain` with older code."""
    home = settings({"flows": []})
    leases = [acquire(home, name, purpose="session") for name in ("plain", "parity")]
    for name, hash_ in (("plain", "0123456789ab"), ("parity", code(parity))):
        now = time.time()
        status = Status(name, "running", os.getpid(), heartbeat=now, started_at=now, begun_at=now)
        status.code_version = f"{hash_} (1.0)"
        write_status(home, status)
    yield home
    for lease in leases:
        lease.release()


def test_a_stream_with_other_code_is_touched_and_the_others_of_its_process_are_named(home: Settings) -> None:
    plan = make_plan(home, TOPOLOGY)
    (touched,) = plan.touched
    assert (touched.stream, touched.before, touched.after) == ("plain", "0123456789ab", code(plain))
    assert touched.beside == ("parity",) and touched.pid == os.getpid() and plan.further_processes == 1
    assert touched.changes == ("the parts of the running code are not known",)
    assert not make_plan(home, TOPOLOGY, ["parity"]).touched


def test_the_changes_are_named_part_by_part(home: Settings) -> None:
    parts = declaration.parts_of(plain, home)
    old = {**parts, "function plain": "other", "setting trigger": "available-now", "topic things: column z": "bigint"}
    old.pop("setting pace")
    words = declaration.changes(old, parts)
    assert "changed: function plain" in words and "gone: topic things: column z (bigint)" in words
    assert f"setting trigger: available-now -> {parts['setting trigger']}" in words
    declaration.note(plain, home)
    assert declaration.noted(home, "plain", code(plain)) == parts
    assert declaration.noted(home, "plain", "0123456789ab") is None, "those of other code"
    path_of(StreamFolder.of(home, "plain").declaration).write_text("{")
    assert declaration.noted(home, "plain", code(plain)) is None


def test_the_parts_of_the_code_change_with_what_they_are_made_of() -> None:
    assert set(code_parts(plain, [])) >= {"function plain"}
    assert code_parts(plain, [])["function plain"] != code_parts(parity, [])["function parity"]


def test_a_password_among_the_properties_of_spark_is_a_hash(settings: SettingsFactory) -> None:
    home = settings({"spark.extra": {"spark.hadoop.fs.s3a.secret.key": "s3cret"}})
    assert "s3cret" not in str(declaration.parts_of(plain, home))


def test_streams_that_are_stopped_new_or_gone_are_not_touched(home: Settings) -> None:
    STOP.ask(home, "plain", "anna")
    by_name = {each.stream: each for each in make_plan(home, TOPOLOGY).streams}
    assert by_name["plain"].action == "not running"
    by_name = {each.stream: each for each in make_plan(home, Topology.of([parity])).streams}
    assert by_name["plain"].action == "removed" and "no longer declared" in by_name["plain"].note
    new = replace(plain, name="fresh", sinks={"fresh": DeltaTable("fresh")})
    assert make_plan(home, Topology.of([new]), ["fresh"]).streams[0].action == "new"


def test_a_stream_that_took_over_a_table_may_be_a_renamed_one(home: Settings) -> None:
    bound = stream_record.BoundTable(plain.primary.name, "an id", "primary")
    stream_record.save(home, replace(stream_record.first("plain"), tables=(bound,)))
    renamed = replace(plain, name="simple")
    (new,) = [e for e in make_plan(home, Topology.of([parity, renamed])).streams if e.action == "new"]
    assert (
        f"table {plain.primary.name} belongs to stream plain" in new.note and "set name='plain' in @stream" in new.note
    )
    other = replace(plain, name="fresh", sinks={"fresh": DeltaTable("fresh")})
    (new,) = [e for e in make_plan(home, Topology.of([parity, other])).streams if e.action == "new"]
    assert "belongs to" not in new.note
    (new,) = [e for e in make_plan(home, Topology.of([plain, parity, other])).streams if e.action == "new"]
    assert "belongs to" not in new.note


def test_other_tables_and_topics_would_be_refused(home: Settings) -> None:
    tables = (stream_record.BoundTable("before", "id", "primary"),)
    topics = (stream_record.BoundTopic("elsewhere", "id", {0: 0}),)
    stream_record.save(home, replace(stream_record.first("plain"), tables=tables, topics=topics))
    words = "; ".join(refusals(home, plain))
    assert "no longer writes table before" in words and "no longer reads topic elsewhere" in words


def test_a_deploy_is_recorded_once_and_a_torn_line_is_no_obstacle(home: Settings) -> None:
    stream_history.record_deploy(home, "plain", "a", "b", "anna")
    stream_history.record_deploy(home, "plain", "a", "b", "anna")
    path = path_of(StreamFolder.of(home, "plain").deploys)
    with path.open("a") as file:
        file.write('{"at": 1, "fr')
    stream_history.record_deploy(home, "plain", "b", "c", "bob")
    assert [(d.before, d.after, d.by) for d in stream_history.deploys(home, "plain")] == [
        ("a", "b", "anna"),
        ("b", "c", "bob"),
    ]


def waited(home: Settings, asked: float, seconds: float = 5) -> DeployOutcome:
    """The outcome of a deploy of `plain`."""
    (outcome,) = wait_for_code(home, [StreamDeploy("plain", "deploy", "a", "b")], {"plain": asked}, seconds, print)
    return outcome


def test_a_request_that_waits_is_not_repeated_unless_the_code_has_changed_or_a_failed_start_has_seen_it(
    home: Settings,
) -> None:
    """As after a deploy that was killed."""
    asked = request(home, "plain", "anna", newest=time.time() - 60)
    assert request(home, "plain", "anna", newest=time.time() - 60) == asked
    later = request(home, "plain", "anna", newest=time.time() + 60)
    assert later > asked, "the code has changed since"
    write_status(home, Status("plain", state="failed", started_at=later + 0.001))
    time.sleep(0.02)
    again = request(home, "plain", "anna", newest=0.0)
    pending = START.request(home, "plain")
    assert again > later and pending is not None and pending.since == again


def test_a_start_that_preflight_refuses_is_the_answer(home: Settings) -> None:
    asked = request(home, "plain", "anna", newest=0.0)
    error = {"code": "REC-021", "found": "another writer", "next": "accept it", "permanent": True}
    write_status(home, Status("plain", state="failed", started_at=asked + 1, error=error))  # type: ignore[arg-type]
    done = waited(home, asked, 3600.0)
    assert done.result == "failed" and "another writer" in done.text and "accept it" in done.text


def test_a_deploy_is_done_when_the_new_code_has_committed(home: Settings) -> None:
    asked = request(home, "plain", "anna", newest=0.0)
    assert waited(home, asked, 0.3).result == "not yet"
    now = time.time()
    status = Status("plain", "running", os.getpid(), heartbeat=now, started_at=now, begun_at=asked + 1)
    status.code_version, status.committed_at = "b (1.0)", asked - 1
    write_status(home, status)
    assert waited(home, asked, 0.3).result == "not yet"
    status.committed_at = asked + 2
    write_status(home, status)
    done = waited(home, asked)
    assert done.ok and "runs b" in done.text
    status.state, status.error = "failed", {"found": "a bug", "next": "correct it"}
    write_status(home, status)
    failed = waited(home, asked)
    assert failed.result == "failed" and "put the code a back" in failed.text and "correct it" in failed.text


def test_a_start_asks_only_where_something_is_to_be_started(home: Settings) -> None:
    assert ask(home, "plain", "anna", again=False).asked is None
    STOP.ask_for(home, "plain", "plan-1")
    (refused,) = wait(home, [ask(home, "plain", "anna", again=True)], 1, lambda _: None)
    assert refused.outcome == "recovering" and "recourse recover resume plan-1" in refused.text
    assert START.request(home, "plain") is None
    STOP.clear_for(home, "plain", "plan-1")
    STOP.ask(home, "plain", "anna")
    begun = ask(home, "plain", "anna", again=False)
    assert begun.asked is not None and not STOP.asked(home, "plain")
