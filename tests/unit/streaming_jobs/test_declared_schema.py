"""A mapping of names to types is the schema that one would write for it; anything else is refused with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import UsageError
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable


def test_a_mapping_is_a_schema() -> None:
    made = Json(
        {
            "id": "BIGINT NOT NULL",
            "note": "string",
            "price": "decimal(10, 2)",
            "legs": ["int"],
            "grid": "array<array<double>>",
            "place": {"x": "double not null"},
            "n": LongType(),
            "m": LongType,
        }
    )
    expected = [
        StructField("id", LongType(), nullable=False),
        StructField("note", StringType()),
        StructField("price", DecimalType(10, 2)),
        StructField("legs", ArrayType(IntegerType())),
        StructField("grid", ArrayType(ArrayType(DoubleType()))),
        StructField("place", StructType([StructField("x", DoubleType(), nullable=False)])),
        StructField("n", LongType()),
        StructField("m", LongType()),
    ]
    assert made.schema == StructType(expected)
    assert made == Json(StructType(expected))
    assert DeltaTable("t", schema={"id": "bigint not null"}).schema == StructType(expected[:1])  # type: ignore[arg-type]
    assert DeltaSource("t", schema={"note": "string"}).columns == StructType(expected[1:2])  # type: ignore[arg-type]
    assert made.read(b'{"id": 1, "legs": [2]}')["legs"] == [2]


@pytest.mark.parametrize(
    ("declared", "found", "remedy"),
    [
        ({"k": "strng"}, "field 'k' has the type 'strng', which is unknown", "did you mean 'string'?"),
        ({"k": 5}, "field 'k' has the type 5", "boolean, tinyint"),
        ({"k": ["int", "int"]}, "field 'k' has the type", "boolean, tinyint"),
        ("k string", "'k string' is no schema of records", "{'id': 'bigint not null', 'note': 'string'}"),
        ({}, "the record declares no field", ""),
        ({"k": "map<string,string>"}, "which is unknown", "boolean, tinyint"),
    ],
)
def test_another_type_is_refused_by_name(declared: Any, found: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        Json(declared)
    assert found in refused.value.found and remedy in refused.value.next_step
