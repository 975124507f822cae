"""Records on which a stream's function raises: set aside once, through kills, recoveries and the verifier."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from reprocessing.slices.rebuild import Tools, Waits, rebuild
from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.planned_once import PlannedOnce, size
from streaming_jobs.runtime.sliceable import sliceable
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.set_aside import SetAsideFile
from streaming_jobs.state.stream_folder import StreamFolder
from tests.conftest import SettingsFactory
from tests.support import raising_flows
from tests.support.driver import Bench, assert_chained, command, driver, finished, ledger, produce, rows, variables
from tests.support.raising_flows import BAD
from tests.support.things import BEGIN, KEYS, expected_totals, thing

TOPIC = "things"
COUNT = 3_000
GOOD = [n for n in range(COUNT) if n not in BAD]


@pytest.fixture
def bootstrap(broker: Broker) -> Iterator[str]:
    """The topic `things` with 3,000 records on two partitions."""
    bootstrap = broker.start()
    topics = Topics.of(Settings.load({}).kafka, bootstrap)
    if topics.describe(TOPIC):
        topics.delete(TOPIC)
    topics.create(TOPIC, 2)
    produce(bootstrap, TOPIC, map(thing, range(COUNT)))
    yield bootstrap
    topics.delete(TOPIC)


@pytest.fixture
def made(bench: Callable[..., Bench], bootstrap: str) -> Bench:
    return bench({"stream.max_offsets_per_trigger": 1_000, "stream.max_restarts": 1})


def letters(settings: Settings, stream: str) -> dict[int, dict[str, Any]]:
    """The dead letters of a stream by the number in their record; each number has one."""
    found = rows(settings, f"{stream}_dead_letters")
    by_number = {json.loads(row["value"])["n"]: row for row in found}
    assert len(by_number) == len(found)
    return by_number


@contextmanager
def stack_traces() -> Iterator[list[str]]:
    """What PySpark writes of exceptions meanwhile."""
    from pyspark.logger import PySparkLogger

    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [PySparkLogger.getLogger(name) for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield written
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def test_records_that_raise_become_dead_letters_with_their_place_and_traceback_and_all_others_rows(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, plans, run, of = list[Sequence[Span]](), list[object](), PlannedOnce.run, PlannedOnce.of
    monkeypatch.setattr(PlannedOnce, "run", lambda self, spans: (planned.append(spans), run(self, spans))[1])
    monkeypatch.setattr(PlannedOnce, "of", lambda *options: (plans.append(options), of(*options))[1])
    ended = made.run(raising_flows.by_python)
    assert (ended.status.state, ended.status.restarts) == ("stopped", 0), ended.status.error
    assert planned and len(planned) <= len(BAD) * 3 + 3, "each search runs one plan, and a record takes one or two runs"
    assert len(plans) == 1, "the plan of the first search holds for the others"
    assert size(planned[0]) == 1, "the batch itself said on which record it stopped"
    got = rows(made.settings, "by_python")
    assert sorted(row["n"] for row in got) == GOOD
    aside = letters(made.settings, "by_python")
    assert sorted(aside) == sorted(BAD)
    places = {(row["part"], row["off"]) for row in got} | {(r["partition"], r["offset"]) for r in aside.values()}
    assert len(places) == COUNT, "a dead letter has the place of its record"
    letter = aside[1555]
    assert letter["reason"] == "function_raised" and letter["key"] == thing(1555)[0]
    summary, _, trace = letter["detail"].partition("\n")
    assert summary.startswith("ValueError: no place for 1555 (") and "raising_flows.py:" in summary
    assert trace.startswith("Traceback") or "raising_flows.py" in trace
    assert_chained(entries := ledger(made.settings, "by_python"))
    assert sum(entry.dead_letters for entry in entries) == len(BAD)
    assert sum(each.records for entry in entries for each in entry.offsets) == COUNT

    for flow in (raising_flows.divided, raising_flows.by_pandas):
        planned.clear()
        assert made.run(flow).status.error is None
        assert sorted(letters(made.settings, flow.name)) == sorted(BAD)
        assert [size(spans) for spans in planned[:1]] == [1], "the batch itself said on which record it stopped"

    with stack_traces() as written:
        assert made.run(raising_flows.by_division).status.error is None
    assert not written, "PySpark writes no stack traces of what is set aside"
    both = rows(made.settings, "halves") + rows(made.settings, "wholes")
    expected = letters(made.settings, "by_division")
    assert sorted(expected) == [77, 1555], "a record of the other table does not raise"
    assert sorted(row["n"] for row in both) == [n for n in range(COUNT) if n not in expected]
    assert "DIVIDE_BY_ZERO" in expected[77]["detail"]

    assert made.run(raising_flows.by_rule).status.error is None
    assert sorted(row["n"] for row in rows(made.settings, "by_rule")) == [n for n in range(COUNT) if n != 77]
    assert sum(entry.dropped for entry in ledger(made.settings, "by_rule")) == 1
    assert rows(made.settings, "by_rule_dead_letters") == []

    verified = made.recourse(
        "tests.support.raising_flows", "verify", "by_python", "by_division", "by_rule", "--finished"
    )
    assert "wrong" not in verified, verified


def test_ahead_of_state_records_are_set_aside_and_what_no_record_raises_alone_stops_the_stream(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, run = list[Sequence[Span]](), PlannedOnce.run
    monkeypatch.setattr(PlannedOnce, "run", lambda self, spans: (planned.append(spans), run(self, spans))[1])
    for flow in (raising_flows.summed, raising_flows.spread):
        ended = made.run(flow)
        if flow is raising_flows.summed:
            assert planned and all(size(spans) < 1_000 for spans in planned), "each batch itself said where it stopped"
        assert (ended.status.state, ended.status.restarts) == ("stopped", 0), "the plan of the batch ran again"
        totals = {row["k"]: row["c"] for row in rows(made.settings, flow.name)}
        assert totals == {key: count for key, (count, _) in expected_totals(GOOD).items()}
        assert sorted(letters(made.settings, flow.name)) == sorted(BAD)
        assert sum(entry.dead_letters for entry in ledger(made.settings, flow.name)) == len(BAD)
    assert {row["k"]: row["c"] for row in rows(made.settings, "again")} == totals

    assert made.run(raising_flows.regrouped).status.restarts > 0, "the first operator's state may be written already"
    assert sorted(letters(made.settings, "regrouped")) == sorted(BAD)

    for records in ([(1, "2024-01-01T05:00:00Z")], [(5, "2024-01-01T00:00:00Z"), (77, "2024-01-01T00:00:00Z")]):
        late = [json.dumps({"k": "late", "n": n, "t": time}).encode() for n, time in records]
        produce(made.bootstrap, TOPIC, [(b"late", value) for value in late])
        assert made.run(raising_flows.hourly).status.restarts == 0
    assert sorted(letters(made.settings, "hourly")) == [77]
    assert len(rows(made.settings, "hourly_late")) == 1, "a dead letter is not a late record, too"

    produce(
        made.bootstrap, TOPIC, [(b"alone", json.dumps({"k": "alone", "n": 5, "t": "2024-01-01T00:00:00Z"}).encode())]
    )
    failed = made.run(raising_flows.overflowing)
    assert failed.status.state == "failed" and failed.status.error is not None
    assert failed.status.error["code"] == "REC-027" and "raises it alone" in failed.status.error["found"]
    assert rows(made.settings, "overflowing_dead_letters") == []

    stopped = made.run(raising_flows.wrong)
    assert stopped.status.error is not None and stopped.status.error["code"] == "REC-027"
    assert "the error budget leaves 100" in stopped.status.error["found"] and stopped.status.restarts == 0
    assert rows(made.settings, "wrong") == rows(made.settings, "wrong_dead_letters") == []


def test_what_is_computed_again_leaves_out_the_records_that_became_dead_letters(made: Bench) -> None:
    assert made.run(raising_flows.sliced).status.error is None
    tools = Tools(made.settings, made.topics, made.bootstrap, lambda: made.spark, waits=Waits(commit=60.0))
    report = rebuild(tools, sliceable(raising_flows.sliced), f"{BEGIN:%Y-%m-%d}", None)
    assert (report.outcome, report.difference.new_rows) == ("unchanged", len(GOOD))


FLOW = """
from pyspark.sql import functions as F
from pyspark.sql.types import LongType
from streaming_jobs import ErrorPolicy
from streaming_jobs.stream import DeltaTable, stream
from tests.support.things import THINGS

