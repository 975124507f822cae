"""JSON in Spark: each verdict is the one of the strict reading in Python, and each good record holds its values.

The corpora are judged in one Spark job each: records made by hypothesis for two schemas, and broken in every way
that a record can be broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from streaming_jobs.errors import UsageError
from streaming_jobs.formats import REQUIRED_CONF, Json
from streaming_jobs.formats.json_reading import Refused, read_record
from tests.support import json_corpus
from tests.support.json_corpus import FLAT, ODD, RICH, WITHOUT_TEXT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Rules of Spark's parser, and of the end mark that Spark's reading adds to a record.
OWN_RULES = (
    b'{"id":1,"name":"x","z":' + b"9" * 1001 + b"}",
    b'{"id":1,"name":"x","' + b"k" * 50_001 + b'":1}',
    b'{"id":1,"name":"x","\\u0001":true}',
    b'{"id":1,"name":"x","\\u0001":true,"x":{}}',
    b'{"id":1,"name":"x","\\u0001":null,"\\u0001":true}',
)
GOOD = tuple(value for value in json_corpus.GOOD if value not in OWN_RULES)
BAD = (*json_corpus.BAD, *OWN_RULES)


@pytest.fixture(scope="module")
def corpus() -> tuple[bytes, ...]:
    """About 20,000 values."""
    return json_corpus.corpus(1500)


def frame(spark: SparkSession, values: Sequence[bytes | None]) -> DataFrame:
    """The values as a frame that Spark runs code for; a local relation would be evaluated by its optimizer."""
    table = pa.table({"i": pa.array(range(len(values))), "value": pa.array(values, pa.binary())})
    return spark.createDataFrame(table).repartition(2)


def judged(spark: SparkSession, schema: StructType, values: Sequence[bytes | None]) -> list[tuple[bool, Any]]:
    """Verdict and record of each value, by Spark."""
    decoded = Json(schema).decode(frame(spark, values), "value")
    shown = decoded.select("i", "_bad", F.when(~F.col("_bad"), F.col("_record")).alias("record"))
    rows = sorted(shown.toArrow().to_pylist(), key=lambda row: row["i"])
    return [(row["_bad"], row["record"]) for row in rows]


def read(schema: StructType, value: bytes | None) -> Any:
    """The record by the strict reading, times in UTC; None where it refuses."""
    try:
        return in_utc(read_record(schema, value))
    except Refused:
        return None


def in_utc(parsed: Any) -> Any:
    if isinstance(parsed, dict):
        return {name: in_utc(value) for name, value in parsed.items()}
    if isinstance(parsed, list):
        return [in_utc(item) for item in parsed]
    return parsed.astimezone(UTC) if isinstance(parsed, datetime) and parsed.tzinfo else parsed


def disagreements(spark: SparkSession, schema: StructType, values: Sequence[bytes | None]) -> list[Any]:
    """Values on which the halves differ, in verdict or in content."""
    differing = []
    for value, (bad, record) in zip(values, judged(spark, schema, values), strict=True):
        strict = read(schema, value)
        if bad is not (strict is None) or (not bad and record != strict):
            differing.append({"value": value, "spark": "refused" if bad else record, "python": strict or "refused"})
    return differing


@pytest.mark.timeout(600)
@pytest.mark.parametrize("schema", [RICH, FLAT, WITHOUT_TEXT], ids=["rich", "flat", "without_text"])
def test_spark_and_the_strict_reading_agree_on_every_record(
    spark: SparkSession, corpus: tuple[bytes, ...], schema: StructType
) -> None:
    refused = sum(read(schema, value) is None for value in corpus)
    assert len(corpus) * 0.1 < refused < len(corpus) * 0.95, "the corpus has to hold both kinds"
    assert disagreements(spark, schema, corpus)[:3] == []


@pytest.mark.parametrize("field", RICH.fields, ids=RICH.fieldNames())
def test_every_odd_value_of_every_type_has_the_verdict_of_the_strict_reading(
    spark: SparkSession, field: StructField
) -> None:
    schema = StructType([field])
    values = [f'{{"{field.name}":{text}}}'.encode("utf-8", "surrogatepass") for text in ODD]
    values += [f'{{"{field.name}":{text},"other":{{}}}}'.encode("utf-8", "surrogatepass") for text in ODD]
    assert disagreements(spark, schema, values) == []


@pytest.mark.parametrize("schema", [RICH, FLAT], ids=["rich", "flat"])
def test_written_examples_have_their_verdict(spark: SparkSession, schema: StructType) -> None:
    assert [value for value, (bad, _) in zip(GOOD, judged(spark, schema, GOOD), strict=True) if bad] == []
    assert [value for value, (bad, _) in zip(BAD, judged(spark, schema, BAD), strict=True) if not bad] == []
    assert disagreements(spark, schema, [*GOOD, *BAD, None]) == []


def test_verdicts_do_not_depend_on_ansi_mode(spark: SparkSession) -> None:
    session = spark.newSession()
    for name, value in {**REQUIRED_CONF, "spark.sql.ansi.enabled": "false"}.items():
        session.conf.set(name, value)
    assert disagreements(session, RICH, [*GOOD, *BAD, None]) == []
    session.conf.set("spark.sql.ansi.enabled", "true")
    assert disagreements(session, RICH, [*GOOD, *BAD, None]) == []


def test_the_last_of_two_fields_wins(spark: SparkSession) -> None:
    values = [b'{"id":1,"name":"a","id":2,"name":"7","other":{}}', b'{"id":1,"name":"a","name":7}']
    (good, record), (bad, _) = judged(spark, FLAT, values)
    assert (good, record["id"], record["name"]) == (False, 2, "7")
    assert bad is True


def test_a_null_value_is_bad_and_fails_nothing(spark: SparkSession) -> None:
    assert judged(spark, RICH, [None]) == [(True, None)]


def test_the_frame_keeps_its_columns_and_gets_two(spark: SparkSession) -> None:
    decoded = Json(RICH).decode(frame(spark, [b"{}"]).withColumn("key", F.lit(1)), "value")
    assert decoded.columns == ["i", "value", "key", "_record", "_bad"]
    assert not decoded.schema["_bad"].nullable
    record_type = decoded.schema["_record"].dataType
    assert isinstance(record_type, StructType)
    assert [(f.name, f.dataType.simpleString()) for f in record_type] == [
        (f.name, f.dataType.simpleString()) for f in RICH
    ]


def test_a_record_is_parsed_once_whatever_is_asked_of_it(spark: SparkSession) -> None:
    decoded = Json(FLAT).decode(frame(spark, [b"{}"]), "value")
    query = decoded.where("not _bad").select("_record.*").where("whole > 3 and name <> 'x'").groupBy("name").count()
    plan = query._jdf.queryExecution().optimizedPlan().toString()
    parsing = [line for line in plan.splitlines() if "StructField(id,LongType" in line]
    assert "Filter" in plan, "the plan has lost its filters"
    assert len(parsing) == 1, "more than one step of the plan parses records"
    assert "Project" in parsing[0]
    assert parsing[0].count("StructField(id,LongType") == 2, "one branch for ordinary values, one for the others"


def test_a_verdict_does_not_depend_on_the_columns_in_use(spark: SparkSession) -> None:
    values = [b'{"id":1,"name":"x","whole":"no number"}', b'{"id":1,"name":"x"}']
    decoded = Json(FLAT).decode(frame(spark, values), "value")
    assert [row.id for row in decoded.where("not _bad").select("_record.id").collect()] == [1]
    assert decoded.where("_bad").count() == 1


def test_a_session_with_another_time_zone_is_refused(spark: SparkSession) -> None:
    session = spark.newSession()
    for name, value in REQUIRED_CONF.items():
        session.conf.set(name, value)
    Json(FLAT).decode(frame(session, [b"{}"]), "value")
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    with pytest.raises(UsageError, match="session.timeZone"):
        Json(FLAT).decode(frame(session, [b"{}"]), "value")


def test_bad_records_stop_no_stateful_stream(spark: SparkSession, tmp_path: Path) -> None:
    values = [*GOOD, *BAD, *[b'{"id":%d,"name":"k%d"}' % (i, i % 3) for i in range(300)]]
    frame(spark, values).repartition(4).write.parquet(str(tmp_path / "records"))
    raw = (
        spark.readStream.schema("i long, value binary")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(tmp_path / "records"))
    )
    judged = Json(FLAT).decode(raw, "value").observe("seen", F.count_if("_bad").alias("bad"))
    counted = judged.where("not _bad").select("_record.*").groupBy("name").count()
    counts: dict[str, int] = {}

    def keep(batch: DataFrame, _: int) -> None:
        counts.update({row["name"]: row["count"] for row in batch.collect()})

    query = (
        counted.writeStream.outputMode("update")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .foreachBatch(keep)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    assert {name: counts[name] for name in ("k0", "k1", "k2")} == {"k0": 100, "k1": 100, "k2": 100}
    assert sum(counts.values()) == 300 + len(GOOD)
    assert sum(progress.observedMetrics["seen"]["bad"] for progress in query.recentProgress) == len(BAD)
