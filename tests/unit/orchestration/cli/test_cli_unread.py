"""Lag in detail: `recourse streams status NAME` and `recourse topics`, with what the broker says given by the test."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.platform import broker
from streaming_jobs.runtime import lag
from streaming_jobs.runtime.lag import Ends, Unread, unread_by_partition, unread_of
from streaming_jobs.settings import Settings
from streaming_jobs.sources import topics
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state.status import Status, write_status
from streaming_jobs.state.topic_records import VoidRange, declare_void
from tests.support.worlds import STREAM, TOPIC, TOPIC_ID, Disk, FakeTopics
from tests.unit.orchestration.cli.conftest import Run

ENDS = Ends(1_000.0, {TOPIC: {0: 50, 1: 7, 2: 0}})
POSITION = {TOPIC: {0: 20, 1: 9}}


@pytest.fixture
def home(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A home in which `parity` has run; its lag was seen just now."""
    monkeypatch.setenv("RECOURSE_FLOWS", '["tests.support.worlds"]')
    settings, now = Settings.load(), time.time()
    status = Status(STREAM, "stopped", heartbeat=now, started_at=now, lag_at=now, lag_records=30, lag_s=4.0)
    write_status(settings, replace(status, lag_partitions={TOPIC: {"0": 30, "1": 0}}))
    return settings


def answers(monkeypatch: pytest.MonkeyPatch, known: Unread | None) -> None:
    monkeypatch.setattr(lag, "unread_now", lambda *_: {STREAM: known} if known is not None else {})


def test_unread_records_are_counted_by_partition_and_never_below_zero() -> None:
    known = unread_of(POSITION, ENDS, {(TOPIC, 0): 400.0})
    assert [(p.partition, p.records, p.oldest) for p in known.partitions] == [
        (0, 30, 400.0),
        (1, 0, None),
        (2, 0, None),
    ]
    assert (known.records, known.oldest) == (30, 400.0)
    assert known.oldest_age == pytest.approx(time.time() - 400, abs=5)
    assert unread_of(POSITION, ENDS, {}).oldest_age is None
    assert unread_of(ENDS.offsets, ENDS, {}).oldest_age == 0.0


def test_only_partitions_with_unread_records_are_read_and_no_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert unread_by_partition(POSITION, ENDS) == {(TOPIC, 0): 20}
    assert unread_by_partition({}, ENDS) == {(TOPIC, 0): 0, (TOPIC, 1): 0}
    monkeypatch.setattr(lag, "MOST", 1)
    assert unread_by_partition({}, ENDS) == {(TOPIC, 0): 0}


