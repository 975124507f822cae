"""The query of a stream: where it begins, its function's frames, its share of a batch, and its trigger.

And the queries of a session: their connection, their start, and the check of the topics before each commit.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError
from structlog.testing import capture_logs

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import (
    BrokerUnreachable,
    ConfigurationError,
    FunctionRaised,
    OffsetsLost,
    PreflightRefused,
    UsageError,
)
from streaming_jobs.formats.json import Json
from streaming_jobs.platform.processes.failing_row import LOCATES
from streaming_jobs.preflight.snapshot import StreamSnapshot
from streaming_jobs.runtime import function_plan, query_builder, query_handle
from streaming_jobs.runtime.batch_watermark import WatermarkServer
from streaming_jobs.runtime.function_plan import FunctionPlan, emit_of
from streaming_jobs.runtime.planned_once import RowsCounted
from streaming_jobs.runtime.query_builder import (
    QueryBuilder,
    next_batch,
    resolve_start,
    triggered,
)
from streaming_jobs.runtime.query_handle import BuiltQuery, QueryHandle
from streaming_jobs.runtime.small_batches import WITHOUT_CLOSURES
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.runtime.stream_queries import QueryHooks, SparkQueries, TopicIdCheck, start
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import SourceCounts
from streaming_jobs.sources.connection import Connection
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_record import BoundTopic, first
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from streaming_jobs.table_sources.lookups import LookupChange, LookupHistory
from tests.conftest import SettingsFactory
from tests.support.runners import Clock, Make, pipeline_of
from tests.support.worlds import (
    THINGS,
    TIMED,
    TOPIC,
    TOPIC_ID,
    FakeTopics,
    NoBytes,
    checkpoint_world,
    lay_checkpoint,
    opened,
    parity,
    record,
    settled,
    with_topic,
)


def test_a_start_position_is_the_topics_first_or_next_offsets_or_those_of_a_time_in_milliseconds_of_utc() -> None:
    topics = FakeTopics()
    starts = ("earliest", "latest", "2026-11-21T10:00:00+02:00", "2026-11-21T08:00:00Z")
    assert [resolve_start(start, topics, TOPIC) for start in starts] == [
        {0: 0, 1: 0},
        {0: 1000, 1: 1000},
        {0: 70, 1: 35},
        {0: 70, 1: 35},
    ]
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
    nothing: Any = SimpleNamespace(client=None, clients=None)
    return QueryBuilder(stream, settings, nothing, "continuous", threading.Event(), nothing, nothing)


def test_a_batch_of_a_replay_ends_where_it_is_compared_and_where_another_version_was_looked_up(
    settings: SettingsFactory,
) -> None:
    looked_up = LookupHistory((LookupChange({TOPIC: {0: 20, 1: 5}}, {}),))
    steps = ({TOPIC: {0: 10, 1: 2}}, {TOPIC: {0: 30, 1: 9}, "others": {0: 4}})
    limits = replace(assembly(settings()), steps=steps, lookups=looked_up).limits_of(TOPIC)
    assert limits.steps == [{0: 10, 1: 2}, {0: 20, 1: 5}, {0: 30, 1: 9}]


def test_a_state_keeps_its_partitions_and_another_number_in_the_settings_is_told(
    settings: SettingsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one partition, small batches run as one stage, without closures."""
    conf = {"spark.sql.shuffle.partitions": "4"}
    spark: Any = SimpleNamespace(conf=SimpleNamespace(get=conf.get, set=conf.__setitem__, unset=conf.pop))
    single: list[object] = []
    monkeypatch.setattr(query_builder, "plan_small_batches", single.append)
    lay_checkpoint(tmp_path / "two", planned=0, committed=0)
    seen = []
    with capture_logs() as logged:
        for of in ("none", "two"):
            for wanted in (0, 1, 2):
                builder = assembly(settings({"stream.state_partitions": wanted}))
                with builder._options(spark, PlanTraits(True, False), record(), Checkpoint(tmp_path / of)):
                    seen.append((conf["spark.sql.shuffle.partitions"], conf.keys() >= WITHOUT_CLOSURES.keys()))
    assert seen == [("4", False), ("1", True), ("2", False), ("2", False), ("2", False), ("2", False)]
    assert single == [spark] and conf == {"spark.sql.shuffle.partitions": "4"}
    assert [(line["event"], line["wanted"], line["state_has"]) for line in logged] == [
        ("state_partitions has no effect", 1, 2)
    ]