@F.udf(LongType())
def picky(number):
    if number in {bad}:
        raise ValueError(f"no place for {{number}}")
    return number

@stream(source=THINGS, sink=DeltaTable("plain"), errors=ErrorPolicy(function="dead_letter"))
def plain(things):
    return things.select(picky("n").alias("n"), F.expr("_source.partition AS part"), F.expr("_source.offset AS off"))

@stream(source=THINGS, sink=DeltaTable("summed", keys=["k"]), errors=ErrorPolicy(function="dead_letter"))
def summed(things):
    return things.groupBy("k").agg(F.count(F.lit(1)).alias("c"), F.sum(picky("n")).alias("s"))
"""
KILLS = (
    "plain:set_aside:0",
    "plain:secondary_committed:0",  # the dead letters are committed, the rows are not
    "plain:primary_committed:0",
    "plain:set_aside:1",
    "plain:staged:1",
    "summed:set_aside:0",  # with state: the plan has run again, and nothing of it is visible
    "summed:secondary_committed:0",
    "summed:primary_committed:0",
    "summed:set_aside:1",
)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_kills_at_every_border_leave_each_record_aside_once_and_a_recovery_with_corrected_code_reads_it(
    settings: SettingsFactory, bootstrap: str
) -> None:
    made = settings({"kafka.bootstrap_servers": bootstrap, "stream.max_offsets_per_trigger": 1_000})
    made.home.mkdir(parents=True, exist_ok=True)
    code = made.home / "own_flows.py"
    code.write_text(FLOW.format(bad=BAD))
    arguments = ("--trigger", "available-now", "--set", "stream.max_offsets_per_trigger=1000", "--streams")

    def run(stream: str, **environment: str) -> tuple[int, str]:
        started = driver(
            made, bootstrap, *arguments, stream, flows="own_flows", folder=made.home, environment=environment
        )
        return finished(started)

    def recourse(*words: str) -> str:
        done = command(made.home, variables(made.home, bootstrap, "own_flows"), *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for kill in KILLS:
        ended, output = run(kill.partition(":")[0], RECOURSE_CRASH=kill)
        assert ended == -signal.SIGKILL, f"{kill}: {output[-3000:]}"
        stream, _, batch = kill.split(":")
        aside = SetAsideFile(StreamFolder.of(made, stream).set_aside).load()
        assert aside.records and (aside.generation, aside.batch) == (1, int(batch)), kill
    ended, output = run("plain,summed")
    assert ended == 0, output[-3000:]

    def right(good: list[int], bad: list[int]) -> None:
        assert sorted(row["n"] for row in rows(made, "plain")) == good
        assert {row["k"]: (row["c"], row["s"]) for row in rows(made, "summed")} == expected_totals(good)
        for stream in ("plain", "summed"):
            assert sorted(letters(made, stream)) == bad
        verified = recourse("verify", "plain", "summed", "--finished")
        assert "wrong" not in verified and "ok" in verified, verified

    assert len(KEYS) == len(rows(made, "summed"))
    right(GOOD, sorted(BAD))
    for stream in ("plain", "summed"):
        assert_chained(entries := ledger(made, stream))
        assert sum(each.records for entry in entries for each in entry.offsets) == COUNT

    code.write_text(FLOW.format(bad=(78,)))
    plans = []
    for stream in ("plain", "summed"):
        plan = ("recover", "plan", stream, "--to-batch", "-1", "--max-changed", "100%", "--output", "json")
        plans.append(json.loads(recourse(*plan))["id"])
        recourse("recover", "apply", plans[-1], "--yes")
    right([n for n in range(COUNT) if n != 78], [78])
    for plan_id in plans:
        recourse("recover", "undo", plan_id, "--yes")
    right(GOOD, sorted(BAD))
