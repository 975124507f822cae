"""The streams of docs/operators.md: equal to plain Python, whatever the batches, over restarts and a crash."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from pyspark import cloudpickle

from streaming_jobs.testing import StreamTest
from tests.support.operator_events import JOINED, TRUTHS, Event, changes, events, keyed, seen, time
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
    killed = False
    for begin, end in zip([0, *cuts], cuts, strict=False):
        read = [event for event in sent[begin:end] if event.topic in topics]
        for event in read:
            test.send(event.value, topic=event.topic, partition=rng.randrange(2), timestamp=time(event.at))
        if begin and read and not killed:
            killed = True
            test.crash_at(rng.choice(["staged", "primary_committed"]))
            test.run()
        test.run()
    assert killed


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


@pytest.mark.parametrize("name", ["pairs", "unpaired", "paired", "others_paired", "all_paired"])
def test_partners_within_a_batch_are_found_however_long_its_time_is(
    operators: ModuleType, stream_test: Callable[..., StreamTest], name: str
) -> None:
    missing = {"events": 5, "others": 3}
    sent = [Event(topic, "a", n, n, 7 * n) for n in range(60) for topic, each in missing.items() if n % each]
    sent += [Event(topic, "z", 1_000, 1, 10_000) for topic in ("events", "others")]
    test = stream_test(getattr(operators, name))
    for part in (sent[:-2], sent[-2:]):
        for event in part:
            test.send(event.value, topic=event.topic)
        test.run()
    for table, expected in TRUTHS[name](sent).items():
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
    assert written == keyed(sent)


@pytest.mark.parametrize(
    ("name", "seed"),
    [("joined_tables", 5), ("orders_with_names", 11), pytest.param("orders_with_names", 12, marks=pytest.mark.long)],
)
def test_tables_are_joined_whatever_changes_moves_or_is_deleted_on_either_side(
    operators: ModuleType, stream_test: Callable[..., StreamTest], name: str, seed: int
) -> None:
    rng = random.Random(seed)
    test = stream_test(getattr(operators, name), partitions=2)
    sent = changes(name, seed, 75)
    cuts = [*sorted(rng.sample(range(1, len(sent)), 4)), len(sent)]
    for begin, end in zip([0, *cuts], cuts, strict=False):
        for change in sent[begin:end]:
            test.send(change.value, key=change.key, topic=change.topic, partition=change.partition)
        if begin == cuts[1]:
            test.crash_at(rng.choice(["staged", "primary_committed"]))
            test.run()
        test.run()
        assert {name: seen(test.rows())} == JOINED[name](sent[:end])
    assert not test.dead_letters()


def test_every_stream_of_the_page_is_tested(operators: ModuleType) -> None:
    from streaming_jobs.stream import Stream

    streams = {name for name, value in vars(operators).items() if isinstance(value, Stream)}
    assert streams == {*TRUTHS, *JOINED, "events_by_key"}
    page = Path(__file__).parents[2].joinpath("docs", "operators.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in streams)
