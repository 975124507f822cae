"""The streams of `life.py`, in a module that imports little: imports are a part of the version of a stream's code."""

from __future__ import annotations

from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, Stream

TOPIC, TOPIC_ID = "things", "topic-1"
ROWS = StructType([StructField("id", LongType()), StructField("place", StringType())])


def things(value: object) -> object:
    """The stream's function; nobody calls it here."""
    return value


STREAM = Stream(
    "things",
    things,
    {"value": KafkaTopic(TOPIC, Json(ROWS))},
    {"things": Declared("things", partition_by=["place"])},
)

OTHERS = Stream(
    "others",
    things,
    {"value": KafkaTopic(TOPIC, Json(ROWS))},
    {"others": Declared("others", partition_by=["place"])},
)
"""A second stream of the same topic."""
