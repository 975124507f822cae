"""Random payments from a seed, some of them out of order, and the truth about their totals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np

from streaming_jobs.examples.payments.streams import HOT_ACCOUNTS, LATENESS, WINDOW

HOT_SHARE = 0.6
"""The part of all payments that the hot account gets."""
ACCOUNTS = 40
REGIONS = ("north", "south", "east", "west")
LONGEST_DELAY = timedelta(minutes=4)
"""How much later than a newer payment a payment of `payments` arrives: less than the lateness of the stream."""
_LATE = 1_000_000_000
_BEGIN = datetime(2026, 3, 2, 6, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Payment:
    """One record of the topic `payments`."""

    number: int
    account: str
    region: str
    payer: str
    cents: int
    at: datetime

    @property
    def key(self) -> bytes:
        """The record's key: payers are many, so the partitions of the topic are even."""
        return self.payer.encode()

    @property
    def value(self) -> bytes:
        fields = {
            "payment": self.number,
            "account": self.account,
            "region": self.region,
            "payer": self.payer,
            "cents": self.cents,
            "at": self.at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return json.dumps(fields, separators=(",", ":")).encode()


def payments(count: int, seed: int = 5, *, seconds: float = 1.0, payers: int = 500) -> list[Payment]:
    """The first `count` payments of a seed, in the order of arrival: one in so many `seconds`.

    Every fifth is delayed, by `LONGEST_DELAY` at most. Three quarters of the hot account's payments, and some more, are
    from one region.
    """
    chance = np.random.default_rng(seed)
    made = []
    for number in range(count):
        hot = chance.random() < HOT_SHARE
        account = HOT_ACCOUNTS[0] if hot else f"account-{int(chance.integers(ACCOUNTS)):02d}"
        region = REGIONS[0] if hot and chance.random() < 0.75 else REGIONS[int(chance.integers(len(REGIONS)))]
        payer = f"payer-{int(chance.integers(payers))}"
        delay = int(chance.integers(LONGEST_DELAY.seconds)) if chance.random() < 0.2 else 0
        at = _BEGIN + timedelta(seconds=int(number * seconds) - delay)
        made.append(Payment(number, account, region, payer, int(chance.integers(1, 50_000)), at))
    return made


def late_payments(after: Sequence[Payment], count: int, seed: int = 6) -> list[Payment]:
    """Later payments, for windows that closed an hour ago or earlier; with their own numbers.

    Raises ValueError if `payments` has too few to have such a window.
    """
    closed = closed_at(after) - timedelta(hours=1) if after else _BEGIN
    ended = [each for each in after if _window(each) + WINDOW <= closed]
    if not ended:
        raise ValueError(f"{len(after):,} payments have no window that is over by an hour")
    chance = np.random.default_rng(seed)
    picked = [ended[int(chance.integers(len(ended)))] for _ in range(count)]
    return [replace(each, number=_LATE + number, cents=1) for number, each in enumerate(picked)]


def closed_at(of: Iterable[Payment]) -> datetime:
    """The watermark after these payments: windows that end at or before it are in the table."""
    return max(payment.at for payment in of) - LATENESS


def true_totals(of: Sequence[Payment]) -> list[Mapping[str, object]]:
    """The rows of the table `payment_totals`, without `parts`, in order of window, account and region."""
    groups: dict[tuple[datetime, str, str], list[Payment]] = {}
    for payment in of:
        groups.setdefault((_window(payment), payment.account, payment.region), []).append(payment)
    closed = closed_at(of)
    return [
        {
            "window_start": start,
            "window_end": start + WINDOW,
            "account": account,
            "region": region,
            "payments": len(group),
            "cents": sum(payment.cents for payment in group),
            "payers": len({payment.payer for payment in group}),
        }
        for (start, account, region), group in sorted(groups.items(), key=lambda each: each[0])
        if start + WINDOW <= closed
    ]


def _window(payment: Payment) -> datetime:
    """The begin of the payment's five minutes."""
    return payment.at - (payment.at - _BEGIN) % WINDOW
