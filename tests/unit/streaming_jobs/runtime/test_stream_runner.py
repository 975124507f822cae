"""A stream in a session: what its status says, where it begins, how it is tried again, stopped and given up."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType
from structlog.testing import capture_logs

from streaming_jobs.errors import (
    BrokerUnreachable,
    ConfigurationError,
    Fenced,
    FunctionRaised,
    OffsetsLost,
    PreflightRefused,
    RecourseError,
    SetupError,
    TransientError,
    UsageError,
)
from streaming_jobs.ledger import LedgerEntry
from streaming_jobs.positions import OffsetRange
from streaming_jobs.preflight.snapshot import StreamSnapshot
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchReport, StopAtBorder
from streaming_jobs.runtime.lag import Ends
from streaming_jobs.runtime.query_builder import (
    BuiltQuery,
    Connection,
    QueryBuilder,
    QueryHandle,
    next_batch,
    resolve_start,
    triggered,
)
from streaming_jobs.runtime.stream_queries import QueryHooks, SparkQueries, TopicCheck, start
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.runtime.stream_tables import make_tables
from streaming_jobs.settings import Settings, StreamSettings
from streaming_jobs.sources.base import Observed
from streaming_jobs.state.first_status import first_status
from streaming_jobs.state.status import Status, late_rows, read_status, update, write_status
from streaming_jobs.state.stream_record import BoundTopic
from streaming_jobs.stream import DeltaTable, Stream
from streaming_jobs.testing import MemoryLeases, MemoryQueries, MemoryQuery, MemoryRuntime
from tests.conftest import SettingsFactory
from tests.support.worlds import (
    OUTPUT,
    STREAM,
    THINGS,
    TOPIC,
    TOPIC_ID,
    Disk,
    FakeTopics,
    checkpoint_world,
    entry,
    opened,
    parity,
    record,
    settled,
)

# what Spark reports


def progress(batch: int = 7, *, ran: bool = True, dropped: int = 0, **changes: Any) -> dict[str, Any]:
    """A report as Spark 4.2 writes it; one that did not run a batch is of an idle moment before `batch`."""
    steps = ("addBatch", "commitOffsets", "getBatch", "latestOffset", "queryPlanning", "triggerExecution", "walCommit")
    return {
        "batchId": batch,
        "inputRowsPerSecond": 1999.96,
        "processedRowsPerSecond": 4000.04,
        "durationMs": dict.fromkeys(steps if ran else ("latestOffset", "triggerExecution"), 3),
        "eventTime": {"watermark": "2013-01-01T05:00:00.000Z"},
        "stateOperators": [{"numRowsTotal": 5, "memoryUsedBytes": 2**20, "numRowsDroppedByWatermark": dropped}],
        "sources": [{"endOffset": {TOPIC: {"0": 40, "1": 20}}, "latestOffset": {TOPIC: {"0": 100, "1": 20}}}],
        **changes,
    }


def updated(**changes: Any) -> Status:
    status = Status(STREAM)
    update(status, progress(**changes))
    return status


def test_rates_state_and_watermark_are_taken_from_sparks_report() -> None:
    status = updated()
    assert status.input_rows_per_s == 2000.0
    assert (status.state_rows, status.state_mb) == (5, 1.0)
    assert status.watermark == "2013-01-01T05:00:00.000Z"


def test_the_watermark_delay_is_counted_from_now_in_seconds() -> None:
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    mark = an_hour_ago.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert updated(eventTime={"watermark": mark}).watermark_delay_s == pytest.approx(3600, abs=5)


@pytest.mark.parametrize("event_time", [{}, None, {"watermark": "1970-01-01T00:00:00.000Z"}])
def test_a_watermark_that_has_not_moved_yet_is_none(event_time: dict[str, str] | None) -> None:
    status = updated(eventTime=event_time)
    assert (status.watermark, status.watermark_delay_s) == (None, None)


@pytest.mark.parametrize("rate", [None, float("nan"), float("inf"), "NaN", 1e300])
def test_a_rate_that_is_no_number_is_none(rate: object) -> None:
    assert updated(inputRowsPerSecond=rate).input_rows_per_s is None


def test_a_stream_without_state_has_no_state_rows() -> None:
    assert updated(stateOperators=[]).state_rows is None


def test_late_rows_are_summed_over_the_operators_of_a_report() -> None:
    operators = [{"numRowsDroppedByWatermark": 2}, {"numRowsDroppedByWatermark": 3}, {}]
    assert late_rows(progress(stateOperators=operators)) == 5
    assert late_rows({}) == 0


# the status file


def test_a_status_comes_back_from_its_file_and_unknown_fields_are_passed_over(settings: SettingsFactory) -> None:
    status = replace(updated(), pid=17, warnings=["short retention"], error={"code": "REC-021"})
    write_status(settings(), status)
    assert read_status(settings(), STREAM) == status
    path = settings().state / STREAM / "status.json"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_a_newer_version": 1}))
    assert read_status(settings(), STREAM) == status


@pytest.mark.parametrize("text", [None, "", '{"stream": "par'])
def test_a_status_that_is_not_there_or_cut_off_is_none(settings: SettingsFactory, text: str | None) -> None:
    if text is not None:
        (settings().state / STREAM).mkdir(parents=True)
        (settings().state / STREAM / "status.json").write_text(text)
    assert read_status(settings(), STREAM) is None


# where a stream begins, and its trigger


def test_a_start_position_is_the_topics_first_or_next_offsets() -> None:
    topics: Any = FakeTopics()
    assert resolve_start("earliest", topics, TOPIC) == {0: 0, 1: 0}
    assert resolve_start("latest", topics, TOPIC) == {0: 1000, 1: 1000}


def test_a_start_time_is_asked_for_in_milliseconds_of_utc() -> None:
    topics = FakeTopics()
    assert resolve_start("2026-11-21T10:00:00+02:00", topics, TOPIC) == {0: 70, 1: 35}
    assert resolve_start("2026-11-21T08:00:00Z", topics, TOPIC) == {0: 70, 1: 35}
    assert topics.asked_ms == [1_795_248_000_000] * 2


@pytest.mark.parametrize("start", ["", "first", "2026-11-21", "2026-11-21T10:00:00", "offsets", "1795248000000"])
def test_any_other_start_position_is_refused_and_a_time_without_zone_too(start: str) -> None:
    with pytest.raises(ConfigurationError, match="not earliest, latest or a time with zone"):
        resolve_start(start, FakeTopics(), TOPIC)


@pytest.mark.parametrize(
    ("snapshot", "batch"),
    [
        (opened(), 0),
        (replace(opened(), checkpoint=checkpoint_world(0, None)), 0),
        (settled(0), 1),
        (replace(settled(6), checkpoint=checkpoint_world(7, 6)), 7),
        (settled(7), 8),
        (replace(settled(7), checkpoint=checkpoint_world(7, 6)), 8),
    ],
    ids=["nothing", "first planned", "first done", "planned", "done", "in the primary table, not yet in commits/7"],
)
def test_the_first_batch_of_new_code_is_the_first_one_that_no_table_has(snapshot: StreamSnapshot, batch: int) -> None:
    assert next_batch(snapshot) == batch


def assembly(settings: Settings, stream: Stream = parity) -> QueryBuilder:
    nothing: Any = SimpleNamespace(client=None)
    return QueryBuilder(stream, settings, nothing, "continuous", threading.Event(), nothing, nothing)


@pytest.mark.parametrize(
    ("path", "route"), [("auto", "batches take the executors"), ("driver", "`path` keeps batches on the driver")]
)
def test_a_warning_for_unknown_operators_names_the_path_that_batches_take(
    settings: SettingsFactory, path: str, route: str
) -> None:
    plan = SimpleNamespace(toString=lambda: "~RememberThings [k#1]\n+- ~StreamingRelationV2 kafka")
    execution = SimpleNamespace(analyzed=lambda: plan)
    conf = SimpleNamespace(get=lambda _: "25", set=lambda *_: None)
    frame: Any = SimpleNamespace(
        sparkSession=SimpleNamespace(conf=conf), _jdf=SimpleNamespace(queryExecution=lambda: execution)
    )
    with capture_logs() as logs:
        assembly(settings({"stream.path": path}))._checked_traits({"evens": frame})
    (warning,) = logs
    assert warning["operators"] == "RememberThings" and warning["event"].endswith(f": {route}")


@pytest.mark.parametrize(("lateness", "delay"), [(None, 21600), ("0 seconds", 0), ("1 hour", 3600)])
def test_a_lateness_in_the_settings_goes_before_the_declared_one_also_when_it_is_zero(
    settings: SettingsFactory, lateness: str | None, delay: int
) -> None:
    late = replace(parity, sources={"things": replace(THINGS, event_time="n", lateness="6 hours")})
    loaded = settings({"stream.lateness": lateness} if lateness else {})
    assert [source.lateness for source in assembly(loaded, late)._sources()] == [timedelta(seconds=delay)]


def test_each_source_gets_a_share_of_a_batch_and_never_none(settings: SettingsFactory) -> None:
    both = Stream("both", lambda a, b: a, {"a": THINGS, "b": replace(THINGS, name="b")}, {"t": DeltaTable("t")})
    assert assembly(settings({"stream.max_offsets_per_trigger": 9}), both).share == 4
    assert assembly(settings({"stream.max_offsets_per_trigger": 1}), both).share == 1


@pytest.mark.parametrize("name", ["a`b", "__delete"])
def test_an_output_column_that_no_table_can_take_is_refused(settings: SettingsFactory, name: str) -> None:
    schema = StructType([*OUTPUT.fields, StructField(name, LongType())])
    output: Any = SimpleNamespace(schema=schema)
    with pytest.raises(UsageError, match="table evens: "):
        make_tables(settings(), parity, {"evens": output}, 1)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, r"the function of stream crooked returned None \(.*test_stream_runner.py:\d+\)"),
        (
            "a text",
            r"the function of stream crooked returned str for t, not a DataFrame \(.*test_stream_runner.py:\d+\)",
        ),
        ({"t": None}, "returned NoneType for t, not a DataFrame"),
    ],
)
def test_a_function_that_returns_no_frame_is_refused_with_its_name_and_place(
    settings: SettingsFactory, returned: Any, words: str
) -> None:
    crooked = Stream("crooked", lambda things: returned, {"things": THINGS}, {"t": DeltaTable("t")})
    with pytest.raises(UsageError, match=words):
        assembly(settings(), crooked)._outputs({"things": None})  # type: ignore[dict-item]


def test_a_function_that_raises_when_it_is_called_is_told_with_its_line(settings: SettingsFactory) -> None:
    crooked = Stream("crooked", lambda things: {}["no such"], {"things": THINGS}, {"t": DeltaTable("t")})
    with pytest.raises(
        FunctionRaised, match=r"the stream's function raised KeyError: 'no such' \(.*test_stream_runner.py:\d+\)"
    ):
        assembly(settings(), crooked)._outputs({"things": None})  # type: ignore[dict-item]


class Writer:
    """A writer that returns the options of its trigger."""

    def trigger(self, **options: object) -> dict[str, object]:
        return options


@pytest.mark.parametrize(
    ("trigger", "options"),
    [
        ("continuous", {"processingTime": "500 milliseconds"}),
        ("available-now", {"availableNow": True}),
        ("every 10 seconds", {"processingTime": "10000 milliseconds"}),
        ("every 100 ms", {"processingTime": "500 milliseconds"}),  # never below the commit interval
    ],
)
def test_a_trigger_is_told_to_spark(trigger: str, options: dict[str, object]) -> None:
    assert triggered(Writer(), trigger, timedelta(milliseconds=500)) == options  # type: ignore[arg-type, comparison-overlap]


def test_without_a_commit_interval_batches_follow_each_other() -> None:
    assert triggered(Writer(), "continuous", timedelta(0)) == {"processingTime": "1 milliseconds"}  # type: ignore[arg-type, comparison-overlap]


def test_the_commit_interval_goes_by_pace_unless_it_is_set_and_upserts_may_have_their_own() -> None:
    live, economy = StreamSettings(), StreamSettings(pace="economy")
    assert live.commit_interval(upsert=True) < timedelta(milliseconds=100) < economy.commit_interval(upsert=False)
    explicit = StreamSettings(
        pace="economy", min_commit_interval=timedelta(0), min_upsert_interval=timedelta(seconds=9)
    )
    assert explicit.commit_interval(upsert=False) == timedelta(0)
    assert explicit.commit_interval(upsert=True) == timedelta(seconds=9)


@pytest.mark.parametrize("trigger", ["", "once", "every", "every now and then", "every -5 seconds", "10 seconds"])
def test_any_other_trigger_is_refused(trigger: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a (trigger|duration)"):
        triggered(Writer(), trigger, timedelta(0))  # type: ignore[arg-type]


def test_counts_of_bad_records_wait_until_the_query_is_known() -> None:
    class Metrics:
        def __init__(self, count: int | None) -> None:
            self.count = count

        def isDefined(self) -> bool:
            return self.count is not None

        def get(self, name: str | None = None) -> Any:
            if name is not None:
                return Metrics({"recourse_things": 4}.get(name))
            return SimpleNamespace(mkString=lambda _: f"{self.count},7")

    execution = SimpleNamespace(observedMetrics=lambda: Metrics(0))
    java = SimpleNamespace(streamingQuery=lambda: SimpleNamespace(lastExecution=lambda: execution))
    handle, counts = QueryHandle(), []
    asking = threading.Thread(target=lambda: counts.append(handle.observed("recourse_things")))
    asking.start()
    assert not counts
    handle.bind(SimpleNamespace(_jsq=java))  # type: ignore[arg-type]
    asking.join(5)
    assert counts == [Observed(4, 7)]
    assert handle.observed("recourse_others") == Observed()


# a stream in its session


@dataclass
class Clock:
    """Both clocks of the session, moved by hand."""

    now: float = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


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

SPARK = MemoryRuntime().start("tests")
Make = Callable[..., StreamRunner]


@dataclass
class Queries(MemoryQueries):
    """Queries that run until the test ends them; `at_launch` is called before each start."""

    at_launch: Callable[[], object] = lambda: None
    seen: list[Ends] = field(default_factory=list)
    """Looks at the ends of the topics, the newest last."""

    def query(self, stream: Stream) -> MemoryQuery:
        self.at_launch()
        return MemoryQuery()

    def ends(self, stream: Stream) -> Ends | None:
        return self.seen[-1] if self.seen else None


@pytest.fixture
def make(settings: SettingsFactory, clock: Clock) -> Make:
    """A running stream with a query, without Spark; with `topics` its preflight is the real one."""

    def make(*, topics: Any = None, **flags: Any) -> StreamRunner:
        loaded = settings({f"stream.{name}": value for name, value in flags.items()})
        queries = Queries(loaded) if topics is None else SparkQueries(loaded, connection=Connection({}, topics, topics))
        lease = MemoryLeases().acquire(STREAM, purpose="session")
        made = StreamRunner(parity, loaded, queries, lease, Status(STREAM, state="running"), clock=clock)
        made.query = MemoryQuery()
        hooks = QueryHooks("continuous", made.stop.requested, made._built, made.batch_done)
        made.pipeline = Queries(loaded).pipeline(parity, hooks)
        return made

    return make


def test_a_pipeline_is_handed_over_before_its_query_starts(make: Make, settings: SettingsFactory) -> None:
    """The first batch can come before the start returns, or while it fails."""
    running = make()
    first, running.pipeline = pipeline_of(running), None

    def starts() -> None:
        assert running.pipeline is first
        raise ConnectionError("the JVM is gone")

    writer: Any = SimpleNamespace(start=starts)
    hooks = QueryHooks("continuous", running.stop.requested, running._built, running.batch_done)
    with pytest.raises(ConnectionError):
        start(BuiltQuery(record(), first, writer, QueryHandle()), hooks)


def test_a_connection_that_was_given_is_the_one_that_is_used(settings: SettingsFactory) -> None:
    topics: Any = FakeTopics()
    given = Connection({}, topics, topics)
    queries = SparkQueries(settings({"kafka.bootstrap_servers": "127.0.0.1:1"}), connection=given)
    queries.open([])
    queries.close()
    assert queries.connection is given


def query_of(running: StreamRunner) -> MemoryQuery:
    assert isinstance(running.query, MemoryQuery)
    return running.query


def pipeline_of(running: StreamRunner) -> BatchPipeline:
    assert running.pipeline is not None
    return running.pipeline


def queries_of(running: StreamRunner) -> Queries:
    assert isinstance(running.queries, Queries)
    return running.queries


def reported(batch: int, note: str | None = None, **changes: Any) -> BatchReport:
    """The pipeline's report of a batch of 15 records, 10 rows and a dead letter."""
    offsets = OffsetRange(TOPIC, TOPIC_ID, {0: batch * 15, 1: 0}, {0: batch * 15 + 15, 1: 0})
    rows = {"written": 10, "dead_letters": 1}
    entry = LedgerEntry("batch", STREAM, "evens", 1, batch, (offsets,), rows, note=note)
    return replace(BatchReport(entry, "driver", "direct", 120, 1), **changes)


