"""What a table that is looked up adds to a batch, by the rows of the table.

    python -m benchmarks lookup --rows 100,1000,100000,1000000 --out benchmarks/results/lookup.json

A stream without a lookup, and one that joins a record with the row of its account, read the same backlog in batches
of 200 and of 10,000 records. Times are medians of those from one commit of the output to the next. Exit code 1: the
output has another number of rows than the topic has records.
"""

from __future__ import annotations

import json
from typing import Annotated

import pyarrow as pa
from confluent_kafka import Producer
from deltalake import DeltaTable as Table
from deltalake import write_deltalake
from pyspark.sql import DataFrame

from benchmarks.feeds import create_topic
from benchmarks.place import Workshop, workshop
from benchmarks.run import Report, Row, median, verdict
from streaming_jobs import Lookup
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

SIZES = (200, 10_000)
RECORDS = KafkaTopic("sales", value=Json({"id": "bigint not null", "account": "bigint"}))
ACCOUNTS = Lookup("accounts", schema={"account": "bigint", "name": "string"})


@stream(source=RECORDS, sink=DeltaTable("alone"))
def alone(records: DataFrame) -> DataFrame:
    return records.select("id", "account")


@stream(source=RECORDS, lookups={"accounts": ACCOUNTS}, sink=DeltaTable("looked_up"))
def looked_up(records: DataFrame, accounts: DataFrame) -> DataFrame:
    return records.join(accounts, "account", "left").select("id", "account", "name")


def run(
    report: Report,
    *,
    rows: Annotated[tuple[int, ...], "of the table"] = (100, 1_000, 100_000, 1_000_000),
    batches: Annotated[int, "after the warm-up"] = 20,
    warm_up: Annotated[int, "batches before"] = 10,
) -> None:
    for size in SIZES:
        for number in (0, *rows):
            with workshop({"stream.max_offsets_per_trigger": size}) as at_work:
                report.table("figures", [_measured(at_work, size, number, warm_up, batches)])


def _measured(at_work: Workshop, size: int, rows: int, warm_up: int, batches: int) -> Row:
    _feed(at_work, size * (warm_up + batches))
    accounts, chosen = at_work.settings.tables / ACCOUNTS.name, looked_up if rows else alone
    numbers = pa.array(range(rows), pa.int64())
    if rows:
        names = pa.array([f"the account with number {each}" for each in range(rows)])
        write_deltalake(str(accounts), pa.table({"account": numbers, "name": names}))
    times = at_work.batches(chosen)
    written = Table(str(at_work.settings.tables / chosen.name)).to_pyarrow_dataset().count_rows()
    return {
        "records a batch": size,
        "rows of the table": rows or "no lookup",
        "batch ms": median([ms for entry, ms in times if entry.batch >= warm_up]),
        "verdict": verdict(written == size * (warm_up + batches)),
    }


def _feed(at_work: Workshop, number: int) -> None:
    create_topic(at_work.place.bootstrap, RECORDS.name, 1)
    producer = Producer({"bootstrap.servers": at_work.place.bootstrap, "linger.ms": 50})
    for each in range(number):
        producer.produce(RECORDS.name, json.dumps({"id": each, "account": each * 7919 % 100}).encode())
        if each % 10_000 == 0:
            producer.flush()
    producer.flush()
