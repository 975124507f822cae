"""Four streams in a diamond: the first writes a table and a topic, and the last reads tables that come from both.

A thing's number is wrong by `MARK`, which stands for a bug in the first stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs import DeltaSource, DeltaTable, Json, KafkaSink, KafkaTopic, stream
from tests.support.things import KEYS, THINGS

MARK = 0

NUMBERED = StructType([StructField("k", StringType()), StructField("n", LongType())])
MARKS = KafkaTopic("diamond_marks", value=Json({"k": "string not null", "n": "bigint not null"}))
EVENTS = DeltaSource("diamond_events")


@stream(
    source=THINGS, sink={"events": DeltaTable("diamond_events", schema=NUMBERED), "marks": KafkaSink(MARKS, key="k")}
)
def first(things: DataFrame) -> Mapping[str, DataFrame]:
    """Every record in a table, and every third one in a topic."""
    numbered = things.select("k", (F.col("n") + MARK).alias("n"))
    return {"events": numbered, "marks": numbered.where("n % 3 = 0")}


@stream(source=EVENTS, sink=DeltaTable("diamond_sums", keys=["k"], order_by=["c"]))
def sums(events: DataFrame) -> DataFrame:
    """Count and sum by key, of the table."""
    return events.groupBy("k").agg(F.count(F.lit(1)).alias("c"), F.sum("n").alias("s"))


@stream(source=MARKS, sink=DeltaTable("diamond_seen", schema=NUMBERED))
def seen(marks: DataFrame) -> DataFrame:
    """Every record of the topic."""
    return marks.select("k", "n")


@stream(source={"events": EVENTS, "seen": DeltaSource("diamond_seen")}, sink=DeltaTable("diamond_both"))
def last(events: DataFrame, seen: DataFrame) -> DataFrame:
    """Rows of both tables."""
    side = F.lit("events").alias("side")
    return events.select(side, "n").unionByName(seen.select(F.lit("seen").alias("side"), "n"))


def truth(numbers: Iterable[int], mark: Mapping[int, int] | None = None) -> dict[str, Counter[tuple[object, ...]]]:
    """By table the rows that the diamond makes of things; `mark` by number, if it is wrong."""
    made = [(KEYS[i % len(KEYS)], i + (mark or {}).get(i, 0)) for i in numbers]
    marked = [(k, n) for k, n in made if n % 3 == 0]
    by_key: dict[str, list[int]] = {}
    for k, n in made:
        by_key.setdefault(k, []).append(n)
    return {
        "diamond_events": Counter(made),
        "diamond_seen": Counter(marked),
        "diamond_sums": Counter((k, len(each), sum(each)) for k, each in by_key.items()),
        "diamond_both": Counter([("events", n) for _, n in made] + [("seen", n) for _, n in marked]),
    }
