"""Class-data archives: a JVM that maps its classes from a file, instead of reading them out of jars, starts faster.

Java writes such a file when it ends (`-XX:ArchiveClassesAtExit`) and uses it at the next start
(`-XX:SharedArchiveFile`), after checking that Java and the class path are the ones it was made with; otherwise it
starts without. The file's name has a hash of both, so another Java or other jars have another file.
streaming_jobs/warm_up.py makes them. An archive takes 100 to 250 MB; the newest three of each kind are kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Literal

from streaming_jobs.platform import java
from streaming_jobs.platform.jars import cache
from streaming_jobs.settings import Settings

Kind = Literal["spark", "broker"]
_KEPT = 3
RECORD_SECONDS = 240.0
"""The limit for a JVM to write its archive when it ends: some seconds when idle, a minute or two on a busy machine."""


def archive(settings: Settings, kind: Kind, jars: Iterable[Path]) -> Path:
    """The path of the archive of this Java with these jars, which may not exist. Raises SetupError without a Java."""
    executable = java.executable().resolve()
    parts = [str(executable), str(executable.stat().st_mtime_ns), *(str(jar) for jar in jars)]
    if kind == "spark":
        distribution = metadata.distribution("pyspark")
        parts += [distribution.version, str(distribution.locate_file("pyspark"))]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return folder(settings) / f"{kind}-{name}.jsa"


def folder(settings: Settings) -> Path:
    """The folder of the archives, beside the jars."""
    return cache(settings).with_name("class-data")


def reading(file: Path) -> list[str]:
    """Options for a JVM that uses an archive; none if there is no such file."""
    # Without the logging options Java complains on standard output when it cannot use the file.
    return [f"-XX:SharedArchiveFile={file}", "-Xshare:auto", "-Xlog:disable"] if file.is_file() else []


def recording(file: Path) -> list[str]:
    """Options for a JVM that writes an archive when it ends; which takes some seconds more."""
    return [f"-XX:ArchiveClassesAtExit={file}", "-Xlog:disable"]


def discard_old(settings: Settings) -> None:
    """Delete all archives except the newest three of each kind."""
    for kind in ("spark", "broker"):
        archives = sorted(folder(settings).glob(f"{kind}-*.jsa"), key=os.path.getmtime, reverse=True)
        for file in archives[_KEPT:]:
            file.unlink(missing_ok=True)
