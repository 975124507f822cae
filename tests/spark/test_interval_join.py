"""`interval_join`: equal to plain Python, whatever kind, bound and batches, over restarts and a crash."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs import DeltaTable, Json, KafkaTopic, Stream, UsageError, interval_join, stream
from streaming_jobs.runtime.spark_plan import set_to
from streaming_jobs.testing import StreamTest
from tests.support.operator_events import START, time

VALUE = Json({"k": "string", "g": "bigint", "id": "bigint not null", "at": "timestamp not null"})
LEFT, RIGHT = (KafkaTopic(name, value=VALUE, event_time="at", lateness="1 minute") for name in ("lefts", "rights"))
CLOSING = 10_000
Made = tuple[str, str | None, int | None, int, int]
"""Topic, two keys, id, and seconds."""


def joined(how: str, before: int, after: int) -> Stream:
    @stream(source={"lefts": LEFT, "rights": RIGHT}, sink=DeltaTable("joined"))
    def both(lefts: DataFrame, rights: DataFrame) -> DataFrame:
        named = rights.withColumnsRenamed({"id": "right_id", "at": "right_at"})
        bounds: Any = {"before": f"{before} seconds", "after": f"{after} seconds", "how": how}
        pairs = interval_join(lefts, named, ["k", "g"], times=("at", "right_at"), **bounds)
        return pairs.selectExpr(
            "k", "g", "id", "CAST(NULL AS BIGINT) AS right_id" if how == "left_semi" else "right_id"
        )

    return both


def records(rng: random.Random) -> list[Made]:
    sent: list[Made] = []
    for n in range(150):
        key, at = (rng.choice(["a", "b", None]), rng.choice([1, 1, None])), 100 + n + rng.randint(-15, 15)
        sent.append((rng.choice(["lefts", "rights"]), *key, n, at))
    return [*sent, *((topic, "z", 1, 1_000, CLOSING) for topic in ("lefts", "rights"))]


def truth(sent: Sequence[Made], how: str, before: int, after: int) -> Counter[tuple[Any, ...]]:
    def partners(mine: Made, others: str, back: int, ahead: int) -> Iterator[int | None]:
        for topic, k, g, number, at in sent:
            if topic == others and (k, g) == mine[1:3] and None not in (k, g) and -back <= at - mine[4] <= ahead:
                yield number

    rows: Counter[tuple[Any, ...]] = Counter()
    for record in sent:
        topic, k, g, number, at = record
        if topic == "lefts" and how != "right":
            found = list(partners(record, "rights", before, after))
            if how == "left_semi":
                found = [None] if found else []
            elif how == "left" and at < CLOSING:
                found = found or [None]
            rows.update((k, g, number, partner) for partner in found)
        elif topic == "rights" and how == "right":
            found = list(partners(record, "lefts", after, before))
            rows.update((k, g, partner, number) for partner in found or [None] * (at < CLOSING))
    return rows


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("how", "before", "after", "seed"),
    [
        ("left", 7, 2, 2),
        ("right", 7, 2, 3),
        pytest.param("inner", 0, 3, 1, marks=LONG),
        pytest.param("left_semi", 2, 1, 4, marks=LONG),
        pytest.param("inner", 0, 0, 5, marks=LONG),
        pytest.param("left", 0, 11, 6, marks=LONG),
        pytest.param("right", 4, 0, 7, marks=LONG),
        *(pytest.param(how, 3, 5, 8, marks=LONG) for how in ("inner", "left", "right", "left_semi")),
    ],
)
def test_pairs_are_those_within_the_bound_whatever_the_batches(
    stream_test: Callable[..., StreamTest], how: str, before: int, after: int, seed: int
) -> None:
    rng = random.Random(seed)
    sent, flow = records(rng), joined(how, before, after)
    test = stream_test(flow, partitions=2, settings={"stream": {"max_offsets_per_trigger": 60}})
    cuts = [0, *sorted(rng.sample(range(1, len(sent) - 2), 2)), len(sent) - 2, len(sent)]
    for begin, end in pairwise(cuts):
        for topic, k, g, number, at in sent[begin:end]:
            value = {"k": k, "g": g, "id": number, "at": time(at)}
            test.send(value, topic=topic, partition=number % 2, timestamp=time(at))
        if begin == cuts[1]:
            test.crash_at(rng.choice(["staged", "primary_committed"]))
            test.run()
        test.run()
    expected = truth(sent, how, before, after)
    assert len(expected) > 2, "something is expected"
    assert Counter(tuple(row[name] for name in ("k", "g", "id", "right_id")) for row in test.rows()) == expected
    assert not test.late


def test_times_before_1970_and_on_the_border_of_a_bucket_have_their_partners(spark: Any) -> None:
    """In one batch without a stream, as `DataFrame.join` with the bound."""
    times = [*range(-40, 40, 3), 0, 4, 8, -4, -8]
    left = spark.createDataFrame([("a", n, float(t)) for n, t in enumerate(times)], "k string, id int, s double")
    right = left.selectExpr("k", "id AS right_id", "timestamp_micros(CAST(s * 1000000 AS BIGINT)) AS right_at")
    left = left.selectExpr("k", "id", "timestamp_micros(CAST(s * 1000000 AS BIGINT)) AS at")
    pairs = interval_join(left, right, "k", times=("at", "right_at"), after="1 second")
    assert pairs.columns == ["k", "id", "at", "right_id", "right_at"]
    found = Counter((row.id, row.right_id) for row in pairs.collect())
    assert found == Counter((i, j) for i, a in enumerate(times) for j, b in enumerate(times) if 0 <= b - a <= 1)


def test_a_day_of_the_bound_has_25_hours_where_the_session_has_a_time_zone_whose_clocks_go_back(spark: Any) -> None:
    """As in `DataFrame.join`. The pair has a border of the buckets between its 24th and its 25th hour."""
    rows = spark.createDataFrame([("a",)], "k string")
    left = rows.selectExpr("k", "timestamp '2026-10-31 23:30:00Z' AS at")
    right = rows.selectExpr("k", "timestamp '2026-11-02 00:30:00Z' AS right_at")
    for zone, pairs in (("UTC", 0), ("America/New_York", 1)):
        with set_to(spark, "spark.sql.session.timeZone", zone):
            for bound, columns in (("after", (left, right)), ("before", (right, left))):
                times: Any = tuple(frame.columns[1] for frame in columns)
                assert interval_join(*columns, "k", times=times, **{bound: "1 day"}).count() == pairs, (zone, bound)


@pytest.mark.parametrize("how", ["left", "right"])
def test_names_may_have_dots_and_the_frame_that_is_kept_says_whose_record_a_row_is(spark: Any, how: str) -> None:
    def frame(number: int, key: str, time: str) -> DataFrame:
        rows = spark.createDataFrame(
            [(key, number, START, (number,))], "k string, id int, at timestamp, _source struct<n int>"
        )
        return rows.withColumnsRenamed({"k": "k.`1", "id": f"id.{number}", "at": time})

    left, right = frame(1, "a", "at.left"), frame(2, "b", "at.right")
    (row,) = interval_join(left, right, "k.`1", times=("at.left", "at.right"), how=how).collect()  # type: ignore[arg-type]
    kept = 1 if how == "left" else 2
    assert row.asDict() == {
        "k.`1": "ab"[kept - 1],
        "id.1": None,
        "at.left": None,
        "id.2": None,
        "at.right": None,
        f"id.{kept}": kept,
        f"at.{how}": START.replace(tzinfo=None),
        "_source": (kept,),
    }


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"how": "full"}, "has no how='full'"),
        ({"how": "left_anti"}, "keep the rows without a partner"),
        ({"on": []}, "has no column to join on"),
        ({"on": "g"}, "the right frame of interval_join\\(\\) has no column g"),
        ({"times": ("at", "later")}, "the right frame of interval_join\\(\\) has no column later"),
        ({"times": ("at", "at"), "right": ["k", "at"]}, "both frames of interval_join\\(\\) have a column at"),
        ({"times": ("at", "At"), "right": ["k", "at AS At"]}, "both frames of interval_join\\(\\) have a column At"),
    ],
)
def test_a_join_that_has_no_buckets_is_refused_with_its_remedy(spark: Any, changed: dict[str, Any], text: str) -> None:
    rows = spark.createDataFrame([("a", 1, START)], "k string, g int, at timestamp")
    options = {"on": "k", "times": ("at", "right_at"), "after": "1 second", **changed}
    right = (
        rows.select("k", F.col("at").alias("right_at"))
        if "right" not in options
        else rows.selectExpr(*options.pop("right"))
    )
    with pytest.raises(UsageError, match=text):
        interval_join(rows, right, options.pop("on"), **options)