def ended(running: StreamRunner, **state: Any) -> StreamRunner:
    """The query has ended, with the pipeline in this state."""
    query_of(running).active = False
    for name, value in state.items():
        setattr(running.pipeline, name, value)
    running.poll(SPARK)
    return running


def again(running: StreamRunner) -> StreamRunner:
    """The same stream with a query that runs, as after a start."""
    hooks = QueryHooks("continuous", running.stop.requested, running._built, running.batch_done)
    running.query, running.pipeline = MemoryQuery(), queries_of(running).pipeline(running.stream, hooks)
    return running


def test_late_rows_are_counted_once_a_batch_although_spark_reports_an_idle_moment_under_the_next_number(
    make: Make,
) -> None:
    running = make()
    query = query_of(running)
    seen = []
    for report in (
        progress(0, dropped=2),
        progress(1, ran=False),
        progress(1, ran=False),
        progress(1, dropped=3),
        progress(1, dropped=3),
    ):
        query.reports = [report]
        running.refresh_status()
        seen.append(running.status.late_rows_dropped)
    assert seen == [2, 2, 2, 5, 5]


def test_late_rows_of_batches_between_two_looks_are_counted_too(make: Make) -> None:
    running = make()
    query = query_of(running)
    query.reports = [progress(0, dropped=1)]
    running.refresh_status()
    query.reports += [progress(1, dropped=1), progress(2, dropped=1), progress(3, ran=False), progress(3, dropped=1)]
    running.refresh_status()
    assert running.status.late_rows_dropped == 4


