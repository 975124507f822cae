"""A stream in a session: how it is tried again, stopped and given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streaming_jobs.errors import (
    BrokerUnreachable,
    ConfigurationError,
    Fenced,
    OffsetsLost,
    RecourseError,
    SetupError,
    TopicUnknown,
    TransientError,
    UsageError,
)
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.batch_hooks import StopAtBorder
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.stream_queries import Preflight, QueryHooks
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.state import stream_history
from streaming_jobs.state.stream_record import CodeSince
from streaming_jobs.testing import MemoryQuery
from tests.conftest import SettingsFactory
from tests.support.runners import SPARK, Clock, Make, Queries, ended, pipeline_of, queries_of, query_of, reported
from tests.support.worlds import CODE, STREAM, TOPIC, TOPIC_ID, Disk, FakeTopics, parity, record, settled

pytestmark = pytest.mark.slow

WORKER = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/pyspark/worker.py", line 1231, in main
    process()
  File "/home/me/flows.py", line 12, in crooked
    raise ValueError(n)
ValueError: {}
"""
"""As Spark passes on what a Python worker raised."""


def again(running: StreamRunner) -> StreamRunner:
    """The same stream with a query that runs, as after a start."""
    hooks = QueryHooks("continuous", running.stop.requested, running._built, running.batch_done)
    running.query, running.pipeline = MemoryQuery(), queries_of(running).pipeline(running.stream, hooks)
    return running


@pytest.mark.parametrize("end", [{}, {"stopped_at_border": True, "failure": StopAtBorder()}], ids=["finite", "border"])
def test_the_end_of_a_finite_run_and_a_stop_at_the_border_are_no_failures(make: Make, end: dict[str, Any]) -> None:
    stopped = ended(make(), **end)
    assert (stopped.status.state, stopped.status.error) == ("stopped", None)


def test_a_stream_is_over_once_its_savepoint_is_taken(make: Make) -> None:
    """A lease that is let go earlier would let a recovery begin while this session still removes old generations."""
    running, done = again(make()), list[bool]([False])
    assert running.pipeline is not None and running.query is not None
    running.pipeline.hooks = replace(running.pipeline.hooks, settled=lambda _: done[0])
    running.query.stop()
    running.poll(SPARK)
    assert not running.ended
    done[0] = True
    running.poll(SPARK)
    assert running.status.state == "stopped"


def test_a_query_that_has_to_begin_again_is_no_stop_and_no_failure(make: Make) -> None:
    again = ended(make(), stopped_at_border=True, replanned=True, failure=None)
    assert not again.ended and again.status.error is None and again.query is None
    again.request_stop()
    again.poll(SPARK)
    assert again.status.state == "stopped"


@pytest.mark.parametrize(
    ("failure", "code", "permanent"),
    [
        (Fenced("table evens is in generation 2", "let it end"), "REC-023", True),
        (ConfigurationError("bad trigger", "correct it"), "REC-002", True),
        (UsageError("the function returned too few frames", "return them"), "REC-001", True),
        (SetupError("no Java", "install it"), "REC-003", False),
    ],
)
def test_what_a_retry_would_meet_again_ends_the_stream(
    make: Make, failure: RecourseError, code: str, permanent: bool
) -> None:
    running = ended(make(), failure=failure)
    assert running.status.state == "failed"
    error = {"code": code, "found": failure.found, "next": failure.next_step, "permanent": permanent}
    assert running.status.error == error


def test_what_may_pass_is_tried_again_later_and_later_and_then_given_up(make: Make, clock: Clock) -> None:
    running = make(max_restarts=3)
    starts = queries_of(running).launched
    waited = []
    for _ in range(3):
        ended(running, failure=TransientError("a passing fault"))
        assert not running.ended
        before, begun = clock.now, len(starts)
        while len(starts) == begun:
            clock.now += 0.5
            running.poll(SPARK)
        waited.append(clock.now - before)
    assert waited == [1.0, 2.0, 4.0]
    assert running.status.restarts == 3
    ended(running, failure=TransientError("a passing fault"))
    for _ in range(2):
        assert (running.status.state, running.gave_up, running.ended) == ("failing", True, False)
        assert running.status.next_try == clock.now + 600
        assert running.status.error is not None and running.status.error["lasting"] is True
        running.fail(TransientError("a passing fault"))
    begun = len(starts)
    clock.now += 599
    running.poll(SPARK)
    assert len(starts) == begun

    def away() -> None:
        raise TransientError("a passing fault")

    queries_of(running).at_launch = away
    clock.now += 1
    running.poll(SPARK)
    assert len(starts) == begun + 1
    running.give_up()
    assert (running.status.state, running.status.next_try, running.gave_up) == ("failed", None, False)
    assert running.status.error is not None and running.status.error["permanent"] is False


