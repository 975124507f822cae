"""CPU time of decoding JSON records into Arrow columns, per record, in one process and without Spark.

    python benchmarks/json_decoding.py [rows per block] [rounds]

Prints a table: each kind of record, good ones with all columns and with one, with one bad record in a hundred, and
with bad records only. Of the rounds the best one counts, which other programs on the machine disturb least.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streaming_jobs.examples.flights.streams import FLIGHT
from streaming_jobs.formats import Json
from streaming_jobs.formats.json_reader import JsonReader

ORDER = StructType(
    [
        StructField("id", LongType(), nullable=False),
        StructField("customer", StringType(), nullable=False),
        StructField("amount", DoubleType()),
        StructField("at", TimestampType(), nullable=False),
        StructField("paid", BooleanType()),
        StructField("city", StringType()),
        StructField("quantity", LongType()),
    ]
)
PLACED = StructType(
    [
        *ORDER.fields,
        StructField("place", StructType([StructField("zip", StringType()), StructField("lat", DoubleType())])),
        StructField("tags", ArrayType(StringType(), containsNull=False)),
    ]
)


def order(number: int) -> dict[str, Any]:
    """A small flat record."""
    return {
        "id": number,
        "customer": f"customer-{number % 100_000}",
        "amount": number * 0.25,
        "at": time_text(number),
        "paid": number % 2 == 0,
        "city": "Springfield",
        "quantity": number % 7,
    }


def placed(number: int) -> dict[str, Any]:
    """The same with an inner object and an array."""
    place = {"zip": str(10_000 + number % 90_000), "lat": number * 0.001}
    return {**order(number), "place": place, "tags": ["a", "b"]}


def flight(number: int) -> dict[str, Any]:
    """A record of the topic `flights`."""
    made = {
        "year": 2013,
        "month": number % 12 + 1,
        "day": number % 28 + 1,
        "sched_dep": time_text(number * 60),
        "actual_dep": time_text(number * 60 + 300),
        "dep_delay": number % 60 - 10,
        "arr_delay": number % 80 - 20,
        "carrier": ("UA", "B6", "9E", "AA")[number % 4],
        "flight": number % 5000,
        "tailnum": f"N{number % 90_000}",
        "origin": "EWR",
        "dest": "IAH",
        "air_time": number % 300,
        "distance": number % 3000,
        "cancelled": number % 40 == 0,
    }
    return {name: made[name] for name in FLIGHT.fieldNames()}


def time_text(seconds: int) -> str:
    """A time of 2013 as text."""
    moment = datetime(2013, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds % 31_000_000)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def spoiled(value: bytes, number: int) -> bytes:
    """The record with one of six faults."""
    return (
        value[: len(value) // 2],
        value + b"}",
        value.replace(b"T", b" "),
        value.replace(b'{"', b'{"\xff":1,"', 1),
        value.replace(b":", b":{},", 1),
        b"",
    )[number % 6]


def cost(reader: JsonReader, values: Sequence[bytes], rounds: int) -> float:
    """CPU microseconds per record of reading a block, in the best round."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        reader.read(values)
        best = min(best, time.process_time() - began)
    return best / len(values) * 1e6


def line(name: str, schema: StructType, make: Callable[[int], dict[str, Any]], rows: int, rounds: int) -> str:
    """One line of the result."""
    good = [json.dumps(make(number), separators=(",", ":")).encode() for number in range(rows)]
    some = [spoiled(value, number // 100) if number % 100 == 50 else value for number, value in enumerate(good)]
    bad = [spoiled(value, number) for number, value in enumerate(good)]
    every, one = Json(schema).reader(), Json(schema).reader(schema.fieldNames()[:1])
    if [len(every.read(values).refused) for values in (good, some, bad)] != [0, rows // 100, rows]:
        raise SystemExit("the made records are not good and bad as they should be")
    size = sum(map(len, good)) / rows
    figures = (cost(every, good, rounds), cost(one, good, rounds), cost(every, some, rounds), cost(every, bad, rounds))
    cells = " | ".join(f"{figure:.2f}" for figure in figures)
    return f"| {name}, {size:.0f} bytes, {len(schema.fields)} fields | {cells} |"


def main() -> None:
    """Three kinds of records."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 50
    print("| us per record | good | good, one column | 1 % bad | all bad |")
    print("|---|---:|---:|---:|---:|")
    print(line("order", ORDER, order, rows, rounds))
    print(line("flight", FLIGHT, flight, rows, rounds))
    print(line("nested", PLACED, placed, rows, rounds))


if __name__ == "__main__":
    main()
