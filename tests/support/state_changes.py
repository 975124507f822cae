"""Changes of functions that keep state, each with its class (`tests/spark/test_state_changes.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from streaming_jobs import DeltaTable, Json, KafkaTopic, Lookup, RecordTimestamp, Stream, interval_join, salt, stream

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

A = KafkaTopic(
    "a", value=Json({"k": "string", "g": "string", "n": "int", "at": "timestamp"}), event_time="at", lateness="1 minute"
)
B = KafkaTopic(
    "b", value=Json({"k2": "string", "m": "int", "z": "int", "bt": "timestamp"}), event_time="bt", lateness="1 minute"
)
Function = Callable[..., Any]
HARMLESS, FITS, REBUILT = "harmless", "state fits", "state has to be rebuilt"


@dataclass(frozen=True)
class Case:
    """`prepared`: what the old, and what the new code does to records ahead of the state; `computed`: the rest.

    `refused`: the step that a refusal names for another reason than the state. `closes`: a later record lets the
    watermark pass all others, whose rows come only then.
    """

    name: str
    old: Stream
    new: Stream
    change: str
    prepared: tuple[Function, Function] = (lambda a: a, lambda a: a)
    computed: Function | None = None
    long: bool = True
    closes: bool = False
    refused: str = ""


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


PER_KEY, ALL_KEYS, ALL = DeltaTable("t", keys=["k"]), DeltaTable("t", keys=["k", "g"]), DeltaTable("t")


@declared(PER_KEY)
def total(a: DataFrame) -> DataFrame:
    return a.groupBy("k").agg(F.sum("n").alias("total"))


@declared(PER_KEY)
def two(a: DataFrame) -> DataFrame:
    return a.groupBy("k").agg(F.sum("n").alias("total"), F.sum(F.length("g")).alias("other"))


CLOSED = DeltaTable("t", keys=["w_start", "k"], emit="close")


@declared(DeltaTable("t", keys=["w_start", "k"]))
def windows(a: DataFrame) -> DataFrame:
    return in_window("10 minutes")(a)


def in_window(*window: str, **options: str) -> Function:
    def function(a: DataFrame) -> DataFrame:
        counts = a.groupBy(F.window("at", *window, **options), "k").count()
        return counts.select(F.col("window.start").alias("w_start"), "k", "count")

    return function


per_two_keys = declared(ALL_KEYS)(lambda a: a.groupBy("k", "g").agg(F.sum("n").alias("total")))
hops = declared(DeltaTable("t", keys=["w_start", "k"]))(in_window("10 minutes", "5 minutes"))


def in_session(gap: str) -> Function:
    return lambda a: a.groupBy(F.session_window("at", gap), "k").count().select("k", "count")


sessions = declared(ALL)(in_session("5 minutes"))


@declared(ALL)
def once(a: DataFrame) -> DataFrame:
    return a.dropDuplicates(["k", "g"]).select("k", "g")


@declared(ALL)
def once_in_time(a: DataFrame) -> DataFrame:
    return a.dropDuplicatesWithinWatermark(["k", "g"]).select("k", "g")


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
        if not parts:
            return a.groupBy(window, "k").agg(F.sum("n").alias("total")).select("k", "total")
        partial = a.groupBy(window, "k", salt("g", parts=parts).alias("part")).agg(F.sum("n").alias("n"))
        return partial.groupBy("window", "k").agg(F.sum("n").alias("total")).select("k", "total")

    return function


WITHIN = "k = k2 AND bt BETWEEN at - INTERVAL 1 HOUR AND at + INTERVAL 1 HOUR"


def join(*columns: str, on: str = WITHIN, how: str = "inner", where: str = "true", left: str = "true") -> Function:
    return lambda a, b: a.where(left).join(b, F.expr(on), how).where(where).selectExpr(*columns)


joined = declared(ALL, both=True)(join("k", "n", "m"))


def in_interval(**options: Any) -> Function:
    return lambda a, b: interval_join(a, b.withColumnRenamed("k2", "k"), "k", times=("at", "bt"), **options).select(
        "k", "n", "m"
    )


in_hour = declared(ALL, both=True)(in_interval(after="1 hour"))


def matched(how: str) -> Stream:
    """A join of the given kind, with the columns that each kind has; null matches nothing."""
    return declared(ALL, both=True)(join("k", "n", on=f"{WITHIN} AND k IS NOT NULL", how=how))


def merged(prepared_a: Function, prepared_b: Function) -> Stream:
    """Totals over both topics, of what the two functions make of them."""

    def function(a: DataFrame, b: DataFrame) -> DataFrame:
        return prepared_a(a).unionByName(prepared_b(b)).groupBy("k").agg(F.sum("n").alias("total"))

    return declared(PER_KEY, both=True)(function)


def of_a(a: DataFrame) -> DataFrame:
    return a.select("k", "n")


def of_b(least: int = 0) -> Function:
    return lambda b: b.where(F.col("m") > least).selectExpr("k2 AS k", "m AS n")


both_topics = merged(of_a, of_b())


@declared(ALL, both=True)
def rows_of_both(a: DataFrame, b: DataFrame) -> DataFrame:
    return of_a(a).unionByName(of_b()(b))  # type: ignore[no-any-return]


def without_b(a: DataFrame, b: DataFrame) -> DataFrame:
    return sum_of("n")(of_a(a))  # type: ignore[no-any-return]


def split_by(separator: str) -> Function:
    """The group is a part of a text, one row for each part."""
    return lambda a: sum_of("n")(a.withColumn("k", F.explode(F.split(F.concat_ws("-", "k", "g"), separator))))


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


class Waiting(StatefulProcessor):
    """Holds the records of a key back for `bound` milliseconds, and numbers them in the order of their times."""

    bound = 0

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.waiting = handle.getListState("waiting", "at timestamp, n int")
        self.count = handle.getValueState("count", "number bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.waiting.appendValue((row.at, row.n))
            self.handle.registerTimer(int(row.at.timestamp() * 1000) + self.bound)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        before = self.count.get()[0] if self.count.exists() else 0
        now = timerValues.getCurrentWatermarkInMs()
        rows = sorted(tuple(row) for row in self.waiting.get())
        due = [row for row in rows if row[0].timestamp() * 1000 + self.bound <= now]
        self.waiting.put(rows[len(due) :]) if len(due) < len(rows) else self.waiting.clear()
        self.count.update((before + len(due),))
        yield from (Row(k=key[0], n=n, number=number) for number, (_, n) in enumerate(due, before + 1))

    def close(self) -> None:
        """Nothing is open."""


def reordered(bound: int, time: str = "EventTime") -> Function:
    kind = type("Waiting", (Waiting,), {"bound": bound})
    output = "k string, n int, number bigint"
    return lambda a: a.groupBy("k").transformWithState(kind(), output, "Append", time)


def reordered_for_longer(a: DataFrame) -> DataFrame:
    """Code of its own, as `doubled`."""
    return reordered(30_000)(a)  # type: ignore[no-any-return]


def numbered(a: DataFrame) -> DataFrame:
    return a.select("k", "n", F.row_number().over(Window.partitionBy("k").orderBy("at")).alias("number"))


in_order = declared(ALL)(reordered(0))
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
    case("key_removed", per_two_keys, sum_of("n"), REBUILT),
    case(
        "keys_exchanged",
        per_two_keys,
        lambda a: a.groupBy("g", "k").agg(F.sum("n").alias("total")),
        REBUILT,
        long=False,
    ),
    case("key_exploded", declared(PER_KEY)(split_by("-")), split_by("x"), REBUILT),
    case(
        "argument_widened",
        total,
        lambda a: sum_of("n")(a.withColumn("n", F.col("n").cast("long"))),
        FITS,
        computed=total.function,
    ),
    case(
        "greatest_widened",
        declared(PER_KEY)(lambda a: a.groupBy("k").agg(F.max("n").cast("long").alias("total"))),
        lambda a: sum_of("n", F.max)(a.withColumn("n", F.col("n").cast("long"))),
        REBUILT,
    ),
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
    case("emit", windows, replace(windows, sinks={"t": CLOSED}), REBUILT),
    case(
        "less_grace",
        windows,
        replace(windows, sources={"a": replace(A, lateness="10 seconds")}),
        FITS,
        same,
        same,
        computed=windows.function,
    ),
    case(
        "watermark_of_another_time",
        windows,
        replace(windows, sources={"a": replace(A, event_time=RecordTimestamp())}),
        FITS,
        same,
        same,
        computed=windows.function,
    ),
    case("emit_at_each_change", replace(windows, sinks={"t": CLOSED}), windows, REBUILT),
    case("window_key_added", windows, lambda a: a.groupBy(F.window("at", "10 minutes"), "k", "g").count(), REBUILT),
    case("window_to_session", windows, in_session("10 minutes"), REBUILT),
    case("hop_slide", hops, in_window("10 minutes", "2 minutes"), REBUILT, long=False),
    case("hop_length", hops, in_window("20 minutes", "5 minutes"), REBUILT),
    case("hop_offset", hops, in_window("10 minutes", "5 minutes", startTime="1 minute"), REBUILT),
    case(
        "filter_ahead_of_hops",
        hops,
        lambda a: hops.function(above(6)(a)),
        FITS,
        same,
        above(6),
        computed=hops.function,
    ),
    case("filter_behind_hops", hops, lambda a: hops.function(a).where("count > 0"), HARMLESS),
    case("session_gap", sessions, in_session("9 minutes"), REBUILT),
    case("session_gap_shorter", sessions, in_session("1 minute"), REBUILT),
    case(
        "filter_ahead_of_sessions",
        sessions,
        lambda a: sessions.function(above(7)(a)),
        FITS,
        same,
        above(7),
        computed=sessions.function,
        closes=True,
    ),
    case("session_to_window", sessions, windows.function, REBUILT),
    case("deduplicated_by_less", once, lambda a: a.dropDuplicates(["k"]).select("k", "g"), REBUILT),
    case("deduplicated_in_time", once, lambda a: a.dropDuplicatesWithinWatermark(["k", "g"]).select("k", "g"), REBUILT),
    case("deduplicated_by_more", once, lambda a: a.dropDuplicates(["k", "g", "n"]).select("k", "g"), REBUILT),
    case(
        "deduplicated_for_longer",
        once_in_time,
        replace(once_in_time, sources={"a": replace(A, lateness="9 minutes")}),
        FITS,
        same,
        same,
        computed=once.function,
    ),
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
    case(
        "join_bound_narrower", joined, join("k", "n", "m", on=WITHIN.replace("+ INTERVAL 1", "+ INTERVAL 0")), REBUILT
    ),
    case("interval_bound", in_hour, in_interval(after="2 hours"), REBUILT),
    case("interval_side", in_hour, in_interval(before="1 hour"), REBUILT),
    case("interval_by_bound", joined, in_interval(before="1 hour", after="1 hour"), REBUILT),
    case("semi_to_inner", matched("left_semi"), matched("inner"), REBUILT),
    case("left_to_full", matched("left"), matched("full"), REBUILT),
    case(
        "filter_of_a_merged_topic",
        both_topics,
        merged(of_a, of_b(70)),
        FITS,
        computed=lambda a, b: both_topics.function(a, b.where("m <= 50 OR m > 70")),
    ),
    case(
        "key_of_a_further_topic",
        both_topics,
        merged(of_a, lambda b: b.selectExpr("upper(k2) AS k", "m AS n")),
        FITS,
        computed=merged(of_a, lambda b: b.selectExpr("if(m <= 50, k2, upper(k2)) AS k", "m AS n")).function,
    ),
    case(
        "merged_topic_left_out",
        both_topics,
        merged(of_a, lambda b: of_b()(b.where("false"))),
        FITS,
        computed=lambda a, b: both_topics.function(a, b.where("m <= 50")),
    ),
    case("merged_topic_dropped", both_topics, without_b, FITS, refused=".where('false')", long=False),
    case("topic_without_state_dropped", rows_of_both, lambda a, b: of_a(a), HARMLESS, refused=".where('false')"),
    case("topics_exchanged", rows_of_both, lambda a, b: of_b()(b).unionByName(of_a(a)), REBUILT),
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
    case("processor_state_removed", declared(PER_KEY)(processed(more="count")), processed(), REBUILT),
    case(
        "reordered_for_longer",
        in_order,
        reordered_for_longer,
        FITS,
        same,
        same,
        computed=numbered,
        closes=True,
        long=False,
    ),
    case("timers_removed", in_order, reordered(0, "None"), REBUILT),
    case("processor_to_aggregate", by_processor, total.function, REBUILT),
    case("second_table_filter", split, split_with("total > 4"), HARMLESS, computed=total.function),
    case("second_table_aggregate", split, split_with("total > 3", "max(n) AS most"), REBUILT),
    case("salt", declared(ALL)(salted(2)), salted(3), REBUILT),
    case("salt_added", declared(ALL)(salted(0)), salted(2), REBUILT),
    case("salt_removed", declared(ALL)(salted(2)), salted(0), REBUILT),
    case("lookup_behind", total, labelled(total.function, ahead=False), HARMLESS, computed=total.function),
    case("lookup_ahead", total, labelled(total.function, ahead=True), FITS, computed=total.function),
]
