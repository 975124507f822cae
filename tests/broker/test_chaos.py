"""The kill loop in its short form, and that nothing of it is left behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from streaming_jobs.settings import Settings
from streaming_jobs.verification.chaos.flight_subject import FLIGHTS
from streaming_jobs.verification.chaos.kill_loop import plan_of, run
from tests.support import ROOT
from tests.support.waiting import wait_for

SEED = 1243
"""The driver is killed between the commits of two tables, and between those of a quarantine and its table; then the
planner alone, and the broker while the stream starts again; then the Python of that same session; then a driver with
files written and nothing committed."""
LONG_SEED, LONG_KILLS = 11, 45


def test_five_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    streams = ("flights_split", "flights_judged")
    plan = plan_of(FLIGHTS, 5, SEED, rate=200, max_offsets=400, streams=streams)
    report = run(FLIGHTS, plan, tmp_path / "home", Settings.load(), lines.append)
    assert report.ok, (lines, report.findings, report.verdict)
    points = ("flights_split:secondary_committed", "flights_judged:secondary_committed", "flights_split:staged")
    assert dict(report.tally.points) == dict.fromkeys(points, 1)
    assert dict(report.tally.victims) == {"python": 1} and report.tally.kills == 5, lines
    assert dict(report.tally.processes) == {"planner": 1} and not report.tally.not_made, lines
    assert report.tally.restarts >= 1, "the session restarted the stream of the killed planner by itself"
    half = {stream for stream, _, _ in report.tally.half}
    assert half == {*streams}, "the first of two tables, and a quarantine, had the batch when the kill came"
    assert report.tally.broker_kills == 1
    # One per fault but the planner's, and the last one, which reads the topic to its end.
    assert report.tally.sessions == 5 and report.tally.unplanned == [], lines
    assert report.verdict.verified == len(streams) * report.verdict.records > 0
    # A version a batch, and the one that made the table.
    assert report.findings.versions_read >= report.batches + len(streams) > len(streams)
    (rules,) = report.findings.rules
    assert min(rules.good, rules.quarantined, rules.dropped) > 0 and rules.records == report.verdict.records
    judged = next(stream for stream in report.verdict.streams if stream.stream == "flights_judged")
    (equation,) = [one for one in judged.comparisons if one.what == "equation"]
    assert equation.verdict == "ok" and equation.text.endswith(
        f"in all {rules.records:,} records = {rules.good:,} written + {rules.quarantined:,} quarantined + "
        f"{rules.dropped:,} dropped + 0 dead letters"
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_forty_five_kills_of_drivers_planners_and_workers_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    report = run(FLIGHTS, plan_of(FLIGHTS, LONG_KILLS, LONG_SEED), tmp_path / "home", Settings.load(), lines.append)
    assert report.ok, (lines, report.findings, report.verdict)
    tally = report.tally
    assert tally.processes["planner"] >= 3 and tally.processes["worker"] >= 3, (tally.not_made, lines)
    assert tally.kills + tally.not_made.total() == LONG_KILLS and tally.unplanned == [], lines
    assert tally.restarts >= tally.processes["planner"], "each planner belonged to a stream that needed it"
    assert report.verdict.verified == len(report.plan.streams) * report.verdict.records > 0


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_cut_off(tmp_path: Path, end: signal.Signals) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "orchestration.cli", "chaos", "--seed", str(SEED), "--home", str(home)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: started(process, home), "the first stream")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len([child for child in children if child.name() == "java"]) >= 2
        process.send_signal(end)
        _, output = process.communicate(timeout=30)
        left = psutil.wait_procs(children, timeout=30)[1]
        assert left == [], [" ".join(each.cmdline()) for each in left]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert home.is_dir() and ("the home is kept" in output) == (end == signal.SIGINT)


def started(process: subprocess.Popen[str], home: Path) -> bool:
    """True if broker and driver have a JVM each, and the driver has asked the broker for all that it needs."""
    assert process.poll() is None, f"it ended at {time.ctime()}"
    named = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
            named.append(child.name())
    log = home / "logs" / "driver-001.log"
    return log.exists() and "stream started" in log.read_text() and named.count("java") >= 2
