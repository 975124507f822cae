"""A matrix of changes of functions that keep state: the class of each, and that the class is the truth.

Each case runs the old code over half of the records, and the new code on the state that it left. A change that is said
to fit ends equal to a batch computation over all records: of earlier ones prepared by the old code, of later ones by
the new. A change that is said not to fit is refused, by Recourse or by Spark itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from streaming_jobs import DeltaTable, Json, KafkaTopic, Lookup, Stream, salt, stream
from streaming_jobs.errors import RecourseError
from streaming_jobs.runtime.trial import trial
from streaming_jobs.testing import StreamTest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
A = KafkaTopic(
    "a", value=Json({"k": "string", "g": "string", "n": "int", "at": "timestamp"}), event_time="at", lateness="1 minute"
)
B = KafkaTopic(
    "b", value=Json({"k2": "string", "m": "int", "z": "int", "bt": "timestamp"}), event_time="bt", lateness="1 minute"
)
FIRST = [(k, g, n, n) for n, (k, g) in enumerate([("x", "p"), ("y", "p"), ("z", "q"), ("x", "q"), ("y", "p")], 1)]
SECOND = [(k, g, n, n) for n, (k, g) in enumerate([("z", "p"), ("y", "q"), ("x", "p"), ("z", "q"), ("w", "p")], 6)]
Function = Callable[..., Any]
HARMLESS, FITS, REBUILT = "harmless", "state fits", "state has to be rebuilt"


@dataclass(frozen=True)
class Case:
    """`prepared`: what the old, and what the new code does to records ahead of the state; `computed`: the rest."""

    name: str
    old: Stream
    new: Stream
    change: str
    prepared: tuple[Function, Function] = (lambda a: a, lambda a: a)
    computed: Function | None = None
    long: bool = True


def of(function: Function, like: Stream) -> Stream:
    return replace(like, function=function)


def case(name: str, like: Stream, new: Function | Stream, change: str, *prepared: Function, **options: Any) -> Case:
    other = new if isinstance(new, Stream) else of(new, like)
    computed = options.pop("computed", None if change == REBUILT else other.function)
    both = prepared or (lambda a: a, lambda a: a)
    return Case(name, like, other, change, both, computed, **options)  # type: ignore[arg-type]


def declared(sink: Any, *, both: bool = False, **options: Any) -> Callable[[Function], Stream]:
    source = {"a": A, "b": B} if both else A
    return stream(name="s", source=source, sink=sink, **options)


PER_KEY, ALL = DeltaTable("t", keys=["k"]), DeltaTable("t")


@declared(PER_KEY)
def total(a: DataFrame) -> DataFrame:
    return a.groupBy("k").agg(F.sum("n").alias("total"))


@declared(PER_KEY)
def two(a: DataFrame) -> DataFrame:
    return a.groupBy("k").agg(F.sum("n").alias("total"), F.sum(F.length("g")).alias("other"))


@declared(DeltaTable("t", keys=["w_start", "k"]))
def windows(a: DataFrame) -> DataFrame:
    return in_window("10 minutes")(a)


def in_window(*window: str, **options: str) -> Function:
    def function(a: DataFrame) -> DataFrame:
        counts = a.groupBy(F.window("at", *window, **options), "k").count()
        return counts.select(F.col("window.start").alias("w_start"), "k", "count")

    return function


@declared(ALL)
def sessions(a: DataFrame) -> DataFrame:
    return a.groupBy(F.session_window("at", "5 minutes"), "k").count().select("k", "count")


@declared(ALL)
def once(a: DataFrame) -> DataFrame:
    return a.dropDuplicates(["k", "g"]).select("k", "g")


@declared(ALL)
def plain(a: DataFrame) -> DataFrame:
    return a.select("k", "n")


@declared({"t": PER_KEY, "u": DeltaTable("u", keys=["k"])})
def split(a: DataFrame) -> dict[str, DataFrame]:
    totals = a.groupBy("k").agg(F.sum("n").alias("total"))
    return {"t": totals, "u": totals.where("total > 3")}


def split_with(where: str, *more: str) -> Function:
    def function(a: DataFrame) -> dict[str, DataFrame]:
        totals = a.groupBy("k").agg(F.sum("n").alias("total"), *map(F.expr, more))
        return {"t": totals.select("k", "total"), "u": totals.where(where).select("k", "total")}

    return function


def salted(parts: int) -> Function:
    def function(a: DataFrame) -> DataFrame:
        window = F.window("at", "10 minutes")
        partial = a.groupBy(window, "k", salt("g", parts=parts).alias("part")).agg(F.sum("n").alias("n"))
        return partial.groupBy("window", "k").agg(F.sum("n").alias("total")).select("k", "total")

    return function


WITHIN = "k = k2 AND bt BETWEEN at - INTERVAL 1 HOUR AND at + INTERVAL 1 HOUR"


def join(*columns: str, on: str = WITHIN, how: str = "inner", where: str = "true", left: str = "true") -> Function:
    return lambda a, b: a.where(left).join(b, F.expr(on), how).where(where).selectExpr(*columns)


joined = declared(ALL, both=True)(join("k", "n", "m"))


class Total(StatefulProcessor):
    state, schema, factor, more = "total", "total bigint", 1, ""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState(self.state, self.schema)
        if self.more:
            handle.getValueState(self.more, "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self.total.get()[0] if self.total.exists() else 0
        value = before + sum(row.n * self.factor for row in rows)
        self.total.update((value,))
        yield Row(k=key[0], total=int(value))

    def close(self) -> None:
        """Nothing is open."""


def processed(**options: Any) -> Function:
    kind = type("Total", (Total,), options)

    def function(a: DataFrame) -> DataFrame:
        return a.groupBy("k").transformWithState(kind(), "k string, total bigint", "Update", "None")

    return function


def doubled(a: DataFrame) -> DataFrame:
    """Code of its own: the version of a function's code does not have what the function encloses."""
    return processed(factor=2)(a)  # type: ignore[no-any-return]


