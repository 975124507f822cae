"""A Spark cluster on this machine: a standalone master and workers that see nothing of the project.

A worker lives in a mount namespace of its own, in which the project's packages are empty folders. It has the Python
packages that a cluster's image would have, and shares every other folder with the driver.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT

PACKAGES = ("streaming_jobs", "reprocessing", "quality", "orchestration", "tests")
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
_MODULE = "jdk.incubator.vector"
"""Spark's own launcher of executors asks for it, and the Java in our environment leaves it out."""
_START = 60.0


@dataclass
class StandaloneCluster:
    """`url` is the master's; each worker has one core, and by default one executor of 512 MB at most.

    Workers, and so executors, have the environment's credentials of a store.
    """

    folder: Path
    java: Path
    memory_mb: int = 700
    url: str = ""
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Those that run, oldest first."""
    _named: int = 0
    _processes: ExitStack = field(default_factory=ExitStack)

    def start(self, workers: int) -> None:
        self.url = self._started("master", [_MASTER, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"])
        for _ in range(workers):
            self.add_worker()

    def add_worker(self) -> None:
        self._named += 1
        name = f"worker-{self._named}"
        work = self.folder / name
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        hide = " && ".join(f"mount --bind {empty} {ROOT / package}" for package in PACKAGES)
        command = [_WORKER, "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1"]
        command += ["--memory", f"{self.memory_mb}m"]
        self._started(
            name,
            [*command, "--work-dir", str(work), self.url],
            prefix=["unshare", *_rights(), "--mount", "sh", "-c", f'{hide} && cd / && exec "$@"', "sh"],
        )

    def environment(self, cores: int = 2, records: int = 1000) -> dict[str, str]:
        """The environment of a driver whose batches, of so many records at most, executors read, judge and write."""
        return {
            "RECOURSE_SPARK__MASTER": self.url,
            "RECOURSE_SPARK__DRIVER_HOST": "127.0.0.1",
            "RECOURSE_SPARK__EXTRA": json.dumps({"spark.executor.memory": "512m", "spark.cores.max": str(cores)}),
            "RECOURSE_STREAM__PATH": "executor",
            "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": str(records),
        }

    def executors(self) -> list[psutil.Process]:
        """The JVMs of executors, oldest first."""
        found = [child for worker in self.workers for child in psutil.Process(worker.pid).children(recursive=True)]
        return sorted((one for one in found if _is_executor(one)), key=lambda one: one.create_time())

    def kill_worker(self, index: int) -> None:
        """kill -9 of a worker with its executors and their Python, as a machine that is lost."""
        killed = self.workers.pop(index)
        worker = psutil.Process(killed.pid)
        for process in [*worker.children(recursive=True), worker]:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        killed.wait(10)

    def close(self) -> None:
        self._processes.close()

    def _started(self, name: str, command: list[str], prefix: list[str] | None = None) -> str:
        """Start a part of the cluster; returns its address once it is registered."""
        import pyspark

        home = Path(str(pyspark.__file__)).parent
        log = self.folder / f"{name}.log"
        python = Path(sys.executable)
        environment = {
            "PATH": os.pathsep.join([str(_named_python3(self.folder, python)), os.environ.get("PATH", os.defpath)]),
            "SPARK_HOME": str(home),
            "SPARK_SCALA_VERSION": "2.13",
            "JAVA_HOME": str(self.java.parents[1]),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self.folder / f"{name}-local"),
            **{key: value for key, value in os.environ.items() if key.startswith("AWS_")},
        }
        jvm = [str(self.java), "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", f"{home / 'jars'}/*", *command]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*(prefix or []), *jvm], env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self._processes.callback(_end, process)
        if prefix is not None:
            self.workers.append(process)
        wanted = re.compile(r"Starting Spark master at (\S+)" if prefix is None else r"(Successfully registered)")
        deadline = time.monotonic() + _START
        while (said := wanted.search(log.read_text(errors="replace"))) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)
        return said[1]


def _named_python3(folder: Path, python: Path) -> Path:
    """A folder in which `python3` is this Python, without the folder that has the project on its path."""
    named = folder / "bin"
    named.mkdir(exist_ok=True)
    if not (named / "python3").exists():
        (named / "python3").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        (named / "python3").chmod(0o755)
    return named


def _java() -> Path | None:
    """A Java of this machine that can run executors."""
    named = [Path(os.environ["JAVA_HOME"]) / "bin" / "java"] if "JAVA_HOME" in os.environ else []
    found = shutil.which("java")
    for java in (*named, *([Path(found)] if found else []), *sorted(Path("/usr/lib/jvm").glob("*/bin/java"))):
        modules = subprocess.run([str(java), "--list-modules"], check=False, capture_output=True, text=True)
        if _MODULE in modules.stdout:
            return java.resolve()
    return None


def _rights() -> list[str]:
    return [] if os.geteuid() == 0 else ["--map-root-user"]


def _is_executor(process: psutil.Process) -> bool:
    try:
        return any("CoarseGrainedExecutorBackend" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.kill()
    process.wait(10)


@contextmanager
def standalone(folder: Path, workers: int = 2, memory_mb: int = 700) -> Iterator[StandaloneCluster]:
    """A cluster in `folder`; skips the test without a Java for executors, or without the right to a mount namespace."""
    allowed = subprocess.run(["unshare", *_rights(), "--mount", "true"], check=False, capture_output=True)
    if allowed.returncode:
        pytest.skip(f"no mount namespace here: {allowed.stderr.decode().strip()}")
    if (java := _java()) is None:
        pytest.skip(f"no Java of this machine has the module {_MODULE}")
    cluster = StandaloneCluster(folder, java, memory_mb)
    try:
        cluster.start(workers)
        yield cluster
    finally:
        cluster.close()
