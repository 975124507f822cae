"""Random events for the streams of docs/operators.md, and what plain Python makes of them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 1, 1, tzinfo=UTC)
Rows = Counter[tuple[Any, ...]]


@dataclass(frozen=True)
class Event:
    """A record of topic `events` or `others`; `at` in seconds."""

    topic: str
    k: str | None
    id: int
    v: int
    at: int

    @property
    def value(self) -> dict[str, Any]:
        return {"k": self.k, "id": self.id, "v": self.v, "at": START + timedelta(seconds=self.at)}


@dataclass(frozen=True)
class Change:
    """A record of a table's topic: the new value of a key; None deletes the key."""

    topic: str
    key: str
    value: dict[str, Any] | None

    @property
    def partition(self) -> int:
        """All records of a key are in one of two partitions."""
        return ord(self.key) % 2


def events(seed: int) -> list[Event]:
    """Out of order by up to 20 seconds, some ids twice, and at the end one of each topic that closes all windows."""
    rng = random.Random(seed)
    made = []
    for number in range(120):
        topic, key = rng.choice(["events", "events", "others"]), rng.choice(["a", "b", "c", None])
        at = 100 + number * 2 + rng.randint(-10, 10)
        made.append(Event(topic, key, number if rng.random() < 0.8 else max(number - 2, 0), rng.randint(0, 99), at))
    return [*made, *(Event(topic, "z", 1_000, 1, 10_000) for topic in ("events", "others"))]


