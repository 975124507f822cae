"""The declaration of row rules: names, conditions in two dialects of SQL, and what is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable as Table
from deltalake import QueryBuilder, write_deltalake
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs import DeltaTable, Json, KafkaTopic, stream
from streaming_jobs.declare.rules import Between, Holds, InSet, Matches, NotNull, RowRules, Rule, Unique
from streaming_jobs.errors import UsageError
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.text.sql import literal

ROWS = StructType([StructField("id", LongType()), StructField("name", StringType())])
TOPIC = KafkaTopic("t", value=Json(ROWS))
AT = datetime(2013, 1, 1, 12, tzinfo=UTC)


def declared(rules: Any, sink: Any = None, name: str = "flow") -> Any:
    def flow(t: Any) -> Any:
        return t

    return stream(source=TOPIC, sink=sink or DeltaTable("rows", schema=ROWS), rules=rules, name=name)(flow)


@pytest.mark.parametrize(
    ("rule", "name", "words"),
    [
        (NotNull("id"), "id_not_null", "id is null"),
        (Between("id", 1, 2), "id_between", "id is not between 1 and 2"),
        (Between("id", low=1), "id_between", "id is below 1"),
        (Between("id", high=1), "id_between", "id is above 1"),
        (InSet("name", ["a", "b"]), "name_in_set", "name is not one of a, b"),
        (InSet("id", range(11)), "id_in_set", "id is not one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."),
        (Matches("name", "^a"), "name_matches", "name does not match ^a"),
        (Holds("id > 1"), "id > 1", "not true: id > 1"),
        (Holds("id > 1", name="large"), "large", "not true: id > 1"),
        (Unique(["id", "name"]), "id_name_unique", "id, name are not unique in the batch"),
        (Unique("id"), "id_unique", "id is not unique in the batch"),
    ],
)
def test_a_rule_has_a_name_and_says_what_a_breach_is(rule: Rule, name: str, words: str) -> None:
    assert (rule.name, rule.words, rule.on_fail) == (name, words, "warn")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: NotNull("id", on_fail="drpo"), "rule id_not_null: on_fail='drpo' did you mean 'drop'"),  # type: ignore[arg-type]
        (lambda: Between("id"), "no bound"),
        (lambda: Between("id", 2, 1), "2 is above 1"),
        (lambda: InSet("id", []), "one value at least"),
        (lambda: InSet("id", [None]), "no None"),  # type: ignore[list-item]
        (lambda: InSet("id", "abc"), "not a list"),
        (lambda: Unique([]), "names no column"),
        (lambda: Unique(["id", "id"]), "names a column twice"),
        (lambda: Between("id", 1, "x"), "no common order"),
        (lambda: literal(Decimal("NaN"), "spark"), "cannot be a value"),
        (lambda: Holds("at <= current_timestamp()"), "another value when a batch is repeated"),
        (lambda: Holds("RAND() < 1"), "another value when a batch is repeated"),
        (lambda: Holds(""), "no usable name"),
        (lambda: literal(object(), "spark"), "cannot be a value"),  # type: ignore[arg-type]
        (lambda: literal(datetime(2013, 1, 1), "spark"), "no time zone"),
        (lambda: declared([NotNull("idd")]), "did you mean 'id'"),
        (lambda: declared(NotNull("id")), None),
        (lambda: declared([NotNull]), "is no rule"),
        (lambda: declared("id"), "is no rule"),
        (lambda: declared([NotNull("id"), NotNull("id")]), "two rules are named id_not_null"),
        (lambda: declared([Holds(f"id > {n}") for n in range(63)]), "62 at most"),
        (lambda: declared({"row": [NotNull("id")]}), "did you mean 'rows'"),
        (lambda: declared([NotNull("id")], {"a": DeltaTable("a"), "b": DeltaTable("b")}), "name no sink"),
        (lambda: declared([NotNull("id", on_fail="quarantine")], DeltaTable("r" * 60)), "is not a table name"),
    ],
)
def test_what_cannot_be_a_rule_is_refused_where_it_is_declared(make: Any, text: str | None) -> None:
    if text is None:
        assert make().rules_of("rows").rules == (NotNull("id"),)
        return
    with pytest.raises(UsageError) as refused:
        make()
    assert text in f"{refused.value.found} {refused.value.next_step}"


def test_rules_make_a_quarantine_and_another_version_of_the_code() -> None:
    flow = declared([NotNull("id", on_fail="quarantine")])
    assert flow.quarantines == {"rows": "rows_quarantine"}
    assert flow.table_names == ("rows", "rows_quarantine", "flow_dead_letters")
    assert declared([NotNull("id")]).table_names == ("rows", "flow_dead_letters")
    versions = {
        code_version(declared(rules), []).hash
        for rules in (
            [],
            [NotNull("id")],
            [NotNull("id", on_fail="drop")],
            [Between("id", 1, 2)],
            [Between("id", 1, 3)],
        )
    }
    assert len(versions) == 5
    assert code_version(declared([]), []) == code_version(declared({}), [])


VALUES: dict[str, Any] = {
    "n": pa.array([1, None, 3], pa.int64()),
    "x": pa.array([1.5, None, float("nan")]),
    "money": pa.array([Decimal("1.10"), None, Decimal("3.00")], pa.decimal128(10, 2)),
    "name": ["it's \\ a", None, 'b"c'],
    "day": [date(2013, 1, 1), None, date(2014, 1, 1)],
    "at": [AT, None, datetime(2014, 1, 1, tzinfo=UTC)],
    'a "b': [True, None, False],
}


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [
        (NotNull('a "b'), [1]),
        (Between("n", 1, 2), [2]),
        (Between("x", 1.5, 1.5), [2]),
        (Between("money", Decimal("1.10"), Decimal("2")), [2]),
        (Between("day", date(2013, 1, 1), date(2013, 12, 31)), [2]),
        (Between("at", AT, AT), [2]),
        (InSet("name", ["it's \\ a"]), [2]),
        (InSet('a "b', [True]), [2]),
        (Matches("name", "^it's"), [2]),
        (Holds("n < 3"), [1, 2]),
    ],
    ids=lambda part: part.name if isinstance(part, Rule) else "",
)
def test_a_condition_means_the_same_to_datafusion(tmp_path: Any, rule: Rule, breaks: list[int]) -> None:
    write_deltalake(tmp_path / "t", pa.table({"row": [0, 1, 2], **VALUES}))
    sql = f'SELECT "row" FROM t WHERE ({rule.condition("datafusion")}) IS NOT TRUE ORDER BY "row"'
    rows = pa.table(QueryBuilder().register("t", Table(tmp_path / "t")).execute(sql).read_all())
    assert rows["row"].to_pylist() == breaks


def test_a_set_of_values_is_the_same_rule_in_every_process_and_columns_may_be_named_like_functions() -> None:
    assert InSet("name", {"c", "a", "b"}) == InSet("name", ["a", "b", "c"])  # type: ignore[arg-type]
    assert Holds("known > 1 and `now` < 2").name


def test_bits_of_rules_by_what_they_do() -> None:
    rules = RowRules(
        (NotNull("a"), NotNull("b", on_fail="drop"), Unique("c", on_fail="fail"), Holds("d", on_fail="drop"))
    )
    assert [rules.bits(each) for each in ("warn", "drop", "quarantine", "fail")] == [1, 10, 0, 4]
    assert [rule.name for rule in rules.broken(9)] == ["a_not_null", "d"]
    assert ([bit for bit, _ in rules.alone], [bit for bit, _ in rules.unique]) == ([1, 2, 8], [4])
    assert not rules.quarantines and not RowRules()
