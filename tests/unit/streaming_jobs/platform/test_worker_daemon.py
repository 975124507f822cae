"""The parent of Python workers, as Spark starts it, without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from streaming_jobs.platform.spark import WORKER_DAEMON


@contextmanager
def daemon(**environment: str) -> Iterator[psutil.Process]:
    """A daemon that has said its port: four bytes on its standard output."""
    command = [sys.executable, "-m", WORKER_DAEMON, "pyspark.worker"]
    variables = {**os.environ, "PYTHON_WORKER_FACTORY_SECRET": "x", **environment}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as started:
        try:
            assert started.stdin is not None and started.stdout is not None
            assert int.from_bytes(started.stdout.read(4)) > 0
            yield psutil.Process(started.pid)
            started.stdin.close()
            assert started.wait(20) is not None, "it ends when its standard input does"
        finally:
            started.kill()


@pytest.mark.parametrize("variable", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "JE_ARROW_MALLOC_CONF"])
def test_it_has_one_thread_whatever_the_user_has_set(variable: str) -> None:
    value = "background_thread:true" if variable.startswith("JE") else "4"
    with daemon(**{variable: value}) as process:
        assert process.num_threads() == 1
        assert WORKER_DAEMON in process.cmdline()


def test_with_a_thread_of_somebody_else_it_becomes_the_daemon_of_pyspark(tmp_path: Path) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(thread)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with daemon(PYTHONPATH=path) as process:
        assert process.cmdline()[1:] == ["-m", "pyspark.daemon", "pyspark.worker"]