def test_late_rows_of_the_last_batches_are_counted_when_the_query_ends(make: Make) -> None:
    running = make()
    query_of(running).reports = [progress(0, dropped=1), progress(1, dropped=1)]
    assert ended(running).status.late_rows_dropped == 2


def test_a_stream_is_idle_when_no_batch_came_for_a_while(make: Make, clock: Clock) -> None:
    running = make()
    running.batch_done(reported(0))
    running.refresh_status()
    assert running.status.state == "running"
    clock.now += 60
    running.refresh_status()
    assert running.status.state == "idle"


def test_a_stream_in_a_long_batch_is_running_and_one_that_found_nothing_new_is_idle(make: Make, clock: Clock) -> None:
    running = make()
    running.status.state = "starting"
    running.refresh_status()
    before = running.status.state
    query_of(running).reports = [progress(7, ran=False)]
    running.refresh_status()
    assert (before, running.status.state) == ("starting", "idle")
    pipeline_of(running).in_batch = True
    clock.now += 60
    running.refresh_status()
    assert running.status.state == "running"


def test_a_stream_with_a_long_interval_is_not_idle_between_two_batches(make: Make, clock: Clock) -> None:
    running = make(trigger="every 10 minutes")
    running.batch_done(reported(0))
    clock.now += 900
    running.refresh_status()
    assert running.status.state == "running"


