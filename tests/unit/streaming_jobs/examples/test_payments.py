"""The payments: their records from a seed, and the two streams as one topology."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from streaming_jobs.catalog.graph import Graph, describe, draw
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.examples.payments import streams
from streaming_jobs.examples.payments.payments import HOT_SHARE, closed_at, late_payments, payments, true_totals
from streaming_jobs.text.durations import parse_duration
from tests.support import ROOT


def test_a_longer_list_begins_with_a_shorter_one_of_declared_values_and_durations() -> None:
    assert payments(3000)[:400] == payments(400)
    (first,) = payments(1)
    assert json.loads(first.value).keys() == set(streams.PAYMENT.fieldNames())
    assert streams.PAYMENTS.delay == streams.LATENESS
    assert streams.PAYMENTS.max_ahead is not None and parse_duration(streams.PAYMENTS.max_ahead) <= streams.LATENESS


def test_the_hot_account_has_its_share_and_no_other_comes_near() -> None:
    counts = Counter(payment.account for payment in payments(5000))
    (hot, most), (_, next_most) = counts.most_common(2)
    assert hot in streams.HOT_ACCOUNTS and most / 5000 == pytest.approx(HOT_SHARE, abs=0.03)
    assert next_most < most / 20


def test_payments_come_out_of_order_and_none_of_them_too_late() -> None:
    made, newest, out_of_order = payments(5000), None, 0
    for payment in made:
        newest = max(newest or payment.at, payment.at)
        out_of_order += payment.at < newest
        assert newest - payment.at < streams.LATENESS / 2
    assert out_of_order > 500


def test_late_payments_are_for_windows_that_are_over() -> None:
    made = payments(8000)
    late = late_payments(made, 50)
    assert len({payment.number for payment in late + made}) == 8050
    assert all(payment.at + streams.WINDOW < closed_at(made) for payment in late)
    with pytest.raises(ValueError, match="3,000 payments have no window"):
        late_payments(made[:3000], 1)
    with pytest.raises(ValueError, match="0 payments have no window"):
        late_payments([], 1)


def test_the_truth_has_every_payment_of_a_closed_window_once() -> None:
    made = payments(5000)
    rows = true_totals(made)
    closed = [p for p in made if p.at < max(row["window_end"] for row in rows)]  # type: ignore[type-var]
    assert sum(row["payments"] for row in rows) == len(closed) > 4000  # type: ignore[misc]
    assert sum(row["cents"] for row in rows) == sum(payment.cents for payment in closed)  # type: ignore[misc]
    assert all(row["window_end"] <= closed_at(made) for row in rows)  # type: ignore[operator]


def test_the_two_streams_are_one_topology_in_order_and_their_picture_in_the_docs_is_drawn() -> None:
    topology = Topology.load(["streaming_jobs.examples.payments.streams"])
    graph = Graph.of(topology.streams.values())
    assert len(graph.parts()) == 1
    text = describe(topology)
    assert "-> topic payment_parts (secondary, exactly once, key account), read by payment_totals" in text
    graph = Graph.of(Topology.load(["streaming_jobs.examples.payments.streams"]).streams.values())
    assert (ROOT / "docs" / "images" / "payments.svg").read_text() == draw(graph)
