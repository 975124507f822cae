"""The columns that a plan uses, from its text; tests/spark/test_used_columns.py reads plans that Spark makes."""

from __future__ import annotations

import pytest

from streaming_jobs.runtime.spark_plan import used_in

FIELDS = ["id", "amount", "kind", "id2"]
SOURCE = "[topic#0, partition#1, offset#2L, timestamp#3, key#4, tombstone#5, _record#6, _bad#7], name=<Unassigned>"
RELATION = f"   +- ~StreamingRelationV2 PythonDataSourceV2@1, kafka-clean-payments, PythonTable@2, [], {SOURCE}"


def plan(*above: str) -> str:
    return "\n".join([*(f"+- ~{line}" for line in above), RELATION])


def test_the_projection_above_the_source_names_the_columns_and_its_uses_the_fields() -> None:
    text = plan("Project [_record#6.id AS id#11L]", "Filter NOT (_record#6.kind = x)", "Project [offset#2L, _record#6]")
    assert used_in(text, "kafka-clean-payments", FIELDS) == {"offset", "_record", "_record.id", "_record.kind"}


def test_a_name_that_begins_another_one_counts_as_used_too() -> None:
    text = plan("Project [_record#6.id2 AS id2#11L]", "Project [_record#6, _bad#7]")
    assert used_in(text, "kafka-clean-payments", FIELDS) == {"_bad", "_record", "_record.id", "_record.id2"}


@pytest.mark.parametrize(
    "use", ["Filter isnotnull(_record#6)", "Project [to_json(_record#6) AS j#9]", "Project [_record#6, _record#6.id]"]
)
def test_a_record_that_is_passed_on_whole_uses_all_of_its_fields(use: str) -> None:
    used = used_in(plan(use, "Project [_record#6]"), "kafka-clean-payments", FIELDS)
    assert used == {"_record", *(f"_record.{name}" for name in FIELDS)}


def test_another_column_of_that_name_and_another_number_are_none_of_its_uses() -> None:
    text = plan("Project [_record#66 AS a#1, _record#6.id AS id#2L]", "Project [_record#6]")
    assert used_in(text, "kafka-clean-payments", FIELDS) == {"_record", "_record.id"}


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


def test_a_name_with_another_end_of_line_in_it_is_found() -> None:
    text = plan("Project [_record#6.a\u2028b AS x#9]", "Project [_record#6, _bad#7]")
    assert used_in(text, "kafka-clean-payments", ["a\u2028b", "id"]) == {"_record", "_bad", "_record.a\u2028b"}


def test_a_field_is_found_however_the_function_spelt_it() -> None:
    text = plan("Filter (_record#6.KIND = x)", "Project [_record#6]")
    assert used_in(text, "kafka-clean-payments", FIELDS) == {"_record", "_record.kind"}