def test_batches_are_summed_and_a_skipped_one_counts_no_rows_again(make: Make) -> None:
    running = make()
    running.batch_done(reported(0))
    running.batch_done(reported(1, milliseconds=90, version=None, skipped=True, note="mixed batch: odds"))
    status = running.status
    assert (status.batch, status.batch_ms, status.rows_written, status.dead_letters) == (1, 90, 10, 1)
    assert status.warnings == ["mixed batch: odds"]


def test_the_end_of_a_finite_run_is_a_stop_and_no_failure(make: Make) -> None:
    assert ended(make()).status.state == "stopped"


def test_a_stop_at_the_border_is_a_stop_and_no_failure(make: Make) -> None:
    stopped = ended(make(), stopped_at_border=True, failure=StopAtBorder())
    assert (stopped.status.state, stopped.status.error) == ("stopped", None)


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


def test_between_two_tries_a_stream_is_failing_and_says_when_the_next_one_is(make: Make, clock: Clock) -> None:
    running = ended(make(), failure=TransientError("a passing fault"))
    running.refresh_status()
    assert (running.status.state, running.status.next_try) == ("failing", clock.now + 1)
    assert not running.gave_up and running.status.error is not None and running.status.error["found"]


def test_without_restarts_nothing_is_tried_again(make: Make) -> None:
    running = ended(make(max_restarts=0), failure=TransientError("a passing fault"))
    assert (running.status.state, running.gave_up) == ("failed", False)


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


