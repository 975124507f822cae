"""Days that lack late records in Dagster: the job, its schedule, and the check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import dagster as dg
import pytest

from orchestration.bundle.job import Bundle
from orchestration.slices.late import CHECK, JOB, STEP, LateConfig, definitions, verdict
from reprocessing.replay.difference import Difference
from reprocessing.slices import late
from reprocessing.slices.late import LateDay, LateReport, State
from reprocessing.slices.rebuild import SliceReport
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import PreflightRefused, RecourseError
from streaming_jobs.examples.flights.streams import airport_hours, flights_clean
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.sliceable import sliceable
from streaming_jobs.settings import Settings
from streaming_jobs.stream import DeltaTable, Stream

READ = OffsetRange("flights", "t", {0: 0}, {0: 9})
TABLE = airport_hours.primary
assert isinstance(TABLE, DeltaTable)
KEPT = replace(airport_hours, sinks={"airport_hours": replace(TABLE, late_rows="keep")})
STREAMS = Topology({"airport_hours": KEPT, "flights_clean": flights_clean})


class Rebuilds:
    """Notes the streams that it is asked for, or raises."""

    def __init__(self, error: RecourseError | None = None) -> None:
        self.error, self.asked = error, list[tuple[str, int]]()

    def __call__(self, _: Settings, stream: Stream, most: int, tell: Callable[[str], None]) -> list[LateReport]:
        tell("at work")
        self.asked.append((stream.name, most))
        if self.error is not None:
            raise self.error
        same = Difference("airport_hours", 53, 55, 3, 5, 0, {}, ())
        rebuilt = SliceReport(
            "a", stream.name, "airport_hours", "days", "committed", 4, 5, 9, 0, 0, 2, 1, 0.5, same, READ
        )
        return [LateReport("airport_hours", (rebuilt,), (lacking(6, "open"), lacking(7, "lost")))]


def lacking(day: int, state: State = "to rebuild") -> LateDay:
    at = datetime(2013, 11, 2, 9, tzinfo=UTC)
    return LateDay(date(2013, 11, day), 3, at, at, state)


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> list[LateDay]:
    """The days that lack late records, by their files."""
    found = [lacking(2), lacking(6, "open")]
    monkeypatch.setattr(late, "late_days", lambda *_: found)
    return found


def made_of(tmp_path: Path, rebuild: Rebuilds | None = None, streams: Topology = STREAMS) -> dg.Definitions:
    bundle = Bundle("shop", "default", (), tmp_path)
    return definitions(Settings.load({"home": tmp_path}), streams, bundle, dg.in_process_executor, rebuild)


def run(defs: dg.Definitions, config: dg.RunConfig) -> dg.ExecuteInProcessResult:
    with dg.DagsterInstance.ephemeral() as instance:
        return defs.resolve_job_def(JOB).execute_in_process(instance=instance, run_config=config, raise_on_error=False)


def test_a_run_says_what_it_has_rebuilt_and_which_days_are_left(tmp_path: Path) -> None:
    rebuild = Rebuilds()
    config = dg.RunConfig(ops={STEP: LateConfig(stream="airport_hours", max_days=7)})
    result = run(made_of(tmp_path, rebuild), config)
    assert result.success and rebuild.asked == [("airport_hours", 7)]
    [output] = [event.step_output_data for event in result.all_events if event.is_successful_output]
    figures = {name.removeprefix("airport_hours_"): value.value for name, value in output.metadata.items()}
    of_days = {"days_left": 0, "days_open": 1, "days_lost": 1}
    assert figures == {"slices": 1, "rows_corrected": 3, "rows_new": 2, **of_days}


def test_a_refusal_fails_the_run_with_its_words(tmp_path: Path) -> None:
    config = dg.RunConfig(ops={STEP: LateConfig(stream="airport_hours")})
    result = run(made_of(tmp_path, Rebuilds(PreflightRefused("a recovery is under way", "wait"))), config)
    failure = result.failure_data_for_node(STEP)
    assert not result.success and failure is not None and failure.user_failure_data is not None
    assert "a recovery is under way" in str(failure.user_failure_data.description)


def test_the_schedule_is_off_and_asks_for_streams_with_closed_days_unless_a_run_is_under_way(
    tmp_path: Path, days: list[LateDay]
) -> None:
    defs = made_of(tmp_path, Rebuilds())
    schedule = defs.resolve_schedule_def(JOB)
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    with dg.instance_for_test() as instance:
        now = datetime(2013, 11, 14, 12, 15, tzinfo=UTC)
        context = dg.build_schedule_context(instance=instance, scheduled_execution_time=now)
        [request] = schedule.evaluate_tick(context).run_requests or []
        assert request.run_key == "2013-11-14T12-airport_hours"
        assert request.run_config["ops"][STEP]["config"] == {"stream": "airport_hours", "max_days": 31}
        days[:] = [lacking(6, "open"), lacking(7, "lost")]
        assert not schedule.evaluate_tick(context).run_requests
        days[:] = [lacking(2)]
        instance.create_run_for_job(
            defs.resolve_job_def(JOB), run_config=request.run_config, status=dg.DagsterRunStatus.STARTED
        )
        busy = schedule.evaluate_tick(context)
        assert not busy.run_requests and busy.skip_message == f"job {JOB} is still at work"


def test_the_check_is_yellow_while_days_lack_late_records(tmp_path: Path, days: list[LateDay]) -> None:
    settings, made = Settings.load({"home": tmp_path}), sliceable(KEPT)
    found = verdict(settings, made)
    assert not found.passed and found.severity is dg.AssetCheckSeverity.WARN
    assert "2 days of airport_hours from 2013-11-02 to 2013-11-06" in found.text
    assert "recourse late rebuild airport_hours" in found.text
    figures = {name: value.value for name, value in found.figures.items()}
    assert {"days_to_rebuild": 1, "days_open": 1, "days_lost": 0, "late_records": 6}.items() <= figures.items()
    days.clear()
    assert verdict(settings, made).passed


def test_only_tables_that_keep_late_records_have_the_check(tmp_path: Path) -> None:
    [checks] = made_of(tmp_path).asset_checks or []
    assert isinstance(checks, dg.AssetChecksDefinition)
    assert set(checks.check_keys) == {dg.AssetCheckKey(dg.AssetKey(["airport_hours"]), CHECK)}
    assert not made_of(tmp_path, streams=Topology({"airport_hours": airport_hours})).jobs