def changes(name: str, seed: int, count: int = 120) -> list[Change]:
    """Changes of the tables that a stream joins: each key is added, changed, moved and deleted several times."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        value: dict[str, Any] | None
        if name == "joined_tables":
            topic, key = rng.choice(["left_table", "right_table"]), rng.choice("abcde")
            value = rng.choice([None, {"v": rng.randint(0, 99)}, {"v": rng.randint(0, 99)}])
        elif rng.random() < 0.6:
            topic, key = "orders_by_id", rng.choice("123456")
            value = {"customer": rng.choice(["a", "b", "c", None]), "v": rng.randint(0, 99)}
            value = None if rng.random() < 0.2 else value
        else:
            topic, key = "customers_by_id", rng.choice("abc")
            value = rng.choice([None, *({"name": name} for name in ("Ann", "Bob", "Cy"))])
        made.append(Change(topic, key, value))
    return made


def newest_values(sent: Sequence[Change], topic: str) -> dict[str, dict[str, Any]]:
    newest = {change.key: change.value for change in sent if change.topic == topic}
    return {key: value for key, value in newest.items() if value is not None}


def joined_tables(sent: Sequence[Change]) -> dict[str, Rows]:
    left, right = newest_values(sent, "left_table"), newest_values(sent, "right_table")
    both = left.keys() & right.keys()
    return {"joined_tables": Counter((key, left[key]["v"], right[key]["v"]) for key in both)}


def orders_with_names(sent: Sequence[Change]) -> dict[str, Rows]:
    customers = newest_values(sent, "customers_by_id")
    return {
        "orders_with_names": Counter(
            (order, customers[value["customer"]]["name"], value["v"])
            for order, value in newest_values(sent, "orders_by_id").items()
            if value["customer"] in customers
        )
    }


def of(sent: Sequence[Event], topic: str = "events") -> list[Event]:
    return [event for event in sent if event.topic == topic]


def by_key(found: Sequence[Event]) -> dict[str | None, list[Event]]:
    keys = defaultdict(list)
    for event in found:
        keys[event.k].append(event)
    return keys


def time(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


def windows(sent: Sequence[Event], length: int, slide: int) -> dict[tuple[datetime, str | None], list[Event]]:
    """The windows that are closed at the end: those of the closing record are not."""
    found = defaultdict(list)
    for event in of(sent):
        for begin in range(event.at // slide * slide, event.at - length, -slide):
            if event.at < 10_000:
                found[time(begin), event.k].append(event)
    return found


def sessions_of(sent: Sequence[Event]) -> Rows:
    rows: Rows = Counter()
    for key, found in by_key([event for event in of(sent) if event.k and event.at < 10_000]).items():
        times = sorted(event.at for event in found)
        begins = [i for i, at in enumerate(times) if i == 0 or at - times[i - 1] > 10]
        for i, end in zip(begins, [*begins[1:], len(times)], strict=True):
            rows[time(times[i]), key, end - i] += 1
    return rows


def in_order(sent: Sequence[Event]) -> Iterator[tuple[str, list[Event]]]:
    """The events of each key by time, those that the watermark has passed at the end."""
    for key, found in by_key([event for event in of(sent) if event.k and event.at < 10_000]).items():
        assert key is not None
        yield key, sorted(found, key=lambda event: (event.at, event.id))


def near(event: Event, others: Sequence[Event]) -> list[Event]:
    return [other for other in others if event.k == other.k and event.k and abs(event.at - other.at) <= 5]


def with_partners(sent: Sequence[Event], *, events_too: bool) -> Rows:
    """Pairs of ids, and the others without a partner; with `events_too`, the events without one, too."""
    firsts, others = of(sent), of(sent, "others")
    rows = Counter((e.id, other.id) for e in firsts for other in near(e, others))
    rows += Counter((None, other.id) for other in others if not near(other, firsts))
    return rows + Counter((e.id, None) for e in firsts if events_too and not near(e, others))


def price_at(event: Event, sent: Sequence[Event]) -> int | None:
    known = [o for o in of(sent, "others") if o.k == event.k and o.at <= event.at]
    return max(known, key=lambda other: (other.at, other.id)).v if known else None


def pairs(sent: Sequence[Event]) -> Rows:
    return Counter((e.id, other.id) for e in of(sent) for other in near(e, of(sent, "others")))


TRUTHS: dict[str, Callable[[Sequence[Event]], dict[str, Rows]]] = {
    "large_events": lambda sent: {"large_events": Counter((e.id, 2 * e.v) for e in of(sent) if e.v >= 50)},
    "single_events": lambda sent: {
        "single_events": Counter((e.id, ten) for e in of(sent) for ten in range(e.v // 10 + 1))
    },
    "events_by_size": lambda sent: {
        "large_ones": Counter((e.id,) for e in of(sent) if e.v >= 50),
        "small_ones": Counter((e.id,) for e in of(sent) if e.v < 50),
    },
    "both_kinds": lambda sent: {"both_kinds": Counter((e.id, e.topic.removesuffix("s")) for e in sent)},
    "newest": lambda sent: {
        "newest": Counter(
            (time(last.at), last.id, k)
            for k, found in by_key(of(sent)).items()
            if k and (last := max(found, key=lambda e: (e.at, e.id)))
        )
    },
    "totals": lambda sent: {
        "totals": Counter(
            (k, max(e.v for e in found), len(found), sum(e.v for e in found))
            for k, found in by_key(of(sent)).items()
            if k
        )
    },
    "totals_twice": lambda sent: {
        "all_totals": Counter((k, sum(e.v for e in found)) for k, found in by_key(of(sent)).items() if k),
        "large_totals": Counter(
            (k, total) for k, found in by_key(of(sent)).items() if k and (total := sum(e.v for e in found)) >= 500
        ),
    },
    "minutes": lambda sent: {
        "minutes": Counter((k, begin, sum(e.v for e in found)) for (begin, k), found in windows(sent, 60, 60).items())
    },
    "hops": lambda sent: {
        "hops": Counter((begin, k, len(found)) for (begin, k), found in windows(sent, 60, 30).items())
    },
    "sessions": lambda sent: {"sessions": sessions_of(sent)},
    "once": lambda sent: {"once": Counter({(e.id,) for e in of(sent)})},
    "pairs": lambda sent: {"pairs": pairs(sent)},
    "pairs_by_time": lambda sent: {"pairs_by_time": pairs(sent)},
    "unpaired": lambda sent: {
        "unpaired": Counter((e.id,) for e in of(sent) if e.at < 10_000 and not near(e, of(sent, "others")))
    },
    "paired": lambda sent: {"paired": Counter((e.id,) for e in of(sent) if near(e, of(sent, "others")))},
    "others_paired": lambda sent: {"others_paired": with_partners(sent, events_too=False)},
    "all_paired": lambda sent: {"all_paired": with_partners(sent, events_too=True)},
    "numbered": lambda sent: {
        "numbered": Counter((e.id, k, n) for k, found in in_order(sent) for n, e in enumerate(found, 1))
    },
    "just_before": lambda sent: {
        "just_before": Counter(
            (e.id, k, sum(o.v for o in found[: n + 1] if o.at > e.at - 10))
            for k, found in in_order(sent)
            for n, e in enumerate(found)
        )
    },
    "priced": lambda sent: {
        "priced": Counter((e.id, k, price_at(e, sent)) for k, found in in_order(sent) for e in found)
    },
}

JOINED: dict[str, Callable[[Sequence[Change]], dict[str, Rows]]] = {
    "joined_tables": joined_tables,
    "orders_with_names": orders_with_names,
}
"""What the joins of tables make of changes; rows whose key is in both tables."""


def keyed(sent: Sequence[Event]) -> Counter[tuple[str | None, int]]:
    """The records that `events_by_key` writes: key and id."""
    return Counter((event.k, event.id) for event in of(sent))


def seen(rows: Sequence[dict[str, Any]]) -> Rows:
    """The rows of a table as the truths have them."""
    return Counter(tuple(row[column] for column in sorted(row) if column[0] != "_") for row in rows)