def test_after_ten_good_minutes_the_retries_count_from_the_beginning(make: Make, clock: Clock) -> None:
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


def test_after_ten_good_batches_the_retries_count_from_the_beginning(make: Make) -> None:
    running = make(max_restarts=1)
    for good in (9, 10):
        running.retries.failures = 0
        running.fail(BrokerUnreachable("no broker"))
        for batch in range(good):
            running.batch_done(reported(batch))
        assert running.retries.failures == (1 if good == 9 else 0)


def test_any_exception_at_start_becomes_an_error_of_ours(make: Make) -> None:
    running = make(max_restarts=0)

    def broken() -> None:
        raise KeyError("things")

    queries_of(running).at_launch = broken
    running.start(SPARK)
    assert running.status.state == "failed"
    assert running.status.error is not None and running.status.error["code"] == "REC-010"


def test_a_stream_that_waits_for_its_retry_stops_at_once(make: Make) -> None:
    running = make()
    ended(running, failure=TransientError("a passing fault"))
    running.request_stop()
    running.poll(SPARK)
    assert (running.status.state, queries_of(running).launched) == ("stopped", [])


def test_a_busy_stream_is_left_to_end_itself_at_the_border(make: Make, clock: Clock) -> None:
    running = make()
    pipeline_of(running).in_batch = True
    running.request_stop()
    assert running.status.state == "stopping"
    for _ in range(50):
        clock.now += 0.5
        running.poll(SPARK)
    assert query_of(running).stops == 0


