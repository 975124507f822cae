"""The status of a running stream: its figures come from batches, Spark's reports and the topics' ends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from streaming_jobs.errors import TransientError
from streaming_jobs.runtime.lag import Ends
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.state.status import PHASES, Status, TableAge, first_status, read_status, write_status
from tests.conftest import SettingsFactory
from tests.support.runners import Clock, Make, ended, pipeline_of, progress, queries_of, query_of, reported
from tests.support.worlds import STREAM, TOPIC, Disk, entry


def test_late_rows_are_counted_once_a_batch_although_spark_reports_an_idle_moment_under_the_next_number(
    make: Make,
) -> None:
    running = make()
    query = query_of(running)
    seen = []
    for report in (
        progress(0, dropped=2),
        progress(1, ran=False),
        progress(1, ran=False),
        progress(1, dropped=3),
        progress(1, dropped=3),
    ):
        query.progress = [report]
        running.refresh_status()
        seen.append(running.status.late_rows_dropped)
    assert seen == [2, 2, 2, 5, 5]


def test_late_rows_of_batches_between_two_looks_and_at_the_end_are_counted_too(make: Make) -> None:
    running = make()
    query = query_of(running)
    query.progress = [progress(0, dropped=1)]
    running.refresh_status()
    query.progress += [progress(1, dropped=1), progress(2, dropped=1), progress(3, ran=False), progress(3, dropped=1)]
    running.refresh_status()
    assert running.status.late_rows_dropped == 4
    running = make()
    query_of(running).progress = [progress(0, dropped=1), progress(1, dropped=1)]
    assert ended(running).status.late_rows_dropped == 2


def test_a_stream_in_a_long_batch_is_running_and_one_that_found_nothing_new_or_got_no_batch_for_a_while_is_idle(
    make: Make, clock: Clock
) -> None:
    running, slow = make(), make(trigger="every 10 minutes")

    def state_after(seconds: float, of: StreamRunner = running) -> str:
        clock.now += seconds
        of.refresh_status()
        return of.status.state

    running.status.state = "starting"
    assert state_after(0) == "starting"
    query_of(running).progress = [progress(7, ran=False)]
    assert state_after(0) == "idle"
    pipeline_of(running).in_batch = True
    assert state_after(60) == "running"
    pipeline_of(running).in_batch = False
    running.batch_done(reported(0))
    slow.batch_done(reported(0))
    assert (state_after(0), state_after(60)) == ("running", "idle")
    assert state_after(840, slow) == "running", "a long interval is no reason to be idle"


def test_batches_are_summed_and_a_skipped_one_counts_no_rows_again(make: Make) -> None:
    running = make()
    running.batch_done(reported(0))
    running.batch_done(reported(1, milliseconds=90, version=None, skipped=True, note="mixed batch: odds"))
    status = running.status
    assert (status.batch, status.batch_ms, status.rows_written, status.dead_letters) == (1, 90, 10, 1)
    assert status.warnings == ["mixed batch: odds"]


def test_phases_and_the_ages_of_tables_follow_the_batches_and_outlive_the_session(
    make: Make, clock: Clock, settings: SettingsFactory
) -> None:
    home, running = settings(), make()
    began = clock.now
    assert {name: age.rows_at for name, age in running.status.tables.items()} == {"evens": None, "odds": None}
    running.status.tables["evens"] = replace(running.status.tables["evens"], fresh_within_s=300.0)
    clock.now += 50
    phases = {"read": 0.125, "function": 0.5, "commit": 0.25}
    running.batch_done(replace(reported(0), phase_s=phases))
    running.batch_done(replace(reported(1), phase_s=phases, read_in_plan_s=0.1))
    query_of(running).progress = [progress(1, durationMs={"triggerExecution": 1500, "addBatch": 900})]
    running.refresh_status()
    status = running.status
    of_two = {"plan": 0.5, "read": 0.25, "decode": 0.0, "function": 1.0, "write": 0.0, "commit": 0.5}
    assert (status.batches, status.phase_s) == (2, of_two), "reading that Spark counts as planning counts once"
    assert status.tables["evens"] == TableAge(began, clock.now, 300.0)
    assert status.tables["odds"].rows_at is None, "these batches have no rows for it"
    write_status(home, status)
    assert first_status(home, STREAM).tables == status.tables


def test_a_batch_that_an_earlier_session_has_committed_makes_no_table_fresh_and_counts_in_the_totals_alone(
    make: Make, clock: Clock
) -> None:
    running = make()
    running.batch_done(reported(0))
    before = running.status.tables["evens"]
    clock.now += 50
    running.batch_done(reported(1, skipped=True))
    status = running.status
    assert (status.tables["evens"], status.batches) == (before, 1)
    assert status.totals is not None and (status.totals.batch, status.totals.records) == (1, 30)


def test_lag_is_the_one_of_now_while_a_batch_runs_and_before_the_first_one(make: Make, clock: Clock) -> None:
    """From the topic's end, not from Spark's last report: 47,000 records came, and no batch has ended since."""
    running = make()
    looks = queries_of(running).seen
    looks.append(Ends(clock.now, {TOPIC: {0: 100, 1: 50}}))
    running.live.position = {TOPIC: {0: 90, 1: 50}}
    running.refresh_status()
    assert (running.status.batch, running.status.lag_records, running.status.lag_at) == (None, 10, clock.now)
    running.batch_done(reported(6))
    looks.append(Ends(clock.now + 2, {TOPIC: {0: 47_105, 1: 50}}))
    pipeline_of(running).in_batch = True
    running.refresh_status()
    assert running.status.lag_records == 47_050
    assert running.status.lag_partitions == {TOPIC: {"0": 47_000, "1": 50}}


def test_a_stream_between_two_tries_has_no_rates_and_upkeep_that_was_put_off_is_a_warning_until_it_succeeds(
    make: Make,
) -> None:
    running = make()
    query_of(running).progress.append(progress(7))
    upkeep: Any = SimpleNamespace(name="evens", put_off={"compaction": "compaction was put off: full"})
    pipeline_of(running).upkeep = [upkeep]
    running.refresh_status()
    running.refresh_status()
    assert running.status.warnings == ["compaction was put off: full"]
    upkeep.put_off = {}
    running.refresh_status()
    assert running.status.warnings == []
    query_of(running).progress.append(progress())
    running.batch_done(reported(7))
    running.refresh_status()
    assert running.status.processed_rows_per_s == 125.0
    running.query = None
    running.refresh_status()
    assert (running.status.input_rows_per_s, running.status.processed_rows_per_s) == (None, None)


def test_the_rate_of_a_batch_leaves_the_pause_after_it_out(make: Make) -> None:
    """Spark counts the two seconds that the stream waits at a trickle as part of the batch."""
    running = make()
    reports = query_of(running).progress
    running.batch_done(reported(7))  # 15 records in 120 ms
    reports.append(progress(7, processedRowsPerSecond=7.1))
    running.refresh_status()
    assert running.status.processed_rows_per_s == 125.0
    running.batch_done(reported(8, milliseconds=1, skipped=True))
    running.batch_done(replace(reported(9), entry=replace(reported(9).entry, offsets=())))
    running.refresh_status()
    assert running.status.processed_rows_per_s == 125.0, "neither a repetition nor a batch without records has one"
    reports.append(progress(10, ran=False, processedRowsPerSecond=0.0))
    running.refresh_status()
    assert running.status.processed_rows_per_s == 0.0, "nothing comes"


def test_totals_and_the_last_error_outlive_the_session(make: Make, settings: SettingsFactory) -> None:
    disk = Disk(settings()).open().run(0, 1, 2)
    before = first_status(disk.settings, STREAM)
    assert (before.generation, before.batch) == (1, 2), "known before Spark has started"
    assert before.totals is not None
    counted = before.totals.records
    assert counted == sum(r.records for b in range(3) for r in entry(b, "evens").offsets)
    running = make()
    running.status.totals = before.totals
    running.status.generation = 1
    running.fail(TransientError("the broker went away", "wait"))
    running.batch_done(reported(3))
    running.batch_done(reported(3, skipped=True))
    assert running.status.rows_written == 10, "rows since this session began"
    write_status(disk.settings, running.status)
    disk.run(3)  # the ledger has the batch as well
    after = first_status(disk.settings, STREAM)
    assert after.totals is not None
    assert (after.totals.batch, after.totals.records, after.totals.dead_letters) == (3, counted + 15, 1)
    assert (after.rows_written, after.error) == (0, None)
    assert after.last_error is not None and after.last_error["found"] == "the broker went away"


def test_a_batch_of_an_earlier_session_makes_no_stream_idle_before_its_first_one(make: Make, clock: Clock) -> None:
    running = make()
    running.status.state, running.status.batch, running.status.committed_at = "starting", 41, clock.now - 500
    running.status.started_at = clock.now - 20
    running.refresh_status()
    assert running.status.state == "starting"


def test_after_the_clock_was_set_back_ages_are_counted_from_then_on(make: Make, clock: Clock) -> None:
    running = make()
    status = running.status
    status.started_at = status.committed_at = status.progress_at = clock.now + 3600
    running.beat()
    assert (status.started_at, status.committed_at, status.progress_at) == (clock.now,) * 3
    assert status.begun_at is None
    clock.now += 400
    running.beat()
    assert status.heartbeat - status.started_at == 400, "a stream that hangs since is found"


def test_phases_of_an_earlier_version_are_read_and_the_next_session_begins_with_those_of_now(
    settings: SettingsFactory,
) -> None:
    home, before = settings(), {"plan": 1.0, "compute": 2.0, "commit": 3.0}
    write_status(home, Status(STREAM, phase_s=before))
    seen = read_status(home, STREAM)
    assert seen is not None and seen.phase_s == before
    assert first_status(home, STREAM).phase_s == dict.fromkeys(PHASES, 0.0)