STARTED = BoundTopic(TOPIC, TOPIC_ID, {0: 600, 1: 700})


@pytest.mark.parametrize(
    ("bound", "topic", "begins"),
    [
        (STARTED, {}, {0: 600, 1: 700}),
        (STARTED, {"earliest": {0: 0, 1: 0, 2: 0}}, {0: 600, 1: 700, 2: 0}),
        (replace(STARTED, topic_id="another"), {}, {0: 1000, 1: 1000}),
        (STARTED, {"earliest": {0: 601, 1: 0}}, {0: 601, 1: 700}),
    ],
    ids=["as the first try", "a partition was added", "the topic was made anew", "the records are gone"],
)
def test_a_first_start_that_planned_no_batch_is_repeated_at_the_offsets_that_it_recorded(
    settings: SettingsFactory, bound: BoundTopic, topic: dict[str, Any], begins: dict[int, int]
) -> None:
    """With `start=latest`, records that arrive between two tries would be skipped otherwise."""
    builder = assembly(settings({"stream.start": "latest"}))
    builder.connection.topics = FakeTopics()  # type: ignore[misc]
    snapshot = with_topic(opened(), **topic)
    assert builder._starts(replace(record(), topics=(bound,)), snapshot) == {TOPIC: begins}
    assert builder._starts(replace(record(), topics=()), snapshot) == {TOPIC: {0: 1000, 1: 1000}}


def with_plan(text: str) -> Any:
    """A frame of this analysed plan."""
    execution = SimpleNamespace(analyzed=lambda: SimpleNamespace(toString=lambda: text))
    conf = SimpleNamespace(get=lambda *_: "25", set=lambda *_: None)
    return SimpleNamespace(
        sparkSession=SimpleNamespace(conf=conf), _jdf=SimpleNamespace(queryExecution=lambda: execution)
    )


def test_a_full_outer_join_that_would_match_null_with_null_is_refused_with_the_condition_that_it_needs(
    settings: SettingsFactory,
) -> None:
    both = Stream("both", lambda a, b: a, {"a": THINGS, "b": replace(THINGS, name="b")}, {"t": DeltaTable("t")})
    plan = "~Join FullOuter, (k#1 = k#2)\n:- ~StreamingRelationV2 a\n+- ~StreamingRelationV2 b"
    with pytest.raises(ConfigurationError, match="stream both has a full outer join of streams on k = k") as refused:
        _ = FunctionPlan(both, settings(), {"t": with_plan(plan)}).traits
    assert "left.key.isNotNull()" in refused.value.next_step
    mended = plan.replace("(k#1 = k#2)", "((k#1 = k#2) AND isnotnull(k#1))")
    assert FunctionPlan(both, settings(), {"t": with_plan(mended)}).traits.joins_streams