def test_a_batch_that_does_not_end_is_cut_off_at_the_deadline(make: Make, clock: Clock) -> None:
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


def test_a_stop_that_is_asked_for_twice_or_too_late_changes_nothing(make: Make, clock: Clock) -> None:
    running = make()
    running.request_stop()
    since = running.stop.requested_at
    clock.now += 10
    running.request_stop()
    assert running.stop.requested_at == since
    done = ended(make())
    done.request_stop()
    assert done.status.state == "stopped"


def test_lost_records_are_explained_by_their_exact_range(make: Make, settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0, 1, 2, 3)
    topics = FakeTopics()
    topics.found.earliest[0] = 41
    running = ended(make(topics=topics), failure=RuntimeError("[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] ..."))
    assert disk.settings == running.settings
    assert running.status.error is not None
    assert running.status.error["code"] == "REC-022"
    assert running.status.error["found"].startswith(f"offsets 40 to 40 of topic {TOPIC}, partition 0, are gone")


def test_preflight_refuses_and_passes_warnings_on(make: Make, settings: SettingsFactory) -> None:
    Disk(settings()).open().run(0)
    topics = FakeTopics()
    assert topics.info is not None
    topics.info = replace(topics.info, retention_ms=604_800_000)
    running = make(topics=topics)
    running.preflight()
    assert ["keeps records for 7 days" in warning for warning in running.status.warnings] == [True]
    topics.info = None
    with pytest.raises(PreflightRefused, match="does not exist"):
        running.preflight()


