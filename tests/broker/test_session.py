"""The driver process: one stream's failure, a second driver, the JVM of a killed one, and every way to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from streaming_jobs.errors import LeaseBusy
from streaming_jobs.platform.broker import Broker
from streaming_jobs.platform.runtime import ExistingSpark
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.session import Session
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.lease import acquire, holder
from streaming_jobs.state.requests import STOP
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.conftest import QUICK_START, SettingsFactory
from tests.support import ROOT
from tests.support.driver import assert_chained, command, driver, finished, ledger, on_topic, produce, rows
from tests.support.things import plain, thing
from tests.support.waiting import wait_for


@pytest.fixture
def things(settings: SettingsFactory, broker: Broker) -> tuple[Settings, str]:
    """The topic `things` with 500 records."""
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics = Topics.of(made.kafka, bootstrap)
    if topics.describe("things"):
        topics.delete("things")
    topics.create("things", 2)
    produce(bootstrap, "things", map(thing, range(500)))
    return made, bootstrap


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    """Driver processes of a test; those that still live are killed after it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def batches(settings: Settings, stream: str) -> int:
    status = read_status(settings, stream)
    return -1 if status is None or status.batch is None else status.batch


def status(settings: Settings, bootstrap: str) -> dict[str, dict[str, Any]]:
    """The output of `recourse streams status` by stream, for the streams that ran; one of them is red."""
    environment = {
        **os.environ,
        "RECOURSE_HOME": str(settings.home),
        "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
        "RECOURSE_FLOWS": '["tests.support.things"]',
        "PYTHONPATH": str(ROOT),
    }
    done = command(settings.home, environment, "streams", "status", "-o", "json")
    assert done.returncode == 1, done.stderr
    return {each["stream"]: each for each in json.loads(done.stdout)}


def test_one_failure_leaves_the_others_running_and_a_second_driver_is_refused_even_by_a_dying_jvm(
    things: tuple[Settings, str], drivers: list[subprocess.Popen[str]]
) -> None:
    settings, bootstrap = things
    quick = ("--set", "streams.broken.max_restarts=0")
    first = driver(settings, bootstrap, "--streams", "plain,broken,crooked", *quick)
    drivers.append(first)
    waiting = wait_for(lambda: (s := read_status(settings, "plain")) and s.lag_records, "the lag")
    assert waiting == 500, "known before the first batch"
    wait_for(lambda: batches(settings, "plain") >= 0, "the first batch")
    wait_for(lambda: (s := read_status(settings, "broken")) is not None and s.state == "failed", "the failure")
    wait_for(lambda: (s := read_status(settings, "crooked")) is not None and s.state == "failed", "the other one")
    produce(bootstrap, "things", map(thing, range(500, 600)))
    wait_for(lambda: len(rows(settings, "plain")) == 600, "the rows after the failure")
    assert first.poll() is None
    failed = read_status(settings, "broken")
    assert failed is not None and failed.error is not None and "a bug in the function" in failed.error["found"]
    raised = read_status(settings, "crooked")
    assert raised is not None and raised.error is not None and raised.restarts == 1, "the second time it is permanent"
    assert (raised.error["code"], raised.error["permanent"]) == ("REC-027", True)
    assert re.fullmatch(
        r"the stream's function raised ValueError: no place for \d+ \(\S+/tests/support/things.py:\d+\) "
        r"\(batch 0: things partition 0 offsets 0 to \d+, things partition 1 offsets 0 to \d+\)",
        raised.error["found"],
    ), raised.error["found"]

    code, output = finished(driver(settings, bootstrap, "--streams", "plain"))
    assert code == 75 and f"held by process {first.pid}" in output

    owner = holder(settings, "plain")
    assert owner is not None and owner.jvm is not None
    jvm = psutil.Process(owner.jvm)
    jvm.suspend()  # it would be gone in two seconds, and the test too late
    first.kill()
    first.wait(10)
    code, output = finished(driver(settings, bootstrap, "--streams", "plain"))
    assert code == 75 and "the JVM of a driver that was killed" in output
    jvm.resume()
    assert psutil.wait_procs([jvm], timeout=30)[1] == []

    produce(bootstrap, "things", map(thing, range(600, 700)))
    by_stream = status(settings, bootstrap)
    assert (by_stream["plain"]["state"], by_stream["plain"]["lag_records"]) == ("dead", 100), (
        "nobody runs it: the command looks"
    )
    assert by_stream["broken"]["reasons"][0]["word"] == "failed"
    code, output = finished(driver(settings, bootstrap, "--streams", "plain", "--trigger", "available-now"))
    assert code == 0, output[-3000:]
    seen = read_status(settings, "plain")
    assert seen is not None and seen.totals is not None
    assert (seen.rows_written, seen.totals.rows_written, seen.totals.records) == (100, 700, 700)
    assert (seen.lag_records, seen.lag_s) == (0, 0.0)
    assert sorted(row["n"] for row in rows(settings, "plain")) == list(range(700))
    assert_chained(ledger(settings, "plain"))


