"""Random orders and deliveries of a shop from a seed, and the truth about its stock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from streaming_jobs.examples.shop.streams import ORDERS, PIECES_OF_A_BOX
from streaming_jobs.settings import KafkaSettings
from streaming_jobs.sources.producing import NewRecord, produce

PRODUCTS = 60
_BEGIN = datetime(2026, 3, 2, 6, 0, tzinfo=UTC)


@dataclass(frozen=True)
class ShopOrder:
    """One record of the topic `shop_orders`."""

    number: int
    kind: str
    product: str
    quantity: int
    unit: str
    at: datetime

    @property
    def pieces(self) -> int:
        """The change of the stock."""
        pieces = self.quantity * (PIECES_OF_A_BOX if self.unit == "box" else 1)
        return -pieces if self.kind == "ordered" else pieces

    @property
    def value(self) -> bytes:
        fields = {
            "order": self.number,
            "kind": self.kind,
            "product": self.product,
            "quantity": self.quantity,
            "unit": self.unit,
            "at": self.at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return json.dumps(fields, separators=(",", ":")).encode()


def orders(count: int, seed: int = 11) -> list[ShopOrder]:
    """The first `count` records of a seed; no stock falls below zero, and about every third one ends at zero."""
    chance = np.random.default_rng(seed)
    left = dict.fromkeys((f"P{number:02d}" for number in range(PRODUCTS)), 0)
    made: list[ShopOrder] = []
    for number in range(count):
        product = f"P{int(chance.integers(PRODUCTS)):02d}"
        kind, quantity, unit = "ordered", int(chance.integers(1, 5)), "piece" if chance.random() < 0.7 else "box"
        if left[product] and chance.random() < 0.3:
            quantity, unit = left[product], "piece"
        order = ShopOrder(number, kind, product, quantity, unit, _BEGIN + timedelta(seconds=20 * number))
        if left[product] + order.pieces < 0:
            kind = "delivered" if chance.random() < 0.9 else "cancelled"
            order = ShopOrder(number, kind, product, quantity, unit, order.at)
        left[product] += order.pieces
        made.append(order)
    return made


def true_stock(of: Iterable[ShopOrder]) -> dict[str, int]:
    """By product the pieces in stock, in the end."""
    stock: dict[str, int] = {}
    for order in of:
        stock[order.product] = stock.get(order.product, 0) + order.pieces
    return stock


def true_availability(of: Sequence[ShopOrder]) -> list[Mapping[str, object]]:
    """The rows of the table `availability`, in order of the product."""
    return [{"product": p, "pieces": n, "available": n > 0} for p, n in sorted(true_stock(of).items())]


def true_levels(of: Iterable[ShopOrder]) -> dict[str, tuple[int, int]]:
    """By product the pieces in stock and the number of changes, in the end."""
    levels: dict[str, tuple[int, int]] = {}
    for order in of:
        pieces, changes = levels.get(order.product, (0, 0))
        levels[order.product] = (pieces + order.pieces, changes + 1)
    return levels


def send(kafka: KafkaSettings, bootstrap: str, of: Iterable[ShopOrder]) -> None:
    """Send orders, keyed by product; raises BrokerUnreachable when they are not all acknowledged within a minute."""
    records = (NewRecord(order.value, order.product) for order in of)
    produce(kafka, bootstrap, ORDERS.name, records, timedelta(minutes=1))
