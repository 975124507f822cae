"""The input of every contestant, and what each work must make of it: numpy arrays from a seed, nothing measured.

A record is JSON of about 120 bytes: an account, an amount in cents, and the time of the event, which is up to two
seconds before the time at which the record is sent. Two last records an hour later close every window before them.
Sums are of integers, so that a truth can be exact. The work `joined` has its records in two topics, in turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Work = Literal[
    "stateless", "windowed", "running", "avro", "protobuf", "joined", "joined_by_bound", "sessions",
    "previous",
]  # fmt: skip
WORKS: tuple[Work, ...] = ("stateless", "windowed", "running")
"""What every contestant does, and what a comparison measures unless it names others."""
FORMATS: tuple[Work, ...] = ("avro", "protobuf")
OPERATORS: tuple[Work, ...] = ("joined", "sessions", "previous")
JOINS: tuple[Work, ...] = ("joined", "joined_by_bound")
LIKE_STATELESS: tuple[Work, ...] = ("stateless", *FORMATS)
"""Works with the rows of `stateless`, of records in several formats."""
LIVE: tuple[Work, ...] = (*WORKS, *FORMATS)
"""Works whose latencies can be told from their rows."""

ACCOUNTS = 1_000
PARTITIONS = 2
RATE = 2_000
"""Records a second of event time in a backlog, and of the clock when live."""
WINDOW_MS, LATENESS_MS = 10_000, 5_000
GAP_MS, WITHIN_MS = 1_000, 1_000
"""The longest pause in a session, and the longest time between the two records of a pair."""
LATE_MS, LATE_SHARE = 2_000, 0.3
DROPPED_SHARE = 0.1
BACKLOG_BEGAN_MS = 1_767_225_600_000
"""2026-01-01T00:00:00Z, the first event of every backlog."""
_AFTER_ALL_MS = 3_600_000
_REST = '"currency":"EUR","country":"DE"'
_KINDS = ("card", "cash", "wire", "note")

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Records:
    """Records in the order in which they are sent; the id of a record is its place. Times in ms since 1970."""

    account: Integers
    amount: Integers
    at_ms: Integers
    sent_ms: Floats
    kind: Integers
    dropped: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.account)

    @property
    def partition(self) -> Integers:
        """The partition of each record; an account has one."""
        return self.account % PARTITIONS

    def encoded(self) -> list[bytes]:
        times = np.datetime_as_string(self.at_ms.astype("datetime64[ms]"), unit="ms")
        names = ["test" if test else _KINDS[kind] for test, kind in zip(self.dropped, self.kind, strict=True)]
        each = zip(self.account.tolist(), self.amount.tolist(), times.tolist(), names, strict=True)
        return [
            f'{{"id":{n},"account":"{account_name(a)}","amount":{m},"at":"{t}Z","kind":"{k}",{_REST}}}'.encode()
            for n, (a, m, t, k) in enumerate(each)
        ]

    def payments(self) -> pa.Table:
        """The fields of the records, for formats other than JSON."""
        kinds = np.where(self.dropped, "test", np.array(_KINDS)[self.kind])
        size = len(self)
        return pa.table(
            {
                "id": np.arange(size),
                "account": _names(self.account),
                "amount": self.amount,
                "at": pa.array(self.at_ms).cast(_TIME),
                "kind": kinds,
                "currency": ["EUR"] * size,
                "country": ["DE"] * size,
            }
        )

    def keys(self) -> list[bytes]:
        """The key of each record: its account."""
        names = [account_name(number).encode() for number in range(int(self.account.max()) + 1)]
        return [names[number] for number in self.account.tolist()]


def account_name(number: int) -> str:
    return f"a{number:06d}"


def generate(count: int, seed: int, *, began_ms: float = BACKLOG_BEGAN_MS, rate: int = RATE) -> Records:
    """`count` records, `rate` a second from `began_ms` on, and after them one per partition that closes the windows."""
    random = np.random.default_rng(seed)
    sent = began_ms + np.arange(count) * (1000.0 / rate)
    late = np.where(random.random(count) < LATE_SHARE, random.integers(0, LATE_MS, count), 0)
    last = sent[-1] + 1000.0 / rate
    closing = np.arange(ACCOUNTS, ACCOUNTS + PARTITIONS)
    return Records(
        account=np.concatenate([random.integers(0, ACCOUNTS, count), closing]),
        amount=np.concatenate([random.integers(1, 100_000, count), np.zeros(PARTITIONS, np.int64)]),
        at_ms=np.concatenate([sent.astype(np.int64) - late, np.full(PARTITIONS, int(last) + _AFTER_ALL_MS)]),
        sent_ms=np.concatenate([sent, np.full(PARTITIONS, last)]),
        kind=np.concatenate([random.integers(0, len(_KINDS), count), np.zeros(PARTITIONS, np.int64)]),
        dropped=np.concatenate([random.random(count) < DROPPED_SHARE, np.ones(PARTITIONS, np.bool_)]),
    )


def truth(records: Records, work: Work) -> pa.Table:
    """What a work must have made of the records, in the order of its key; see `COLUMNS`."""
    if work in LIKE_STATELESS:
        kept = np.flatnonzero(~records.dropped)
        amount = records.amount[kept]
        return _table(
            work, id=kept, account=_names(records.account[kept]), amount=amount, at=records.at_ms[kept],
            net=amount - amount // 100,
        )  # fmt: skip
    if work == "running":
        account, count, total = _sums(records.account, records.amount)
        return _table(work, account=_names(account), count=count, total=total)
    if work in JOINS:
        return _pairs(records)
    if work == "previous":
        return _previous(records)
    closed = records.account < ACCOUNTS  # nothing comes that would close the window of the two last ones
    if work == "sessions":
        return _sessions(records.account[closed], records.at_ms[closed], records.amount[closed])
    start = records.at_ms[closed] // WINDOW_MS
    key, count, total = _sums(start * ACCOUNTS + records.account[closed], records.amount[closed])
    starts = key // ACCOUNTS * WINDOW_MS
    return _table(work, start=starts, account=_names(key % ACCOUNTS), count=count, total=total)


_TIME = pa.timestamp("ms", "UTC")
_TOTALS = [("account", pa.string()), ("count", pa.int64()), ("total", pa.int64())]
_ROW = [("id", pa.int64()), ("account", pa.string()), ("amount", pa.int64()), ("at", _TIME), ("net", pa.int64())]
_WINDOW = [("start", _TIME), *_TOTALS]
COLUMNS: dict[Work, pa.Schema] = {
    **{work: pa.schema(_ROW) for work in LIKE_STATELESS},
    "windowed": pa.schema(_WINDOW),
    "running": pa.schema(_TOTALS),
    **dict.fromkeys(JOINS, pa.schema([("id", pa.int64()), ("account", pa.string()), ("confirmation", pa.int64())])),
    "sessions": pa.schema(_WINDOW),
    "previous": pa.schema([*_ROW[:3], ("previous", pa.int64())]),
}
"""The columns that are compared, for each work."""
KEYS: dict[Work, tuple[str, ...]] = {
    **dict.fromkeys(LIKE_STATELESS, ("id",)),
    "windowed": ("start", "account"),
    "running": ("account",),
    **dict.fromkeys(JOINS, ("id", "confirmation")),
    "sessions": ("start", "account"),
    "previous": ("id",),
}


def inputs(topic: str, work: Work) -> tuple[str, ...]:
    """The topics that a work reads; record `n` is in topic `n` modulo their number."""
    return (topic, f"{topic}.confirmations") if work in JOINS else (topic,)


def difference(found: pa.Table, expected: pa.Table, work: Work) -> str | None:
    """What is wrong with an output, in words; None when it is exactly the truth."""
    keys = list(KEYS[work])
    found = _sorted(found.select(COLUMNS[work].names).cast(expected.schema), work)
    if found.equals(expected):
        return None
    distinct = found.group_by(keys).aggregate([]).num_rows
    common = found.join(expected, keys=keys, join_type="inner", right_suffix="_true").num_rows
    return (
        f"{found.num_rows} rows instead of {expected.num_rows}; {found.num_rows - distinct} with a key that is there "
        f"already, {common} with a key of the truth"
    )


def _sorted(rows: pa.Table, work: Work) -> pa.Table:
    return rows.sort_by([(key, "ascending") for key in KEYS[work]])


def _names(accounts: Integers) -> pa.Array:
    return pa.array([account_name(number) for number in accounts.tolist()])


def _sums(keys: Integers, amounts: Integers) -> tuple[Integers, Integers, Integers]:
    distinct, place = np.unique(keys, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, place, amounts)
    return distinct, np.bincount(place).astype(np.int64), total


def _pairs(records: Records) -> pa.Table:
    """Each payment, a record with an even number, with the confirmations of its account within a second after it."""
    began, numbers = records.at_ms.min(), np.arange(len(records))
    span = int(records.at_ms.max() - began) + WITHIN_MS + 1
    key = records.account * span + (records.at_ms - began)
    confirmations = numbers[1::2][np.argsort(key[1::2])]
    first = np.searchsorted(key[confirmations], key[::2], side="left")
    count = np.searchsorted(key[confirmations], key[::2] + WITHIN_MS, side="right") - first
    payment = np.repeat(numbers[::2], count)
    place = np.repeat(first - np.cumsum(count) + count, count) + np.arange(len(payment))
    account = _names(records.account[payment])
    return _table("joined", id=payment, account=account, confirmation=confirmations[place])


def _sessions(account: Integers, at_ms: Integers, amount: Integers) -> pa.Table:
    order = np.lexsort((at_ms, account))
    account, at_ms = account[order], at_ms[order]
    first = np.flatnonzero(np.r_[True, (np.diff(account) != 0) | (np.diff(at_ms) > GAP_MS)])
    total, count = np.add.reduceat(amount[order], first), np.diff(np.r_[first, len(order)])
    return _table("sessions", start=at_ms[first], account=_names(account[first]), count=count, total=total)


def _previous(records: Records) -> pa.Table:
    """Each record with the amount of the record before it of its account, 0 for the first."""
    order = np.argsort(records.account, kind="stable")
    same = np.r_[False, np.diff(records.account[order]) == 0]
    previous = np.zeros(len(records), np.int64)
    previous[order] = np.where(same, np.roll(records.amount[order], 1), 0)
    account = _names(records.account)
    return _table("previous", id=np.arange(len(records)), account=account, amount=records.amount, previous=previous)


def _table(work: Work, **columns: Integers | pa.Array) -> pa.Table:
    rows = pa.table({name: pa.array(columns[name]) for name in COLUMNS[work].names}).cast(COLUMNS[work])
    return _sorted(rows, work)
