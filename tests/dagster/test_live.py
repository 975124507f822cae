"""Dagster's real code server, webserver and daemon over the real session, broker and flights: killed one by one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
from deltalake import DeltaTable

from orchestration.local_dagster.processes import CODE_SERVER, DAEMON, WEBSERVER, DagsterProcesses
from streaming_jobs.errors import SetupError
from streaming_jobs.examples.flights.feeder import feed
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import Owner, holder
from streaming_jobs.state.status import Status, read_status
from tests.dagster.live import LiveDagster, selector
from tests.support import ROOT

JOB = "flights"
STREAMS = ("flights_clean", "airport_hours", "carrier_totals")
SHARE = 0.02


class Live(LiveDagster):
    """Dagster over the session of the flights."""

    def state(self) -> object:
        return self.runs()

    def runs(self) -> list[tuple[str, str]]:
        """The job's runs, newest first; none while the webserver cannot answer."""
        try:
            return [(run["runId"], run["status"]) for run in self.client.runs(JOB)]
        except Exception:  # noqa: BLE001
            return []

    def driver(self) -> Owner | None:
        """The holder of the leases; all streams have one driver or none."""
        owners = {owner.pid: owner for name in STREAMS if (owner := holder(self.settings, name))}
        assert len(owners) <= 1, f"two drivers: {owners}"
        return next(iter(owners.values()), None)

    def status(self, stream: str = "flights_clean") -> Status | None:
        return read_status(self.settings, stream)

    def session_at_work(self, other_than: str = "") -> str | None:
        """The id of a started run whose driver has caught up."""
        for run_id, status in self.runs()[:1]:
            seen = self.status()
            if status == "STARTED" and run_id != other_than and seen and seen.run_id == run_id and self.driver():
                return run_id if seen.state in ("running", "idle", "starting") and self.statuses_of(run_id) else None
        return None

    def statuses_of(self, run_id: str) -> bool:
        """True if every stream of the run has started its query (its generation is written then)."""
        statuses = [self.status(name) for name in STREAMS]
        return all(s and s.run_id == run_id and s.generation for s in statuses)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def live(home: Path) -> Iterator[Live]:
    flags: dict[str, Any] = {
        "home": str(home),
        "dagster.port": "0",
        "dagster.observe_every": "2 seconds",
        "dagster.materialize_every": "2 seconds",
        "dagster.stale_after": "10 seconds",
        "quality.every": "1 minute",
        "spark.driver_memory_mb": "700",
        "spark.master": "local[2]",
    }
    settings = Settings.load(flags)
    environment = {"RECOURSE_" + key.upper().replace(".", "__"): value for key, value in flags.items()}
    with Broker(settings) as broker:
        broker.start()
        feed(settings, rate=None, share=SHARE)
        with DagsterProcesses(settings, environment, module="tests.dagster.fakes.quick") as processes:
            yield Live(settings, processes)
        assert not processes.pids
    left = [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])]
    assert not left


def test_keepalive_starts_the_session_and_its_figures_can_be_seen(live: Live) -> None:
    run_id = live.wait_for(live.session_at_work, "the first session")
    live.wait_for(
        lambda: (s := live.status("carrier_totals")) and s.batch is not None and s.lag_records == 0, "the end"
    )
    key = dg.AssetKey("carrier_totals")
    with live.stored() as stored:
        wanted = {"last_committed_batch", "lag_records", "rows_since_session_start"}

        def figures() -> bool:
            event = stored.get_latest_materialization_event(key)
            return bool(event and event.asset_materialization and wanted <= event.asset_materialization.metadata.keys())

        live.wait_for(figures, "a materialisation with figures")
        log = [entry.user_message for entry in stored.all_logs(run_id) if "its log:" in (entry.user_message or "")]
        assert str(live.settings.logs / "session-flights.log") in log[0]
        shown_as = stored.compute_log_manager.build_log_key_for_run(run_id, "of any step")
        captured = stored.compute_log_manager.get_log_data(shown_as)
        assert captured.stderr is not None and b"event=batch stream=carrier_totals" in captured.stderr

        def topic() -> bool:
            event = stored.get_latest_materialization_event(dg.AssetKey(["kafka", "flights"]))
            found = event.asset_materialization.metadata if event and event.asset_materialization else {}
            return "lag_of_carrier_totals" in found and found["lag_of_carrier_totals"].value == 0

        live.wait_for(topic, "the figures of the topic")
    live.wait_for(lambda: shown(live) == ("SUCCEEDED", False), "a green check, and a table that is not being made")


