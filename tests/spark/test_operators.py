"""The streams of docs/operators.md: equal to plain Python, whatever the batches, over restarts and a crash."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark import cloudpickle

from streaming_jobs.testing import StreamTest
from tests.support.operator_events import TRUTHS, Event, events, of, seen, time
from tests.support.pages import code_of


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
        assert seen(test.rows(table)) == expected
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


@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.long)])
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