@pytest.mark.parametrize("how", ["SIGTERM", "marker", pytest.param("stdin", marks=pytest.mark.long)])
def test_a_session_ends_at_a_batch_border(
    things: tuple[Settings, str], drivers: list[subprocess.Popen[str]], how: str
) -> None:
    settings, bootstrap = things
    process = driver(settings, bootstrap, "--streams", "plain", "--supervised")
    drivers.append(process)
    wait_for(lambda: batches(settings, "plain") >= 0, "the first batch")
    marker = settings.state / "plain" / "stop"
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    elif how == "stdin":
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    else:
        marker.touch()
    code, output = finished(process, 60)
    assert code == 0, output[-3000:]
    status = read_status(settings, "plain")
    assert status is not None and status.state == "stopped" and status.error is None
    place = StreamFolder.of(settings, "plain").checkpoint(1)
    assert place.last_planned is not None and place.last_committed is not None
    assert place.last_planned - place.last_committed <= 1
    assert holder(settings, "plain") is None
    if how == "marker":
        code, output = finished(driver(settings, bootstrap, "--streams", "plain", "--respect-stop"), 30)
        assert code == 0 and "stopped on purpose" in output and marker.exists()


def test_a_wrong_name_or_setting_is_a_usage_error(things: tuple[Settings, str]) -> None:
    settings, bootstrap = things
    code, output = finished(driver(settings, bootstrap, "--streams", "nothing"), 30)
    assert code == 2 and "no stream is named 'nothing'" in output
    code, output = finished(driver(settings, bootstrap, "--set", "stream.path=sideways"), 30)
    assert code == 2 and "stream.path (flag)" in output
    code, output = finished(driver(settings, bootstrap, "--trigger", "sometimes"), 30)
    assert code == 2 and "--trigger: 'sometimes' is not a trigger" in output and output.count("sometimes") == 1


def test_a_broker_that_is_not_there_is_a_failure_that_may_pass(things: tuple[Settings, str]) -> None:
    settings, _ = things
    code, output = finished(
        driver(
            settings,
            "127.0.0.1:1",
            "--streams",
            "plain",
            "--set",
            "kafka.timeout=2 s",
            "--set",
            "stream.max_restarts=0",
        )
    )
    assert code == 1 and "REC-012" in output, output[-2000:]


