"""A recovery from Dagster's Launchpad, with real processes: planned, killed with its run, continued, taken back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from orchestration.cli.demo import BAD, Story
from orchestration.local_dagster.processes import DagsterProcesses
from orchestration.recoveries.launchpad import LAUNCHPAD
from orchestration.sessions.ownership import PLAN_TAG, STAGE_TAG, WORKER_TAG
from reprocessing.plan.journal import journal_of
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.stock import movements
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.lease import holder
from streaming_jobs.state.requests import STOP
from streaming_jobs.state.status import read_status
from tests.dagster.live import LiveDagster
from tests.support import ROOT
from tests.support.stories import with_a_bug

COUNT = 4_000
JOBS = Path(__file__).parent / "fakes" / "stock.yml"


@dataclass
class Live(LiveDagster):
    """A running Dagster over the streams of the story, half of whose movements were read by wrong code."""

    story: Story

    def launch(self, fields: Mapping[str, Any]) -> str:
        return self.client.launch("recover", LAUNCHPAD.run_config(fields))

    def ended(self, run_id: str) -> str:
        return (
            self.wait_for(
                lambda: (status := self.client.status(run_id)) in ("SUCCESS", "FAILURE", "CANCELED") and status,
                f"the end of run {run_id}",
            )
            or ""
        )

    def tags(self, run_id: str) -> dict[str, str]:
        (run,) = [run for run in self.client.runs("recover") if run["runId"] == run_id]
        return {tag["key"]: tag["value"] for tag in run["tags"]}

    def quantities(self) -> dict[str, int]:
        return {row["product"]: row["quantity"] for row in self.story.rows("inventory")}

    def at_work(self, stream: str = "inventory") -> bool:
        """True if a session runs the stream."""
        owner, status = holder(self.settings, stream), read_status(self.settings, stream)
        at_work = owner is not None and owner.purpose == "session" and status is not None and status.pid == owner.pid
        return bool(at_work and status and status.state in ("running", "idle") and status.lag_records == 0)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    home = tmp_path_factory.mktemp("stock")
    machine = Settings.load({"home": str(home)})
    with Broker(machine) as broker, pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        story = Story(home, machine, broker.start(), COUNT)
        patch.syspath_prepend(str(story.code.parent))
        tell(story)
        yield from running(story)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])]
    assert not left


def tell(story: Story) -> None:
    """The story up to the point where the bug is corrected."""
    story.begin()
    with_a_bug(story)


def running(story: Story, batch: int = 100) -> Iterator[Live]:
    """Dagster over the story; a replay has many batches of so many records, so that it can be caught in one."""
    flags = {
        **{name: text for name, text in story.environment().items() if name.startswith(("RECOURSE_", "PYTHON"))},
        "RECOURSE_JOBS": str(JOBS),
        "RECOURSE_DAGSTER__PORT": "0",
        "RECOURSE_SPARK__DRIVER_MEMORY_MB": "700",
        "RECOURSE_SPARK__MASTER": "local[2]",
        "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": str(batch),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, text in flags.items():
            if name.startswith("RECOURSE_"):
                patch.setenv(name, text)
        settings = Settings.load()
        with DagsterProcesses(settings, flags, module="tests.dagster.fakes.quick") as processes:
            yield Live(settings, processes, story)
        assert not processes.pids


def said(live: Live, run_id: str) -> str:
    """Everything that the run's log says."""
    with live.stored() as stored:
        return "\n".join(entry.user_message or entry.message or "" for entry in stored.all_logs(run_id))


def results(live: Live, run_id: str) -> Mapping[str, dg.MetadataValue]:
    """The metadata of the run's output."""
    with live.stored() as stored:
        events = [entry.dagster_event for entry in stored.all_logs(run_id) if entry.dagster_event]
    (output,) = [event.step_output_data for event in events if event.is_successful_output]
    return output.metadata


def marks(live: Live, table: str) -> list[dict[str, Any]]:
    """The marks of recoveries on a table, newest first."""
    with live.stored() as stored:
        records = stored.fetch_observations(dg.AssetKey(table), limit=20).records
        found = [record.asset_observation.metadata for record in records if record.asset_observation]
    return [{name: entry.value for name, entry in each.items()} for each in found if "recovery" in each]


