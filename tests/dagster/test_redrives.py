"""The job `redrive`: one run is one redrive, a refusal fails it with its words, the schedule is off at first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg

from orchestration.bundle.job import Bundle
from orchestration.redrives.definitions import JOB, STEP, RedriveConfig, definitions, nightly
from reprocessing.redrive.redrive import RedriveReport
from streaming_jobs import DeltaTable, Holds, Json, KafkaSink, KafkaTopic, Slices, Stream
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.redriven import RedrivenRecord
from streaming_jobs.state import stream_record
from tests.support.days import declared


def rows(orders: Any) -> Any:
    return orders


TOPIC = KafkaTopic("orders", value=Json({"id": "int"}))
RULES = {"orders": [Holds("id > 0", on_fail="quarantine")]}
ORDERS = Stream("orders", rows, {"orders": TOPIC}, {"orders": DeltaTable("orders")}, rules=RULES)
OUT = Stream("out", rows, {"orders": TOPIC}, {"out": KafkaSink(KafkaTopic("copied", value=Json({"id": "int"})))})
SUMS = Stream("sums", rows, {"orders": TOPIC}, {"sums": DeltaTable("sums")})
HOURS = declared(Slices("at", reach="1 hour"))
NEW = Stream("new", rows, {"orders": TOPIC}, {"new": DeltaTable("new")})
STREAMS = Topology({"orders": ORDERS, "out": OUT, "sums": SUMS, "days": HOURS, "new": NEW})


def run(tmp_path: Path, error: RecourseError | None, **config: Any) -> tuple[dg.ExecuteInProcessResult, list[Any]]:
    asked: list[Any] = []

    def redrive(_: Settings, stream: Stream, chosen: RedriveConfig, tell: Callable[[str], None]) -> RedriveReport:
        tell("at work")
        asked.append((stream.name, chosen.quarantine, chosen.offsets, chosen.dry_run))
        if error is not None:
            raise error
        record = RedrivenRecord("orders", 0, 5, "malformed_json", "dead again")
        return RedriveReport(stream.name, "orders_dead_letters", "committed", (record,), {"orders": 3}, id="r")

    settings = Settings.load({"home": tmp_path})
    defs = definitions(settings, STREAMS, Bundle("shop", "default", (), tmp_path), dg.in_process_executor, redrive)
    with dg.DagsterInstance.ephemeral() as instance:
        wanted = {"ops": {STEP: {"config": config}}}
        return defs.resolve_job_def(JOB).execute_in_process(wanted, instance=instance, raise_on_error=False), asked


def test_a_run_is_one_redrive_with_its_numbers(tmp_path: Path) -> None:
    result, asked = run(tmp_path, None, stream="orders", offsets=["orders/0"], dry_run=True)
    assert result.success and asked == [("orders", False, ["orders/0"], True)]
    (output,) = [event for event in result.all_events if event.is_successful_output]
    figures = {name: value.value for name, value in output.step_output_data.metadata.items()}
    assert {"outcome": "committed", "records_dead_again": 1, "rows_orders": 3}.items() <= figures.items()


def test_a_refusal_fails_the_run_with_its_words(tmp_path: Path) -> None:
    result, _ = run(tmp_path, UsageError("it keeps state", "recover it"), stream="orders")
    failure = result.failure_data_for_node(STEP)
    assert not result.success and failure is not None and failure.user_failure_data is not None
    assert "it keeps state" in str(failure.user_failure_data.description)


def test_the_schedule_is_off_and_names_what_can_be_redriven(tmp_path: Path) -> None:
    settings = Settings.load({"home": tmp_path})
    for name, state in (("orders", {}), ("out", {}), ("sums", {"aggregate": "sum"}), ("days", {"aggregate": "sum"})):
        stream_record.save(settings, replace(stream_record.first(name), state_fingerprint=state))
    defs = definitions(settings, STREAMS, Bundle("shop", "default", (), tmp_path), dg.in_process_executor)
    schedule = defs.resolve_schedule_def(JOB)
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    wanted = [{"stream": "orders"}, {"stream": "orders", "quarantine": True, "table": "orders"}, {"stream": "days"}]
    assert list(nightly(settings, STREAMS)) == wanted
    with dg.DagsterInstance.ephemeral() as instance:
        now = datetime(2026, 11, 26, 3, 30, tzinfo=UTC)
        context = dg.build_schedule_context(instance, scheduled_execution_time=now)
        requests = schedule.evaluate_tick(context).run_requests or []
    assert [request.run_key for request in requests] == [
        "2026-11-26-orders-",
        "2026-11-26-orders-orders",
        "2026-11-26-days-",
    ]
