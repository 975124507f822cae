"""A stream of changes and tombstones, in an order that is not that of the changes, and who is left at the end."""

from __future__ import annotations

import json
import random

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

CUSTOMER = StructType(
    [
        StructField("customer", StringType(), nullable=False),
        StructField("changed", LongType(), nullable=False),
        StructField("closed", BooleanType()),
    ]
)
COUNT, TOMBSTONED, PARTITIONS = 1_000, 400, 3


@stream(
    source=KafkaTopic("customers", value=Json(CUSTOMER), tombstones="keep"),
    sink=DeltaTable("customers", keys=["customer"], order_by=["changed"], delete_when="gone"),
)
def customers(changes: DataFrame) -> DataFrame:
    """Every customer as of the last change, by the time of the change."""
    return changes.select(
        F.coalesce("customer", F.col("_source.key").cast("string")).alias("customer"),
        "changed",
        (F.col("_source.tombstone") | F.coalesce("closed", F.lit(False))).alias("gone"),
        "_source",
    )


def history() -> tuple[list[tuple[bytes, bytes | None]], dict[str, int]]:
    """Changes in an order that is not that of their times, 400 tombstones among them, and who is left at the end."""
    chance = random.Random(7)
    events: list[tuple[str, int, bool] | tuple[str, None, bool]] = []
    for number in range(COUNT):
        events += [(f"c{number}", changed, False) for changed in chance.sample(range(100), 3)]
        if number % 5 == 0:  # closed in order, and a change that is older may come after it
            events.append((f"c{number}", chance.randrange(100), True))
    events += [(f"c{number}", None, True) for number in range(TOMBSTONED)]
    chance.shuffle(events)
    records, left = [], {}
    newest: dict[str, tuple[int, int, bool]] = {}
    for place, (customer, changed, gone) in enumerate(events):
        if changed is None:
            newest.pop(customer, None)
            records.append((customer.encode(), None))
            continue
        value = json.dumps({"customer": customer, "changed": changed, "closed": gone}).encode()
        records.append((customer.encode(), value))
        newest[customer] = max(newest.get(customer, (-1, -1, False)), (changed, place, gone))
    for customer, (changed, _, gone) in newest.items():
        if not gone:
            left[customer] = changed
    return records, left
