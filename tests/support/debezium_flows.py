"""A stream over Debezium's change events, for tests."""

from __future__ import annotations

from pyspark.sql import DataFrame

from streaming_jobs import Debezium, DeltaTable, KafkaTopic, stream

CLIENTS = KafkaTopic("db.shop.clients", value=Debezium({"id": "bigint not null", "name": "string"}), tombstones="keep")


@stream(source=CLIENTS, sink=DeltaTable("clients", keys=["id"], delete_when="_op = 'd'"))
def clients(clients: DataFrame) -> DataFrame:
    """The table as the database has it."""
    return clients.where("not _source.tombstone")