def test_a_commit_that_runs_past_the_stop_deadline_keeps_the_lease_until_it_is_over(
    bench: BenchFactory, topic: str, spark: SparkSession
) -> None:
    """Spark calls the query terminated at once; a second session must not come before the batch is done."""
    quick = {**QUICK_START, "spark.sql.streaming.stopTimeout": "500ms"}
    made = bench({"stream.stop_deadline": "1 s", "spark.extra": quick})
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(50)))
    committing, go_on, after = threading.Event(), threading.Event(), []

    class Slow(SparkQueries):
        def before_commit(self, stream: Stream) -> Callable[[StreamRecord], None]:
            def wait(_: StreamRecord) -> None:
                committing.set()
                assert go_on.wait(120)
                after.append((q := session.running[0].query) is None or q.isActive)

            return wait

    settings = made.settings
    runtime = ExistingSpark(settings, spark)
    session = Session(settings, [on_topic(plain, topic)], runtime=runtime, queries=Slow(settings))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(session.run()))
    thread.start()
    try:
        assert committing.wait(120)
        session.stop_all.set()
        wait_for(lambda: (q := session.running[0].query) is None or not q.isActive, "Spark's word that it has ended")
        for _ in range(20):  # of the session's looks
            with pytest.raises(LeaseBusy):
                acquire(settings, "plain", purpose="session", wait=0.1).release()
        assert not codes
        go_on.set()
        thread.join(60)
        assert codes == [0] and set(after) == {False}, "the batch ran on after Spark had called its query terminated"
        acquire(settings, "plain", purpose="session", wait=0).release()
        assert len(rows(settings, "plain")) == 50
        made.run(on_topic(plain, topic))
        assert len(rows(settings, "plain")) == 50
    finally:
        go_on.set()
        thread.join(60)


FLOW = """
from pyspark.sql import functions as F
from pyspark.sql.types import LongType
from streaming_jobs.stream import DeltaTable, stream
from tests.support.things import THINGS

@F.udf(LongType())
def checked(number):
    {body}

@stream(source=THINGS, sink=DeltaTable("good"))
def good(things):
    return things.select("n")

@stream(source=THINGS, sink=DeltaTable("mended"))
def mended(things):
    return things.select(checked("n").alias("n"))
"""


@pytest.mark.long
def test_streams_run_goes_on_with_corrected_code_and_after_a_recovery(
    things: tuple[Settings, str], drivers: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Only the stream that was corrected or recovered starts again; the other one of its session runs on."""
    settings, bootstrap = things
    (tmp_path / "own_flows.py").write_text(FLOW.format(body="raise ValueError(number)"))
    process = driver(
        settings,
        bootstrap,
        "good",
        "mended",
        flows="own_flows",
        module=["orchestration.cli", "streams", "run"],
        folder=tmp_path,
    )
    drivers.append(process)

    def status(stream: str) -> Status:
        return read_status(settings, stream) or Status(stream)

    def at_work(stream: str, after: float) -> bool:
        now = status(stream)
        return now.started_at > after and now.state in ("running", "idle") and (now.batch or 0) >= 0

    wait_for(lambda: status("mended").state == "failed" and at_work("good", 0), "the failure of one stream")
    first = status("good")
    assert status("mended").error["code"] == "REC-027"  # type: ignore[index]
    (tmp_path / "own_flows.py").write_text(FLOW.format(body="return number"))
    wait_for(lambda: at_work("mended", first.started_at), "the corrected stream")
    wait_for(lambda: len(rows(settings, "mended")) == 500, "the rows of the corrected function")
    assert status("good").pid == first.pid != status("mended").pid, "newer code has a process of its own"

    second = status("mended")
    STOP.ask_for(settings, "mended", "mended-0001")
    wait_for(lambda: status("mended").state == "stopped", "the stop for the recovery")
    assert status("good").state in ("running", "idle")
    (tmp_path / "own_flows.py").write_text(FLOW.format(body="return number + 0"))
    STOP.clear_for(settings, "mended", "mended-0001")
    wait_for(lambda: at_work("mended", second.started_at), "the stream after the recovery")
    assert status("mended").code_version != second.code_version

    third = status("mended")
    STOP.ask_for(settings, "mended", "mended-0002")
    wait_for(lambda: status("mended").state == "stopped", "the stop for the second recovery")
    STOP.clear_for(settings, "mended", "mended-0002")
    wait_for(lambda: at_work("mended", third.started_at), "the stream after the second recovery")
    now = status("good")
    assert (now.pid, now.begun_at, now.restarts) == (first.pid, first.begun_at, 0), "the other one did not stop"
    process.send_signal(signal.SIGTERM)
    code, output = finished(process, 90)
    assert code == 0, output[-3000:]
    assert sorted(row["n"] for row in rows(settings, "mended")) == list(range(500))
