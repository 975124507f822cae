"""What Spark does with the tasks that read a source of ours."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession, udf
from pyspark.sql.datasource import DataSource, DataSourceReader

from streaming_jobs.sources.data_source import _register


class _Times(DataSource):
    @classmethod
    def name(cls) -> str:
        return "times"

    def schema(self) -> str:
        return "at timestamp"

    def reader(self, schema: Any) -> DataSourceReader:
        return _Reader()


class _Reader(DataSourceReader):
    def read(self, partition: Any) -> Iterator[tuple[datetime]]:
        yield (datetime(2026, 1, 1),)


def test_tasks_that_read_a_source_carry_no_accumulator_of_python(spark: SparkSession) -> None:
    _register(spark, _Times)
    assert spark.read.format("times").load().count() == 1
    found = spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource("times")
    assert found.dataSourceCls().accumulator() is None


def test_a_spark_without_the_private_interface_registers_by_the_public_one(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped, results = udf._wrap_function, [SimpleNamespace()]  # a result without the attributes of this version's
    monkeypatch.setattr(udf, "_wrap_function", lambda *of: results.pop() if results else wrapped(*of))
    _register(spark, _Times)
    assert not results
    assert spark.read.format("times").load().count() == 1
