"""The topics of a stream as sinks: which topics their rows may name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pyspark.sql.types import StringType, StructField, StructType

from streaming_jobs import Json, KafkaSink, KafkaTopic
from streaming_jobs.runtime.stream_topics import DiscardedTopicSinks
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.kafka.output import TopicOutput
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.stream import Stream

LINE = Json(StructType([StructField("line", StringType())]))


class Lookup:
    """A broker that has every topic."""

    def describe(self, name: str) -> TopicInfo | None:
        return TopicInfo(name, "id", 1, -1, "delete")


def split(lines: Any) -> Any:
    return {"good": lines, "bad": lines}


def test_rows_may_not_go_to_a_topic_that_the_stream_reads_or_that_another_sink_of_it_writes() -> None:
    sinks = {name: KafkaSink(KafkaTopic(name, value=LINE)) for name in ("good", "bad")}
    flow = Stream("split", split, {"lines": KafkaTopic("lines", value=LINE)}, sinks)
    connection = cast("Any", SimpleNamespace(topics=Lookup()))
    opened = cast("list[TopicOutput]", DiscardedTopicSinks().open(Settings.load({}), flow, 1, connection))
    names = ("good", "bad", "lines", "other")
    allowed = {sink.declared.name: [name for name in names if sink.topics[name]] for sink in opened}
    assert allowed == {"good": ["good", "other"], "bad": ["bad", "other"]}
