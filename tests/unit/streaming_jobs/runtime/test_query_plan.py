"""What is read off a stream's plan: state, rows that multiply, columns that are used, a changed meaning of the state.

plans.json holds analysed plans as Spark 4.2 prints them, of small streams that differ in one thing each: `w` is
a rate stream with a watermark and the key k = value % 3. tests/spark/test_used_columns.py reads plans that Spark makes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streaming_jobs.runtime.batch_hooks import choose_path
from streaming_jobs.runtime.output_plans import output_of
from streaming_jobs.runtime.spark_plan import (
    INPUT,
    MULTIPLIED,
    comparable,
    fingerprint_of,
    has_wall_clock,
    parameters_read,
    traits_of,
)
from streaming_jobs.runtime.state_changes import classified, differences
from streaming_jobs.runtime.used_columns import used_in
from streaming_jobs.settings import StreamSettings

PLANS = {
    name: "\n".join(lines) for name, lines in json.loads(Path(__file__).with_name("plans.json").read_text()).items()
}

CTE_TWICE = PLANS.pop("cte_twice")
"""A table expression that is joined with itself."""

STATELESS = (
    "select",
    "join_static",
    "join_static_agg",
    "explode",
    "map_pandas",
    "map_arrow",
    "observe",
    "union",
    "cte",
    "cte_static",
    "by_batch",
)
STATEFUL = tuple(name for name in PLANS if name not in STATELESS)
MULTIPLYING = (
    "join_static",
    "join_static_agg",
    "join_streams",
    "explode",
    "map_pandas",
    "map_arrow",
    "state_pandas",
    "cte_static",
    "by_batch",
    "hops",
    "hops_slide",
    "hops_length",
    "hops_offset",
    "exploded",
    "exploded_otherwise",
    "rollup",
    "cube",
)


@pytest.mark.parametrize("name", PLANS)
def test_every_operator_of_a_plan_its_state_and_whether_it_multiplies_rows_are_read_off_it(name: str) -> None:
    """Only state has a fingerprint, which is without generated ids."""
    traits, fingerprint = traits_of(PLANS[name]), fingerprint_of(PLANS[name])
    assert (traits.stateful, traits.multiplies, traits.unknown) == (name in STATEFUL, name in MULTIPLYING, ())
    assert traits.may_keep_state == traits.stateful == bool(fingerprint)
    assert not set("#~").intersection("".join(fingerprint.values()))
    assert "more fields" not in PLANS[name], "the recorded plan is whole"


def test_a_table_expression_that_is_used_twice_may_keep_state_although_its_source_is_shown_once() -> None:
    joined = traits_of(CTE_TWICE)
    assert joined.may_keep_state and joined.unknown == ("CTERelationRef",)
    path = choose_path(StreamSettings(), joined, records=1, bytes_per_record=1, died_before=False)
    assert path == "executor"


@pytest.mark.parametrize(
    ("kind", "more", "null_keys"),
    [
        ("Inner", "", ()),
        ("LeftOuter", "", ()),
        ("FullOuter", "", ("account = account",)),
        ("FullOuter", " AND isnotnull(account#1)", ()),
        ("FullOuter", " AND isnotnull(account#7)", ()),
        ("FullOuter", " AND isnotnull(account#12)", ("account = account",)),
    ],
)
def test_the_keys_under_which_a_full_outer_join_matches_null_with_null_are_named(
    kind: str, more: str, null_keys: tuple[str, ...]
) -> None:
    condition = f"(((account#1 = account#7) AND (at#8-T60000ms >= at#2-T60000ms)){more})"
    plan = f"~Join {kind}, {condition}\n:- ~StreamingRelationV2 a\n+- ~StreamingRelationV2 b"
    assert traits_of(plan).joins_streams and traits_of(plan).null_keys == null_keys
    assert not traits_of(plan.replace("+- ~S", "+- S")).joins_streams, "a join with a static table"


@pytest.mark.parametrize("name", ["select", "sum", "explode"])
def test_an_operator_that_is_not_known_may_keep_state_and_takes_the_executors(name: str) -> None:
    """Also one of a later Spark that merely begins like a plain one."""
    plan = f"~RememberThings [k#1], 7\n+- ~ProjectTwice [k#1]\n   +- {PLANS[name]}"
    traits = traits_of(plan)
    assert traits.unknown == ("ProjectTwice", "RememberThings")
    assert traits.may_keep_state
    assert (traits.stateful, traits.multiplies) == (name in STATEFUL, name in MULTIPLYING)
    path = choose_path(StreamSettings(), traits, records=1, bytes_per_record=1, died_before=False)
    assert path == "executor"
    static = plan.replace("~RememberThings", "RememberThings")
    assert traits_of(static).unknown == ("ProjectTwice",), "what works on a static table keeps no state"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sum", "max"),  # Spark runs on silently: the state has the same type
        ("sum", "by_k_mod_5"),
        ("window10", "window20"),
        ("window10", "session"),
        ("window10", "record"),
        ("sum", "window10"),
        ("dedup", "dedup_wm"),
        ("sum", "two_step_key"),
        ("wide", "wide_last_max"),  # only the 30th column differs
        ("processor", "processor_by_value"),  # a key of the same type
        ("processor", "processor_by_two"),
        ("hops", "hops_slide"),
        ("hops", "hops_length"),
        ("hops", "hops_offset"),
        ("exploded", "exploded_otherwise"),
        ("rollup", "cube"),
    ],
)
def test_another_aggregation_grouping_or_window_is_another_fingerprint(before: str, after: str) -> None:
    assert fingerprint_of(PLANS[before]) != fingerprint_of(PLANS[after])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sum", "sum_other_lateness"),
        ("sum", "sum_after_filter"),
        ("sum", "sum_then_rename"),
        ("dedup", "distinct"),
        ("record", "record_wider"),  # a field more in the record, which the aggregation does not use
        ("processor", "processor_wider"),  # the same of a processor, which gets every column
    ],
)
def test_what_does_not_touch_the_state_keeps_the_fingerprint(before: str, after: str) -> None:
    assert differences(fingerprint_of(PLANS[before]), fingerprint_of(PLANS[after])) == ""


@pytest.mark.parametrize("name", ["hops", "exploded", "cube"])
def test_a_fingerprint_from_before_multiplied_keys_were_noted_still_compares(name: str) -> None:
    now = fingerprint_of(PLANS[name])
    stored = {key: text for key, text in now.items() if key != MULTIPLIED}
    assert stored != now and differences(stored, now) == differences(now, stored) == ""
    assert differences({"0": "Aggregate [j], [j]"}, now)


def test_an_unbalanced_bracket_in_a_text_leaves_a_stable_fingerprint() -> None:
    for plan, old, new in (("exploded", ", -, -1", ", [, -1"), ("cube", "[timestamp", "[[, timestamp")):
        odd = fingerprint_of(changed(plan, old, new))
        assert odd == fingerprint_of(changed(plan, old, new)) and odd["0"] == fingerprint_of(PLANS[plan])["0"]


def test_the_sources_that_a_plan_reads_are_in_the_order_in_which_it_reads_them() -> None:
    leaf = "~StreamingRelationV2 PythonDataSourceV2, kafka-s-{0}, PythonTable, [], [topic#1]"
    plan = "\n".join(["~Union", *(f"+- {leaf.format(name)}" for name in ("b", "a", "b"))])
    assert parameters_read(plan) == ["b", "a"]
    for unknown in ("~CTERelationDef 0, false", "~StreamingRelationV2 RateStreamProvider, rate, [], [value#1]"):
        assert parameters_read(f"{plan}\n+- {unknown}") == []


def changed(plan: str, old: str, new: str) -> str:
    assert old in PLANS[plan]
    return PLANS[plan].replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("g(k#2L, value#1L)", "g(k#2L, value#1L, more#3L)", True),
        ("[k#69L, value#70L]", "[k#69L, value#70L, more#71L]", True),
        ("g(k#2L", "f(k#2L", False),
        ("[StructField(c,", "[StructField(d,", False),
        (", [k#2L],", ", [value#1L],", False),
        ("cast(3 as bigint)", "cast(5 as bigint)", False),
        ("NoTimeout", "EventTimeTimeout", False),
    ],
)
def test_a_function_with_state_of_its_own_is_known_by_its_keys_and_its_state(old: str, new: str, *, same: bool) -> None:
    other = fingerprint_of(changed("state_pandas", old, new))
    assert (differences(fingerprint_of(PLANS["state_pandas"]), other) == "") is same


def test_a_processor_is_known_by_its_name_its_state_and_its_modes() -> None:
    totals = "processor Totals; value total: struct<n:bigint>"
    first = fingerprint_of(PLANS["processor"], [totals])
    assert first["0"] == (
        f"TransformWithStateInPySpark [k], Append, EventTime; (value % cast(3 as bigint)) AS k; {totals}"
    )
    for declared in ("processor Sums; value total: struct<n:bigint>", "processor Totals; value total: struct<n:int>"):
        words = differences(first, fingerprint_of(PLANS["processor"], [declared]))
        assert f"new: {next(part for part in declared.split('; ') if part not in totals)}" in words
    for other in (changed("processor", "EventTime, p", "NoTime, p"), changed("processor", "Append", "Update")):
        assert differences(first, fingerprint_of(other, [totals]))
    assert differences(first, fingerprint_of(changed("processor", "python_row", "pandas"), [totals])) == ""


def test_timers_of_the_wall_clock_are_read_off_the_plan() -> None:
    assert not any(traits_of(plan).wall_clock for plan in PLANS.values())
    assert traits_of(changed("processor", "Append, EventTime", "Append, ProcessingTime")).wall_clock
    assert traits_of(changed("state_pandas", "NoTimeout", "ProcessingTimeTimeout")).wall_clock
    named = changed("processor", "k#66L", "ProcessingTime#66L")
    assert not traits_of(named).wall_clock, "a column of that name"
    for name, mode in (("processor", ("EventTime", "ProcessingTime")), ("state_pandas", ("No", "ProcessingTime"))):
        of_event_time, of_the_wall = fingerprint_of(PLANS[name]), fingerprint_of(changed(name, *mode))
        assert (has_wall_clock(of_event_time), has_wall_clock(of_the_wall)) == (False, True)


def test_a_semi_join_of_streams_is_read_off_the_plan() -> None:
    assert not any(traits_of(plan).semi_joins for plan in PLANS.values())
    assert traits_of(changed("join_streams", "Join Inner", "Join LeftSemi")).semi_joins
    assert not traits_of(changed("join_static", "Join Inner", "Join LeftSemi")).semi_joins, "that keeps no state"


def test_what_the_function_reads_itself_is_read_off_the_plan() -> None:
    assert not any(traits_of(plan).unrecorded for plan in PLANS.values()), "rows of the code are no such thing"
    lookup = "\n      +- RelationV2[code#1, label#2] lookup-s-names lookup-s-names"
    assert traits_of(PLANS["join_static"] + lookup).unrecorded == ()
    itself = "\n      +- Relation [code#1,label#2] csv"
    assert traits_of(PLANS["join_static"] + itself).unrecorded == ("csv",)


FIRST_SCHEME = {
    "processor": "TransformWithStateInPySpark transformWithStateUDF(timestamp, value, k), 1, [k, n], Append, "
    "EventTime, python_row, false, 0",
    "state_pandas": "FlatMapGroupsInPandasWithState g(k, value), [k], [k, value], [StructField(c,LongType,true)], "
    "Update, NoTimeout; (value % cast(3 as bigint)) AS k",
    "by_batch": "FlatMapGroupsInPandas [k], <lambda>(timestamp, value, k), [timestamp, value, k]; "
    "(value % cast(3 as bigint)) AS k",
}


@pytest.mark.parametrize("name", FIRST_SCHEME)
def test_fingerprints_that_homes_have_from_the_first_scheme_still_compare(name: str) -> None:
    stored, now = {"0": FIRST_SCHEME[name]}, fingerprint_of(PLANS[name], ["processor Totals"])
    assert differences(stored, now) == differences(now, stored) == ""
    behind = {**stored, "1": "Aggregate [k], [k, sum(n) AS s]"}
    assert differences(behind, fingerprint_of(PLANS["sum"]))
    if name == "by_batch":
        assert comparable({"0": FIRST_SCHEME[name], "1": "Aggregate [k], [k]"}, {"0": "Aggregate [k], [k]"}) == (
            {"0": "Aggregate [k], [k]"},
            {"0": "Aggregate [k], [k]"},
        )
    else:
        other = {"0": FIRST_SCHEME[name].replace("[k, ", "[j, ")}
        assert differences(other, now) and differences(now, other)


def test_what_emit_and_aggregates_differ_in_is_told() -> None:
    counts = fingerprint_of(PLANS["sum"])
    assert differences({**counts, "emit": "update"}, {**counts, "emit": "close"}) == "emit: update -> close"
    assert differences(counts, {**counts, "emit": "close"}) == ""
    old = {"0": "Aggregate [k], [k, sum(value) AS s]; value AS k"}
    new = {"0": "Aggregate [k], [k, sum(value) AS s, max(amount) AS m]; value AS k"}
    assert differences(old, new) == "new: max(amount) AS m"
    assert differences(new, old) == "gone: max(amount) AS m"
    assert differences(old, {}) == "there was state, and now there is none"
    assert differences({}, new) == "there was no state, and now there is"


@pytest.mark.parametrize(
    ("plan", "replaced", "same"),
    [
        ("window10", {"#39": "#1039", "#2L": "#1002L", "#34L": "#7L"}, True),  # generated ids
        ("window10", {"-T10000ms": "-T1200000ms", "10 seconds": "20 minutes"}, True),  # another lateness
        ("two_step_key", {"cast(3 as bigint)": "cast(5 as bigint)"}, False),  # what a key is made of, two steps back
    ],
)
def test_the_fingerprint_has_what_a_key_is_made_of_and_neither_ids_nor_lateness(
    plan: str, replaced: dict[str, str], *, same: bool
) -> None:
    text = PLANS[plan]
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    assert (fingerprint_of(text) == fingerprint_of(PLANS[plan])) is same


def test_a_plan_that_cannot_be_taken_apart_still_has_a_stable_fingerprint() -> None:
    odd = PLANS["sum"].replace("(value#1L % cast(3 as bigint))", "concat(value#1L, a), ](b")
    assert fingerprint_of(odd) == fingerprint_of(odd) != {}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("window10", "window20", "window of timestamp: 10 minutes -> 20 minutes"),
        ("sum", "max", "sum(value) AS s -> max(value) AS s"),
        ("sum", "by_k_mod_5", "k: value % 3 -> value % 5"),
        ("dedup", "dedup_wm", "Deduplicate -> DeduplicateWithinWatermark"),
        ("window10", "session", "gone: window of timestamp, 10 minutes"),
        ("window10", "session", "new: session_window of timestamp"),
        ("two_step_key", "sum", "new: sum(value) AS s"),
        ("hops", "hops_slide", "window of timestamp: 10 minutes each 5 minutes -> 10 minutes each 2 minutes"),
        ("hops", "hops_length", "window of timestamp: 10 minutes each 5 minutes -> 20 minutes each 5 minutes"),
        ("hops", "window10", "new: window of timestamp, 10 minutes"),
        ("exploded", "exploded_otherwise", "e: explode(split(cast(k as string), -, -1)), false"),
        ("rollup", "cube", "spark_grouping_id: 0 and "),
    ],
)
def test_what_differs_between_two_states_is_told_in_a_line(before: str, after: str, words: str) -> None:
    changes = differences(fingerprint_of(PLANS[before]), fingerprint_of(PLANS[after]))
    assert words in changes, changes
    assert len(changes) < 300 and "precisetimestampconversion" not in changes


@pytest.mark.parametrize("before", STATEFUL)
def test_of_any_two_states_that_differ_something_is_told(before: str) -> None:
    for after, plan in PLANS.items():
        old, new = fingerprint_of(PLANS[before]), fingerprint_of(plan)
        first, second = comparable(old, new)
        assert bool(differences(old, new)) == (first != second), after
        assert len(differences(old, new)) < 1_000


SOURCE = """~Project [_record#9.k AS k#10, _record#9.n AS n#11L, struct(offset, offset#3L) AS _source#12]
+- ~Filter NOT _bad#8
   +- ~Project [value#1, _record#9, _bad#8]
      +- ~StreamingRelationV2 kafka, [value#1, partition#2, offset#3L]"""


def over_source(*nodes: str) -> str:
    """A plan of these nodes over the source's own."""
    above = [f"{'   ' * depth}+- {node}" if depth else node for depth, node in enumerate(nodes)]
    return "\n".join([*above, *(f"{'   ' * len(nodes)}+- {line}" for line in SOURCE.splitlines())])


@pytest.mark.parametrize(
    ("nodes", "added", "position"),
    [
        (
            ["~Project [k#10, _source#12.partition AS part#20, _source#12.offset AS off#21L]"],
            ["Project"],
            ["part", "off"],
        ),
        (
            [
                "~Filter (n#11L > 3)",
                "~Project [p#22 AS part#24, o#23L AS off#25L, k#10]",
                "~Project [k#10, n#11L, cast(_source#12.partition as bigint) AS p#22, _source#12.offset AS o#23L]",
            ],
            ["Filter", "Project"],
            ["part", "off"],
        ),
        (["~Project [k#10, (_source#12.offset + 1) AS off#21L, _source#12.partition AS part#20]"], ["Project"], None),
        (["~Aggregate [k#10], [k#10, count(1) AS c#30L]"], ["Aggregate"], None),
    ],
)
def test_what_a_plan_makes_of_a_record_is_read_off_it(
    nodes: list[str], added: list[str], position: list[str] | None
) -> None:
    assert output_of(over_source(*nodes), [SOURCE]) == {"nodes": added, "position": position}


FIELDS = ["id", "amount", "kind", "id2"]
COLUMNS = "[topic#0, partition#1, offset#2L, timestamp#3, key#4, tombstone#5, _record#6, _bad#7], name=<Unassigned>"
RELATION = f"   +- ~StreamingRelationV2 PythonDataSourceV2@1, kafka-clean-payments, PythonTable@2, [], {COLUMNS}"


def plan(*above: str) -> str:
    return "\n".join([*(f"+- ~{line}" for line in above), RELATION])


def test_the_columns_and_fields_that_the_plan_uses_are_found_however_a_name_begins_ends_or_is_spelt() -> None:
    text = plan("Project [_record#6.id AS id#11L]", "Filter NOT (_record#6.kind = x)", "Project [offset#2L, _record#6]")
    assert used_in(text, "kafka-clean-payments", FIELDS) == {"offset", "_record", "_record.id", "_record.kind"}
    text = plan("Project [_record#66 AS a#1, _record#6.id AS id#2L]", "Project [_record#6]")
    assert used_in(text, "kafka-clean-payments", FIELDS) == {"_record", "_record.id"}
    text = plan("Project [_record#6.id2 AS id2#11L]", "Project [_record#6, _bad#7]")
    assert used_in(text, "kafka-clean-payments", FIELDS) == {"_bad", "_record", "_record.id", "_record.id2"}
    text = plan("Project [_record#6.a\u2028b AS x#9]", "Project [_record#6, _bad#7]")
    assert used_in(text, "kafka-clean-payments", ["a\u2028b", "id"]) == {"_record", "_bad", "_record.a\u2028b"}
    text = plan("Filter (_record#6.KIND = x)", "Project [_record#6]")
    assert used_in(text, "kafka-clean-payments", FIELDS) == {"_record", "_record.kind"}


@pytest.mark.parametrize(
    "use", ["Filter isnotnull(_record#6)", "Project [to_json(_record#6) AS j#9]", "Project [_record#6, _record#6.id]"]
)
def test_a_record_that_is_passed_on_whole_uses_all_of_its_fields(use: str) -> None:
    used = used_in(plan(use, "Project [_record#6]"), "kafka-clean-payments", FIELDS)
    assert used == {"_record", *(f"_record.{name}" for name in FIELDS)}


@pytest.mark.parametrize(
    "text",
    [
        RELATION,
        plan("Project [offset#2L]") + "\n" + plan("Project [offset#2L]"),
        plan("Project [offset#2L]").replace("kafka-clean-payments", "kafka-clean-orders"),
        plan("Project [offset#2L]").replace(", name=", ", called="),
    ],
    ids=["no line above", "twice", "another source", "another text"],
)
def test_what_does_not_look_as_expected_uses_all_columns(text: str) -> None:
    assert used_in(text, "kafka-clean-payments", FIELDS) is None


@pytest.mark.parametrize("above", ["Filter NOT _bad#7", "Project [offset#2L, (partition#1 + 1) AS p#9]"])
def test_without_a_plain_projection_all_columns_are_used_and_the_fields_that_are_named(above: str) -> None:
    columns = {"topic", "partition", "offset", "timestamp", "key", "tombstone", "_record", "_bad"}
    named = plan("Project [_record#6.kind AS kind#9, named_struct(offset, offset#2L) AS _source#10]", above)
    assert used_in(named, "kafka-clean-payments", FIELDS) == columns | {"_record.kind"}
    whole = plan("Project [_record#6 AS r#9]", above)
    assert used_in(whole, "kafka-clean-payments", FIELDS) == columns | {f"_record.{name}" for name in FIELDS}


@pytest.mark.parametrize(
    ("before", "after", "refusal", "kind"),
    [
        ({}, {}, "", "harmless"),
        ({"0": "Aggregate [k]", INPUT: "a"}, {"0": "Aggregate [k]", INPUT: "a"}, "", "harmless"),
        ({"0": "Aggregate [k]", INPUT: "a"}, {"0": "Aggregate [k]", INPUT: "b"}, "", "state fits"),
        ({"0": "Aggregate [k]"}, {"0": "Aggregate [k]", INPUT: "b"}, "", "state fits"),
        ({"0": "Aggregate [k]", INPUT: "a"}, {"0": "Aggregate [k]", INPUT: "a"}, "types", "state has to be rebuilt"),
        ({"0": "Aggregate [k]", INPUT: "a"}, {"0": "Aggregate [j]", INPUT: "a"}, "", "state has to be rebuilt"),
        ({}, {"0": "Aggregate [k]", INPUT: "a"}, "", "state has to be rebuilt"),
        ({"0": "Aggregate [k]", INPUT: "a"}, {}, "", "state has to be rebuilt"),
    ],
)
def test_the_class_of_a_change_follows_from_both_fingerprints_and_from_what_spark_refuses(
    before: dict[str, str], after: dict[str, str], refusal: str, kind: str
) -> None:
    assert classified(before, after, refusal).kind == kind


def test_a_join_with_a_table_keeps_no_state_and_an_earlier_fingerprint_with_it_still_equals_todays() -> None:
    today = {"0": "Aggregate [k]", "1 lookup": "Join Inner"}
    formerly, without = {"0": "Aggregate [k]", "1": "Join Inner"}, {"0": "Aggregate [k]"}
    assert differences(formerly, {**today, "1 lookup": "Join LeftOuter"}), "an earlier scheme does not tell them apart"
    assert not differences({**today, "1 lookup": "Join LeftOuter"}, today)
    assert not differences(formerly, today) and not differences(without, today)
