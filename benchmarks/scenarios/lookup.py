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
from deltalake import DeltaTable as Table
from deltalake import write_deltalake
from pyspark.sql import DataFrame

from benchmarks.feeds import feed_values
from benchmarks.place import Workshop, workshop
from benchmarks.run import Report, Row, median, progress, verdict
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
    measured = []
    for size in SIZES:
        for number in (0, *rows):
            with workshop({"stream.max_offsets_per_trigger": size}) as at_work:
                measured.append(_measured(at_work, size, number, warm_up, batches))
    report.table("figures", measured)


def _measured(at_work: Workshop, size: int, rows: int, warm_up: int, batches: int) -> Row:
    records = size * (warm_up + batches)
    values = (json.dumps({"id": each, "account": each * 7919 % 100}).encode() for each in range(records))
    feed_values(at_work.place.bootstrap, RECORDS.name, values)
    tables, chosen = at_work.settings.tables, looked_up if rows else alone
    if rows:
        names = [f"the account with number {each}" for each in range(rows)]
        write_deltalake(str(tables / ACCOUNTS.name), pa.table({"account": pa.array(range(rows)), "name": names}))
    times = at_work.batches(chosen)
    written = Table(str(tables / chosen.name)).to_pyarrow_dataset().count_rows()
    progress(f"{size:,} records a batch, {rows:,} rows")
    return {
        "records a batch": size,
        "rows of the table": rows or "no lookup",
        "batch ms": median([ms for entry, ms in times if entry.batch >= warm_up]),
        "verdict": verdict(written == records),
    }