def test_the_suites_of_the_tables_run_by_themselves(live: Live) -> None:
    with live.stored() as stored:

        def evaluated() -> dg.AssetCheckEvaluation | None:
            key = dg.AssetCheckKey(dg.AssetKey("flights_clean"), "flights_rows")
            records = stored.event_log_storage.get_asset_check_execution_history(key, limit=20)
            evaluations = (record.evaluation for record in records)
            return next((each for each in evaluations if isinstance(each, dg.AssetCheckEvaluation)), None)

        found = live.wait_for(evaluated, "the first outcome of the suite")
    assert found.passed or found.severity is dg.AssetCheckSeverity.WARN, found.description
    assert {"rows", "expectations failed"} <= found.metadata.keys()


def shown(live: Live, table: str = "carrier_totals") -> tuple[str | None, bool]:
    """The catalog's view of a table: its check beside the newest materialisation; True if it is being made."""
    answer = live.client.query(
        """query($key: AssetKeyInput!) { assetsLatestInfo(assetKeys: [$key]) { inProgressRunIds unstartedRunIds }
        assetNodes(assetKeys: [$key]) { assetChecksOrError { ... on AssetChecks { checks { name
        executionForLatestMaterialization { status } } } } } }""",
        {"key": {"path": [table]}},
    )
    (info,), (node,) = answer["assetsLatestInfo"], answer["assetNodes"]
    (check,) = [each for each in node["assetChecksOrError"]["checks"] if each["name"] == "health"]
    execution = check["executionForLatestMaterialization"]
    return execution and execution["status"], bool(info["inProgressRunIds"] or info["unstartedRunIds"])


def verdicts(stored: dg.DagsterInstance, table: str) -> list[tuple[float, str]]:
    """Time and verdict of the table's check, oldest first."""
    key = dg.AssetCheckKey(dg.AssetKey(table), "health")
    records = stored.event_log_storage.get_asset_check_execution_history(key, limit=100)
    return [
        (r.create_timestamp, str(r.evaluation.metadata["verdict"].value)) for r in reversed(records) if r.evaluation
    ]


def test_kill_9_of_the_driver_is_a_failed_run_and_a_new_session(live: Live) -> None:
    before = live.wait_for(live.session_at_work, "a session")
    driver = live.driver()
    assert driver is not None
    killed = int(time.time())  # Dagster keeps the time of a check in whole seconds
    switch_keepalive(live, on=False)  # it may be quicker than the next look at the streams
    os.kill(driver.pid, signal.SIGKILL)
    with live.stored() as stored:
        tables = ("flights_clean", "airport_hours", "carrier_totals")

        def red() -> bool:
            return all("red: dead" in (m for t, m in verdicts(stored, table) if t >= killed) for table in tables)

        live.wait_for(red, "a red check on every table")
        switch_keepalive(live, on=True)
        live.wait_for(lambda: {verdicts(stored, table)[-1][1] for table in tables} == {"well"}, "green checks again")
    live.wait_for(lambda: (before, "FAILURE") in live.runs(), "the failed run")
    live.wait_for(lambda: live.session_at_work(other_than=before), "the next session")
    now = live.driver()
    assert now is not None
    assert now.pid != driver.pid