by_processor = declared(PER_KEY)(processed())
NAMES = Lookup("names", schema={"code": "string", "label": "string"})


def times(factor: int) -> Function:
    return lambda a: a.withColumn("n", F.col("n") * factor)


def above(least: int) -> Function:
    return lambda a: a.where(F.col("n") > least)


def same(a: DataFrame) -> DataFrame:
    return a


def labelled(totals: Function, *, ahead: bool) -> Stream:
    """The stream with a table that it looks up, ahead of its state or behind it."""

    def function(a: DataFrame, names: DataFrame) -> DataFrame:
        known = names.select(F.col("code").alias("code"), "label")
        if ahead:
            return totals(a.join(known, F.col("g") == F.col("code"), "left"))
        return totals(a).join(known, F.col("k") == F.col("code"), "left").drop("code", "label")

    return declared(PER_KEY, lookups={"names": NAMES})(function)


def sum_of(column: str, function: Callable[[Any], Any] = F.sum, key: str = "k") -> Function:
    return lambda a: a.groupBy(F.expr(key)).agg(function(column).alias("total"))


CASES = [
    case("comment", total, lambda a: a.groupBy("k").agg(F.sum("n").alias("total")), HARMLESS),
    case("having", total, lambda a: total.function(a).where("total > 0"), HARMLESS, long=False),
    case("column_behind", total, lambda a: total.function(a).withColumn("half", F.expr("total / 2")), HARMLESS),
    case(
        "cast_behind",
        two,
        lambda a: two.function(a).drop("other").withColumn("other", F.lit(None).cast("long")),
        REBUILT,
    ),
    case("aggregate_added", total, two.function, REBUILT, long=False),
    case("aggregate_removed", two, total.function, REBUILT),
    case("aggregate_renamed", total, lambda a: a.groupBy("k").agg(F.sum("n").alias("sum")), REBUILT),
    case("aggregate_exchanged", total, sum_of("n", F.max), REBUILT),
    case(
        "aggregates_swapped",
        two,
        lambda a: a.groupBy("k").agg(F.sum(F.length("g")).alias("total"), F.sum("n").alias("other")),
        REBUILT,
    ),
    case(
        "argument_of_an_aggregate", total, lambda a: a.groupBy("k").agg(F.sum(F.col("n") * 2).alias("total")), REBUILT
    ),
    case(
        "type_of_an_argument",
        total,
        lambda a: sum_of("n")(a.withColumn("n", F.col("n").cast("double"))),
        REBUILT,
        long=False,
    ),
    case(
        "value_ahead",
        total,
        lambda a: sum_of("n")(times(2)(a)),
        FITS,
        same,
        times(2),
        computed=total.function,
        long=False,
    ),
    case("filter_ahead", total, lambda a: sum_of("n")(above(6)(a)), FITS, same, above(6), computed=total.function),
    case("key_changed", total, sum_of("n", key="g AS k"), REBUILT, long=False),
    case("key_expression", total, sum_of("n", key="upper(k) AS k"), REBUILT),
    case("key_added", total, lambda a: a.groupBy("k", "g").agg(F.sum("n").alias("total")), REBUILT),
    case("window_length", windows, in_window("20 minutes"), REBUILT),
    case("window_slide", windows, in_window("10 minutes", "5 minutes"), REBUILT),
    case("window_offset", windows, in_window("10 minutes", startTime="1 minute"), REBUILT),
    case("window_filter_behind", windows, lambda a: windows.function(a).where("count > 0"), HARMLESS),
    case(
        "grace",
        windows,
        replace(windows, sources={"a": replace(A, lateness="9 minutes")}),
        FITS,
        same,
        same,
        computed=windows.function,
    ),
    case("emit", windows, replace(windows, sinks={"t": DeltaTable("t", keys=["w_start", "k"], emit="close")}), REBUILT),
    case(
        "session_gap",
        sessions,
        lambda a: a.groupBy(F.session_window("at", "9 minutes"), "k").count().select("k", "count"),
        REBUILT,
    ),
    case("deduplicated_by_less", once, lambda a: a.dropDuplicates(["k"]).select("k", "g"), REBUILT),
    case("deduplicated_in_time", once, lambda a: a.dropDuplicatesWithinWatermark(["k", "g"]).select("k", "g"), REBUILT),
    case("filter_behind_deduplication", once, lambda a: once.function(a).where("k <> 'nobody'"), HARMLESS),
    case(
        "filter_ahead_of_deduplication",
        once,
        lambda a: once.function(above(7)(a)),
        FITS,
        same,
        above(7),
        computed=once.function,
    ),
    case("deduplication_ahead", total, lambda a: sum_of("n")(a.dropDuplicates(["k", "n"])), REBUILT),
    case("state_added", plain, lambda a: a.dropDuplicates(["k", "n"]).select("k", "n"), REBUILT),
    case("state_removed", once, lambda a: a.select("k", "g"), REBUILT),
    case("no_state", plain, lambda a: a.select("k", F.col("n").cast("int").alias("n")), HARMLESS),
    case("join_bound", joined, join("k", "n", "m", on=WITHIN.replace("+ INTERVAL 1", "+ INTERVAL 2")), REBUILT),
    case("join_kind", joined, join("k", "n", "m", how="left"), REBUILT),
    case("join_column_added", joined, join("k", "n", "m", "z"), REBUILT, long=False),
    case(
        "join_column_exchanged",
        joined,
        lambda a, b: a.join(b, F.expr(WITHIN)).selectExpr("k", "n", "z AS m"),
        REBUILT,
        long=False,
    ),
    case("join_filter_behind", joined, join("k", "n", "m", where="n + m > 0"), HARMLESS),
    case("join_column_behind", joined, join("k", "n", "m + 0 AS m"), HARMLESS),
    case(
        "join_filter_ahead", joined, join("k", "n", "m", left="n > 6"), FITS, same, above(6), computed=joined.function
    ),
    case("processor_body", by_processor, doubled, FITS, same, times(2), computed=total.function, long=False),
    case("processor_state_added", by_processor, processed(more="count"), REBUILT),
    case("processor_state_renamed", by_processor, processed(state="sum"), REBUILT),
    case("processor_state_of_another_type", by_processor, processed(schema="total double"), REBUILT),
    case("second_table_filter", split, split_with("total > 4"), HARMLESS, computed=total.function),
    case("second_table_aggregate", split, split_with("total > 3", "max(n) AS most"), REBUILT),
    case("salt", declared(ALL)(salted(2)), salted(3), REBUILT),
    case("lookup_behind", total, labelled(total.function, ahead=False), HARMLESS, computed=total.function),
    case("lookup_ahead", total, labelled(total.function, ahead=True), FITS, computed=total.function),
]


