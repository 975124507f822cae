"""A sample in this process's memory: Arrow, then pandas, with types that keep integers, decimals and nulls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quality.engines.great_expectations import Evaluated, Frame, evaluate
from quality.expectations import SQL_ONLY, NamedExpectation
from quality.sample_rows import SampleReader, position

if TYPE_CHECKING:
    import pandas as pd


def evaluate_with_pandas(
    reader: SampleReader, expectations: Sequence[NamedExpectation], key: Sequence[str]
) -> tuple[int, list[Evaluated]]:
    """The number of rows, and the results; raises PreflightRefused for a file that is gone."""
    frame = to_pandas(reader)
    asked = [each for each in expectations if each.kind != SQL_ONLY]
    index = [column for column in key if column in frame.columns]
    results = evaluate(Frame("pandas", frame, index, whole_rows=True, positions=_positions), asked)
    refused = [
        Evaluated(each, passed=False, error="pandas evaluates no SQL; run it with --engine spark")
        for each in expectations
        if each.kind == SQL_ONLY
    ]
    return len(frame), [*results, *refused]


def to_pandas(reader: SampleReader) -> pd.DataFrame:
    """The rows with their positions as the index: a hidden column would be one more for expectations on columns."""
    tables, positions = [], []
    for number, table in reader.tables():
        tables.append(table)
        positions.append(np.arange(position(number, 0), position(number, table.num_rows), dtype=np.int64))
    rows = pa.concat_tables(tables) if tables else reader.schema.empty_table()
    frame = _frame(_wider_decimals(rows))
    frame.index = np.concatenate(positions) if positions else np.empty(0, np.int64)
    return frame


def _frame(rows: pa.Table) -> pd.DataFrame:
    import pandas as pd

    nullable = {
        pa.int8(): pd.Int8Dtype(),
        pa.int16(): pd.Int16Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.int64(): pd.Int64Dtype(),
        pa.bool_(): pd.BooleanDtype(),
        pa.float32(): pd.Float32Dtype(),
        pa.float64(): pd.Float64Dtype(),
    }

    def mapped(kind: pa.DataType) -> Any:
        return pd.ArrowDtype(kind) if pa.types.is_decimal(kind) else nullable.get(kind)

    frame: pd.DataFrame = rows.to_pandas(types_mapper=mapped)
    return frame


def _wider_decimals(rows: pa.Table) -> pa.Table:
    """Decimals with four more digits, as Spark's mean of them has; pandas rounds a mean to the column's own."""
    fields = [_wider(field) for field in rows.schema]
    return rows.cast(pa.schema(fields))


def _wider(field: pa.Field) -> pa.Field:
    kind = field.type
    if not pa.types.is_decimal(kind):
        return field
    return field.with_type(pa.decimal256(kind.precision + 4, kind.scale + 4))


def _positions(result: dict[str, Any]) -> Sequence[int]:
    rows = result.get("unexpected_rows")
    return [] if rows is None else [int(at) for at in rows.index]