def test_one_stream_is_shown_with_its_partitions(home: Settings, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    answers(monkeypatch, unread_of(POSITION, ENDS, {(TOPIC, 0): 1_357_000_000.0}))
    printed = run("streams", "status", STREAM)
    assert printed.code == 0
    assert "30 records unread; by timestamps the oldest is of 2013-01-01 00:26:40 UTC" in printed.err
    (line,) = [line.split() for line in printed.out.splitlines() if "2013-01-01" in line]
    assert line[:5] == [TOPIC, "0", "20", "50", "30"]
    answers(monkeypatch, unread_of(POSITION, ENDS, {}))
    assert "not read in time" in run("streams", "status", STREAM).out
    assert "unread" not in run("streams", "status").err


def test_json_has_it_for_every_stream(home: Settings, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    answers(monkeypatch, unread_of(POSITION, ENDS, {}))
    by_name = {value["stream"]: value["unread"] for value in run.json("streams", "status")}
    assert by_name["plain"] is None
    assert by_name[STREAM]["records"] == 30 and by_name[STREAM]["oldest_age_s"] is None
    assert by_name[STREAM]["partitions"][0]["position"] == 20


def test_code_that_cannot_be_loaded_costs_the_detail_and_no_status(
    home: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    (tmp_path / "torn_flows.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RECOURSE_FLOWS", '["torn_flows"]')
    printed = run("streams", "status", "-o", "json")
    (value,) = printed.value
    assert printed.code == 0 and (value["stream"], value["unread"]) == (STREAM, None)
    assert "the code on disk cannot be loaded" in printed.err


def test_without_a_broker_the_last_known_lag_is_shown_with_its_age(
    home: Settings, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    answers(monkeypatch, None)
    printed = run("streams", "status", STREAM)
    assert re.search(r"the end of its topics cannot be seen; the lag by partition \d s ago was", printed.err)
    assert next(line.split() for line in printed.out.splitlines() if line.startswith(TOPIC)) == [TOPIC, "0", "30"]


class Growing(FakeTopics):
    """A topic to which 20 records come between two looks."""

    bootstrap = "broker:9092"
    looks = 0

    def offsets(self, name: str) -> OffsetBounds:
        self.looks += 1
        return OffsetBounds({0: 5, 1: 0}, {0: 40 + 20 * self.looks, 1: 8})

    def mean_size(self, name: str, starts: object) -> float | None:
        return 120.0


@pytest.fixture
def growing(home: Settings, monkeypatch: pytest.MonkeyPatch) -> Growing:
    fake = Growing(TopicInfo(TOPIC, TOPIC_ID, 2, 604_800_000, "delete"))
    monkeypatch.setattr(broker, "bootstrap_servers", lambda _: "broker:9092")
    monkeypatch.setattr(topics.Topics, "of", lambda *_: fake)
    return fake


def test_topics_have_figures_and_the_lag_of_their_readers(
    growing: Growing, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    answers(monkeypatch, unread_of(POSITION, ENDS, {}))
    (value,) = run.json("topics", "--seconds", "0.05")
    assert (value["topic"], value["partitions"], value["records"], value["end"]) == (TOPIC, 2, 83, 88)
    assert 0 < value["records_per_s"] <= 20 / 0.05
    assert value["lag"] == {"parity": 30, "plain": None}
    assert value["bytes"] is None
    printed = run("topics", TOPIC, "--seconds", "0")
    assert "7 days" in printed.out and "about 120 bytes" in printed.err
    assert len(printed.out.splitlines()) == 3 + 1 + 4


def test_a_topic_that_no_stream_reads_has_a_schema_from_its_records(
    growing: Growing, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("RECOURSE_FLOWS", "[]")
    values = [b'{"id": 1, "at": "2026-01-01T00:00:00Z"}', b'{"id": 2, "at": null}', b"no JSON"]
    monkeypatch.setattr(growing, "newest_values", lambda name, _: values if name == "new" else [], raising=False)
    printed = run.ended(0, "topics", "new", "--schema")
    schema = {"id": "bigint not null", "at": "timestamp"}
    assert eval(printed.out, {"Json": dict}) == schema
    assert "made from 3 records of topic new" in printed.err
    assert "1 of them would be dead letters: malformed_json" in printed.err
    assert run.json("topics", "new", "--schema")["schema"] == schema
    assert "recourse topics TOPIC --schema" in run.said("topics", "--schema")
    assert "of 0 records of topic empty, none is a JSON object" in run.said("topics", "empty", "--schema")


def test_void_ranges_of_a_topic_are_shown_with_their_plans(
    growing: Growing, home: Settings, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    answers(monkeypatch, unread_of(POSITION, ENDS, {}))
    ranges = [VoidRange(0, 11, 33, "w-0001", 2, 0.0), VoidRange(0, 20, 40, "w-0002", 3, 1.0)]
    gone = VoidRange(0, 50, 60, "w-0003", 4, 2.0)
    declare_void(home, TOPIC, TOPIC_ID, writer="w", path=(1, 2, 3), ranges=[*ranges, gone])
    lines = [line.split() for line in run("topics", TOPIC, "--seconds", "0").out.splitlines()]
    assert lines[2][3] == "29", "ranges that overlap count once"
    assert [line[:4] for line in lines if "1970-01-01" in line] == [
        ["0", "11", "33", "w-0001"],
        ["0", "20", "40", "w-0002"],
    ]
    (value,) = run.json("topics", "--seconds", "0")
    assert [each["plan"] for each in value["void"]] == ["w-0001", "w-0002"]
    declare_void(home, TOPIC, "another id", writer="w", path=(1,), ranges=[VoidRange(0, 1, 2, "x", 1, 0.0)])
    assert run.json("topics", "--seconds", "0")[0]["void"] == []


def test_void_offsets_are_not_unread() -> None:
    void = {TOPIC: VoidRanges.of([(0, 10, 35), (0, 45, 60)])}
    known = unread_of(POSITION, ENDS, {}, void)
    assert [p.records for p in known.partitions] == [30 - 15 - 5, 0, 0]
    assert unread_by_partition(POSITION, ENDS, void) == {(TOPIC, 0): 35}, "the first record that will be read"
    assert unread_by_partition(POSITION, ENDS, {TOPIC: VoidRanges.of([(0, 10, 50)])}) == {}


def test_a_topic_that_is_missing_or_unknown_is_named(
    growing: Growing, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    growing.info = None
    missing, unknown = run("topics"), run("topics", "thing")
    assert missing.code == 0 and f"topic {TOPIC} does not exist at broker:9092" in missing.err
    assert unknown.code == 2 and f"did you mean '{TOPIC}'" in unknown.err


def test_the_void_ranges_of_a_streams_topics_are_those_of_the_topic_that_it_is_bound_to(home: Settings) -> None:
    disk = Disk(home).open()
    ranges = [VoidRange(0, 10, 20, "w-0001", 2, 0.0)]
    declare_void(home, TOPIC, TOPIC_ID, writer="w", path=(1, 2), ranges=ranges)
    assert lag._void(home, disk.stream) == {TOPIC: VoidRanges.of([(0, 10, 20)])}
    declare_void(home, TOPIC, "another id", writer="w", path=(1, 2), ranges=ranges)
    assert lag._void(home, disk.stream) == {}
