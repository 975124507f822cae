"""A rehearsal without Spark: where it begins, when it ends, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from streaming_jobs.errors import BrokerUnreachable
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.runtime import rehearsal
from streaming_jobs.runtime.rehearsal import NEWEST, rehearse
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.stream import Stream
from streaming_jobs.testing.session import MemoryQueries, MemoryQuery
from tests.support.worlds import RECORDS, TOPIC, FakeTopics, parity


@dataclass
class Rehearsed(MemoryQueries):
    """Queries of a rehearsal; `fails` is raised by `open`."""

    made: Callable[[], MemoryQuery] = lambda: MemoryQuery(active=False)
    fails: Exception | None = None
    connection: Any = field(default_factory=lambda: SimpleNamespace(topics=FakeTopics()))
    until: TopicOffsets | None = None
    closed: bool = False
    begins: TopicOffsets = field(default_factory=dict)

    def open(self, streams: object) -> None:
        if self.fails is not None:
            raise self.fails

    def query(self, stream: Stream) -> MemoryQuery:
        self.begins = stream_record.existing(self.settings, stream.name).starts
        return self.made()

    def close(self) -> None:
        self.closed = True


@dataclass
class Rehearsals:
    """A function that rehearses `parity`, and what it has logged."""

    home: Settings
    patch: pytest.MonkeyPatch
    made: list[Rehearsed] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """The folders that are there after the last rehearsal."""

    def __call__(self, *, wanted: Callable[[], bool] = lambda: True, **options: Any) -> str:
        def queries(own: Settings, **_: object) -> Rehearsed:
            self.made.append(Rehearsed(own, **options))
            return self.made[-1]

        self.patch.setattr(rehearsal, "SparkQueries", queries)
        with structlog.testing.capture_logs() as logged:
            rehearse(self.home, [parity], cast("Any", None), lambda _: wanted())
        self.left = [each.name for each in self.home.home.glob("scratch/rehearsal-*/*/")]
        assert all(each.closed for each in self.made)
        return " ".join(f"{line['event']} {line.get('reason', '')}" for line in logged).strip()


@pytest.fixture
def run(home: Settings, monkeypatch: pytest.MonkeyPatch) -> Rehearsals:
    return Rehearsals(home, monkeypatch)


def test_it_reads_the_newest_records_of_each_partition_in_folders_of_its_own(run: Rehearsals) -> None:
    assert "not rehearsed" not in run()
    (made,) = run.made
    assert made.begins == {TOPIC: dict.fromkeys((0, 1), RECORDS - NEWEST)}
    assert made.until == {TOPIC: {0: RECORDS, 1: RECORDS}}
    assert not run.left
    assert run.home.state not in (made.settings.state, *made.settings.state_folder.parents)


def test_its_failure_is_logged_and_the_start_is_left_to_be_tried(run: Rehearsals) -> None:
    fails = BrokerUnreachable("the broker is away", "start it")
    assert run(fails=fails) == "the start of the stream was not rehearsed the broker is away"
    said = run(made=lambda: MemoryQuery(active=False, failure=ValueError("of the function")))
    assert "was not rehearsed" in said and "of the function" in said
    assert not run.left


def test_a_query_that_does_not_end_is_stopped_at_the_deadline(run: Rehearsals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_TAKES", 0.1)
    endless = MemoryQuery()
    assert "it took too long" in run(made=lambda: endless)
    (made,) = run.made
    assert endless.stops == 1 and made.hooks["parity"].stop.is_set() and not run.left


def test_the_folder_of_a_query_that_does_not_end_stays(run: Rehearsals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_TAKES", 0.1)
    monkeypatch.setattr(rehearsal, "_ENDS_WITHIN", 0.1)
    for number in (1, 2):  # each in a folder of its own
        assert "does not end within 0.1 s" in run(made=lambda: MemoryQuery(thread_lives=True))
        assert len(run.left) == number


def test_a_query_that_ends_later_than_sparks_stop_waits_has_ended(
    run: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndsLater(MemoryQuery):
        @property
        def ended(self) -> bool:
            self.thread_lives = self.active or next(looks, False)
            return not self.thread_lives

    looks = iter([True, True])
    monkeypatch.setattr(rehearsal, "_TAKES", 0.1)
    assert "it took too long" in run(made=lambda: EndsLater(thread_lives=True))
    assert not run.left and not [*looks]


def test_it_ends_when_the_session_need_no_longer_stand_by_and_does_not_begin_then(run: Rehearsals) -> None:
    answers, endless = iter([True, True, False]), MemoryQuery()
    assert "no longer wanted" in run(made=lambda: endless, wanted=lambda: next(answers)) and endless.stops == 1
    assert run(wanted=lambda: False) == "" and len(run.made) == 1