def test_without_restarts_nothing_is_tried_again_and_any_exception_at_start_becomes_an_error_of_ours(
    make: Make,
) -> None:
    running = ended(make(max_restarts=0), failure=TransientError("a passing fault"))
    assert (running.status.state, running.gave_up) == ("failed", False)

    def broken() -> None:
        raise KeyError("things")

    queries_of(running).at_launch = broken
    running.start(SPARK)
    assert running.status.state == "failed"
    assert running.status.error is not None and running.status.error["code"] == "REC-010"


def test_an_exception_of_the_streams_function_that_comes_back_in_the_same_batch_is_permanent(
    make: Make, clock: Clock
) -> None:
    running, entry = (
        make(),
        LedgerEntry("batch", STREAM, "evens", 1, 7, (OffsetRange(TOPIC, TOPIC_ID, {0: 40}, {0: 50}),)),
    )
    pipeline_of(running).unfinished = entry
    ended(running, failure=RuntimeError(WORKER.format("no place for 41")))
    assert running.status.state == "failing" and running.status.error is not None
    assert running.status.error["found"] == (
        "the stream's function raised ValueError: no place for 41 (/home/me/flows.py:12) "
        "(batch 7: things partition 0 offsets 40 to 49)"
    )
    again(running)
    pipeline_of(running).unfinished = replace(entry, batch=8)
    ended(running, failure=RuntimeError(WORKER.format("no place for 41")))
    assert running.status.state == "failing", "another batch"
    again(running)
    pipeline_of(running).unfinished = replace(entry, batch=8)
    ended(running, failure=RuntimeError(WORKER.format("no place for 43")))
    assert running.status.state == "failed"
    assert (running.status.error["code"], running.status.error["permanent"]) == ("REC-027", True)


def test_after_ten_good_minutes_or_batches_the_retries_count_from_the_beginning(make: Make, clock: Clock) -> None:
    running = make(max_restarts=1)
    running.fail(BrokerUnreachable("no broker"))
    running.retries.none_planned()
    running.retries.started(clock.now)
    clock.now += 599
    running.poll(SPARK)
    assert running.retries.failures == 1
    clock.now += 2
    running.poll(SPARK)
    running.fail(BrokerUnreachable("no broker"))
    assert not running.ended
    running = make(max_restarts=1)
    for good in (9, 10):
        running.retries.failures = 0
        running.fail(BrokerUnreachable("no broker"))
        for batch in range(good):
            running.batch_done(reported(batch))
        assert running.retries.failures == (1 if good == 9 else 0)


def test_a_busy_stream_is_left_to_end_itself_at_the_border_until_the_deadline(make: Make, clock: Clock) -> None:
    running = make()
    pipeline_of(running).in_batch = True
    running.request_stop()
    assert running.status.state == "stopping"
    for _ in range(50):
        clock.now += 0.5
        running.poll(SPARK)
    assert query_of(running).stops == 0
    running = make(stop_deadline="30 seconds")
    pipeline_of(running).in_batch = True
    running.request_stop()
    clock.now += 31
    running.poll(SPARK)
    assert query_of(running).stops == 1


def test_a_batch_that_runs_on_past_the_deadline_keeps_the_stream_until_it_is_over(make: Make, clock: Clock) -> None:
    running = make(stop_deadline="30 seconds")
    query = query_of(running)
    pipeline_of(running).in_batch = query.thread_lives = True
    running.request_stop()
    for _ in range(200):
        clock.now += 1
        running.poll(SPARK)
    assert (running.status.state, running.stuck, query.stops) == ("stopping", False, 1)
    pipeline_of(running).in_batch = False  # its rows are committed, Spark is about to write commits/N
    running.poll(SPARK)
    assert not running.ended
    query.thread_lives = False
    running.poll(SPARK)
    assert (running.status.state, running.stuck) == ("stopped", False)


def test_a_failed_query_is_not_started_again_before_its_batch_is_over(make: Make, clock: Clock) -> None:
    running = make()
    query = query_of(running)
    pipeline_of(running).in_batch = True
    query.active, query.failure = False, RuntimeError("the callback's connection broke")
    for _ in range(100):
        clock.now += 1
        running.poll(SPARK)
    assert running.query is query and running.status.restarts == 0
    pipeline_of(running).in_batch = False
    running.poll(SPARK)
    assert running.query is None and running.retries.next_at is not None


def test_a_batch_that_does_not_end_at_all_makes_the_stream_stuck(make: Make, clock: Clock) -> None:
    running = make(stop_deadline="30 seconds")
    pipeline_of(running).in_batch = query_of(running).thread_lives = True
    running.request_stop()
    clock.now += 31
    running.poll(SPARK)
    clock.now += 299
    running.poll(SPARK)
    assert not running.stuck
    clock.now += 2
    assert running.stuck and not running.ended


