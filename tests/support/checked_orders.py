"""A table of orders in a home of its own, written by batches with ledger entries, for suites to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, app_id
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import moving
from streaming_jobs.stream import DeltaTable as DeclaredTable
from streaming_jobs.stream import KafkaTopic, Stream, stream

ORDER = StructType(
    [
        StructField("id", LongType()),
        StructField("item", StringType()),
        StructField("amount", IntegerType()),
        StructField("at", TimestampType()),
    ]
)


@stream(source=KafkaTopic("orders", value=Json(ORDER)), sink=DeclaredTable("orders", partition_by=["month"]))
def orders(orders: Any) -> Any:
    return orders


TOPOLOGY = Topology.of([orders])
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("item", pa.string()),
        ("amount", pa.int32()),
        ("at", pa.timestamp("us", "UTC")),
        ("month", pa.string()),
    ]
)


def order(
    number: int, *, amount: int | None = 1, item: str | None = "tea", day: int = 1, month: int = 1
) -> dict[str, Any]:
    at = datetime(2026, month, day, tzinfo=UTC)
    return {"id": number, "item": item, "amount": amount, "at": at, "month": f"2026-{month:02d}"}


@dataclass
class OrdersTable:
    """The table; each call is one batch, which writes one file per month."""

    settings: Settings
    declared: Stream = orders
    batch: int = -1
    code: str = "aaaa"
    files: dict[int, list[str]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.settings.tables / "orders"

    @property
    def handle(self) -> DeltaTable:
        return DeltaTable(self.path)

    def properties(self) -> CommitProperties:
        self.batch += 1
        entry = LedgerEntry(
            "batch", "orders", "orders", 1, self.batch, rows={"written": 1}, code=CodeVersion(self.code, "0.1.0")
        )
        return moving(entry, app_id("orders", "orders"))

    def append(self, *rows: dict[str, Any], schema: pa.Schema = SCHEMA) -> int:
        """The version that has them."""
        if not self.path.exists():
            DeltaTable.create(self.path, schema=schema, partition_by=["month"])
        table = pa.Table.from_pylist(list(rows), schema=schema)
        write_deltalake(self.handle, table, mode="append", commit_properties=self.properties(), schema_mode="merge")
        return int(self.handle.version())

    def delete(self, predicate: str) -> int:
        self.handle.delete(predicate, commit_properties=self.properties())
        return int(self.handle.version())

    def compact(self, partitions: Sequence[tuple[str, str, Any]] | None = None) -> int:
        self.handle.optimize.compact(partition_filters=list(partitions) if partitions else None)
        return int(self.handle.version())

    def vacuum(self) -> None:
        self.handle.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
