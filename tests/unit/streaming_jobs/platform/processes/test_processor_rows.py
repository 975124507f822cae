"""Rows of processors by columns are those that PySpark makes one by one, whatever their types, keys and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkTypeError
from pyspark.sql import Row
from pyspark.sql.pandas.serializers import ArrowStreamSerializer, TransformWithStateInPySparkRowSerializer
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, StringType, StructType

from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.platform.processes import processor_rows
from streaming_jobs.platform.processes.processor_rows import rows_by_columns

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FLAT = schema_of({"k": "string", "n": "bigint", "at": "timestamp", "day": "date", "price": "decimal(9,2)"}).add(
    "raw", "binary"
)
NESTED = (
    schema_of({"k": "string"})
    .add("tags", ArrayType(StringType()))
    .add("place", schema_of({"x": "double", "y": "double"}))
)
Processor = Callable[[Any, Iterator[Row]], Iterable[Row]]


@pytest.fixture(params=[False, True], ids=["row by row", "by columns"])
def serializer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind = TransformWithStateInPySparkRowSerializer
    for name in ("load_stream", "dump_stream"):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    if request.param:
        monkeypatch.setattr(processor_rows, "_MOST", 7)
        rows_by_columns()
    return kind(arrow_max_records_per_batch=10_000)


def sent(schema: StructType, rows: list[dict[str, Any]], per_batch: int) -> BytesIO:
    """The rows as the JVM sends them."""
    table, stream = pa.Table.from_pylist(rows, to_arrow_schema(schema, timezone="UTC")), BytesIO()
    ArrowStreamSerializer().dump_stream(iter(table.to_batches(per_batch)), stream)
    stream.seek(0)
    return stream


def returned(serializer: Any, stream: BytesIO, processor: Processor, schema: StructType) -> list[dict[str, Any]]:
    """What the JVM receives; the processor is called for the timers and for the end too."""
    serializer.key_offsets, out = [0], BytesIO()
    calls = ([(processor(key, rows or iter([])), schema)] for _, key, rows in serializer.load_stream(stream))
    serializer.dump_stream(calls, out)
    out.seek(4)  # behind the word that begins an Arrow stream
    (rows,) = pa.ipc.open_stream(out).read_all().columns
    return list(rows.to_pylist())


def flat(count: int) -> list[dict[str, Any]]:
    """Rows in the order of their keys, with nulls."""
    random = Random(5)
    keys = sorted((random.choice("abcdefg") for _ in range(count)), key=ord)
    rows = [
        {"k": k, "n": n, "at": NOON + timedelta(microseconds=n), "day": date(2026, 1, 1 + n % 9),
         "price": Decimal(n) / 4, "raw": b"x" * (n % 3)}
        for n, k in enumerate(keys)
    ]  # fmt: skip
    return [{**row, **{name: None for name in ("n", "at", "price", "raw") if random.random() < 0.2}} for row in rows]


@pytest.mark.parametrize("per_batch", [1, 4, 1000])
def test_flat_rows_come_back_whether_by_keywords_or_by_a_class_of_rows(serializer: Any, per_batch: int) -> None:
    rows, seen = flat(60), list[str]()
    positional = Row(*FLAT.fieldNames())

    def echo(key: Any, of_the_key: Iterator[Row]) -> Iterator[Row]:
        if key is None:
            return
        seen.append(key[0])
        for number, row in enumerate(of_the_key):
            assert row.asDict()["k"] == row.k == key[0] and row.n == row[1]
            yield Row(**row.asDict()) if number % 2 else positional(*row)

    assert returned(serializer, sent(FLAT, rows, per_batch), echo, FLAT) == rows
    assert seen == sorted(set(seen)), "each key once"


def test_nested_rows_and_rows_of_fewer_or_other_fields_become_those_of_the_schema(serializer: Any) -> None:
    rows = [
        {"k": "a", "tags": ["x", None], "place": {"x": 1.5, "y": None}},
        {"k": "b", "tags": None, "place": None},
        {"k": "b", "tags": [], "place": {"x": 0.0, "y": 2.0}},
    ]
    assert returned(serializer, sent(NESTED, rows, 2), lambda _, of_the_key: of_the_key, NESTED) == rows
    inner = lambda key, _: [Row(k="c", tags=None, place=Row(y=2.0, x=1.0))] if key else []  # noqa: E731
    expected = [{"k": "c", "tags": None, "place": {"x": 1.0, "y": 2.0}}]
    assert returned(serializer, sent(NESTED, rows[:1], 2), inner, NESTED) == expected
    odd = lambda key, _: [Row(n=1), Row(more=2, k="z")] if key else []  # noqa: E731
    found = returned(serializer, sent(NESTED, rows[:1], 2), odd, schema_of({"k": "string", "n": "bigint"}))
    assert found == [{"k": None, "n": 1}, {"k": "z", "n": None}]


def test_timers_come_after_the_rows_and_an_empty_answer_has_the_schema(serializer: Any) -> None:
    calls = list[Any]()

    def at_the_end(key: Any, _: Iterator[Row]) -> Iterator[Row]:
        calls.append(key)
        yield from [Row(k="timer")] if calls.count(None) == 1 and key is None else []

    columns = schema_of({"k": "string"})
    assert returned(serializer, sent(FLAT, flat(3), 2), at_the_end, columns) == [{"k": "timer"}]
    assert calls[-2:] == [None, None] and None not in calls[:-2]
    assert returned(serializer, sent(FLAT, flat(3), 2), lambda *_: [], columns) == []


@pytest.mark.parametrize(("wrong", "error"), [(Row("x", 1), PySparkTypeError), (Row(k=1), pa.ArrowTypeError)])
def test_what_is_no_row_of_the_schema_is_refused_and_an_error_of_the_processor_is_raised(
    serializer: Any, wrong: Row, error: type[Exception]
) -> None:
    columns = schema_of({"k": "string"})
    with pytest.raises(error):
        returned(serializer, sent(FLAT, flat(3), 2), lambda key, _: [wrong] if key else [], columns)

    def fails(key: Any, _: Iterator[Row]) -> Iterator[Row]:
        yield Row(k="a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        returned(serializer, sent(FLAT, flat(3), 2), fails, columns)
