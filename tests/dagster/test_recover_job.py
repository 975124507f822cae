"""The run of a recovery: how it ends, in which words, and that its process ends with it. Fake process, no Spark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
import psutil
import pytest

from orchestration.recoveries.events import ChangedTable, Ended, Event, Failed, OffsetSpan, PlanShown, encode
from orchestration.recoveries.launchpad import LAUNCHPAD
from orchestration.sessions.ownership import KIND_TAG, PLAN_TAG, RECOVERY_KIND, STAGE_TAG
from reprocessing.plan.journal import journal_of
from reprocessing.stages.recovery import StageBegun
from streaming_jobs.settings import Settings
from tests.dagster.fakes.execute import execute
from tests.dagster.fakes.recover_worker import recover
from tests.support import ROOT
from tests.support.waiting import wait_for

PLAN = "orders-0001"
SHOWN = PlanShown(PLAN, f"Plan {PLAN}: rewind", "batch 3", ["orders"], "/nowhere", 900)
REPLAY = StageBegun(4, 8, "replay", "orders", "replay 900 records")
CHANGE = ChangedTable("orders", 60, 60, 30, 0, 0, ["30 corrected"])
PUBLISHED = Ended(PLAN, "published", {"orders": 2}, [OffsetSpan("orders", "t", 0, 100, 1000)])
REFUSED = Failed("REC-030", "3 rows break the rule id > 0", f"give it up: recourse recover abort {PLAN}")
APPLY = {"do": "apply", "plan": PLAN}

pytestmark = pytest.mark.usefixtures("quick")


def script(settings: Settings, *lines: Event | str) -> None:
    """What the process will do."""
    texts = [line if isinstance(line, str) else encode(line).decode().strip() for line in lines]
    (settings.home / "script").write_text("\n".join(texts))


def pids(settings: Settings) -> list[int]:
    """The processes that were started."""
    path = settings.home / "recoveries_begun"
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def launched(settings: Settings, stored: dg.DagsterInstance, fields: Mapping[str, Any]) -> dg.DagsterRun:
    run = execute(recover(settings), stored, run_config=LAUNCHPAD.run_config(fields))
    assert not any(psutil.pid_exists(pid) for pid in pids(settings))
    return run


def errors(stored: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """All that the run's page shows of a failure."""
    entries = [entry.dagster_event for entry in stored.all_logs(run.run_id) if entry.dagster_event]
    failures = [event.step_failure_data for event in entries if event.is_step_failure]
    ends = [event.message or "" for event in entries if event.is_run_failure]
    return "\n".join([*(failure.error_display_string for failure in failures), *ends])


def test_a_recovery_that_publishes_is_a_run_that_succeeds_with_all_that_is_known(
    shop: Settings, stored: dg.DagsterInstance
) -> None:
    script(shop, SHOWN, REPLAY, CHANGE, PUBLISHED)
    run = launched(shop, stored, APPLY)
    assert run.is_success
    assert (run.tags[PLAN_TAG], run.tags[STAGE_TAG]) == (PLAN, "published")
    assert recover(shop).tags[KIND_TAG] == RECOVERY_KIND
    (output,) = [
        entry.dagster_event.step_output_data
        for entry in stored.all_logs(run.run_id)
        if entry.dagster_event and entry.dagster_event.is_successful_output
    ]
    assert {"outcome", "plan", "plan_text", "changed_rows", "recovered_offsets", "next_steps"} <= output.metadata.keys()
    event = stored.get_latest_materialization_event(dg.AssetKey("orders"))
    assert event is not None and event.asset_materialization is not None and event.run_id == ""
    assert event.asset_materialization.metadata["generation"].value == "2"
    assert "of a library" in (shop.logs / "recovery-orders.log").read_text(), "what libraries print is in the log"


