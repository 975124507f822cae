"""A Spark that is there already: a session uses it, and leaves it as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.runtime import ExistingSpark, existing_spark
from tests.conftest import SettingsFactory

ZONE = "spark.sql.session.timeZone"


def test_a_spark_that_is_there_runs_on_with_its_own_queries(spark: SparkSession, settings: SettingsFactory) -> None:
    spark.conf.set(ZONE, "America/New_York")
    theirs = numbers(spark, "theirs")
    try:
        runtime = ExistingSpark(settings(), spark)
        assert runtime.jvm is None and runtime.failure() is None
        ours = runtime.start("ours")
        assert ours.conf.get(ZONE) == "UTC" and spark.conf.get(ZONE) == "America/New_York"
        assert ours.range(3).count() == 3
        query = numbers(ours, "ours")
        jvm = spark._jvm
        assert jvm is not None
        assert runtime.jvm == jvm.java.lang.ProcessHandle.current().pid()
        assert runtime.failure() is None
        runtime.stop()
        assert not query.isActive and theirs.isActive
        assert runtime.jvm is None, "nothing of the session is in it any more"
        assert spark.range(3).count() == 3
    finally:
        theirs.stop()
        spark.conf.unset(ZONE)


def test_the_session_that_is_active_is_taken_if_none_is_given(spark: SparkSession, settings: SettingsFactory) -> None:
    assert SparkSession.getActiveSession() is not None
    runtime = ExistingSpark(settings())
    ours = runtime.start("ours")
    assert ours.sparkContext is spark.sparkContext and ours is not spark
    query = numbers(ours, "ours")
    runtime.kill()
    assert not query.isActive, "no lease covers it from now on"
    assert runtime.jvm is not None, "an interrupted batch ends with this process, which the JVM may outlive"


def test_a_driver_takes_the_session_of_its_process_and_its_master(
    spark: SparkSession, settings: SettingsFactory
) -> None:
    made = settings({"spark.master": "spark://elsewhere:7077"})
    found, runtime = existing_spark(made)
    assert runtime is not None and runtime.session is not None
    assert runtime.session.sparkContext is spark.sparkContext
    assert found.spark.master == spark.sparkContext.master and not found.spark.has_executors
    ours = runtime.start("ours")
    assert ours.range(3).count() == 3
    runtime.stop()
    assert spark.range(3).count() == 3


def numbers(spark: SparkSession, name: str) -> StreamingQuery:
    return spark.readStream.format("rate").load().writeStream.format("noop").queryName(name).start()


TWICE = """
import sys
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.settings import Settings

settings = Settings.load({"home": sys.argv[1]})
for name in ("first", "second"):
    runtime = LocalSpark(settings)
    print(runtime.start(name).range(3).count(), runtime.jvm)
    runtime.stop() if name == "first" else runtime.kill()
"""


def test_spark_starts_again_in_a_process_in_which_it_has_ended(tmp_path: Path) -> None:
    """As for the replays of a recovery of two streams."""
    command = [sys.executable, "-c", TWICE, str(tmp_path)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=180).stdout
    counts, jvms = zip(*(line.split() for line in out.splitlines()), strict=True)
    assert counts == ("3", "3") and len(set(jvms)) == 2


def test_an_expression_that_fails_on_a_record_is_told_with_its_line(spark: SparkSession) -> None:
    numbers_ = spark.range(3).select(F.col("id").cast("string").alias("text"))
    line = sys._getframe().f_lineno + 1
    second = F.split("text", ",")[1]
    with pytest.raises(PySparkException) as raised:
        numbers_.select(second.alias("place")).collect()
    assert f"({__file__}:{line})" in classify(raised.value).found
    with pytest.raises(PySparkException) as raised:
        numbers_.select(F.expr("1 / (length(text) - 1)").alias("place")).collect()
    assert "(in the SQL 1 / (length(text) - 1))" in classify(raised.value).found
