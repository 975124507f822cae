"""A stream whose format or rule is wrong until `REDRIVE_CODE` is `right`, for tests of redrives."""

from __future__ import annotations

import os

from pyspark.sql import DataFrame

from streaming_jobs import DeltaTable, Holds, Json, KafkaTopic, Stream, stream


def priced(topic: str, code: str) -> Stream:
    """The code `wrong` refuses prices with a fraction and quarantines those above 50, `right` does neither."""
    kind, most = ("int", 50) if code == "wrong" else ("double", 10_000)
    source = KafkaTopic(topic, value=Json({"id": "int", "price": kind}))

    @stream(
        name="priced",
        source=source,
        sink=DeltaTable("priced"),
        rules=[Holds(f"price <= {most}", name="cheap", on_fail="quarantine")],
    )
    def rows(orders: DataFrame) -> DataFrame:
        place = ("_source.partition AS p", "_source.offset AS o", "_source")
        return orders.selectExpr("id", "CAST(price AS DOUBLE) AS price", *place)

    return rows


if "REDRIVE_TOPIC" in os.environ:
    flow = priced(os.environ["REDRIVE_TOPIC"], os.environ.get("REDRIVE_CODE", "right"))
