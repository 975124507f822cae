"""The streams of docs/operators.md: equal to plain Python, whatever the batches, over restarts and a crash."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark import cloudpickle

from streaming_jobs.testing import StreamTest
from tests.support.pages import code_of

START = datetime(2026, 1, 1, tzinfo=UTC)
LATENESS = timedelta(minutes=1)
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


def events(seed: int) -> list[Event]:
    """Out of order by up to 20 seconds, some ids twice, and at the end one of each topic that closes all windows."""
    rng = random.Random(seed)
    made = []
    for number in range(120):
        topic, key = rng.choice(["events", "events", "others"]), rng.choice(["a", "b", "c", None])
        at = 100 + number * 2 + rng.randint(-10, 10)
        made.append(Event(topic, key, number if rng.random() < 0.8 else max(number - 2, 0), rng.randint(0, 99), at))
    return [*made, *(Event(topic, "z", 1_000, 1, 10_000) for topic in ("events", "others"))]


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


def price_at(event: Event, sent: Sequence[Event]) -> int | None:
    known = [o for o in of(sent, "others") if o.k == event.k and o.at <= event.at]
    return max(known, key=lambda other: (other.at, other.id)).v if known else None


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
    "pairs": lambda sent: {
        "pairs": Counter((e.id, other.id) for e in of(sent) for other in near(e, of(sent, "others")))
    },
    "unpaired": lambda sent: {
        "unpaired": Counter((e.id,) for e in of(sent) if e.at < 10_000 and not near(e, of(sent, "others")))
    },
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


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    """The module of the page; Spark's workers get what they need of it with their task."""
    module = ModuleType("operators_page")
    sys.modules[module.__name__] = module
    exec(compile(code_of("operators.md"), "operators.md", "exec"), vars(module))
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def run(test: StreamTest, sent: Sequence[Event], seed: int) -> None:
    """Send and read in random parts, each a start of the stream; one of them is killed on its way."""
    rng = random.Random(seed)
    topics = {topic.name for topic in test.stream.topics}
    cuts = sorted({rng.randrange(1, len(sent) - 2), len(sent) - 2, len(sent)})  # what closes the windows comes alone
    for begin, end in zip([0, *cuts], cuts, strict=False):
        for event in sent[begin:end]:
            if event.topic in topics:
                test.send(event.value, topic=event.topic, partition=rng.randrange(2), timestamp=time(event.at))
        if begin == cuts[0]:
            test.crash_at(rng.choice(["staged", "primary_committed"]))
            test.run()
        test.run()


@pytest.mark.parametrize("name", list(TRUTHS))
def test_an_operator_is_equal_to_plain_python(
    operators: ModuleType, stream_test: Callable[..., StreamTest], name: str
) -> None:
    seed = 7 + list(TRUTHS).index(name)
    sent = events(seed)
    test = stream_test(getattr(operators, name), partitions=2, settings={"stream": {"max_offsets_per_trigger": 60}})
    run(test, sent, seed)
    for table, expected in TRUTHS[name](sent).items():
        assert expected, "something is expected"
        assert Counter(tuple(row[c] for c in sorted(row) if c[0] != "_") for row in test.rows(table)) == expected
    assert not test.late


def test_the_records_of_a_topic_have_the_key_that_was_selected(
    operators: ModuleType, stream_test: Callable[..., StreamTest]
) -> None:
    sent = events(3)
    test = stream_test(operators.events_by_key, partitions=2)
    run(test, sent, 3)
    written = Counter(
        (record.key and record.key.decode(), json.loads(record.value or b"")["id"]) for record in test.topic()
    )
    assert written == Counter((e.k, e.id) for e in of(sent))


def test_two_tables_are_joined_and_a_delete_on_either_side_deletes(
    operators: ModuleType, stream_test: Callable[..., StreamTest]
) -> None:
    rng = random.Random(5)
    test = stream_test(operators.joined_tables)
    sides: dict[str, dict[str, int | None]] = {"left_table": {}, "right_table": {}}
    for _ in range(4):
        for _ in range(12):
            topic, key = rng.choice(list(sides)), rng.choice("abcde")
            value = rng.choice([None, rng.randint(0, 99), rng.randint(0, 99)])
            sides[topic][key] = value
            test.send(None if value is None else {"v": value}, key=key, topic=topic)
        test.run()
        left, right = (
            {k: v for k, v in sides[name].items() if v is not None} for name in ("left_table", "right_table")
        )
        expected = [{"k": k, "left": left[k], "right": right[k]} for k in sorted(left.keys() & right.keys())]
        assert test.rows() == expected


@pytest.mark.parametrize("seed", [11, 12])
def test_orders_are_joined_with_their_customers_whatever_changes_moves_or_is_deleted(
    operators: ModuleType, stream_test: Callable[..., StreamTest], seed: int
) -> None:
    rng = random.Random(seed)
    test = stream_test(operators.orders_with_names, partitions=2)
    orders: dict[str, dict[str, Any] | None] = {}
    customers: dict[str, str | None] = {}
    for part in range(5):
        for _ in range(rng.randint(5, 25)):
            if rng.random() < 0.6:
                order, belongs = rng.choice("123456"), rng.choice(["a", "b", "c", None])
                orders[order] = None if rng.random() < 0.2 else {"customer": belongs, "v": rng.randint(0, 99)}
                test.send(orders[order], key=order, topic="orders_by_id", partition=int(order) % 2)
            else:
                customer, name = rng.choice("abc"), rng.choice([None, "Ann", "Bob", "Cy"])
                customers[customer] = name
                test.send(name and {"name": name}, key=customer, topic="customers_by_id", partition=ord(customer) % 2)
        if part == 2:
            test.crash_at(rng.choice(["staged", "primary_committed"]))
            test.run()
        test.run()
        expected = [
            {"id": order, "v": value["v"], "name": name}
            for order, value in sorted(orders.items())
            if value is not None and (name := customers.get(value["customer"] or "")) is not None
        ]
        assert test.rows() == expected
    assert not test.dead_letters()


def test_every_stream_of_the_page_is_tested(operators: ModuleType) -> None:
    from streaming_jobs.stream import Stream

    streams = {name for name, value in vars(operators).items() if isinstance(value, Stream)}
    assert streams == {*TRUTHS, "events_by_key", "joined_tables", "orders_with_names"}
    page = Path(__file__).parents[2].joinpath("docs", "operators.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in streams)
