"""Adoptions and undos, killed by SIGKILL before each of their writes and run again: as if nobody had killed them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from streaming_jobs.inspection.adoption import adopt
from streaming_jobs.settings import Settings
from tests.support import ROOT
from tests.support.plain_histories import PlainJob
from tests.unit.streaming_jobs.inspection.test_adoption import fits, keep_state, orders, plan

pytestmark = pytest.mark.slow
TWO = ("/stream.json", "commit")
"""The record's file gets its name, or is removed; the commit to the table."""
_WHAT = [("adopt", True, TWO), ("undo", True, TWO)]
_LONG = [pytest.param(what, stateful, (), marks=pytest.mark.long) for what in ("adopt", "undo") for stateful in (0, 1)]


@pytest.mark.parametrize(("what", "stateful", "chosen"), [*_WHAT, *_LONG])
def test_a_kill_before_any_write_changes_nothing_in_the_end(
    tmp_path: Path, what: str, stateful: bool, chosen: tuple[str, ...]
) -> None:
    home = tmp_path / "template"
    (home / "job").mkdir(parents=True)
    job = PlainJob(home / "job", random.Random(3), "append-once")
    job.run(5)
    if stateful:
        keep_state(job)
    settings = Settings.load({"home": home / ".recourse"})
    assert isinstance(settings.tables, Path)
    settings.tables.mkdir(parents=True)
    job.table = job.table.rename(settings.tables / "orders")
    if what == "undo":
        adopt(settings, orders, plan(settings, job, try_state=fits))
    command = [sys.executable, "-m", "tests.support.killed_adoption", str(tmp_path), what, *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    undisturbed, *killed = (json.loads(line) for line in done.stdout.splitlines())
    writes = [each["write"] for each in killed]
    assert "commit" in writes and any(write.endswith("/stream.json") for write in writes), writes
    assert len(writes) == 2 if chosen else len(writes) >= 4, writes
    assert (undisturbed["there"]["record"] is None) is (what == "undo")
    assert bool(undisturbed["there"]["carried"]) is (what == "adopt" and bool(stateful))
    for each in killed:
        assert each["there"] == undisturbed["there"], each["write"]
