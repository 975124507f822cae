"""The check `rules`: what it says of the counts of row rules, and that it is told when it changes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest

from orchestration.quality.rules import RECENT, RuleChecks, RuleCount, RuledTable, counts_in, verdict
from streaming_jobs.declare.rules import NotNull, RowRules
from streaming_jobs.errors import RuleBroken
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.row_rules import refuse

NOW = 1_000_000.0
ORDERS = RuledTable("orders", "orders", ("customer_not_null",))


def count(total: int, ago: float | None = 60, on_fail: str = "quarantine") -> RuleCount:
    return RuleCount(total, None if ago is None else NOW - ago, on_fail)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counts", "passed", "severity", "mark"),
    [
        ({}, True, "ERROR", "well"),
        ({"a": count(0, None)}, True, "ERROR", "well"),
        ({"a": count(3, RECENT + 1)}, True, "ERROR", "well"),
        ({"a": count(3), "b": count(0, None)}, False, "WARN", "broken: a"),
        ({"a": count(3, on_fail="warn"), "b": count(9, on_fail="drop")}, False, "WARN", "broken: a, b"),
        ({"a": count(3), "b": count(1, on_fail="fail")}, False, "ERROR", "broken: a, b"),
    ],
)
def test_the_verdict(counts: Mapping[str, RuleCount], passed: bool, severity: str, mark: str) -> None:
    outcome = verdict("orders", counts, NOW)
    assert (outcome.passed, outcome.severity.value, outcome.mark) == (passed, severity, mark)


def test_the_words_say_how_many_rows_and_where_they_are_and_the_totals_are_plotted() -> None:
    outcome = verdict("orders", {"a": count(3), "b": count(1200, on_fail="drop"), "c": count(5, 9e9)}, NOW)
    assert outcome.text == (
        "rows of the last hour broke 2 of 3 rules: b: 1,200 so far, dropped; a: 3 so far, in orders_quarantine"
    )
    assert outcome.figures["rows that broke a rule"] == dg.MetadataValue.int(1208)
    assert outcome.figures["broke c"] == dg.MetadataValue.int(5)


def test_the_sensor_reports_a_change_once_and_counts_that_cannot_be_read_are_red() -> None:
    found: dict[str, RuleCount] = {"customer_not_null": RuleCount(0)}

    def counts(settings: Settings, stream: str, table: str, /) -> Mapping[str, RuleCount]:
        assert (stream, table) == ("orders", "orders")
        if not found:
            raise OSError("status.json is damaged")
        return found

    checks = RuleChecks([ORDERS], Settings(), counts)
    (sensor,) = checks.definitions().sensors or ()
    assert isinstance(sensor, dg.SensorDefinition)
    with dg.DagsterInstance.ephemeral() as instance:

        def tick() -> list[tuple[bool, str]]:
            result = sensor(dg.build_sensor_context(instance=instance))
            assert isinstance(result, dg.SensorResult)
            for event in result.asset_events:
                instance.report_runless_asset_event(event)
            return [(e.passed, e.severity.value) for e in result.asset_events]  # type: ignore[union-attr]

        assert tick() == [(True, "ERROR")]
        assert tick() == []
        found["customer_not_null"] = RuleCount(2, time.time(), "quarantine")
        assert tick() == [(False, "WARN")]
        assert tick() == []
        found.clear()
        assert tick() == [(False, "ERROR")]


def test_a_person_can_execute_it_and_tables_without_rules_have_none() -> None:
    checks = RuleChecks([ORDERS], Settings(), lambda *_: {"customer_not_null": RuleCount(0)})
    with dg.DagsterInstance.ephemeral() as instance:
        look = dg.define_asset_job("look", dg.AssetSelection.all_asset_checks())
        table = dg.Definitions(assets=[dg.AssetSpec("orders")], jobs=[look])
        defs = dg.Definitions.merge(table, checks.definitions())
        done = defs.resolve_job_def("look").execute_in_process(instance=instance)
        (evaluation,) = done.get_asset_check_evaluations()
        assert (evaluation.asset_check_key, evaluation.passed) == (ORDERS.key(checks.settings), True)
    none = RuleChecks([], Settings(), lambda *_: {})
    assert none.definitions() == dg.Definitions()


def test_an_error_is_that_of_the_rule_and_the_table_that_it_names() -> None:
    import pyarrow as pa

    rules = RowRules((NotNull("id", on_fail="fail"), NotNull("order_id", on_fail="fail")))
    with pytest.raises(RuleBroken) as broken:
        refuse("orders", rules, pa.table({"order_id": pa.nulls(1)}), [0, 2], [])
    error = {"code": broken.value.code, "found": broken.value.found}
    status = cast("Any", SimpleNamespace(totals=None, error=error))
    assert {name: each.total for name, each in counts_in(status, "orders", rules).items()} == {
        "id_not_null": 0,
        "order_id_not_null": 1,
    }
    assert not any(each.total for each in counts_in(status, "more_orders", rules).values())
