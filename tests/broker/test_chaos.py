"""The kill loop in its short form, and that nothing of it is left behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from streaming_jobs.proof.chaos import Plan, run
from streaming_jobs.settings import Settings
from tests.driver import REPOSITORY, until

SEED = 2


@pytest.mark.timeout(300)
def test_two_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    report = run(Plan(kills=2, seed=SEED, rate=400, max_offsets=800), tmp_path / "home", Settings.load(), lines.append)
    assert report.ok, (lines, report.faults, report.verdict, report.truth)
    assert report.tally.kills == sum(report.tally.points.values()) + sum(report.tally.victims.values()) == 2
    assert report.tally.sessions >= 3 and report.tally.unplanned == []
    assert report.verdict.verified == 4 * report.verdict.records > 0
    # A version a batch, and the one that made the table.
    assert report.versions_read >= report.batches + 4 > 4
    assert len(report.truth) == 3 and all(check.found_rows for check in report.truth), report.truth


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_cut_off(tmp_path: Path, end: signal.Signals) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "orchestration.cli", "chaos", "--seed", str(SEED), "--home", str(home)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: started(process, home), 60, "the first driver's JVM")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len([child for child in children if child.name() == "java"]) >= 2
        process.send_signal(end)
        _, said = process.communicate(timeout=30)
        assert psutil.wait_procs(children, timeout=30)[1] == []
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert home.is_dir() and ("the home is kept" in said) == (end == signal.SIGINT)


def started(process: subprocess.Popen[str], home: Path) -> bool:
    """Whether broker and driver have each a JVM."""
    assert process.poll() is None, f"it ended at {time.ctime()}"
    named = [child.name() for child in psutil.Process(process.pid).children(recursive=True)]
    return (home / "logs" / "driver-001.log").exists() and named.count("java") >= 2
