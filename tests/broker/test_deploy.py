"""Start, restart and deploy of one stream of a session, as an operator does it: the other one runs on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestration.cli.demo import Story
from orchestration.cli.live import Freshness
from streaming_jobs.platform.broker import Broker
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import savepoints
from streaming_jobs.state.status import Status, read_status
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.driver import assert_chained, command, driver, finished, ledger, produce, rows
from tests.support.things import thing
from tests.support.waiting import wait_for

FLOW = """
from pyspark.sql import functions as F
from streaming_jobs.stream import DeltaTable, stream
from tests.support.things import THINGS

FACTOR = {factor}

@stream(source=THINGS, sink=DeltaTable("steady"))
def steady(things):
    return things.select("n")

@stream(source=THINGS, sink=DeltaTable("changing"))
def changing(things):
    return things.select("n", (F.col("n") * FACTOR).alias("m"){more})
"""


LARGEST = ', StructField("largest", IntegerType(), True, {"comment": "The largest change"})'


def test_one_stream_is_stopped_started_and_gets_new_code_while_the_other_one_runs_on(
    settings: SettingsFactory, broker: Broker, tmp_path: Path
) -> None:
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics = Topics.of(made.kafka, bootstrap)
    if topics.describe("things"):
        topics.delete("things")
    topics.create("things", 2)
    flow = tmp_path / "deployed_flows.py"
    flow.write_text(FLOW.format(factor=1, more=""))
    sent, enough = [0], threading.Event()

    def feed() -> None:
        while not enough.wait(0.2):
            produce(bootstrap, "things", map(thing, range(sent[0], sent[0] + 20)))
            sent[0] += 20

    def status(stream: str) -> Status:
        return read_status(made, stream) or Status(stream)

    def works(stream: str) -> bool:
        return status(stream).state in ("running", "idle") and (status(stream).batch or 0) >= 1

    environment = {
        **os.environ,
        "RECOURSE_HOME": str(made.home),
        "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
        "RECOURSE_FLOWS": '["deployed_flows"]',
        "PYTHONPATH": str(ROOT),
    }

    def recourse(*arguments: str, code: int = 0) -> Any:
        done = command(tmp_path, environment, *arguments, "-o", "json")
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout) if done.stdout.strip() else done.stderr

    feeder = threading.Thread(target=feed)
    process = driver(
        made,
        bootstrap,
        "steady",
        "changing",
        flows="deployed_flows",
        module=["orchestration.cli", "streams", "run"],
        folder=tmp_path,
    )
    try:
        feeder.start()
        wait_for(lambda: works("steady") and works("changing"), "both streams")
        steady, first = status("steady"), status("changing")

        stopped = recourse("streams", "stop", "changing")
        assert stopped[0]["stopped"]
        (again,) = recourse("streams", "start", "changing")
        assert again["outcome"] == "started" and status("changing").pid == first.pid, "in its session"
        (runs,) = recourse("streams", "start", "changing")
        assert runs["outcome"] == "runs"
        (restarted,) = recourse("streams", "restart", "changing")
        assert restarted["outcome"] == "restarted"
        wait_for(lambda: works("changing"), "its batches")

        flow.write_text(FLOW.format(factor=2, more=", 'k'"))
        wait_for(lambda: status("changing").disk_code, "the notice that other code is on disk")
        assert status("steady").disk_code is None
        plan = recourse("deploy", "--dry-run")
        assert plan["touched"] == ["changing"] and plan["further_processes"] == 1
        (each,) = (s for s in plan["streams"] if s["stream"] == "changing")
        assert each["beside"] == ["steady"] and set(each["changes"]) == {
            "changed: FACTOR",
            "changed: function changing",
        }
        (outcome,) = recourse("deploy", "--yes")["outcomes"]
        assert outcome["result"] == "deployed" and 0 < outcome["stood_still"] < 120
        now = status("changing")
        assert now.code_version.startswith(each["after"]) and now.pid != first.pid
        assert outcome["savepoint"] in {s.id for s in savepoints.savepoints(made, "changing") if s.reason == "code"}
        lines = (made.state / "changing" / "deploys.jsonl").read_text().splitlines()
        assert [(d["from"], d["to"]) for d in map(json.loads, lines)] == [(each["before"], each["after"])]
        assert recourse("deploy", "--yes")["touched"] == [], "it is done"

        flow.write_text("def broken(:\n")
        wait_for(lambda: status("changing").disk_code_error, "the notice that it cannot be loaded")
        shown = {s["stream"]: s for s in recourse("streams", "status")}
        assert "SyntaxError" in shown["changing"]["disk_code_error"] and not shown["steady"]["red"]
        assert "cannot be imported" in recourse("deploy", "--yes", code=2)

        after = status("steady")
        assert (after.pid, after.begun_at, after.restarts) == (steady.pid, steady.begun_at, 0), "it never stopped"
        assert (after.batch or 0) > (steady.batch or 0)
        enough.set()
        feeder.join(30)
        for stream in ("steady", "changing"):
            wait_for(lambda stream=stream: len(rows(made, stream)) >= sent[0], f"the last rows of {stream}")
        process.send_signal(signal.SIGTERM)
        code, output = finished(process, 90)
        assert code == 0, output[-3000:]
        for stream in ("steady", "changing"):
            assert sorted(row["n"] for row in rows(made, stream)) == list(range(sent[0]))
            assert_chained(ledger(made, stream))
        of_code = {row["m"] == row["n"] * 2 for row in rows(made, "changing") if row["k"] is not None}
        assert of_code == {True}, "rows of the new code"
        assert all(row["m"] == row["n"] for row in rows(made, "changing") if row["k"] is None)
    finally:
        enough.set()
        feeder.join(30)
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "killed_at",
    ["", *(pytest.param(point, marks=pytest.mark.long) for point in ("recover_follow_ran", "recover_publish_between"))],
)
def test_state_that_does_not_fit_new_code_is_rebuilt_beside_the_stream(stock: Story, killed_at: str) -> None:
    """The old code serves readers until the new one takes over; killed in between, the same deploy finishes it."""
    story = stock
    story.feed(story.all[:10_000])
    live = story.live(10_000, 100)
    with story.session() as check:
        story.wait(lambda: story.has_read(10_000), "the movements", check)
        steady = read_status(story.settings, "low_stock")
        with live.running():
            text = story.code.read_text()
            for line, more in (
                ('F.max("at").alias("last_at")', ', F.max("change").alias("largest")'),
                ('StructField("last_at", TimestampType(), True, {"comment": "When the last one was"})', LARGEST),
            ):
                assert line in text
                text = text.replace(line, line + more)
            story.code.write_text(text)
            arguments = ["deploy", "--rebuild", "--yes", "--output", "json"]
            if killed_at:
                environment = {**story.environment(), "RECOURSE_CRASH": f"inventory:{killed_at}:0"}
                died = story.command(story.folder, environment, *arguments)
                assert died.returncode == -signal.SIGKILL, died.stderr
            document = json.loads(story.recourse(*arguments, quiet=True))
            story.wait(lambda: story.runs_in(2), "batches of the new code", check)
        story.wait(lambda: story.has_read(live.sent), "the rest", check)
        assert read_status(story.settings, "low_stock").begun_at == steady.begun_at, "it ran on"  # type: ignore[union-attr]
    assert (document["rebuilt"], document["touched"], document["recoveries"]) == (["inventory"], [], ["inventory-0001"])
    (outcome,) = document["outcomes"]
    assert (outcome["stream"], outcome["result"]) == ("inventory", "deployed"), outcome
    story.compare(live.sent, right=True, low_stock=True)
    largest: dict[str, int] = {}
    for movement in story.all[: live.sent]:
        largest[movement.product] = max(movement.change, largest.get(movement.product, movement.change))
    assert {row["product"]: row["largest"] for row in story.rows("inventory")} == largest
    assert 0 < Freshness(live.looks).largest_gap() < 45


def test_what_is_not_there_is_not_started(settings: SettingsFactory, tmp_path: Path) -> None:
    """Neither a session nor Dagster is here: the command says so at once, and what would start the stream."""
    made = settings()
    (tmp_path / "deployed_flows.py").write_text(FLOW.format(factor=1, more=""))
    environment = {
        **os.environ,
        "RECOURSE_HOME": str(made.home),
        "RECOURSE_FLOWS": '["deployed_flows"]',
        "PYTHONPATH": str(ROOT),
    }
    done: subprocess.CompletedProcess[str] = command(tmp_path, environment, "streams", "start", "changing")
    assert done.returncode == 1
    assert "nothing that would start it runs here" in done.stdout and "recourse streams run changing" in done.stdout