def record(of_: tuple[str, str, int, int]) -> dict[str, Any]:
    k, g, n, minute = of_
    return {"k": k, "g": g, "n": n, "at": NOON + timedelta(seconds=minute)}


def other(of_: tuple[str, str, int, int]) -> dict[str, Any]:
    k, _, n, minute = of_
    return {"k2": k, "m": 10 * n, "z": 100 * n, "bt": NOON + timedelta(seconds=minute)}


def send(test: StreamTest, records: list[tuple[str, str, int, int]]) -> None:
    for each in records:
        test.send(record(each), topic="a")
        if "b" in {topic.name for topic in test.stream.topics}:
            test.send(other(each), topic="b")


def truth(spark: SparkSession, case: Case) -> list[dict[str, Any]]:
    """The rows that a batch computation over all records makes."""
    assert case.computed is not None
    kind, kind_b = "k string, g string, n int, at timestamp", "k2 string, m int, z int, bt timestamp"
    parts = [
        prepare(spark.createDataFrame([record(r) for r in records], kind))
        for prepare, records in zip(case.prepared, (FIRST, SECOND), strict=True)
    ]
    frames = [parts[0].unionByName(parts[1])]
    if len(case.old.sources) == 2:
        frames.append(spark.createDataFrame([other(r) for r in [*FIRST, *SECOND]], kind_b))
    return [row.asDict() for row in case.computed(*frames).collect()]