@pytest.mark.parametrize(("now", "words"), [(None, "was deleted while"), ("new", "was deleted and made anew while")])
def test_a_topic_that_is_recreated_under_a_running_stream_stops_it_before_the_commit(
    settings: SettingsFactory, now: str | None, words: str
) -> None:
    topics = FakeTopics()
    TopicCheck(parity, settings(), topics)(record())
    assert topics.info is not None
    topics.info = replace(topics.info, id=now) if now else None
    with pytest.raises(OffsetsLost, match=words):
        TopicCheck(parity, settings(), topics)(record())


def test_a_broker_that_is_away_does_not_stop_a_batch_that_was_read(settings: SettingsFactory) -> None:
    class Away(FakeTopics):
        def describe(self, name: str) -> Any:
            raise BrokerUnreachable("no broker")

    TopicCheck(parity, settings(), Away())(record())


def test_topics_are_asked_for_at_most_once_a_second(settings: SettingsFactory, clock: Clock) -> None:
    described: list[str] = []

    class Counting(FakeTopics):
        def describe(self, name: str) -> Any:
            described.append(name)
            return super().describe(name)

    check = TopicCheck(parity, settings(), Counting(), clock.monotonic)
    for _ in range(10):
        check(record(topics=(BoundTopic(TOPIC, TOPIC_ID, {}),)))
    assert described == [TOPIC]
    clock.now += 2
    check(record())
    assert len(described) == 2


def test_a_query_over_kafka_checks_its_topics_before_each_commit(settings: SettingsFactory) -> None:
    topics: Any = FakeTopics()
    check = SparkQueries(settings(), connection=Connection({}, topics, topics)).before_commit(parity)
    topics.info = None
    with pytest.raises(OffsetsLost, match="was deleted while stream parity was reading it"):
        check(record())


def test_lag_is_the_one_of_now_while_a_batch_runs_and_before_the_first_one(make: Make, clock: Clock) -> None:
    """From the topic's end, not from Spark's last report: 47,000 records came, and no batch has ended since."""
    running = make()
    looks = queries_of(running).seen
    looks.append(Ends(clock.now, {TOPIC: {0: 100, 1: 50}}))
    running.live.position = {TOPIC: {0: 90, 1: 50}}
    running.refresh_status()
    assert (running.status.batch, running.status.lag_records, running.status.lag_at) == (None, 10, clock.now)
    running.batch_done(reported(6))
    looks.append(Ends(clock.now + 2, {TOPIC: {0: 47_105, 1: 50}}))
    pipeline_of(running).in_batch = True
    running.refresh_status()
    assert running.status.lag_records == 47_050
    assert running.status.lag_partitions == {TOPIC: {"0": 47_000, "1": 50}}


def test_upkeep_that_was_put_off_is_a_warning_until_it_succeeds(make: Make) -> None:
    running = make()
    query_of(running).reports.append(progress(7))
    upkeep: Any = SimpleNamespace(
        sink=SimpleNamespace(name="evens"), put_off={"compaction": "compaction was put off: full"}
    )
    pipeline_of(running).upkeep = [upkeep]
    running.refresh_status()
    running.refresh_status()
    assert running.status.warnings == ["compaction was put off: full"]
    upkeep.put_off = {}
    running.refresh_status()
    assert running.status.warnings == []


