"""The suites of the flights: the failing rows of the year are those that pandas counts from the package's data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from quality.examples import flights as suites
from quality.runs.runner import RunRequest, run_suite
from quality.validation import CheckOutcome, Validation
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.examples.flights import dataset, streams
from streaming_jobs.examples.flights.truth import truth
from streaming_jobs.settings import Settings

pytestmark = pytest.mark.slow

TOPOLOGY = Topology.of([streams.flights_clean, streams.airport_hours, streams.carrier_totals])
SUITES = {
    "flights_clean": suites.flights_rows,
    "airport_hours": suites.airport_hours_rows,
    "carrier_totals": suites.carrier_totals_rows,
}


def arrow(table: str) -> pa.Table:
    from pyspark.sql.pandas.types import to_arrow_schema

    schema = to_arrow_schema(getattr(streams, table.upper()), timezone="UTC")
    return pa.Table.from_pandas(truth(table)[schema.names], schema=schema, preserve_index=False)


@pytest.fixture(scope="module")
def validations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Validation]]:
    settings = Settings.load({"home": tmp_path_factory.mktemp("flights")})
    done = {}
    for table, suite in SUITES.items():
        rows = arrow(table)
        DeltaTable.create(settings.tables / table, schema=rows.schema)
        write_deltalake(settings.tables / table, rows, mode="append")
        done[table] = run_suite(settings, TOPOLOGY, replace(suite, checks=()), RunRequest(docs=False))
    dataset.release()
    yield done


def failing(validation: Validation) -> dict[str, tuple[str, int | None]]:
    return {o.expectation: (o.severity, o.failing) for o in validation.outcomes if not o.passed}


@pytest.mark.parametrize("table", SUITES)
def test_each_suite_has_ten_expectations_and_the_critical_ones_hold(
    validations: dict[str, Validation], table: str
) -> None:
    validation = validations[table]
    assert len(validation.outcomes) >= 10 and not validation.broken
    assert not [outcome for outcome in validation.outcomes if outcome.error]


def test_flights_that_fail_are_counted_as_the_package_has_them(validations: dict[str, Validation]) -> None:
    raw = dataset.read("flights.csv.zip")
    flew = raw["dep_time"].notna()
    registered = re.compile(suites.REGISTRATION)
    tails = raw["tailnum"].dropna()
    assert failing(validations["flights_clean"]) == {
        "departed_has_arrival": ("warning", int((flew & raw["arr_delay"].isna()).sum())),
        "tailnum_not_null": ("warning", int(raw["tailnum"].isna().sum())),
        "dep_delay_usual": ("warning", int(((raw["dep_delay"] < -15) | (raw["dep_delay"] > 600)).sum())),
        "tailnum_is_a_registration": ("info", int((~tails.map(lambda t: bool(registered.match(t)))).sum())),
    }
    outcome = outcome_of(validations["flights_clean"], "cancelled_has_no_departure")
    assert (outcome.rows, outcome.failing) == (int((~flew).sum()), 0)


def test_hours_that_fail_are_counted_as_the_package_has_them(validations: dict[str, Validation]) -> None:
    raw = dataset.read("flights.csv.zip")
    hours = raw.groupby(["time_hour", "origin"]).agg(
        n=("flight", "size"), mean=("dep_delay", "mean"), greatest=("dep_delay", "max")
    )
    assert failing(validations["airport_hours"]) == {
        "mean_dep_delay_not_null": ("warning", int(hours["mean"].isna().sum())),
        "mean_delay_under_an_hour": ("warning", int((hours["mean"] > 60).sum())),
        "no_delay_over_ten_hours": ("warning", int((hours["greatest"] > 600).sum())),
        "more_than_one_flight": ("info", int((hours["n"] < 2).sum())),
    }


def test_carriers_that_fail_are_counted_as_the_package_has_them(validations: dict[str, Validation]) -> None:
    flights = dataset.read("flights.csv.zip")["carrier"].value_counts()
    few = sorted(str(carrier) for carrier in flights[flights < 500].index)
    assert failing(validations["carrier_totals"]) == {"enough_flights_for_a_mean": ("info", len(few))}
    sample = outcome_of(validations["carrier_totals"], "enough_flights_for_a_mean").sample
    assert sorted(row["carrier"] for row in sample) == few
    assert outcome_of(validations["carrier_totals"], "flights_sum_between").number == flights.sum()


def outcome_of(validation: Validation, name: str) -> CheckOutcome:
    return next(outcome for outcome in validation.outcomes if outcome.expectation == name)
