"""A warm-up: the shipped streams run once on some flights, so that both JVMs leave class-data archives behind.

    python -m streaming_jobs.warm_up

Afterwards a session starts in about half the time, and so does the embedded broker. It takes a minute with Java 25,
half of one with 17 and 21, once per Java and set of jars, and uses a temporary folder and its own broker.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import structlog

from streaming_jobs.errors import RecourseError, SetupError, TransientError
from streaming_jobs.platform import class_data
from streaming_jobs.platform.class_data import RECORD_SECONDS
from streaming_jobs.platform.jars import broker_jars, spark_jars
from streaming_jobs.platform.processes.child import ended_by
from streaming_jobs.settings import DEMONSTRATION, Settings, SparkSettings
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locks import locked
from streaming_jobs.storage.log_stream import log_stream
from streaming_jobs.text import commands

_SHARES = {".aot": 0.3, ".jsa": 0.01}
_REPEAT_SECONDS = 15.0


def archives(settings: Settings) -> tuple[Path, Path]:
    """The files of the Spark JVM and of the broker's. Raises SetupError for a jar that is missing or damaged."""
    spark = class_data.archive(settings, "spark", spark_jars(settings))
    return spark, class_data.archive(settings, "broker", broker_jars(settings))


def share(archive: Path) -> float:
    """The share of the flights that is fed: enough for batches of all three streams.

    An AOT cache also has profiles of the methods, which are worth more after more batches.
    """
    return _SHARES[archive.suffix]


def needed(settings: Settings) -> bool:
    return not all(file.is_file() for file in archives(settings))


def warm_up(settings: Settings) -> None:
    """Make the archives if one is missing; a second process waits for the first.

    Uses only the settings of the folders of jars and archives. Raises what broker and session raise; without archives
    only speed is lost.
    """
    with _alone(settings):
        if not needed(settings):
            return
        try:
            _warm_up(settings)
        except TransientError as error:  # a busy machine, mostly
            _say(f"repeated: {error.found}")
            _warm_up(settings)
        class_data.discard_old(settings)


def _warm_up(settings: Settings) -> None:
    finals = archives(settings)
    with tempfile.TemporaryDirectory(prefix="recourse-warm-up-") as home:
        trial = Settings(
            home=Path(home),
            flows=list(DEMONSTRATION),
            jars_dir=settings.jars_dir,
            java_home=settings.java_home,
            spark=SparkSettings(driver_memory_mb=1024),
        )
        new = tuple(Path(home) / final.name for final in finals)
        ended = _run(trial, *new)
        for made, final, code in zip(new, finals, ended, strict=True):
            _keep(made, final, code, _last_words(_printed(trial)))


def _run(settings: Settings, spark: Path, broker: Path) -> tuple[int | None, int | None]:
    """Run the streams; returns the exit codes of both JVMs, negative for a signal."""
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.examples.flights.feeder import feed
    from streaming_jobs.platform import spark as spark_session
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.platform.runtime import LocalSpark
    from streaming_jobs.session import Session

    kafka = Broker(settings, record_classes=broker)
    # Java prints the whole class path when it writes an AOT cache.
    with _progress() as at, kafka, _printed(settings).open("wb") as printed:
        at("1 of 3: a broker starts and gets records")
        feed(settings, rate=None, share=share(spark))
        at("2 of 3: three streams read the records, and Spark's Java writes an archive")
        streams = Topology.load(settings.flows).select([])
        runtime = LocalSpark(settings, record_classes=spark, launch=partial(spark_session.launch, output=printed))
        session = Session(settings, streams, trigger="available-now", runtime=runtime)
        code = session.run()
        at("3 of 3: the broker's Java writes an archive")
    if code:
        errors = [r.status.error["found"] for r in session.running if r.status.error]
        raise TransientError(f"the session of the warm-up ended with exit code {code}{': ' * bool(errors)}{errors[:1]}")
    return runtime.exit_code, kafka.exit_code


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function that prints a step; the step is repeated with its age while it lasts."""
    steps: Queue[str | None] = Queue()

    def show() -> None:
        step, since = steps.get(), time.monotonic()
        while step is not None:
            age = time.monotonic() - since
            _say(step if age < _REPEAT_SECONDS else f"{step} ({age:.0f} s)")
            with suppress(Empty):
                step, since = steps.get(timeout=_REPEAT_SECONDS), time.monotonic()

    printing = Thread(target=show, name="progress", daemon=True)
    printing.start()
    try:
        yield steps.put
    finally:
        steps.put(None)
        printing.join()


def _say(text: str) -> None:
    print(f"warm-up: {text}", file=sys.stderr, flush=True)


def _printed(settings: Settings) -> Path:
    """The file of what Spark's JVM prints."""
    return private_folder(settings.logs) / "spark.out"


def _last_words(printed: Path) -> str:
    if not printed.is_file():
        return ""
    lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join(line[:200] for line in lines if not line.startswith("Picked up "))[-600:]


def _keep(made: Path, final: Path, code: int | None, printed: str) -> None:
    """Move an archive into the cache by one rename, so that no JVM ever maps a partial archive."""
    if not made.is_file():
        raise _unwritten(final.name, code, printed)
    arriving = final.with_suffix(".arriving")
    with made.open("rb") as source, arriving.open("wb") as target:
        while piece := source.read(1 << 22):
            target.write(piece)
        os.fsync(target.fileno())
    arriving.replace(final)


def _unwritten(name: str, code: int | None, printed: str) -> RecourseError:
    """The error for a missing archive, by the exit code of its JVM."""
    if code == -signal.SIGKILL:
        return TransientError(
            f"Java had not written the archive {name} {RECORD_SECONDS:.0f} s after it was asked to end, and was killed",
            "nothing but speed is lost; try again when the machine is less busy: python -m streaming_jobs.warm_up",
        )
    folders = [variable for variable in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR") if os.environ.get(variable)]
    how = "" if code in (None, 0, 128 + signal.SIGTERM) else f": {ended_by(code or 0)}"
    return SetupError(
        f"Java did not write the archive {name}{how}{': ' * bool(printed)}{printed}",
        f"nothing but speed is lost; {' and '.join(folders)} on the class path may prevent it: unset, then try again"
        if folders
        else "nothing but speed is lost; the disk of the temporary folder may be full",
    )


@contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    folder = private_folder(class_data.folder(settings))
    folder.chmod(0o700)
    with locked(folder / ".lock"):
        yield


def main() -> int:
    """Make missing archives. The exit code is 0 even if that fails: only speed is lost. An interrupt is 130."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(log_stream(sys.stderr)),
    )
    settings = Settings.load()
    try:
        if needed(settings):
            _say("once for this environment, so that Java starts faster from now on; about a minute")
            warm_up(settings)
    except KeyboardInterrupt:
        _say(f"interrupted; the next `{commands.up()}` or `make setup` begins it again")
        return 130
    except (RecourseError, OSError) as error:
        _say(f"failed, which costs nothing but speed: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