@pytest.mark.parametrize("by", ["the trial", "the start"])
def test_outputs_over_different_topics_are_refused_as_such_not_as_a_topic_that_is_no_longer_read(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The first output alone has lost a topic, which the checkpoint has a position of; the second one reads it."""
    other = replace(THINGS, name="other")
    sinks = {name: DeltaTable(name) for name in ("t", "u")}
    both = Stream("both", lambda a, b: {"t": a, "u": b}, {"a": THINGS, "b": other}, sinks)
    plans: dict[str, Any] = {name: with_plan(f"~StreamingRelationV2 {name}") for name in "ab"}
    outputs = {"t": plans["a"], "u": plans["b"]}
    builder = assembly(settings(), both)
    monkeypatch.setattr(FunctionPlan, "_sources_read", lambda *_: ([TOPIC, "other"], [TOPIC]))

    def of(stream: str, outputs: object) -> None:
        raise ConfigurationError(f"the outputs of {stream} are not made of one frame", "compute it once")

    monkeypatch.setattr(function_plan, "SharedPlan", SimpleNamespace(of=of))
    if by == "the trial":
        monkeypatch.setattr(QueryBuilder, "_without_start", lambda *_: outputs)
        monkeypatch.setattr(QueryBuilder, "_sources", lambda *_: [])
        with pytest.raises(ConfigurationError, match="not made of one frame"):
            builder.check(plans["a"].sparkSession, record(), keeps_state=False)
        return
    plan, none = FunctionPlan(both, builder.settings, outputs), plans["a"].sparkSession
    with pytest.raises(ConfigurationError, match="not made of one frame"):
        builder._bound(none, record(), settled(3), {}, plan)


SUMS = "~Aggregate [k#1], [k#1, sum(v#2) AS s#3]\n+- ~StreamingRelationV2 kafka"


@pytest.mark.parametrize(
    ("sink", "stored", "refused"),
    [
        (DeltaTable("t", keys=["k"]), {}, ""),
        (DeltaTable("t", keys=["k"], emit="close"), {}, "emit: update -> close"),  # the keys decided
        (DeltaTable("t", keys=["k"], emit="close"), {"emit": "close"}, ""),
        (DeltaTable("t", keys=["k"]), {"emit": "close"}, "emit: close -> update"),
        (DeltaTable("t"), {"emit": "close"}, ""),
        (KafkaSink(KafkaTopic("sums", value=Json(TIMED)), emit="update"), {}, ""),  # it is not known what it was
        (KafkaSink(KafkaTopic("sums", value=Json(TIMED))), {"emit": "update"}, "emit: update -> close"),
    ],
)
def test_state_of_an_aggregation_is_read_on_only_with_the_emit_that_it_was_built_with(
    settings: SettingsFactory, sink: Any, stored: dict[str, str], refused: str
) -> None:
    sums = Stream("sums", lambda things: things, {"things": THINGS}, {"t": sink})
    outputs = {"t": with_plan(SUMS)}
    record = replace(first("sums"), state_fingerprint={"0": "Aggregate [k], [k, sum(v) AS s]", **stored})
    if not refused:
        kept = FunctionPlan(sums, settings(), outputs).checked_state(record, keeps_state=True)
        assert kept["emit"] == emit_of(sums)
        return
    with pytest.raises(PreflightRefused, match=f"was built by another aggregation: {refused}"):
        FunctionPlan(sums, settings(), outputs).checked_state(record, keeps_state=True)
    assert FunctionPlan(sums, settings(), outputs).checked_state(record, keeps_state=False)["emit"] != stored.get(
        "emit"
    )


@pytest.mark.parametrize(
    ("path", "route"), [("auto", "batches take the executors"), ("driver", "`path` keeps batches on the driver")]
)
def test_a_warning_for_unknown_operators_names_the_path_that_batches_take(
    settings: SettingsFactory, path: str, route: str
) -> None:
    frame = with_plan("~RememberThings [k#1]\n+- ~StreamingRelationV2 kafka")
    with capture_logs() as logs:
        _ = FunctionPlan(parity, settings({"stream.path": path}), {"evens": frame}).traits
    (warning,) = logs
    assert warning["operators"] == "RememberThings" and warning["event"].endswith(f": {route}")


@pytest.mark.parametrize(("lateness", "delay"), [(None, 21600), ("0 seconds", 0), ("1 hour", 3600)])
def test_a_lateness_in_the_settings_goes_before_the_declared_one_also_when_it_is_zero(
    settings: SettingsFactory, lateness: str | None, delay: int
) -> None:
    late = replace(
        parity, sources={"things": replace(THINGS, value=NoBytes(TIMED), event_time="at", lateness="6 hours")}
    )
    loaded = settings({"stream.lateness": lateness} if lateness else {})
    assert [source.lateness for source in assembly(loaded, late)._sources({})] == [timedelta(seconds=delay)]


def test_each_source_gets_a_share_of_a_batch_and_never_none(settings: SettingsFactory) -> None:
    both = Stream("both", lambda a, b: a, {"a": THINGS, "b": replace(THINGS, name="b")}, {"t": DeltaTable("t")})
    assert assembly(settings({"stream.max_offsets_per_trigger": 9}), both).limits.records == 4
    assert assembly(settings({"stream.max_offsets_per_trigger": 1}), both).limits.records == 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda things: None, r"the function of stream crooked returned None \(.*test_query_builder.py:\d+\)"),
        (lambda things: "a text", r"returned str for t, not a DataFrame \(.*test_query_builder.py:\d+\)"),
        (lambda things: {"t": None}, "returned NoneType for t, not a DataFrame"),
        (lambda things: {}["no such"], r"function raised KeyError: 'no such' \(.*test_query_builder.py:\d+\)"),
    ],
    ids=["None", "a text", "none of the table's", "raises"],
)
def test_a_function_that_raises_or_returns_no_frame_is_refused_with_its_name_and_place(
    settings: SettingsFactory, function: Any, words: str
) -> None:
    crooked = Stream("crooked", function, {"things": THINGS}, {"t": DeltaTable("t")})
    with pytest.raises(FunctionRaised if "raised" in words else UsageError, match=words):
        assembly(settings(), crooked)._outputs({"things": None})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("trigger", "interval", "options"),
    [
        ("continuous", 500, {"processingTime": "500 milliseconds"}),
        ("available-now", 500, {"availableNow": True}),
        ("every 10 seconds", 500, {"processingTime": "10000 milliseconds"}),
        ("every 100 ms", 500, {"processingTime": "500 milliseconds"}),  # never below the commit interval
        ("continuous", 0, {"processingTime": "1 milliseconds"}),  # batches follow each other
    ],
)
def test_a_trigger_is_told_to_spark(trigger: Any, interval: int, options: dict[str, object]) -> None:
    writer: Any = SimpleNamespace(trigger=lambda **told: told)
    assert triggered(writer, trigger, timedelta(milliseconds=interval)) == options


@pytest.mark.parametrize("trigger", ["", "once", "every", "every now and then", "every -5 seconds", "10 seconds"])
def test_any_other_trigger_is_refused(trigger: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a (trigger|duration)"):
        triggered(SimpleNamespace(), trigger, timedelta(0))  # type: ignore[arg-type]


def test_counts_of_bad_records_wait_until_the_query_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {"recourse_things": "4,7"}
    figures = SimpleNamespace(of=lambda _: None, counts=counted.get)
    monkeypatch.setattr(query_handle, "new_object", lambda *_: figures)
    handle, counts = QueryHandle(object()), []  # type: ignore[arg-type]
    asking = threading.Thread(target=lambda: counts.append(handle.observed("recourse_things")))
    asking.start()
    assert not counts
    handle.bind(SimpleNamespace(_jsq=SimpleNamespace(streamingQuery=lambda: None)))  # type: ignore[arg-type]
    asking.join(5)
    assert counts == [SourceCounts(4, 7)]
    assert handle.observed("recourse_others") == SourceCounts()


def test_a_batch_that_fails_says_what_it_has_read_unless_this_spark_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"spark.sql.execution.arrow.maxRecordsPerBatch": "10000"}
    sizes["spark.sql.execution.python.udf.maxRecordsPerBatch"] = "100"
    properties: dict[str, str] = {}
    context = SimpleNamespace(setLocalProperty=properties.__setitem__)
    spark: Any = SimpleNamespace(conf=sizes, sparkContext=context)
    execution = SimpleNamespace(executedPlan=lambda: "plan")
    java = SimpleNamespace(streamingQuery=lambda: SimpleNamespace(lastExecution=lambda: execution))
    lines = '20 false ArrowEvalPython\n30 false BatchEvalPython\n41 true {"my things":{"0":7}}\n5 true {"b":{}}\n'
    asked: list[bool] = []

    def look(plan: str, say: bool) -> str:
        asked.append(say)
        return lines if say else ""

    def made(_: object, name: str, __: str) -> Any:
        if name == "CountedRows" and broken:
            raise Py4JError("no such class")
        return SimpleNamespace(apply=look, of=lambda _: None)

    monkeypatch.setattr("streaming_jobs.runtime.query_handle.new_object", made)
    for broken in (False, True):
        handle = QueryHandle(spark)
        handle.bind(SimpleNamespace(_jsq=java))  # type: ignore[arg-type]
        handle.count_failed_rows(True)
        assert handle.rows_counted() == (
            None if broken else RowsCounted([("my things", 41), ("b", 5)], [(20, 10_000), (30, 100)])
        )
    assert asked == [False, True]
    assert properties == {LOCATES: "true"}, "its workers look for the row"
    handle.count_failed_rows(False)
    assert properties == {LOCATES: "false"} and len(asked) == 2, "those of a batch on the executors' path do not"


def test_a_batch_runs_again_with_other_records_where_all_were_sent_along_and_this_spark_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    execution = SimpleNamespace(executedPlan=lambda: "plan")
    java = SimpleNamespace(streamingQuery=lambda: SimpleNamespace(lastExecution=lambda: execution))
    sent: list[object] = []
    ends: list[str | None] = []

    def made(_: object, name: str, __: str) -> Any:
        def run_all() -> None:
            sent.append("all")
            if broken:
                raise Py4JError("no such method")

        def send(*scan: object) -> bool:
            sent.append(scan)
            return not full

        return SimpleNamespace(of=lambda _: None, scans=lambda _: ends[-1], send=send, runAll=run_all)

    monkeypatch.setattr("streaming_jobs.runtime.query_handle.new_object", made)
    monkeypatch.setattr("streaming_jobs.runtime.query_handle.rows_of", lambda frame: f"rows of {frame}")
    handle, broken, full = QueryHandle(SimpleNamespace()), False, False  # type: ignore[arg-type]
    handle.bind(SimpleNamespace(_jsq=java))  # type: ignore[arg-type]
    records: Any = {"my things": "a", "b": "b"}
    for each in (None, "", '{"c":{"0":1}}\n'):
        ends.append(each)
        assert not handle.send_anew(records), "not sent along; no scan; a table beside the topics"
    assert sent == []
    ends.append('{"b":{"0":1}}\n{"my things":{"0":7}}\n{"b":{"0":1}}\n')
    assert handle.send_anew(records)
    assert sent == [(0, "rows of b"), (1, "rows of a"), (2, "rows of b"), "all"]
    broken = True
    assert not handle.send_anew(records)
    broken, full = False, True
    assert not handle.send_anew(records), "Spark has not kept them"


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
        start(BuiltQuery(record(), first, writer, QueryHandle(), nullcontext(), WatermarkServer()), hooks)


def test_a_connection_that_was_given_is_the_one_that_is_used(settings: SettingsFactory) -> None:
    topics: Any = FakeTopics()
    given = Connection({}, topics, topics)
    queries = SparkQueries(settings({"kafka.bootstrap_servers": "127.0.0.1:1"}), connection=given)
    queries.open([])
    queries.close()
    assert queries.connection is given


def test_a_topic_that_is_recreated_under_a_running_stream_stops_it_before_the_commit_and_a_broker_away_does_not(
    settings: SettingsFactory,
) -> None:
    topics = FakeTopics()
    TopicIdCheck(parity, settings(), topics)(record())
    assert topics.info is not None
    topics.info = replace(topics.info, id="new")
    with pytest.raises(OffsetsLost, match="was deleted and made anew while"):
        TopicIdCheck(parity, settings(), topics)(record())

    class Away(FakeTopics):
        def describe(self, name: str) -> Any:
            raise BrokerUnreachable("no broker")

    TopicIdCheck(parity, settings(), Away())(record())
    topics: Any = FakeTopics()
    check = SparkQueries(settings(), connection=Connection({}, topics, topics)).before_commit(parity)
    topics.info = replace(topics.info, id="new")
    with pytest.raises(OffsetsLost, match="was deleted and made anew while stream parity was reading it"):
        check(record())


def test_a_topic_that_the_broker_does_not_know_was_deleted_only_if_that_lasts(
    settings: SettingsFactory, clock: Clock
) -> None:
    """Brokers of a rolling restart answer for a moment before they know their topics."""
    topics = FakeTopics()
    there, check = topics.info, TopicIdCheck(parity, settings(), topics, clock.monotonic)
    for topics.info in (None, None, there, None):
        check(record())
        clock.now += 50
    with pytest.raises(OffsetsLost, match="was deleted while"):
        clock.now += 10
        check(record())


def test_topics_are_asked_for_at_most_once_a_second(settings: SettingsFactory, clock: Clock) -> None:
    described: list[str] = []

    class Counting(FakeTopics):
        def describe(self, name: str) -> Any:
            described.append(name)
            return super().describe(name)

    check = TopicIdCheck(parity, settings(), Counting(), clock.monotonic)
    for _ in range(10):
        check(record(topics=(BoundTopic(TOPIC, TOPIC_ID, {}),)))
    assert described == [TOPIC]
    clock.now += 2
    check(record())
    assert len(described) == 2
