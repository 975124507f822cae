"""Random stock movements from a seed, with which no stock falls below zero; and the truth about them.

One in fifty is a correction after a stock-taking, with its sign; one in twenty is a return.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from streaming_jobs.settings import KafkaSettings
from streaming_jobs.sources.producing import NewRecord, produce

TOPIC = "stock_movements"
PARTITIONS = 2
PRODUCTS = 200
_BEGIN = datetime(2026, 3, 2, 6, 0, tzinfo=UTC)
_KINDS = ("received", "sold", "returned", "corrected")
_SHARES = (0.33, 0.60, 0.05, 0.02)


@dataclass(frozen=True)
class Movement:
    """One movement; `change` is what it does to the stock."""

    product: str
    kind: str
    quantity: int
    at: datetime

    @property
    def change(self) -> int:
        """The change of the stock, in pieces."""
        return -self.quantity if self.kind == "sold" else self.quantity

    @property
    def value(self) -> bytes:
        at = self.at.strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = {"product": self.product, "kind": self.kind, "quantity": self.quantity, "at": at}
        return json.dumps(fields, separators=(",", ":")).encode()


def movements(
    count: int, seed: int = 7, products: int = PRODUCTS, apart: timedelta = timedelta(seconds=30)
) -> list[Movement]:
    """The first `count` movements of a seed; the same ones each time, and a longer list begins with a shorter one."""
    chance = np.random.default_rng(seed)
    stock = [0] * products
    made = []
    for number in range(count):
        product = int(chance.integers(products))
        kind = _KINDS[int(np.searchsorted(np.cumsum(_SHARES), chance.random()))]
        quantity = int(chance.integers(1, 9))
        if kind == "corrected":
            quantity = int(chance.integers(-3, 4)) or 1
        down = quantity if kind == "sold" else -quantity
        if stock[product] < down:
            kind, quantity, down = "received", 12 + quantity, -(12 + quantity)
        stock[product] -= down
        made.append(Movement(f"P{product:03d}", kind, quantity, _BEGIN + number * apart))
    return made


def inventory(of: Sequence[Movement]) -> dict[str, tuple[int, int, datetime]]:
    """The true stock: by product its quantity, its movements and when the last one was."""
    stock: dict[str, tuple[int, int, datetime]] = {}
    for movement in of:
        quantity, count, _ = stock.get(movement.product, (0, 0, movement.at))
        stock[movement.product] = (quantity + movement.change, count + 1, movement.at)
    return stock


def low_stock(of: Sequence[Movement]) -> list[tuple[str, int, datetime]]:
    """The true large withdrawals, in order of product and time."""
    return sorted((m.product, -m.change, m.at) for m in of if m.change <= -5)


def send(kafka: KafkaSettings, bootstrap: str, of: Sequence[Movement]) -> None:
    """Send movements, keyed by product; raises BrokerUnreachable when they are not all acknowledged within a minute."""
    records = (NewRecord(each.value, each.product, int(each.at.timestamp() * 1000)) for each in of)
    produce(kafka, bootstrap, TOPIC, records, timedelta(minutes=1))
