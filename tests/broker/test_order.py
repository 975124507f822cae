"""A table with `order_by` on a real topic: what it ends as does not depend on how the topic was cut into batches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.driver import Bench, on_topic, produce, rows

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


@pytest.mark.parametrize("borders", ["one batch", "many batches"])
def test_a_topic_of_changes_and_tombstones_ends_as_the_same_table_however_it_is_cut(
    bench: Callable[..., Bench], borders: str
) -> None:
    records, left = history()
    topic = f"customers-{borders.replace(' ', '-')}"
    made = bench({"stream.max_offsets_per_trigger": 100_000 if borders == "one batch" else 500})
    made.topics.create(topic, PARTITIONS)
    produce(made.bootstrap, topic, records)
    running = made.run(on_topic(customers, topic))
    assert running.status.error is None and (running.status.batch == 0) == (borders == "one batch")
    found = {row["customer"]: row["changed"] for row in rows(made.settings, "customers")}
    wrong = {c for c in found.keys() | left.keys() if found.get(c) != left.get(c)}
    assert found == left, f"{len(wrong)} customers are wrong, {len(found.keys() - left.keys())} of them should be gone"
