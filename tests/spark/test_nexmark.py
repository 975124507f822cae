"""The streams of docs/nexmark.md: equal to DuckDB over all events, whatever the batches, over restarts and a crash."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from streaming_jobs.testing import StreamTest
from tests.support.pages import code_of

START = datetime(2026, 1, 1, 23, 58, tzinfo=UTC)  # the day changes among the events
END = 10_000
"""The second of the events that close all windows; no query counts them."""
Event = dict[str, Any]
Events = dict[str, list[Event]]


def time(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def events(seed: int) -> Events:
    """Each topic's events; a bid may be before its auction, and after its end."""
    rng = random.Random(seed)
    persons = [
        {"id": n, "name": f"p{n}", "state": rng.choice(["OR", "ID", "CA", "NY"]), "ts": time(n * 6 + rng.randint(0, 8))}
        for n in range(30)
    ]
    auctions, bids = [], []
    for number in range(40):
        at = number * 4 + rng.randint(0, 8)
        seller = max(at // 6 - rng.randrange(3), 0)  # somebody who has come lately
        times = {"ts": time(at), "expires": time(at + rng.randint(10, 90))}
        auctions.append({"id": number, "seller": seller, "category": 10 + number % 3, **times})
        bids += [
            {"auction": number, "bidder": rng.randrange(12), "price": rng.randrange(10, 900), "ts": time(at + after)}
            for after in rng.choices(range(-2, 100), k=rng.randrange(12))
        ]
    return {"persons": persons, "auctions": auctions, "bids": bids}


def in_disorder(sent: Events, topics: Sequence[str], seed: int) -> list[tuple[str, Event]]:
    """The events of these topics as they come: up to eight seconds late."""
    rng = random.Random(seed)
    mixed = [(topic, event) for topic in topics for event in sent[topic]]
    return sorted(mixed, key=lambda each: each[1]["ts"] + timedelta(seconds=rng.uniform(0, 8)))


def ending(topic: str) -> Event:
    at = time(END)
    return {
        "persons": {"id": 1_000, "name": "end", "state": "NY", "ts": at},
        "auctions": {"id": 1_000, "seller": 1_000, "category": 99, "ts": at, "expires": at + timedelta(days=1)},
        "bids": {"auction": 1_000, "bidder": 1_000, "price": 1, "ts": at},
    }[topic]


HIGHEST = """
    SELECT begin, {columns} FROM (SELECT *, max({by}) OVER (PARTITION BY begin) AS best FROM ({rows})) WHERE {by} = best
"""
TEN_SECONDS = "time_bucket(INTERVAL '10 seconds', {ts})"
HOPS = """
    SELECT begin, auction, count(*) AS n FROM (
        SELECT auction, time_bucket(INTERVAL '2 seconds', ts) - to_seconds(hop * 2) AS begin
        FROM bids, range(5) hops(hop)
    ) GROUP BY ALL
"""
WINNERS = """
    SELECT auction, category, bidder, price, bids.ts AS ts FROM bids JOIN auctions ON auction = id
    WHERE bids.ts BETWEEN auctions.ts AND expires
    QUALIFY row_number() OVER (PARTITION BY auction ORDER BY price DESC, bids.ts, bidder) = 1
"""
QUERIES = {
    "q0": "SELECT auction, bidder, price, ts FROM bids",
    "q1": "SELECT auction, bidder, price * 0.908 AS euros, ts FROM bids",
    "q2": "SELECT auction, price FROM bids WHERE auction % 12 = 0",
    "q3": """
        SELECT name, state, auctions.id AS auction FROM auctions JOIN persons ON seller = persons.id
        WHERE category = 10 AND state IN ('OR', 'ID', 'CA')
    """,
    "q5": HIGHEST.format(by="n", columns="n, auction", rows=HOPS),
    "q7": HIGHEST.format(
        by="price", columns="price, auction, bidder", rows=f"SELECT *, {TEN_SECONDS.format(ts='ts')} AS begin FROM bids"
    ),
    "q8": f"""
        SELECT DISTINCT persons.id, name, {TEN_SECONDS.format(ts="persons.ts")} AS begin
        FROM persons JOIN auctions ON seller = persons.id
        WHERE {TEN_SECONDS.format(ts="persons.ts")} = {TEN_SECONDS.format(ts="auctions.ts")}
    """,
    "q9": WINNERS,
    "q11": """
        SELECT bidder, min(ts) AS begin, max(ts) + INTERVAL '10 seconds' AS end, count(*) AS n FROM (
            SELECT *, count(*) FILTER (gap IS NULL OR gap > INTERVAL '10 seconds') OVER visits AS visit FROM (
                SELECT *, ts - lag(ts) OVER (PARTITION BY bidder ORDER BY ts) AS gap FROM bids
            ) WINDOW visits AS (PARTITION BY bidder ORDER BY ts, gap NULLS FIRST)
        ) GROUP BY bidder, visit
    """,
    "q12": f"SELECT bidder, {TEN_SECONDS.format(ts='ts')} AS begin, count(*) AS n FROM bids GROUP BY ALL",
    "q17": """
        SELECT auction, ts::DATE AS day, count(*) AS bids, count(*) FILTER (price < 100) AS low,
            count(*) FILTER (price BETWEEN 100 AND 499) AS middle, count(*) FILTER (price >= 500) AS high,
            min(price) AS least, max(price) AS most, sum(price)::BIGINT AS total
        FROM bids GROUP BY ALL
    """,
    "q18": """
        SELECT bidder, auction, ts, price FROM bids
        QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY ts DESC, price DESC) = 1
    """,
    "q20": """
        SELECT auction, bidder, price, seller FROM bids JOIN auctions ON auction = id
        WHERE category = 10 AND bids.ts BETWEEN auctions.ts AND expires
    """,
}
AVERAGES = f"SELECT category, avg(price) AS average FROM ({WINNERS}) GROUP BY category"


def expected(sent: Events, query: str) -> Counter[str]:
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        for topic, rows in sent.items():
            database.register(topic, pa.Table.from_pylist(rows))
        answer = database.sql(query).to_arrow_table()
    return Counter(text(row) for row in answer.to_pylist())


def text(row: dict[str, Any]) -> str:
    """A row without the columns that each table has; times without a zone are UTC."""
    zoned = {
        name: value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
        for name, value in row.items()
        if not name.startswith("_")
    }
    return json.dumps(zoned, default=str, sort_keys=True)


@pytest.fixture(scope="module")
def nexmark() -> ModuleType:
    """The module of the page; Spark's workers get what they need of it with their task."""
    module = ModuleType("nexmark_page")
    sys.modules[module.__name__] = module
    exec(compile(code_of("nexmark.md"), "nexmark.md", "exec"), vars(module))
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def run(test: StreamTest, sent: Sequence[tuple[str, Event]], closing: Sequence[str], seed: int) -> None:
    """Send and read in random parts, each a start of the stream; the first is killed on its way."""
    rng = random.Random(seed)
    cut = rng.randrange(len(sent) // 3, len(sent) * 2 // 3)
    for number, part in enumerate([sent[:cut], sent[cut:], [(topic, ending(topic)) for topic in closing]]):
        for topic, event in part:
            test.send(event, topic=topic, partition=rng.randrange(2), timestamp=event["ts"])
        if number == 0:
            test.crash_at(rng.choice(["staged", "primary_committed"]))
            test.run()
        test.run()


def seen(test: StreamTest, table: str) -> Counter[str]:
    """The rows of a table, without those of the events that close all windows."""
    rows = [row for row in test.rows(table) if row.get("auction") != 1_000 and row.get("bidder") != 1_000]
    return Counter(text(row) for row in rows)


@pytest.mark.parametrize("name", list(QUERIES))
def test_a_query_is_equal_to_duckdb(nexmark: ModuleType, stream_test: Callable[..., StreamTest], name: str) -> None:
    seed = 40 + list(QUERIES).index(name)
    test = stream_test(getattr(nexmark, name), partitions=2, settings={"stream": {"max_offsets_per_trigger": 150}})
    sent = events(seed)
    topics = [topic.name for topic in test.stream.topics]
    run(test, in_disorder(sent, topics, seed), topics, seed)
    right = expected(sent, QUERIES[name])
    assert len(right) > 3, "something is expected"
    assert seen(test, name) == right
    assert not test.late
    if name != "q9":
        return
    averages = stream_test(nexmark.q4)
    for record in test.topic("winning_bids"):
        averages.send(record.value)
    averages.run()
    assert seen(averages, "q4") == expected(sent, AVERAGES)
