"""Days of a table as partitions: one run for a range, refusals as failures, the newest closed day on a schedule."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from orchestration.location import definitions
from orchestration.slices.definitions import JOB, definitions_of, newest_closed_day
from orchestration.slices.definitions import definitions as slice_definitions
from reprocessing.replay.difference import Difference
from reprocessing.slices.rebuild import SliceReport
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import OffsetsLost, RecourseError, TransientError
from streaming_jobs.examples.flights.streams import airport_hours, flights_clean
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.sliceable import Sliceable, sliceable
from streaming_jobs.settings import Settings

READ = OffsetRange("flights", "t", {0: 0}, {0: 9})
KEY = dg.AssetKey(["slices", "airport_hours"])


class Rebuilds:
    """Notes the ranges that it is asked for, or raises."""

    def __init__(self, error: RecourseError | None = None) -> None:
        self.error, self.asked = error, list[tuple[str, str, str]]()

    def __call__(
        self, _: Settings, made: Sliceable, first: str, after: str, tell: Callable[[str], None]
    ) -> SliceReport:
        tell("at work")
        self.asked.append((made.table.name, first, after))
        if self.error is not None:
            raise self.error
        same = Difference(made.table.name, 53, 55, 3, 5, 0, {}, ())
        return SliceReport(
            "a", made.stream.name, made.table.name, "days", "committed", 4, 5, 99, 0, 0, 2, 1, 0.5, same, READ
        )


def settings(tmp_path: Path) -> Settings:
    return Settings.load({"home": tmp_path})


def run(defs: dg.Definitions, first: str, last: str) -> dg.ExecuteInProcessResult:
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
    with dg.DagsterInstance.ephemeral() as instance:
        return defs.resolve_job_def(JOB).execute_in_process(
            instance=instance, asset_selection=[KEY], tags=tags, raise_on_error=False
        )


def made_of(tmp_path: Path, rebuild: Any) -> dg.Definitions:
    return definitions_of(settings(tmp_path), [sliceable(airport_hours), sliceable(flights_clean)], rebuild)


def test_a_range_of_days_is_one_run_and_each_day_is_materialised(tmp_path: Path) -> None:
    rebuild = Rebuilds()
    result = run(made_of(tmp_path, rebuild), "2013-11-02", "2013-11-04")
    assert result.success and rebuild.asked == [("airport_hours", "2013-11-02", "2013-11-05")]
    events = result.asset_materializations_for_node("slices__airport_hours")
    assert [event.partition for event in events] == ["2013-11-02", "2013-11-03", "2013-11-04"]
    figures = {name: value.value for name, value in events[0].metadata.items()}
    expected = {"rows_before": 53, "rows_after": 55, "corrected": 3, "new": 2, "gone": 0, "late_records": 2}
    assert expected.items() <= figures.items()


@pytest.mark.parametrize("error", [OffsetsLost("they are gone", "bring them back"), TransientError("still open")])
def test_a_refusal_fails_the_run_with_its_words(tmp_path: Path, error: RecourseError) -> None:
    result = run(made_of(tmp_path, Rebuilds(error)), "2013-11-02", "2013-11-02")
    failure = result.failure_data_for_node("slices__airport_hours")
    assert not result.success and failure is not None and failure.user_failure_data is not None
    assert error.found in str(failure.user_failure_data.description)


def test_the_schedule_is_off_and_asks_for_the_newest_closed_day_of_each_table(tmp_path: Path) -> None:
    defs = made_of(tmp_path, Rebuilds())
    schedule = defs.resolve_schedule_def(JOB)
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    with dg.DagsterInstance.ephemeral() as instance:
        noon = datetime(2013, 11, 14, 12, tzinfo=UTC)
        context = dg.build_schedule_context(
            instance=instance, repository_def=defs.get_repository_def(), scheduled_execution_time=noon
        )
        requests = schedule.evaluate_tick(context).run_requests or []
    asked = {str(r.asset_selection[0].path[-1]): r.partition_key for r in requests if r.asset_selection}
    assert asked == {"airport_hours": "2013-11-03", "flights_clean": "2013-11-13"}


def test_a_day_is_closed_by_the_watermark_of_a_stream_that_keeps_up(tmp_path: Path) -> None:
    made, own = sliceable(airport_hours), settings(tmp_path)
    # Its day ends at 05:00 UTC, the last window may end an hour later, the watermark is ten days behind.
    assert newest_closed_day(made, own, datetime(2013, 11, 14, 5, 59, tzinfo=UTC)) == date(2013, 11, 2)
    assert newest_closed_day(made, own, datetime(2013, 11, 14, 6, tzinfo=UTC)) == date(2013, 11, 3)
    less = Settings.load({"home": tmp_path, "streams": {"airport_hours": {"lateness": "1 day"}}})
    assert newest_closed_day(made, less, datetime(2013, 11, 14, 12, tzinfo=UTC)) == date(2013, 11, 12)


def test_the_shipped_tables_have_days_and_a_location_without_slices_has_none(shop: Settings, tmp_path: Path) -> None:
    assert not [job for job in definitions(shop).jobs or [] if job.name == JOB]
    own = shop.model_copy(update={"flows": ["streaming_jobs.examples.flights.streams"]})
    made = slice_definitions(own, Topology.of_settings(own))
    graph = made.resolve_asset_graph()
    assert graph.materializable_asset_keys == {dg.AssetKey(["slices", "flights_clean"]), KEY}
    days = graph.get(KEY).partitions_def
    assert days is not None and days.get_first_partition_key() == "2013-01-01"
    assert made.resolve_job_def(JOB)
