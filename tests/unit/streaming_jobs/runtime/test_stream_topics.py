"""The topics of a stream as sinks: which topics their rows may name."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from streaming_jobs import DeltaTable, Json, KafkaSink, KafkaTopic
from streaming_jobs.runtime.stream_sinks import DiscardedTopicSinks
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.kafka.output import TopicOutput
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.stream import Stream, StreamSource

LINE = Json(StructType([StructField("line", StringType())]))


class Lookup:
    """A broker that has every topic."""

    def describe(self, name: str) -> TopicInfo | None:
        return TopicInfo(name, "id", 1, -1, "delete")


def split(lines: Any) -> Any:
    return {"good": lines, "bad": lines}


def forwarded(lines: Any) -> Any:
    return lines


def topic(name: str) -> KafkaTopic:
    return KafkaTopic(name, value=LINE)


LINES: dict[str, StreamSource] = {"lines": topic("lines")}


def allowed(flow: Stream, flows: list[str], *names: str) -> dict[str, list[str]]:
    """By sink those of the names that its rows may go to."""
    connection = cast("Any", SimpleNamespace(topics=Lookup()))
    settings = Settings.load({"flows": flows})
    opened = cast("list[TopicOutput]", DiscardedTopicSinks().open(settings, flow, 1, connection))
    return {sink.declared.name: [name for name in names if sink.topics[name]] for sink in opened}


def test_rows_may_not_go_to_a_topic_that_the_stream_reads_or_that_another_sink_of_it_writes() -> None:
    flow = Stream("split", split, LINES, {name: KafkaSink(topic(name), route="to") for name in ("good", "bad")})
    assert allowed(flow, [], "good", "bad", "lines", "other") == {"good": ["good", "other"], "bad": ["bad", "other"]}


def test_rows_may_not_go_to_a_topic_that_another_declared_stream_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Stream("router", forwarded, LINES, {"mine": KafkaSink(topic("mine"), route="to")})
    module = ModuleType("declared_here")
    module.__dict__.update(
        flow=flow,
        other=Stream("other", forwarded, LINES, {"theirs": KafkaSink(topic("theirs"))}),
        reader=Stream("reader", forwarded, {"lines": topic("read")}, {"read_lines": DeltaTable("read_lines")}),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert allowed(flow, [module.__name__], "mine", "theirs", "read") == {"mine": ["mine", "read"]}
