"""A sample as a Spark frame, for Great Expectations' Spark engine.

The files are read by Arrow in Spark's Python workers, with the code of the other engine, so that both see the same
rows; one task reads neighbouring files, so that the first failing rows are the first. Then the frame is kept (memory,
then disk): the 20 jobs of a suite read the files once, and a vacuum in between changes nothing.

Positions of rows are a further column, `_recourse_row`. Expectations on the table's columns are evaluated on an empty
pandas frame, which does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quality.engines.great_expectations import Evaluated, Frame, evaluate
from quality.engines.pandas_engine import to_pandas
from quality.expectations import SQL_ONLY, NamedExpectation
from quality.sample_rows import SampleReader, position
from quality.validation import MOST_ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BOUNDS = ("expect_column_min_to_be_between", "expect_column_max_to_be_between")
ROW = "_recourse_row"
"""The column with the position of a row."""

_MOST_TASKS = 200
_UNIQUE = ("expect_column_values_to_be_unique", "expect_compound_columns_to_be_unique")


def evaluate_with_spark(
    spark: SparkSession, reader: SampleReader, expectations: Sequence[NamedExpectation], key: Sequence[str]
) -> tuple[int, list[Evaluated]]:
    """The number of rows, and the results; raises Spark's exception if a file cannot be read."""
    about_columns = [each for each in expectations if each.kind.startswith("expect_table_column")]
    others = [each for each in expectations if each not in about_columns]
    empty = SampleReader(reader.name, reader.version, (), reader.schema, None)
    results = evaluate(Frame("pandas", to_pandas(empty), (), whole_rows=False, positions=_positions), about_columns)
    frame = to_spark(spark, reader)
    try:
        rows = frame.count()
        index = [*(column for column in key if column in reader.schema.names), ROW]
        bounds = [each for each in others if _is_bound_of_times(each, reader.schema)]
        others = [each for each in others if each not in bounds]
        results += evaluate(Frame("spark", frame, index, whole_rows=False, positions=_positions), others)
        results += [each for bound in bounds for each in _of_bounds(frame, bound)]
        return rows, [_with_first_rows(frame, each) for each in results]
    finally:
        frame.unpersist()


def to_spark(spark: SparkSession, reader: SampleReader) -> DataFrame:
    """The rows with their positions, kept by Spark once they are read."""
    from pyspark import StorageLevel
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = pa.schema([*reader.schema, pa.field(ROW, pa.int64())])
    files = len(reader.files)
    tasks = max(min(files, _MOST_TASKS), 1)

    def read(blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for block in blocks:
            for number, table in reader.tables(block.column(0).to_pylist()):
                at = pa.array(range(position(number, 0), position(number, table.num_rows)), pa.int64())
                yield from table.append_column(ROW, at).cast(schema).to_batches()

    numbers = spark.range(0, files, 1, tasks)
    frame = numbers.mapInArrow(read, from_arrow_schema(schema, prefer_timestamp_ntz=True))
    return frame.persist(StorageLevel.MEMORY_AND_DISK)


def _is_bound_of_times(named: NamedExpectation, schema: pa.Schema) -> bool:
    """True for a least or greatest time with a zone: GX compares Spark's, which has none, with one that has it."""
    if named.kind not in _BOUNDS or named.expectation.row_condition is not None:
        return False
    kind = schema.field(named.columns[0]).type if named.columns[0] in schema.names else None
    return kind is not None and pa.types.is_timestamp(kind) and kind.tz is not None


def _of_bounds(frame: DataFrame, named: NamedExpectation) -> list[Evaluated]:
    """The result on the column's least and greatest value alone, which Spark finds and pandas compares."""
    from pyspark.sql import functions as F

    column = named.columns[0]
    least, greatest = (F.min(frame[f"`{column}`"]).alias(column), F.max(frame[f"`{column}`"]).alias(column))
    values = pa.concat_tables([frame.agg(each).toArrow() for each in (least, greatest)])
    return evaluate(Frame("pandas", values.to_pandas(), (), whole_rows=False, positions=_positions), [named])


def _with_first_rows(frame: DataFrame, evaluated: Evaluated) -> Evaluated:
    """The result with the positions of its first failing rows, where GX gives any or none of them."""
    from dataclasses import replace

    named = evaluated.named
    if named.kind == SQL_ONLY and not evaluated.passed and not evaluated.error:
        positions = _first(_selected(frame, named.expectation.unexpected_rows_query))
        failing = evaluated.observed if isinstance(evaluated.observed, int) else None
        return replace(evaluated, failing=failing, positions=positions)
    if named.kind in _UNIQUE and (evaluated.failing or 0) > MOST_ROWS and named.expectation.row_condition is None:
        return replace(evaluated, positions=_first(_doubled(frame, named.columns)))
    return evaluated


def _doubled(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows whose values in these columns occur more than once, without rows in which all of them are null."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    times = F.count(F.lit(1)).over(Window.partitionBy(*(frame[f"`{column}`"] for column in columns)))
    present = F.coalesce(*(frame[f"`{column}`"].cast("string") for column in columns)).isNotNull()
    return frame.where(present).withColumn("_recourse_times", times).where("_recourse_times > 1")


def _selected(frame: DataFrame, query: str) -> DataFrame:
    """The rows that a query of UnexpectedRowsExpectation selects."""
    view = f"recourse_{id(frame):x}"
    frame.createOrReplaceTempView(view)
    return frame.sparkSession.sql(query.format(batch=view))


def _first(rows: DataFrame) -> tuple[int, ...]:
    if ROW not in rows.columns:  # the query selects something else
        return ()
    return tuple(int(row[0]) for row in rows.select(ROW).orderBy(ROW).limit(MOST_ROWS).collect())


def _positions(result: dict[str, Any]) -> Sequence[int]:
    rows = result.get("partial_unexpected_index_list") or ()
    return sorted(int(row[ROW]) for row in rows if isinstance(row, dict) and ROW in row)
