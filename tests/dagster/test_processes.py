"""The three Dagster processes and what hangs on them: they end with `recourse up`, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from uuid import uuid4

import dagster as dg
import psutil
import pytest

from orchestration.local_dagster.dagster_home import code_server_port, prepare
from orchestration.local_dagster.processes import DAEMON, DagsterProcesses, _DagsterProcess
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.ownership import STOPPED_BY_TAG
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.platform import ports
from streaming_jobs.settings import Settings
from tests.dagster.conftest import starts
from tests.support import ROOT
from tests.support.dagster_runs import RunsClient
from tests.support.waiting import wait_for

SLOW = 120.0
"""Seconds that a busy machine may take to start Dagster."""


def of_home(settings: Settings) -> list[psutil.Process]:
    """Every process that has this home in its environment, but not this one."""
    home = str(settings.home)
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("RECOURSE_HOME") == home:
                processes.append(process)
        except psutil.Error:
            continue
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def ups(shop: Settings) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts of `recourse up`; whatever is left at the end is killed."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in of_home(shop):
        process.kill()
    for up in started:
        up.wait()


def start_up(ups: list[subprocess.Popen[str]]) -> RunsClient:
    up = subprocess.Popen([sys.executable, "-m", "tests.dagster.fakes.up"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    ups.append(up)
    assert up.stdout is not None
    return RunsClient(up.stdout.readline().strip())


def newest(client: RunsClient) -> tuple[str, str]:
    runs = client.runs("shop")
    return (runs[0]["runId"], runs[0]["status"]) if runs else ("", "")


def test_up_ends_sessions_in_order_goes_on_next_time_and_leaves_nothing_when_killed(
    shop: Settings, ups: list[subprocess.Popen[str]]
) -> None:
    client = start_up(ups)
    wait_for(lambda: newest(client)[1] == "STARTED" and len(starts(shop)) == 1, "the first session")
    ups[0].terminate()
    assert ups[0].wait(SLOW) == 0
    assert of_home(shop) == []
    assert "stopped at a batch border" in (shop.logs / "session-shop.log").read_text()

    client = start_up(ups)
    wait_for(lambda: len(starts(shop)) == 2, "a session although the last run was canceled")
    runs = client.runs("shop")
    assert [run["status"] for run in runs] == ["STARTED", "CANCELED"]
    assert {"key": STOPPED_BY_TAG, "value": "shutdown"} in runs[1]["tags"]
    ups[1].kill()
    wait_for(lambda: of_home(shop) == [], "the end of everything")

    client = start_up(ups)
    wait_for(lambda: len(starts(shop)) == 3, "a session after the kill")
    wait_for(lambda: [r["status"] for r in client.runs("shop")] == ["STARTED", "FAILURE", "CANCELED"], "no lie")


def test_a_run_that_keepalive_starts_while_all_is_ended_is_ended_too(
    shop: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sessions are asked to stop before the daemon has ended, since they take seconds."""
    processes, stopped = DagsterProcesses(shop), []
    with dg.DagsterInstance.ephemeral() as instance:

        def launch(run_id: str) -> None:
            instance.add_run(dg.DagsterRun(job_name="shop", run_id=run_id, status=dg.DagsterRunStatus.STARTED))

        def cancel(_: object, __: object, run_id: str) -> None:
            stopped.append(run_id)
            run = instance.get_run_by_id(run_id)
            assert run is not None
            instance.report_run_canceled(run)

        def end(_: object, name: str, patience: float) -> None:
            if name == DAEMON:
                launch(late)

        early, late = str(uuid4()), str(uuid4())
        launch(early)
        monkeypatch.setattr(DagsterProcesses, "_instance", lambda _: nullcontext(instance))
        monkeypatch.setattr(DagsterProcesses, "_cancel", cancel)
        monkeypatch.setattr(DagsterProcesses, "_end", end)
        processes.stop()
        assert stopped == [early, late]
        assert all(run.tags[STOPPED_BY_TAG] == "shutdown" for run in instance.get_runs())


def test_a_process_that_dies_is_started_again_later_each_time(shop: Settings) -> None:
    child = _DagsterProcess("short", ["/bin/false"], {}, BoundedLog(shop.logs / "short.log"))
    child.start()
    delays = []
    for _ in range(3):
        wait_for(lambda: not child.running, "its end")
        child.look_after()
        assert child.restart_at is not None
        delays.append(round(child.restart_at - time.monotonic()))
        child.restart_at = 0.0
        child.look_after()
    child.end(1.0)
    assert delays == [1, 2, 4]


def test_streams_that_cannot_be_loaded_are_told_and_nothing_is_left(shop: Settings, tmp_path: os.PathLike[str]) -> None:
    assert shop.jobs is not None
    broken = shop.home / "broken.yml"
    broken.write_text(shop.jobs.read_text().replace("orders,customers", "oders"))
    processes = DagsterProcesses(shop, {"RECOURSE_JOBS": str(broken)}, module="tests.dagster.fakes.definitions")
    with pytest.raises(ConfigurationError, match="no stream is named 'oders'"), processes:
        pass
    assert of_home(shop) == []


def test_the_code_server_s_port_stays_the_same_while_it_is_free(shop: Settings) -> None:
    home = prepare(shop)
    first = code_server_port(home)
    assert code_server_port(home) == first
    assert ports.is_free(first)
    assert home.stat().st_mode & 0o777 == 0o700
