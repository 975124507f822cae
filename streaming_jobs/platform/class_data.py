"""Class-data archives: a JVM that maps its classes from a file, instead of reading them out of jars, starts faster.

Java 17 and 21 write such a file when they end (`-XX:ArchiveClassesAtExit`) and use it at the next start
(`-XX:SharedArchiveFile`). Java 25 makes more of it, an AOT cache (`-XX:AOTCacheOutput`, `-XX:AOTCache`; JEP 483, 514
and 515): the classes are loaded and linked in it, and it has profiles of the methods, with which the compiler begins
at once. Either is used only after Java has checked that it is the Java, and the class path the one, that the file was
made with; otherwise it starts without. The file's name has a hash of both, so another Java or other jars have another
file; and of options of Arrow and of Java's compiler: profiles recorded with others make code slower.
`warm_up.py` makes them. A file takes 60 to 250 MB. Each environment has files of its own; those that were used last
are kept, 2 GiB in all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal

from streaming_jobs.platform import java
from streaming_jobs.platform.jars import cache
from streaming_jobs.platform.spark_jvm import LATER_SECOND_COMPILER, module_options
from streaming_jobs.settings import Settings

Kind = Literal["spark", "broker"]
_KEPT_BYTES = 2 << 30
_AOT_SINCE = 25
_AOT, _CDS = ".aot", ".jsa"
_WHERE_IT_WAS = ("-XX:+UnlockDiagnosticVMOptions", "-XX:ArchiveRelocationMode=0")
"""Map the file at the address that it was made for. Elsewhere Java has to change, and so to copy, each of its pages."""
RECORD_SECONDS = 240.0
"""The limit for a JVM to write its archive when it ends: some seconds when idle, a minute or two on a busy machine."""


def archive(settings: Settings, kind: Kind, jars: Iterable[Path]) -> Path:
    """The path of the archive of this Java with these jars, which may not exist: `.aot` for Java 25, else `.jsa`.

    Raises SetupError without a Java.
    """
    used = java.choose(settings)
    executable = used.executable.resolve()
    parts = [str(executable), str(executable.stat().st_mtime_ns), *(str(jar) for jar in jars)]
    if kind == "spark":
        distribution = metadata.distribution("pyspark")
        parts += [distribution.version, str(distribution.locate_file("pyspark")), *module_options(used)]
        parts.append(LATER_SECOND_COMPILER)
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return folder(settings) / f"{kind}-{name}{_AOT if used.major >= _AOT_SINCE else _CDS}"


def folder(settings: Settings) -> Path:
    """The folder of the archives, beside the jars."""
    return cache(settings).with_name("class-data")


def reading(file: Path) -> list[str]:
    """Options for a JVM that uses an archive, whose modification time becomes now; none without an archive."""
    if not file.is_file():
        return []
    with suppress(OSError):  # in a cache of another user
        os.utime(file)
    # Without the logging options Java complains on standard output when it cannot use the file.
    if file.suffix == _AOT:
        use = [f"-XX:AOTCache={file}", "-XX:AOTMode=auto"]
    else:
        use = [f"-XX:SharedArchiveFile={file}", "-Xshare:auto"]
    return [*use, "-Xlog:disable", *_WHERE_IT_WAS]


def recording(file: Path) -> list[str]:
    """Options for a JVM that writes an archive when it ends; which takes some seconds more."""
    option = "AOTCacheOutput" if file.suffix == _AOT else "ArchiveClassesAtExit"
    return [f"-XX:{option}={file}", "-Xlog:disable"]


def discard_old(settings: Settings) -> None:
    """Delete the archives that were used longest ago, as far as all together take more than 2 GiB."""
    files = [file for file in folder(settings).iterdir() if file.suffix in (_AOT, _CDS)]
    room = _KEPT_BYTES
    for file in sorted(files, key=os.path.getmtime, reverse=True):
        room -= file.stat().st_size
        if room < 0:
            file.unlink(missing_ok=True)
