"""Row rules on every way of a batch's rows into a table: what is written, set aside, dropped, counted, and refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streaming_jobs.declare.rules import Between, Holds, InSet, Matches, NotNull, RowRules, Rule, Unique
from streaming_jobs.errors import RuleBroken, UsageError
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.delta.fitting import fitted
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.writers import prepare_write
from streaming_jobs.sinks.schemas import quarantine_of
from streaming_jobs.sinks.tables import begin_late, open_tables
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import Stream
from tests.conftest import SettingsFactory
from tests.support.worlds import STREAM, THINGS, entry

pytestmark = pytest.mark.spark

WAYS = {
    "driver append": ((), {"driver": True, "spark_commits": False}),
    "executors append": ((), {"driver": False, "spark_commits": False}),
    "delta-spark append": ((), {"driver": False, "spark_commits": True}),
    "driver merge": (("id",), {"driver": True, "spark_commits": False}),
    "executors merge": (("id",), {"driver": False, "spark_commits": True}),
}
COLUMNS = StructType(
    [
        StructField("id", LongType()),
        StructField("name", StringType()),
        StructField("n", LongType()),
        StructField("x", DoubleType()),
        StructField("money", DecimalType(12, 2)),
        StructField("day", DateType()),
        StructField("at", TimestampType()),
        StructField("yes", BooleanType()),
    ]
)
DAY, AT = date(2013, 5, 1), datetime(2013, 5, 1, 12, tzinfo=UTC)
FINE = (0, "it's", 5, 1.5, Decimal("9.99"), DAY, AT, True)


def rows_of(spark: SparkSession, changes: Sequence[Mapping[str, Any]]) -> DataFrame:
    """One row per mapping: a fine one with these values in place of its own."""
    names = COLUMNS.fieldNames()
    rows = [
        tuple({**dict(zip(names, FINE, strict=True)), "id": n, **c}[name] for name in names)
        for n, c in enumerate(changes)
    ]
    frame = spark.createDataFrame(rows, COLUMNS)
    return frame.selectExpr(
        "*", "named_struct('topic', 't', 'partition', 3, 'offset', 100 + id, 'timestamp', at, 'key', name) AS _source"
    )


class Home:
    """A table with rules and its quarantine; `write` is one batch."""

    def __init__(
        self, settings: SettingsFactory, way: str, rules: Sequence[Rule], name: str = "judged", gone: str | None = None
    ) -> None:
        keys, self.way = WAYS[way]
        declared = Declared(name, keys=keys, delete_when=gone)
        home = settings()
        self.sink = ensure_sink(home, declared, STREAM, COLUMNS, generation=1)
        aside = Declared(f"{name}_quarantine")
        self.aside = ensure_sink(home, aside, STREAM, quarantine_of(name, COLUMNS), generation=1)
        self.rules = RowRules(tuple(rules))
        self.batch = -1

    def write(self, frame: DataFrame) -> PendingWrite:
        self.batch += 1
        made = self.prepare(frame, self.batch)
        try:
            for aside in made.before:
                self.commit(aside, self.aside, self.batch)
            self.commit(made, self.sink, self.batch)
        finally:
            made.close()
        return made

    def prepare(self, frame: DataFrame, batch: int) -> PendingWrite:
        rows = fitted(self.sink.declared, self.sink.schema, frame, ["t"], self.rules)
        return prepare_write(
            self.sink, rows, **self.way, batch=(1, batch), topics=["t"], rules=self.rules, quarantine=self.aside
        )

    def commit(self, made: PendingWrite, sink: DeltaSink, batch: int) -> None:
        assert made.commit(entry(batch, sink.name)) is not None
        sink.refresh()

    def ids(self, sink: DeltaSink | None = None) -> list[int]:
        return sorted(DeltaTable((sink or self.sink).path).to_pyarrow_table()["id"].to_pylist())

    def set_aside(self) -> dict[int, dict[str, Any]]:
        return {row["id"]: row for row in DeltaTable(self.aside.path).to_pyarrow_table().to_pylist()}


def map_columns(spark: SparkSession, sink: DeltaSink) -> None:
    """Give a table a feature that only delta-spark writes."""
    spark.sql(f"ALTER TABLE delta.`{sink.path}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    sink.refresh()
    sink._read_schema()
    assert not sink.direct


def files(sink: DeltaSink) -> set[str]:
    return {str(path.relative_to(sink.path)) for path in sink.path.rglob("*.parquet") if "_delta_log" not in path.parts}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_goes_where_its_strictest_rule_sends_it_and_every_breach_is_counted(
    spark: SparkSession, settings: SettingsFactory, way: str
) -> None:
    rules = [
        NotNull("name", on_fail="quarantine"),
        Between("n", 0, 10),
        InSet("yes", [True], on_fail="drop"),
        Matches("name", "^[a-z' ]+$", on_fail="quarantine"),
        Holds("n >= id - 100", name="n against id", on_fail="drop"),
        Between("money", Decimal("0.01"), Decimal("100.00")),
        Between("day", date(2013, 1, 1), date(2013, 12, 31)),
        Between("at", high=datetime(2013, 12, 31, tzinfo=UTC)),
        Between("x", low=-1.5),
    ]
    changes: list[Mapping[str, Any]] = [
        {},
        {"name": None},
        {"n": 11},
        {"yes": False},
        {"name": "It's", "yes": False},
        {"n": -1, "name": None, "yes": False},
        {"n": None},
        {"money": Decimal("100.01"), "day": date(2014, 1, 1), "at": datetime(2014, 1, 1, tzinfo=UTC), "x": -1.6},
        {"name": None, "n": None, "x": None, "money": None, "day": None, "at": None, "yes": None},
        {"x": float("nan")},
    ]
    home = Home(settings, way, rules)
    made = home.write(rows_of(spark, changes))
    assert home.ids() == [0, 2, 7, 9]
    aside = home.set_aside()
    assert {n: row["_rules"] for n, row in aside.items()} == {
        1: ["name_not_null"],
        4: ["name_matches"],
        5: ["name_not_null"],
        8: ["name_not_null"],
    }
    assert aside[4]["_reason"] == "name does not match ^[a-z' ]+$"
    assert {(r["_topic"], r["_partition"], r["_offset"], r["_generation"], r["_batch"]) for r in aside.values()} == {
        ("t", 3, 100 + n, 1, 0) for n in aside
    }
    assert aside[5] | {"_rules": 0, "_reason": 0} == dict(
        zip(COLUMNS.fieldNames(), (5, None, -1, *FINE[3:7], False), strict=True)
    ) | {"_rules": 0, "_reason": 0, "_topic": "t", "_partition": 3, "_offset": 105, "_generation": 1, "_batch": 0}
    assert [write.committer for write in made.before] == [made.committer]
    assert made.outcome.dropped == 2, "rows 3 and 6"
    assert made.outcome.broken == {
        "name_not_null": 3,
        "n_between": 2,
        "yes_in_set": 3,
        "name_matches": 1,
        "n against id": 2,
        "money_between": 1,
        "day_between": 1,
        "at_between": 1,
        "x_between": 1,
    }
    assert made.rows + len(aside) + made.outcome.dropped == len(changes)


@pytest.mark.parametrize("mapped", ["table", "quarantine"])
def test_a_table_and_its_quarantine_are_written_by_one_committer_where_one_of_them_needs_delta_spark(
    spark: SparkSession, settings: SettingsFactory, mapped: str
) -> None:
    home = Home(settings, "driver append", [NotNull("name", on_fail="quarantine")])
    map_columns(spark, home.sink if mapped == "table" else home.aside)
    output = home.sink.for_batches(StreamSettings(), rules=home.rules, quarantine=home.aside)
    made = output.prepare(output.fit(rows_of(spark, [{}, {"name": None}]), ["t"]), BatchOfRows(1, 0, True, ["t"]))
    (aside,) = made.before
    assert (made.committer, aside.committer) == ("spark", "spark")
    assert aside.commit(entry(0, home.aside.name)) is not None
    assert made.commit(entry(0, home.sink.name)) is not None
    made.close()
    written, quarantined = (
        spark.read.format("delta").load(str(sink.path)).collect() for sink in (home.sink, home.aside)
    )
    assert [row["id"] for row in written] == [0]
    assert [(row["id"], row["_rules"], row["_offset"]) for row in quarantined] == [(1, ["name_not_null"], 101)]


@pytest.mark.parametrize("way", [way for way in WAYS if "driver" not in way])
def test_a_repeated_batch_writes_no_files_of_rows_that_the_quarantine_has(
    spark: SparkSession, settings: SettingsFactory, way: str
) -> None:
    home = Home(settings, way, [NotNull("name", on_fail="quarantine")])
    frame = rows_of(spark, [{}, {"name": None}, {"name": None}])
    died = home.prepare(frame, 0)
    (aside,) = died.before
    home.commit(aside, home.aside, 0)
    died.close()
    before = files(home.aside)

    again = home.prepare(frame, 0)
    (aside,) = again.before
    assert aside.rows == 2 and aside.commit(entry(0, home.aside.name)) is None
    home.commit(again, home.sink, 0)
    again.close()
    assert files(home.aside) == before
    assert home.ids() == [0] and home.ids(home.aside) == [1, 2]

    home.batch = 0
    home.write(frame)
    assert home.ids(home.aside) == [1, 1, 2, 2], "the next batch sets its own rows aside"


def test_a_quarantine_begins_later_beside_a_table_whose_columns_are_mapped(
    spark: SparkSession, settings: SettingsFactory
) -> None:
    declared = Declared("judged", keys=["id"], order_by=["at"], delete_when="not yes")
    table = ensure_sink(settings(), declared, STREAM, COLUMNS, generation=1)
    map_columns(spark, table)
    assert any(field.metadata for field in table.schema.fields)
    rules = {"judged": [NotNull("name", on_fail="quarantine")]}
    judged = Stream(STREAM, lambda things: things, {"things": THINGS}, {"judged": declared}, rules=rules)
    begin_late(settings(), judged, generation=1)
    tables = open_tables(settings(), judged)
    assert tables["judged_quarantine"].schema == quarantine_of("judged", COLUMNS)
    assert tables["judged_deletes"].schema.fieldNames() == ["id", "at", "_deleted_at", "_position"]


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_only_warn_are_all_written_and_a_fine_batch_has_no_verdict(
    spark: SparkSession, settings: SettingsFactory, way: str
) -> None:
    home = Home(settings, way, [Between("n", 0, 4), NotNull("name", on_fail="quarantine")])
    made = home.write(rows_of(spark, [{}, {"n": 3}]))
    assert (made.outcome.broken, made.outcome.dropped, made.before) == ({"n_between": 1}, 0, [])
    assert home.ids() == [0, 1]
    made = home.write(rows_of(spark, [{"n": 1}]))
    assert (dict(made.outcome.broken), made.outcome.dropped, made.before) == ({}, 0, [])
    assert home.set_aside() == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_rule_that_stops_the_stream_names_rule_and_rows_and_nothing_is_visible(
    spark: SparkSession, settings: SettingsFactory, way: str
) -> None:
    home = Home(settings, way, [Between("n", 0, 10, on_fail="fail"), NotNull("name", on_fail="quarantine")])
    with pytest.raises(RuleBroken) as refused:
        home.write(rows_of(spark, [{}, {"n": 12}, {"name": None}]))
    assert "table judged: 1 row breaks n_between" in refused.value.found and "n 12" in refused.value.found
    assert "name_not_null" not in refused.value.found and "n_between" in refused.value.next_step
    assert home.ids() == [] and home.set_aside() == {}


@pytest.mark.parametrize("way", [way for way in WAYS if "append" in way])
def test_rows_of_a_batch_that_are_equal_in_some_columns_all_break_unique(
    spark: SparkSession, settings: SettingsFactory, way: str
) -> None:
    home = Home(settings, way, [Unique(["name", "n"], on_fail="quarantine"), Unique("x")])
    made = home.write(
        rows_of(
            spark, [{"n": 1, "x": 1.0}, {"n": 1, "x": 2.0}, {"n": 2, "x": None}, {"n": None, "x": None}, {"n": None}]
        )
    )
    assert sorted(home.set_aside()) == [0, 1]
    assert home.ids() == [2, 3, 4], "a null is equal to nothing"
    assert made.outcome.broken == {"name_n_unique": 2}


def test_deletes_and_rows_without_their_key_are_not_judged(spark: SparkSession, settings: SettingsFactory) -> None:
    rules = [NotNull("name", on_fail="quarantine"), Unique("x", on_fail="quarantine")]
    for way in ("driver merge", "executors merge"):
        home = Home(settings, way, rules, way.split()[0], gone="n = 99")
        changes = [{"x": 1.0}, {"n": 99, "name": None, "x": 1.0}, {"id": None, "name": None, "x": 1.0}]
        made = home.write(rows_of(spark, changes))
        assert home.ids() == [0] and home.set_aside() == {} and not made.outcome.broken
        assert made.rejected is not None and made.rejected.num_rows == 1
        assert not [name for name in made.rejected.column_names if name == "__broken"]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Holds("nope > 1"), "nope"),
        (Holds("n +"), "cannot be evaluated"),
        (Holds("n + 1"), "cannot be evaluated"),
        (NotNull("nobody"), "nobody"),
        (Unique(["n", "nobody"]), "nobody"),
    ],
)
def test_a_rule_that_spark_cannot_evaluate_is_named_before_the_query_starts(
    spark: SparkSession, settings: SettingsFactory, rule: Rule, text: str
) -> None:
    home = Home(settings, "driver append", [Between("n", 0, 1), rule])
    with pytest.raises(UsageError) as refused:
        fitted(home.sink.declared, home.sink.schema, rows_of(spark, [{}]), ["t"], home.rules)
    assert f"rule {rule.name} of table judged" in refused.value.found and text in refused.value.found


def test_a_rule_that_warns_costs_no_second_job_and_a_quarantine_without_rows_neither(
    spark: SparkSession, settings: SettingsFactory
) -> None:
    """Spark's own count of jobs, with and without rules."""
    tracker = spark.sparkContext.statusTracker()
    jobs: Counter[tuple[str, bool]] = Counter()
    for way in WAYS:
        for judged in (False, True):
            rules = [Between("n", 0, 4), NotNull("name", on_fail="quarantine")] if judged else []
            home = Home(settings, way, rules, f"t{len(jobs)}")
            frame = rows_of(spark, [{}, {"n": 3}])
            group = f"{way} {judged}"
            spark.sparkContext.setJobGroup(group, group)
            home.write(frame)
            jobs[way, judged] = len(tracker.getJobIdsForGroup(group))
    spark.sparkContext.setJobGroup("", "")
    for way in WAYS:
        further = {"executors merge": 2}.get(way, 0)  # one more aggregate of the cached rows
        assert jobs[way, True] <= jobs[way, False] + further, jobs
