"""The shop: its orders from a seed, and the three streams as one topology."""

from __future__ import annotations

import json

from streaming_jobs.catalog.graph import Graph, describe, draw
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.examples.shop import streams
from streaming_jobs.examples.shop.orders import orders, true_availability, true_stock
from tests.support import ROOT


def test_a_longer_list_begins_with_a_shorter_one_of_declared_values_and_no_stock_is_below_zero() -> None:
    made = orders(4000)
    assert orders(400) == made[:400]
    stock: dict[str, int] = {}
    for order in made:
        stock[order.product] = stock.get(order.product, 0) + order.pieces
        assert stock[order.product] >= 0
    assert stock == true_stock(made)
    assert {order.kind for order in made} == {"ordered", "delivered", "cancelled"}
    assert {order.unit for order in made} == {"piece", "box"}
    (first,) = orders(1)
    assert json.loads(first.value).keys() == set(streams.ORDER.fieldNames())


def test_some_products_can_be_ordered_and_some_cannot() -> None:
    found = [row["available"] for row in true_availability(orders(4000))]
    assert len(found) == 60 and 5 < sum(map(bool, found)) < 55


def test_the_three_streams_are_one_topology_in_order_and_their_picture_in_the_docs_is_drawn() -> None:
    topology = Topology.load(["streaming_jobs.examples.shop.streams"])
    graph = Graph.of(topology.streams.values())
    assert len(graph.parts()) == 1
    text = describe(topology)
    assert "-> topic shop_stock_changes (secondary, exactly once, key product), read by stock" in text
    assert "<- topic shop_stock as levels, written by stock" in text
    graph = Graph.of(Topology.load(["streaming_jobs.examples.shop.streams"]).streams.values())
    assert (ROOT / "docs" / "images" / "shop.svg").read_text() == draw(graph)
