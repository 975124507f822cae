"""The shipped streams by `stream_test`: records in, rows out, through the query that a session runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.examples.flights.streams import airport_hours, carrier_totals, flights_clean
from streaming_jobs.examples.payments.streams import payment_parts, payment_totals
from streaming_jobs.examples.shop.streams import availability, stock, stock_changes
from streaming_jobs.examples.stock.streams import inventory, low_stock
from streaming_jobs.runtime.crash_points import POINTS
from streaming_jobs.testing import StreamTest

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
Make = Callable[..., StreamTest]


def flight(at: datetime, **fields: Any) -> dict[str, Any]:
    known = {"year": at.year, "month": at.month, "day": at.day, "sched_dep": at, "actual_dep": at, "cancelled": False}
    place = {"carrier": "UA", "flight": 1, "tailnum": "N1", "origin": "EWR", "dest": "IAH", "distance": 1400}
    return {**known, **place, "dep_delay": 5, "arr_delay": 3, "air_time": 200, **fields}


def movement(kind: str, quantity: int, product: str = "tea") -> dict[str, Any]:
    return {"product": product, "kind": kind, "quantity": quantity, "at": NOON}


def payment(number: int, at: datetime, payer: str = "ada") -> dict[str, Any]:
    return {"payment": number, "account": "rent", "region": "north", "payer": payer, "cents": 100, "at": at}


def test_a_flight_that_cannot_be_right_is_set_aside(stream_test: Make) -> None:
    test = stream_test(flights_clean)
    test.send(flight(NOON))
    test.send(flight(NOON, origin="XXX", flight=2))
    test.send(b"no JSON", key="UA3", headers={"sent-by": b"a test"})
    test.send(None)
    test.run()
    assert [(row["flight"], row["source_offset"], row["month"]) for row in test.rows()] == [(1, 0, "2026-01")]
    assert [row["flight"] for row in test.rows("flights_clean_quarantine")] == [2]
    letters = [(letter["offset"], letter["key"], letter["reason"]) for letter in test.dead_letters()]
    assert letters == [(2, b"UA3", "malformed_json"), (3, None, "tombstone")]
    assert test.dead_letters()[0]["headers"] == [{"key": "sent-by", "value": b"a test"}]


def test_an_hour_of_flights_is_written_when_it_is_over_and_a_late_flight_is_counted(stream_test: Make) -> None:
    test = stream_test(airport_hours)
    test.send(flight(NOON))
    test.send(flight(NOON + timedelta(minutes=59), dep_delay=15))
    test.run()
    assert test.rows() == [] and test.watermark == NOON + timedelta(minutes=59) - timedelta(days=10)
    assert [(each["key"]["origin"], each["value"]["count"]) for each in test.state("EWR")] == [("EWR", 2)]
    test.send(flight(NOON + timedelta(days=11)))
    test.run()
    [hour] = test.rows()
    assert (hour["window_start"], hour["flights"], hour["mean_dep_delay"]) == (NOON, 2, 10.0)
    test.send(flight(NOON))
    test.run()
    assert (test.late, test.rows()) == (1, [hour])


def test_totals_go_on_from_the_state_of_the_run_before(stream_test: Make) -> None:
    test = stream_test(carrier_totals, partitions=2)
    for partition, carrier in ((0, "UA"), (1, "UA"), (1, "B6")):
        test.send(flight(NOON, carrier=carrier), partition=partition)
    test.run()
    test.send(flight(NOON, cancelled=True, actual_dep=None, dep_delay=None, arr_delay=None))
    test.run()
    totals = {row["carrier"]: (row["flights"], row["dep_delay_minutes"], row["cancelled"]) for row in test.rows()}
    assert totals == {"UA": (3, 10, 1), "B6": (1, 5, 0)}


def test_an_order_becomes_a_change_in_the_topic_of_changes(stream_test: Make) -> None:
    test = stream_test(stock_changes)
    order = {"order": 1, "kind": "ordered", "product": "tea", "quantity": 2, "unit": "box", "at": NOON}
    test.send(order)
    test.run()
    [change] = test.topic()
    assert (change.key, change.timestamp) == (b"tea", NOON)
    assert change.value == b'{"product":"tea","pieces":-24,"at":"2026-01-01T12:00:00.000000Z"}'
    levels = stream_test(stock)
    levels.send(change.value, key=change.key)
    levels.run()
    assert [level.value for level in levels.topic("shop_stock")] == [b'{"product":"tea","pieces":-24,"changes":1}']
    products = stream_test(availability)
    products.send(levels.topic()[0].value)
    products.run()
    assert products.rows() == [{"product": "tea", "pieces": -24, "available": False}]


def test_a_part_of_a_total_is_written_once_when_its_five_minutes_are_over(stream_test: Make) -> None:
    test = stream_test(payment_parts)
    test.clock = NOON
    for number, payer in enumerate(("ada", "bob", "ada")):
        test.send(payment(number, NOON, payer))
    test.send(payment(4, NOON + timedelta(hours=1)), timestamp=NOON)
    test.send(payment(5, NOON + timedelta(minutes=20)), timestamp=NOON + timedelta(minutes=20))
    test.run()
    assert [letter["reason"] for letter in test.dead_letters()] == ["event_time_ahead"]
    [part] = test.topic()
    assert part.key == b"rent" and b'"payments":3,"cents":300,"payers":2' in part.value
    totals = stream_test(payment_totals)
    totals.send(part.value)
    totals.run()
    assert [(row["payments"], row["payers"], row["parts"]) for row in totals.rows()] == [(3, 2, 1)]


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_anywhere_in_a_batch_counts_no_movement_twice(stream_test: Make, point: str) -> None:
    test = stream_test(inventory)
    test.send(movement("received", 12))
    test.run()
    test.send(movement("sold", 5))
    test.crash_at(point)
    test.run()
    test.send(movement("returned", 1))
    test.run()
    assert [(row["quantity"], row["movements"]) for row in test.rows()] == [(8, 3)]
    assert [entry.batch for entry in test.batches] == [0, 1, 2]


def test_other_code_goes_on_with_the_rows_or_is_refused_for_the_state(stream_test: Make) -> None:
    plain, totals = stream_test(low_stock), stream_test(inventory)
    for test in (plain, totals):
        test.send(movement("sold", 5))
        test.run()
    plain.deploy(replace(low_stock, function=lambda movements: low_stock.function(movements.where("false"))))
    totals.deploy(replace(inventory, function=lambda movements: inventory.function(movements).where("movements > 0")))
    for test in (plain, totals):
        test.send(movement("sold", 6))
    plain.run()
    totals.run()
    assert [row["taken"] for row in plain.rows()] == [5]
    assert [row["quantity"] for row in totals.rows()] == [-11]
    totals.deploy(
        replace(
            inventory, function=lambda movements: inventory.function(movements.withColumn("product", movements.kind))
        )
    )
    totals.send(movement("sold", 1))
    with pytest.raises(PreflightRefused, match="built by another aggregation"):
        totals.run()


def test_what_cannot_be_sent_is_refused(stream_test: Make) -> None:
    test = stream_test(inventory)
    for send, words in (
        (lambda: test.send({"product": "tea"}), "no record of topic stock_movements"),
        (lambda: test.send({**movement("sold", 1), "colour": "red"}), "no field colour"),
        (lambda: test.send(b"{}", partition=1), "no partition 1"),
        (lambda: test.send(b"{}", topic="other"), "reads the topics stock_movements"),
        (lambda: test.rows("other"), "no table of the stream"),
        (test.topic, r"writes the topics \(none\)"),
        (lambda: test.crash_at("somewhere"), "not a point of a batch"),
    ):
        with pytest.raises(UsageError, match=words):
            send()
    test.run()  # Spark's first batch, of no record
    test.crash_at("staged")
    with pytest.raises(UsageError, match="no batch came to staged"):
        test.run()
