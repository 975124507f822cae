"""A trial of new code: what a start would refuse shows before, and nothing is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.runtime.trial import trial
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream
from tests.conftest import SettingsFactory
from tests.support.things import THING, plain, totals

TOTAL = StructType([StructField("k", StringType()), StructField("c", LongType()), StructField("s", LongType())])


def of_text(things: DataFrame) -> DataFrame:
    """Its state does not fit either, and a rebuild of the state would not help."""
    return things.groupBy("k").agg(F.count("*").alias("c"), F.max("n").cast("string").alias("s"))


def without_a_column(things: DataFrame) -> DataFrame:
    return things.select("k", "n")


def raising(things: DataFrame) -> DataFrame:
    raise ValueError("a bug")


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (plain, None),
        (totals, "the state of stream totals was built by another aggregation"),
        (replace(totals, function=of_text), "column s would change from bigint to string"),
        (replace(plain, function=without_a_column), None),
        (replace(plain, function=raising), "ValueError: a bug"),
    ],
)
def test_what_a_start_would_refuse_shows_before_it(
    spark: SparkSession, settings: SettingsFactory, stream: Stream, words: str | None
) -> None:
    home = settings()
    table = stream.primary
    store = store_of(table)
    store.ensure(home, table, stream.name, TOTAL if stream.name == totals.name else THING, generation=1)
    record = replace(stream_record.first(stream.name), state_fingerprint={"0": "Aggregate [n], [n]"})
    stream_record.save(home, record)
    if stream.name == totals.name:
        commits = StreamFolder.of(home, stream.name).checkpoint(1).folder / "commits"
        commits.mkdir(parents=True)
        (commits / "0").write_text("v1\n{}")
    before = store.open(home, table, stream.name)
    found = trial(home, stream, spark)
    assert bool(found.found) == bool(found.next_step) == (words is not None)
    assert (words or "") in found.found
    assert found.only_state is (stream is totals), "what a rebuild of the state cures"
    after = store.open(home, table, stream.name)
    assert before is not None and after is not None and before.version == after.version
    assert stream_record.load(home, stream.name) == record