def test_kill_9_of_the_code_server_leaves_no_orphan_and_no_false_running(live: Live) -> None:
    before = live.wait_for(live.session_at_work, "a session")
    driver = live.driver()
    assert driver is not None
    server = psutil.Process(live.processes.pids[CODE_SERVER])
    family = [server, *(child for child in server.children() if "grpc" in child.cmdline())]
    assert len(family) == 2
    for process in family:
        process.kill()
    live.wait_for(lambda: not alive(driver.pid), "the end of the driver")
    live.wait_for(lambda: (before, "FAILURE") in live.runs(), "the failed run")
    live.wait_for(lambda: live.session_at_work(other_than=before), "a session under the new code server")
    assert [status for _, status in live.runs()].count("STARTED") == 1


def test_the_webserver_and_the_daemon_come_back_and_the_session_goes_on(live: Live) -> None:
    before = live.wait_for(live.session_at_work, "a session")
    driver = live.wait_for(lambda: (d := live.driver()) and d.jvm and d, "a driver that has noted its JVM")
    pids = live.processes.pids
    for name in (WEBSERVER, DAEMON):
        os.kill(pids[name], signal.SIGKILL)
    live.wait_for(lambda: len(live.processes.pids) == 3 and live.processes.pids[DAEMON] != pids[DAEMON], "restarts")
    live.wait_for(lambda: live.runs() and live.runs()[0] == (before, "STARTED"), "the same run")
    assert live.driver() == driver


def test_stop_cancels_the_run_and_nobody_starts_it_again_but_a_person(live: Live) -> None:
    run_id = live.wait_for(live.session_at_work, "a session")
    live.client.stop(run_id)
    live.wait_for(lambda: (run_id, "CANCELED") in live.runs(), "the canceled run")
    assert live.driver() is None
    assert {(s.state if (s := live.status(name)) else None) for name in STREAMS} == {"stopped"}
    since = time.time()
    live.wait_for(
        lambda: any("operator" in reason for reason in live.skips(f"keepalive_{JOB}", since)), "keepalive's refusal"
    )
    assert live.runs()[0] == (run_id, "CANCELED")
    launched = live.client.launch(JOB, {"ops": {f"{JOB}_session": {"config": {"max_offsets_per_trigger": "1000"}}}})
    live.wait_for(lambda: live.session_at_work(other_than=run_id) == launched, "the launched session")


def test_after_all_this_every_record_is_there_once(live: Live) -> None:
    live.wait_for(lambda: (s := live.status()) and s.state in ("running", "idle", "starting"), "a session")
    rows = DeltaTable(live.settings.tables / "flights_clean").to_pyarrow_table(
        columns=["source_partition", "source_offset"]
    )
    positions = rows.to_pylist()
    fed = round(336_776 * SHARE)
    assert abs(len(positions) - fed) <= 1
    assert len({(p["source_partition"], p["source_offset"]) for p in positions}) == len(positions)


def test_a_taken_port_is_said_before_anything_starts(live: Live, tmp_path: Path) -> None:
    port = int(live.processes.url.rpartition(":")[2])
    other = DagsterProcesses(Settings.load({"home": str(tmp_path), "dagster.port": str(port)}))
    with pytest.raises(SetupError, match=f"port {port} of 127.0.0.1 is taken"):
        other.start()
    assert not other.pids


def switch_keepalive(live: Live, *, on: bool) -> None:
    """Start or stop the sensor, as a person does in the UI."""
    sensor = selector(f"keepalive_{JOB}")
    found = """query($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) {
        ... on Sensor { sensorState { id } } } }"""
    answer = live.client.query(found, {"sensor": sensor})
    if on:
        start = "mutation($sensor: SensorSelector!) { startSensor(sensorSelector: $sensor) { __typename } }"
        changed = live.client.query(start, {"sensor": sensor})["startSensor"]
    else:
        stop = "mutation($id: String!) { stopSensor(id: $id) { __typename } }"
        changed = live.client.query(stop, {"id": answer["sensorOrError"]["sensorState"]["id"]})["stopSensor"]
    assert changed["__typename"] in ("Sensor", "StopSensorMutationResult"), changed


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
