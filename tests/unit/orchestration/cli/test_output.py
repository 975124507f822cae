"""What commands print on stderr."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("logger", ["DataFrameQueryContextLogger", "SQLQueryContextLogger"])
def test_an_error_of_a_plan_is_told_without_the_traces_that_pyspark_logs(logger: str) -> None:
    code = (
        "from orchestration.cli.text import log_to_stderr, say\n"
        "from pyspark.logger import PySparkLogger\n"
        "log_to_stderr()\n"
        f"PySparkLogger.getLogger({logger!r}).exception('a trace', file='flows.py', line='7')\n"
        "say('column piecez cannot be resolved')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "column piecez cannot be resolved\n"