def test_an_idle_stream_gets_no_batch_and_is_stopped_from_outside(make: Make, clock: Clock) -> None:
    running = make()
    running.request_stop()
    running.poll(SPARK)
    assert query_of(running).stops == 0  # a batch may be about to begin
    clock.now += 1.5
    running.poll(SPARK)
    assert query_of(running).stops == 1
    running.poll(SPARK)
    assert running.status.state == "stopped"


class Busy(MemoryQuery):
    """A query that is active until its thread ends, which it does not."""

    def stop(self) -> None:
        self.stops += 1
        raise RuntimeError("Stream Execution thread for stream parity failed to stop within 5000 milliseconds")


def test_a_query_that_does_not_stop_in_time_is_asked_again(make: Make, clock: Clock) -> None:
    running, query = make(), Busy()
    running.query = query
    running.request_stop()
    for _ in range(3):
        running.poll(SPARK)
        clock.now += 1.5
    assert (query.stops, running.status.state) == (2, "stopping")


def test_a_stop_asked_for_twice_or_too_late_changes_nothing_and_ends_a_wait_for_a_retry_in_which_the_stream_is_failing(
    make: Make, clock: Clock
) -> None:
    running = make()
    running.request_stop()
    since = running.stop.requested_at
    clock.now += 10
    running.request_stop()
    assert running.stop.requested_at == since
    done = ended(make())
    done.request_stop()
    assert done.status.state == "stopped"
    running = make()
    ended(running, failure=TransientError("a passing fault"))
    running.request_stop()
    running.poll(SPARK)
    assert (running.status.state, queries_of(running).launched) == ("stopped", [])
    running = ended(make(), failure=TransientError("a passing fault"))
    running.refresh_status()
    assert (running.status.state, running.status.next_try) == ("failing", clock.now + 1)
    assert not running.gave_up and running.status.error is not None and running.status.error["found"]


def test_lost_records_are_explained_by_their_exact_range(make: Make, settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0, 1, 2, 3)
    topics = FakeTopics()
    topics.found.earliest[0] = 41
    running = ended(make(topics=topics), failure=RuntimeError("[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] ..."))
    assert disk.settings == running.settings
    assert running.status.error is not None
    assert running.status.error["code"] == "REC-022"
    assert running.status.error["found"].startswith(f"offsets 40 to 40 of topic {TOPIC}, partition 0, are gone")


def test_lost_records_that_a_second_look_finds_may_pass_for_a_minute(
    make: Make, settings: SettingsFactory, clock: Clock
) -> None:
    """A broker that has just started knows less than is there; a look that finds nothing missing settles it."""
    Disk(settings()).open().run(0, 1, 2, 3)
    lost = OffsetsLost("topic numbers is gone, and the stream has read a part of it", "see status")
    running = ended(make(topics=FakeTopics()), failure=lost)
    assert running.status.state == "failing" and running.status.error is not None
    assert running.status.error["code"] == "REC-010" and lost.found in running.status.error["found"]
    clock.now += 60
    running.query = MemoryQuery()
    assert ended(running, failure=lost).status.state == "failed"
    assert running.status.error["code"] == "REC-022"


def test_preflight_refuses_and_passes_warnings_on(make: Make, settings: SettingsFactory) -> None:
    Disk(settings()).open().run(0)
    topics = FakeTopics()
    assert topics.info is not None
    topics.info = replace(topics.info, retention_ms=604_800_000)
    running = make(topics=topics)
    running.preflight()
    assert ["keeps records for 7 days" in warning for warning in running.status.warnings] == [True]
    topics.info = None
    with pytest.raises(TopicUnknown, match="does not exist"):
        running.preflight()


def test_the_status_names_the_trigger_of_the_session(make: Make) -> None:
    assert make().status.trigger == "continuous"
    assert make(trigger="available-now").status.trigger == "available-now"


def test_a_crash_deploys_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `stream.require_deploy` the start after it is refused until somebody has deployed the code on disk."""
    ran = replace(settled(7), record=record(code=(CodeSince(CODE.hash, CODE.package, 1, 0, 1.7e9),)))
    monkeypatch.setattr(Queries, "preflight", lambda *_: Preflight(ran, []))
    running = make(require_deploy=True)
    running.start(SPARK)
    error = running.status.error
    assert running.status.state == "failed" and error is not None and error["permanent"]
    assert f"recourse deploy {STREAM}" in str(error["next"])
    stream_history.record_deploy(
        running.settings, STREAM, CODE.hash, loaded_code(parity, running.settings.flows).hash, "anna"
    )
    assert running.preflight() == ran == make(require_deploy=False).preflight()