def test_the_rate_of_a_batch_leaves_the_pause_after_it_out(make: Make) -> None:
    """Spark counts the two seconds that the stream waits at a trickle as part of the batch."""
    running = make()
    reports = query_of(running).reports
    running.batch_done(reported(7))  # 15 records in 120 ms
    reports.append(progress(7, processedRowsPerSecond=7.1))
    running.refresh_status()
    assert running.status.processed_rows_per_s == 125.0
    running.batch_done(reported(8, milliseconds=1, skipped=True))
    running.batch_done(replace(reported(9), entry=replace(reported(9).entry, offsets=())))
    running.refresh_status()
    assert running.status.processed_rows_per_s == 125.0, "neither a repetition nor a batch without records has one"
    reports.append(progress(10, ran=False, processedRowsPerSecond=0.0))
    running.refresh_status()
    assert running.status.processed_rows_per_s == 0.0, "nothing comes"


def test_a_stream_between_two_tries_has_no_rates(make: Make) -> None:
    running = make()
    query_of(running).reports.append(progress())
    running.batch_done(reported(7))
    running.refresh_status()
    assert running.status.processed_rows_per_s == 125.0
    running.query = None
    running.refresh_status()
    assert (running.status.input_rows_per_s, running.status.processed_rows_per_s) == (None, None)


def test_totals_and_the_last_error_outlive_the_session(make: Make, settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0, 1, 2)
    before = first_status(disk.settings, STREAM)
    assert (before.generation, before.batch) == (1, 2), "known before Spark has started"
    assert before.totals is not None
    counted = before.totals.records
    assert counted == sum(r.records for b in range(3) for r in entry(b, "evens").offsets)
    running = make()
    running.status.totals = before.totals
    running.status.generation = 1
    running.fail(TransientError("the broker went away", "wait"))
    running.batch_done(reported(3))
    running.batch_done(reported(3, skipped=True))
    assert running.status.rows_written == 10, "rows since this session began"
    write_status(disk.settings, running.status)
    disk.run(3)  # the ledger has the batch as well
    after = first_status(disk.settings, STREAM)
    assert after.totals is not None
    assert (after.totals.batch, after.totals.records, after.totals.dead_letters) == (3, counted + 15, 1)
    assert (after.rows_written, after.error) == (0, None)
    assert after.last_error is not None and after.last_error["found"] == "the broker went away"


def test_batches_whose_status_a_kill_took_are_counted_from_the_ledger(settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0, 1)
    write_status(disk.settings, first_status(disk.settings, STREAM))
    disk.run(2, 3)
    totals = first_status(disk.settings, STREAM).totals
    assert totals is not None and totals.batch == 3
    assert totals.records == sum(r.records for b in range(4) for r in entry(b, "evens").offsets)


def test_a_batch_of_an_earlier_session_makes_no_stream_idle_before_its_first_one(make: Make, clock: Clock) -> None:
    running = make()
    running.status.state, running.status.batch, running.status.committed_at = "starting", 41, clock.now - 500
    running.status.started_at = clock.now - 20
    running.refresh_status()
    assert running.status.state == "starting"


def test_after_the_clock_was_set_back_ages_are_counted_from_then_on(make: Make, clock: Clock) -> None:
    running = make()
    status = running.status
    status.started_at = status.committed_at = status.progress_at = clock.now + 3600
    running.beat()
    assert (status.started_at, status.committed_at, status.progress_at) == (clock.now,) * 3
    assert status.begun_at is None
    clock.now += 400
    running.beat()
    assert status.heartbeat - status.started_at == 400, "a stream that hangs since is found"


def test_the_status_names_the_trigger_of_the_session(make: Make) -> None:
    assert make().status.trigger == "continuous"
    assert make(trigger="available-now").status.trigger == "available-now"


def test_a_ledger_file_that_cannot_be_read_costs_a_figure_and_no_stream(settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0)
    (disk.ledger_file.folder / "2020-01-01.jsonl.gz").write_bytes(b"\x1f\x8b cut off")
    totals = first_status(disk.settings, STREAM).totals
    assert totals is not None and totals.records == 0