@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.name, marks=[pytest.mark.long] if each.long else []) for each in CASES]
)
def test_the_class_of_a_change_is_true(stream_test: Callable[..., StreamTest], case: Case) -> None:
    test = stream_test(case.old)
    send(test, FIRST)
    test.run()
    test.deploy(case.new)
    if case.new.lookups:
        test.lookup("names", [{"code": "p", "label": "pine"}])
    spark = test._spark
    before = {path: path.stat().st_mtime_ns for path in test.settings.state.rglob("*") if path.is_file()}
    verdict = trial(test.settings, test.stream, spark)
    after = {path: path.stat().st_mtime_ns for path in test.settings.state.rglob("*") if path.is_file()}
    assert after == before, "a trial writes nothing to the state"
    assert (verdict.change, bool(verdict.found)) == (case.change, case.change == REBUILT), verdict
    send(test, SECOND)
    if case.change == REBUILT:
        with pytest.raises(RecourseError):
            test.run()
        return
    test.run()
    expected = truth(spark, case)
    names = expected[0].keys()
    assert rows_of(test.rows(), names) == rows_of(expected, names)


def rows_of(rows: Sequence[Mapping[str, Any]], names: Collection[str]) -> list[str]:
    """The rows in one order, with times as Spark returns them."""
    plain = ([v.replace(tzinfo=None) if isinstance(v, datetime) else v for v in map(row.get, names)] for row in rows)
    return sorted(map(repr, plain))
