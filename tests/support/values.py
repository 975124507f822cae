"""Hostile values of every type that a table may have, and three engines that must return them.

`ROWS` has a row for each value; `missed_by_*` filter a table on each column by each value and tell which rows a filter
does not find although they are there, or finds although they are not: what pruning by statistics could do wrong.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import types as t

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EPOCH = datetime(1970, 1, 1)
_TIMES = [
    datetime(1, 1, 1),
    datetime(1, 1, 1, 0, 0, 0, 1),
    datetime(999, 5, 5, 5),
    datetime(1582, 10, 4, 23, 59, 59, 999_999),
    datetime(1582, 10, 10, 12),
    datetime(1582, 10, 15),
    datetime(1969, 12, 31, 23, 59, 59, 999_999),
    datetime(2024, 1, 1, 0, 0, 0, 123_456),
    datetime(2024, 1, 1, 0, 0, 0, 123_999),
    datetime(9999, 12, 31, 23, 59, 59, 999_999),
]
_WIDE = "\U0010ffff"
VALUES: dict[str, tuple[t.DataType, pa.DataType, list[Any]]] = {
    "tiny": (t.ByteType(), pa.int8(), [-128, 0, 127]),
    "small": (t.ShortType(), pa.int16(), [-(2**15), 0, 2**15 - 1]),
    "whole": (t.IntegerType(), pa.int32(), [-(2**31), 0, 2**31 - 1]),
    "long": (t.LongType(), pa.int64(), [-(2**63), 2**63 - 1, 2**53 + 1, 0]),
    "single": (t.FloatType(), pa.float32(), [0.5, -0.0, 0.0, math.nan, math.inf, -math.inf, 2.0**-149]),
    "double": (t.DoubleType(), pa.float64(), [0.1, -0.0, 0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7e308]),
    "money": (t.DecimalType(9, 2), pa.decimal128(9, 2), [Decimal("0.10"), Decimal("-9999999.99"), Decimal("1.00")]),
    "huge": (
        t.DecimalType(38, 0),
        pa.decimal128(38, 0),
        [Decimal("9" * 38), Decimal("-" + "9" * 38), Decimal(2**53 + 1), Decimal(10**30)],
    ),
    "exact": (t.DecimalType(38, 38), pa.decimal128(38, 38), [Decimal("0." + "1" * 38), Decimal("-0." + "9" * 38)]),
    "flag": (t.BooleanType(), pa.bool_(), [True, False]),
    "day": (
        t.DateType(),
        pa.date32(),
        [date(1, 1, 1), date(999, 5, 5), date(1582, 10, 4), date(1582, 10, 10), date(1582, 10, 15), date(9999, 12, 31)],
    ),
    "at": (t.TimestampType(), pa.timestamp("us", "UTC"), [at.replace(tzinfo=UTC) for at in _TIMES]),
    "local": (t.TimestampNTZType(), pa.timestamp("us"), _TIMES),
    "text": (
        t.StringType(),
        pa.string(),
        [
            "",
            "a",
            "\u2028x",
            "\u2029",
            "x\u0085",
            "it's",
            "a\0b",
            "日" * 31 + _WIDE,
            "日" * 32 + _WIDE,
            _WIDE * 40,
            "x" * 33,
            "x" * 65,
            "\ue000",
            "\U0001f600",
            "\x7f" * 70,
            "\ud7ff" * 40,
            "y" * 2**20,
            "null",
        ],
    ),
    "raw": (t.BinaryType(), pa.binary(), [b"", b"\xff", b"\0" * 70, b"\xff" * 70]),
}
"""Name of a column: its type for Spark, for Arrow, and the values."""
_INSIDE = pa.struct([("id", pa.decimal128(20, 0)), ("n", pa.int64()), ("f", pa.float64()), ("text", pa.string())])
_NESTED: dict[str, tuple[t.DataType, pa.DataType, list[Any]]] = {
    "inside": (
        t.StructType(
            [
                t.StructField("id", t.DecimalType(20, 0)),
                t.StructField("n", t.LongType()),
                t.StructField("f", t.DoubleType()),
                t.StructField("text", t.StringType()),
            ]
        ),
        _INSIDE,
        [
            {"id": Decimal(2**53 + 1), "n": 2**53 + 1, "f": math.nan, "text": "\u2028" * 40},
            {"id": None, "n": None, "f": None, "text": None},
            None,
        ],
    ),
    "items": (
        t.ArrayType(t.DecimalType(20, 0)),
        pa.list_(pa.decimal128(20, 0)),
        [[Decimal(2**53 + 1), None], [], None],
    ),
    "pairs": (
        t.MapType(t.StringType(), t.DoubleType()),
        pa.map_(pa.string(), pa.float64()),
        [[("\u2029", math.nan), ("", None)], [], None],
    ),
}
COLUMNS = {**VALUES, **_NESTED}
SCHEMA = t.StructType(
    [t.StructField("id", t.LongType()), *(t.StructField(name, kind) for name, (kind, _, _) in COLUMNS.items())]
)
_EVERY = slice(None)
COUNT = max(len(values) for _, _, values in VALUES.values())
"""Rows of values; one more is null in every column."""


def rows(first: int = 0) -> pa.Table:
    """A row for each value, shorter columns from their beginning again, and a row of nulls; ids from `first`."""
    made = {"id": pa.array(range(first, first + COUNT + 1), pa.int64())}
    for name, (_, kind, values) in COLUMNS.items():
        made[name] = pa.array([*(values[i % len(values)] for i in range(COUNT)), None], kind)
    return pa.table(made)


def as_text(table: pa.Table) -> list[str]:
    """The rows in order of their ids, each value as a text that differs for NaN and -0.0."""
    return [repr(row) for row in sorted(table.select(SCHEMA.names).to_pylist(), key=lambda row: row["id"])]


def questions(columns: list[str] | None = None) -> Iterator[tuple[str, str, Any]]:
    """Column, comparison and value of every filter."""
    for name, (_, _, values) in VALUES.items():
        if columns is None or name in columns:
            yield from ((name, "=", value) for value in values)
            yield from ((name, ">", value) for value in (min(values, key=_low), max(values, key=_low)))
            yield from ((name, "<=", value) for value in (min(values, key=_low), values[0]))
            yield name, "IS NULL", None


def missed_by_pyarrow(table: Path, every: slice = _EVERY, *, cast_text: bool = False) -> list[str]:
    """Filters, of `every` question, that pyarrow answers otherwise with the table's statistics than of rows in memory.

    With `cast_text`, conditions on text and bytes cast the column first, as those on files of a merge have to.
    """
    data = DeltaTable(table).to_pyarrow_dataset()
    memory = ds.dataset(data.to_table())
    wrong = []
    for name, comparison, value in list(questions())[every]:
        condition = _arrow(name, comparison, value, cast=cast_text and name in ("text", "raw"))
        returned, there = (sorted(d.to_table(["id"], filter=condition)["id"].to_pylist()) for d in (data, memory))
        if returned != there:
            wrong.append(_words("pyarrow", name, comparison, value, there, returned))
    return wrong


def missed_by_datafusion(table: Path, every: slice = _EVERY) -> list[str]:
    """Filters, of `every` question, that DataFusion answers otherwise as a condition than as a column of all rows."""
    data = QueryBuilder().register("t", DeltaTable(table))
    wrong = []
    chosen = list(questions())[every]
    for name in dict.fromkeys(column for column, _, _ in chosen):
        asked = [question for question in chosen if question[0] == name]
        conditions = [_sql(*question, _datafusion) for question in asked]
        computed = ", ".join(f"({c}) AS h{i}" for i, c in enumerate(conditions))
        whole = pa.table(data.execute(f"SELECT id, {computed} FROM t").read_all())
        for number, (question, condition) in enumerate(zip(asked, conditions, strict=True)):
            there = sorted(whole.filter(pc.fill_null(whole[f"h{number}"], False))["id"].to_pylist())
            returned = sorted(
                pa.table(data.execute(f"SELECT id FROM t WHERE {condition}").read_all())["id"].to_pylist()
            )
            if returned != there:
                wrong.append(_words("DataFusion", *question, there, returned))
    return wrong


def missed_by_spark(spark: SparkSession, table: Path, columns: list[str], comparisons: tuple[str, ...]) -> list[str]:
    """Filters that Spark answers otherwise as a condition than as a column computed of all rows."""
    frame = spark.read.format("delta").load(str(table))
    wrong = []
    for name in columns:
        asked = [question for question in questions([name]) if question[1] in comparisons]
        conditions = [_sql(*question, _spark) for question in asked]
        whole = frame.selectExpr("id", *(f"({c}) AS h{i}" for i, c in enumerate(conditions))).toArrow()
        for number, (question, condition) in enumerate(zip(asked, conditions, strict=True)):
            there = sorted(whole.filter(pc.fill_null(whole[f"h{number}"], False))["id"].to_pylist())
            returned = sorted(row[0] for row in frame.where(condition).select("id").collect())
            if returned != there:
                wrong.append(_words("Spark", *question, there, returned))
    return wrong


def _low(value: Any) -> Any:
    return -math.inf if isinstance(value, float) and math.isnan(value) else value


def _arrow(name: str, comparison: str, value: Any, *, cast: bool) -> pc.Expression:
    column, other = pc.field(name), pa.scalar(value, VALUES[name][1])
    column = column.cast(VALUES[name][1]) if cast else column
    match comparison:
        case "=":
            return column == other
        case ">":
            return column > other
        case "<=":
            return column <= other
    return column.is_null()


def _sql(name: str, comparison: str, value: Any, literal: Any) -> str:
    return f"{name} IS NULL" if comparison == "IS NULL" else f"{name} {comparison} {literal(name, value)}"


def _datafusion(name: str, value: Any) -> str:
    kind = VALUES[name][1]
    if pa.types.is_string(kind):
        return "'" + value.replace("'", "''") + "'"
    if pa.types.is_binary(kind):
        return f"X'{value.hex()}'"
    if pa.types.is_decimal(kind):
        return f"CAST('{value}' AS DECIMAL({kind.precision}, {kind.scale}))"
    if pa.types.is_boolean(kind):
        return str(value)
    if pa.types.is_date(kind):
        return f"DATE '{value.isoformat()}'"
    if pa.types.is_timestamp(kind):
        micros = (value.replace(tzinfo=None) - _EPOCH) // timedelta(microseconds=1)
        zone = 'Some("UTC")' if kind.tz else "None"
        return f"arrow_cast({micros}, 'Timestamp(Microsecond, {zone})')"
    arrow = f"{'Float' if pa.types.is_floating(kind) else 'Int'}{kind.bit_width}"
    return f"arrow_cast('{'NaN' if value != value else value}', '{arrow}')"


def _spark(name: str, value: Any) -> str:
    kind = VALUES[name][0]
    if isinstance(kind, t.StringType):
        return f"CAST(unbase64('{base64.b64encode(value.encode()).decode()}') AS STRING)"
    if isinstance(kind, t.BinaryType):
        return f"X'{value.hex()}'"
    if isinstance(kind, t.DateType):
        return f"DATE'{value.isoformat()}'"
    if isinstance(kind, t.TimestampType | t.TimestampNTZType):
        word = "TIMESTAMP" if isinstance(kind, t.TimestampType) else "TIMESTAMP_NTZ"
        return f"{word}'{value.replace(tzinfo=None).isoformat(' ')}'"
    special = {math.inf: "Infinity", -math.inf: "-Infinity"}
    text = "NaN" if value != value else special.get(value, value) if isinstance(value, float) else value
    return f"CAST('{text}' AS {kind.simpleString()})"


def _words(engine: str, name: str, comparison: str, value: Any, there: list[int], returned: list[int]) -> str:
    return f"{engine}: {name} {comparison} {value!r:.40}: {len(returned)} of {len(there)} rows"