def test_a_recovery_is_planned_killed_with_its_run_continued_and_taken_back(live: Live) -> None:
    live.wait_for(live.at_work, "the session")
    wrong = live.quantities()
    right = {product: quantity for product, (quantity, *_) in movements.inventory(live.story.all).items()}
    assert wrong != right

    with pytest.raises(UsageError, match="inventry"):
        live.launch({"do": "plan", "streams": ["inventry"], "target": {"to_batch": 0}})
    planned = live.launch({"do": "plan", "streams": ["inventory"], "target": {"before_first_bad": BAD}})
    assert live.ended(planned) == "SUCCESS", said(live, planned)
    plan = live.tags(planned)[PLAN_TAG]
    assert "What will happen" in said(live, planned) and f"do: apply, plan: {plan}" in said(live, planned)
    assert live.at_work() and not marks(live, "inventory")

    applied = live.launch({"do": "apply", "plan": plan})
    live.wait_for(lambda: live.tags(applied).get(STAGE_TAG) == "4 of 8: replay", "the replay")
    live.wait_for(lambda: "records, " in said(live, applied), "its progress")
    assert marks(live, "inventory")[0]["recovery"].startswith(f"under recovery by plan {plan}")
    owner = holder(live.settings, "inventory")
    assert owner is not None and owner.purpose == f"recovery {plan}"
    worker = int(live.tags(applied)[WORKER_TAG].split(":")[1])
    assert psutil.Process(owner.pid).ppid() == worker
    os.kill(worker, signal.SIGKILL)
    live.wait_for(lambda: not psutil.pid_exists(owner.pid), "the end of the recovery's process")
    assert live.ended(applied) == "FAILURE"
    assert journal_of(live.settings, plan).outcome == "applying" and live.quantities() == wrong
    live.wait_for(
        lambda: any(f"recover resume {plan}" in reason for reason in live.skips("keepalive_stock")),
        "keepalive's advice",
    )
    assert not live.at_work() and live.at_work("low_stock")

    resumed = live.launch({"do": "apply", "plan": plan})
    assert live.ended(resumed) == "SUCCESS", said(live, resumed)
    assert "was begun and is not over" in said(live, resumed)
    assert live.quantities() == right and live.tags(resumed)[STAGE_TAG] == "published"
    document = results(live, resumed)["corrections"].value
    assert (document["plan"], document["streams"][0]["generation"]) == (plan, {"before": 1, "after": 2})
    mark = marks(live, "inventory")[0]
    assert (mark["recovery"], mark["generation"]) == (f"recovered by plan {plan}", "2")
    assert sum(record.data["records"] for record in mark["recovered_offsets"].records) == COUNT // 2
    live.wait_for(live.at_work, "the stream again")
    assert not STOP.asked(live.settings, "inventory")

    undone = live.launch({"do": "undo", "plan": plan})
    assert live.ended(undone) == "SUCCESS", said(live, undone)
    assert live.quantities() == wrong
    record = stream_record.load(live.settings, "inventory")
    assert record is not None and record.generation == 3
    live.wait_for(live.at_work, "the stream again")


@pytest.mark.long
def test_a_run_that_is_killed_while_its_replay_follows_stops_nothing_and_is_continued(live: Live) -> None:
    live.wait_for(live.at_work, "the session")
    begun = read_status(live.settings, "inventory")
    planned = live.launch({"do": "plan", "streams": ["inventory"], "target": {"to_earliest": True}})
    assert live.ended(planned) == "SUCCESS", said(live, planned)
    plan = live.tags(planned)[PLAN_TAG]
    applied = live.launch({"do": "apply", "plan": plan})
    live.wait_for(lambda: "follow" in live.tags(applied).get(STAGE_TAG, ""), "the replay beside the stream")
    live.wait_for(lambda: "records, " in said(live, applied), "its progress")
    os.kill(int(live.tags(applied)[WORKER_TAG].split(":")[1]), signal.SIGKILL)
    assert live.ended(applied) == "FAILURE"
    now = read_status(live.settings, "inventory")
    assert live.at_work() and begun is not None and now is not None and now.begun_at == begun.begun_at
    assert not STOP.asked(live.settings, "inventory")
    resumed = live.launch({"do": "apply", "plan": plan})
    assert live.ended(resumed) == "SUCCESS", said(live, resumed)
    assert journal_of(live.settings, plan).outcome == "published"
    assert live.quantities() == {
        product: quantity for product, (quantity, *_) in movements.inventory(live.story.all).items()
    }
    live.wait_for(live.at_work, "the stream again")
