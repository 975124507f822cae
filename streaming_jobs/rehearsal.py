"""A rehearsal: the shipped streams run once on a few flights, so that both JVMs leave class-data archives behind.

    python -m streaming_jobs.rehearsal

Afterwards a session starts in about half the time, and so does the embedded broker. It takes half a minute, once for
each Java and set of jars, and works in a temporary folder with a broker of its own.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from streaming_jobs.errors import RecourseError, SetupError, TransientError
from streaming_jobs.files import private_folder
from streaming_jobs.platform import class_data
from streaming_jobs.platform.jars import broker_jars, spark_jars
from streaming_jobs.settings import Settings, SparkSettings

SHARE = 0.01
"""Of the flights: enough for batches of all three streams."""


def archives(settings: Settings) -> tuple[Path, Path]:
    """The files of the Spark JVM and of the broker's. Raises SetupError for a jar that is missing or damaged."""
    spark = class_data.archive(settings, "spark", spark_jars(settings))
    return spark, class_data.archive(settings, "broker", broker_jars(settings))


def needed(settings: Settings) -> bool:
    """Whether an archive is missing."""
    return not all(file.is_file() for file in archives(settings))


def rehearse(settings: Settings) -> None:
    """Make the archives, if one is missing; whoever comes second waits for the first.

    Of the settings only those count that say where jars and archives lie. Raises what broker and session raise;
    nothing but speed is lost without archives.
    """
    with _alone(settings):
        if not needed(settings):
            return
        spark, broker = archives(settings)
        with tempfile.TemporaryDirectory(prefix="recourse-rehearsal-") as home:
            own = Settings(home=Path(home), jars_dir=settings.jars_dir, spark=SparkSettings(driver_memory_mb=1024))
            new = Path(home) / spark.name, Path(home) / broker.name
            _run(own, *new)
            for made, final in zip(new, (spark, broker), strict=True):
                _keep(made, final)
        class_data.discard_old(settings)


def _run(settings: Settings, spark: Path, broker: Path) -> None:
    from streaming_jobs.flights.feeder import feed
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.session import Session
    from streaming_jobs.topology import Topology

    with Broker(settings, record_classes=broker):
        feed(settings, rate=None, share=SHARE)
        streams = Topology.load(settings.flows).select([])
        code = Session(settings, streams, trigger="available-now", record_classes=spark).run()
    if code:
        raise TransientError(f"the rehearsal's session ended with exit code {code}")


def _keep(made: Path, final: Path) -> None:
    """Into the cache by one rename, so that no JVM ever maps a part of it."""
    if not made.is_file():
        raise SetupError(
            f"Java did not write the archive {final.name}",
            "nothing but speed is lost; SPARK_CONF_DIR and HADOOP_CONF_DIR on the class path prevent it",
        )
    arriving = final.with_suffix(".arriving")
    with made.open("rb") as source, arriving.open("wb") as target:
        while piece := source.read(1 << 22):
            target.write(piece)
        os.fsync(target.fileno())
    arriving.replace(final)


@contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    folder = private_folder(class_data.folder(settings))
    folder.chmod(0o700)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Make what is missing. Exit code 0 also when that fails: everything works without, only slower."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    settings = Settings.load()
    try:
        if needed(settings):
            print("a rehearsal, so that Java starts faster from now on; once, half a minute", file=sys.stderr)
            rehearse(settings)
    except (RecourseError, OSError) as error:
        print(f"the rehearsal failed, which costs nothing but speed: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
