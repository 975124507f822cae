"""The suites of a configuration: found in its modules, checked against its streams, cheap to list."""

from __future__ import annotations

import pytest

from quality import Suite, suite
from quality.expectations import default_name
from quality.suite_set import SuiteSet
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import UsageError
from tests.conftest import SettingsFactory
from tests.support.checked_orders import TOPOLOGY


def nothing() -> list[object]:
    return []


def test_the_shipped_streams_bring_their_suites(settings: SettingsFactory) -> None:
    found = SuiteSet.of_settings(settings(), Topology.of_settings(settings()))
    assert list(found.suites) == ["airport_hours_rows", "carrier_totals_rows", "flights_rows"]


def test_suites_are_found_in_the_modules_of_both_settings(
    settings: SettingsFactory, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("modules")
    text = 'from quality import suite\n@suite(table="orders")\ndef {name}():\n    """Says so."""\n    return []\n'
    stream = "from tests.support.checked_orders import orders\n"
    (folder / "beside_flows.py").write_text(stream + text.format(name="beside"))
    (folder / "elsewhere_suites.py").write_text(text.format(name="elsewhere"))
    monkeypatch.syspath_prepend(str(folder))
    made = settings({"flows": ["beside_flows"], "quality.suites": ["elsewhere_suites"]})
    found = SuiteSet.of_settings(made, Topology.of_settings(made))
    assert {name: (s.table, s.description) for name, s in found.suites.items()} == {
        "beside": ("orders", "Says so."),
        "elsewhere": ("orders", "Says so."),
    }


def test_dead_letters_may_have_a_suite() -> None:
    declared = suite(table="orders_dead_letters")(nothing)
    assert SuiteSet.of([declared], TOPOLOGY).writers[declared.table] == "orders"


@pytest.mark.parametrize(
    ("names", "table", "asked", "words"),
    [
        (["s"], "order", "s", "did you mean 'orders'"),
        (["s", "s"], "orders", "s", "two suites are named s"),
        (["orders_rows"], "orders", "order_rows", "did you mean 'orders_rows'"),
    ],
    ids=["an unknown table names the near one", "two suites of one name", "an unknown suite names the near one"],
)
def test_what_does_not_fit_is_refused(names: list[str], table: str, asked: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        SuiteSet.of([Suite(name, table, nothing) for name in names], TOPOLOGY)[asked]
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "columns", "name"),
    [
        ("expect_column_values_to_be_between", ["dep_delay"], "dep_delay_between"),
        ("expect_column_values_to_not_be_null", ["origin"], "origin_not_null"),
        ("expect_column_values_to_match_regex", ["tailnum"], "tailnum_match_regex"),
        ("expect_column_values_to_not_be_in_set", ["a b"], "a_b_not_in_set"),
        ("expect_column_mean_to_be_between", ["delay"], "delay_mean_between"),
        ("expect_column_to_exist", ["delay"], "delay_exist"),
        ("expect_table_row_count_to_be_between", [], "row_count_between"),
        ("expect_compound_columns_to_be_unique", ["a", "b"], "a_b_compound_columns_unique"),
        ("unexpected_rows_expectation", [], "unexpected_rows_expectation"),
    ],
)
def test_default_names_are_made_of_columns_and_kind(kind: str, columns: list[str], name: str) -> None:
    assert default_name(kind, columns) == name
