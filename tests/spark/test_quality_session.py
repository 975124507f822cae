"""The Spark session of a run of suites: it computes, and its JVM is gone when the run is over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

CODE = """
import sys
import psutil
from orchestration.quality.spark_session import session_of_run
from streaming_jobs.settings import Settings

def javas():
    return [p for p in psutil.Process().children(recursive=True) if p.name() == "java"]

run = session_of_run(Settings.load({"home": sys.argv[1]}))
resource = next(run)
assert not javas(), "nothing is started before it is needed"
assert resource.spark_session.range(5).count() == 5
assert resource.spark_session is resource.spark_session
(jvm,) = javas()
assert next(run, "over") == "over"
assert not javas() and not jvm.is_running()
print("well")
"""


def test_the_jvm_starts_when_it_is_needed_and_ends_with_the_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=150
    )
    assert done.stdout.strip() == "well", done.stderr[-3000:]