def test_a_refusal_is_a_failed_run_in_readable_words_without_a_stack_trace(
    shop: Settings, stored: dg.DagsterInstance
) -> None:
    script(shop, SHOWN, REPLAY, CHANGE, REFUSED, "exit 78")
    journal_of(shop, PLAN).write("audit", "failed", {"error": REFUSED.found})
    run = launched(shop, stored, APPLY)
    assert run.status is dg.DagsterRunStatus.FAILURE
    words = errors(stored, run)
    assert "REC-030 3 rows break the rule id > 0" in words and f"next: {REFUSED.next}" in words
    assert f"in the Launchpad: check again: do: resume, plan: {PLAN}" in words
    assert "Traceback" not in words and 'File "' not in words
    assert run.tags[STAGE_TAG] == "refused in replay"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do": "apply"}, "do: apply needs a plan's id"),
        ({"do": "apply", "plan": "../x"}, "'../x' is not the name of a plan"),
        ({"do": "plan", "target": {"to_batch": 1}}, "no stream was given"),
    ],
)
def test_a_launch_that_makes_no_sense_starts_no_process(
    shop: Settings, stored: dg.DagsterInstance, fields: Mapping[str, Any], words: str
) -> None:
    run = launched(shop, stored, fields)
    assert words in errors(stored, run) and not pids(shop)


@pytest.mark.parametrize(("end", "words"), [("die", "was killed (-9, perhaps out of memory)"), ("exit 1", "code 1")])
def test_a_process_that_says_nothing_at_its_end_is_a_failed_run_with_its_log(
    shop: Settings, stored: dg.DagsterInstance, end: str, words: str
) -> None:
    script(shop, SHOWN, REPLAY, end)
    journal_of(shop, PLAN).write("replay", "begun")
    run = launched(shop, stored, APPLY)
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert words in errors(stored, run) and f"continue it: do: resume, plan: {PLAN}" in errors(stored, run)
    mark = stored.fetch_observations(dg.AssetKey("orders"), limit=1).records[0].asset_observation
    assert mark is not None and f"plan {PLAN} is not over" in str(mark.metadata["recovery"].value)


def test_stop_interrupts_the_process_and_the_run_is_canceled(shop: Settings, stored: dg.DagsterInstance) -> None:
    script(shop, SHOWN, REPLAY, "wait")
    journal_of(shop, PLAN).write("replay", "begun")

    def stop() -> None:
        run = stored.get_runs(limit=1)[0]
        stored.report_run_canceling(run)
        os.kill(os.getpid(), signal.SIGINT)  # what Dagster's terminate does in a run worker

    run = meanwhile(shop, stored, stop)
    assert run.status is dg.DagsterRunStatus.CANCELED
    line = [e.message for e in stored.all_logs(run.run_id) if "stopped on request" in (e.message or "")][-1]
    assert line == (
        f"stopped on request; plan {PLAN}, in stage replay; continue it: do: resume, plan: {PLAN}; "
        f"give it up: do: abort, plan: {PLAN}"
    )


def meanwhile(settings: Settings, stored: dg.DagsterInstance, act: Callable[[], None]) -> dg.DagsterRun:
    """Run the job here, and `act` when its stage has begun."""
    problems: list[BaseException] = []

    def do() -> None:
        try:
            wait_for(lambda: (r := stored.get_runs(limit=1)) and "replay" in r[0].tags.get(STAGE_TAG, ""), "the stage")
            act()
        except BaseException as error:  # noqa: BLE001
            problems.append(error)
            for pid in pids(settings):
                os.kill(pid, signal.SIGKILL)  # or the job would go on for ever

    thread = threading.Thread(target=do)
    thread.start()
    run = launched(settings, stored, APPLY)
    thread.join()
    assert not problems, problems
    return run


def test_kill_9_of_the_worker_ends_the_process_too(shop: Settings, stored: dg.DagsterInstance) -> None:
    script(shop, SHOWN, REPLAY, "wait")
    environment = {**os.environ, "DAGSTER_HOME": str(shop.dagster_home), "PYTHONPATH": str(ROOT)}
    worker = subprocess.Popen([sys.executable, "-m", "tests.dagster.fakes.recover_worker"], env=environment)
    try:
        (pid,) = wait_for(lambda: pids(shop), "the process")
    finally:
        worker.kill()
        worker.wait()
    wait_for(lambda: not psutil.pid_exists(pid), "the end of the process")
