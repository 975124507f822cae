"""The process of a recovery: `python -m orchestration.recoveries.child`, started by the job `recover`.

    standard input     one line, the launch as JSON; its end of file means that the parent is gone
    standard output    one event per line (`events.py`)
    standard error     the log, of Spark's session too

SIGTERM, SIGINT and the end of standard input interrupt the work at any point: every stage can be repeated from its
beginning, and readers see the old rows until the plan publishes. After `GRACE` seconds, the process group is killed,
the JVM included.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import BinaryIO

import structlog

from orchestration.recoveries.events import Event, Failed, encode
from orchestration.recoveries.request import Launch
from streaming_jobs.errors import RecourseError, setup_error
from streaming_jobs.platform import entry
from streaming_jobs.runtime.session_options import log_to_stderr

log = structlog.get_logger()

BUG, INTERRUPTED = 3, 130
GRACE = 20.0
"""Seconds that an interrupted recovery has to end its Spark session."""


def main() -> int:
    """Do the work of one launch, and return the exit code: that of the error, 0, or 130 if it was interrupted."""
    channel = _take_standard_output()
    log_to_stderr()
    _interrupt_on_signals()
    try:
        text = _first_line()
        threading.Thread(target=_watch_parent, name="parent", daemon=True).start()
        return _work(text, lambda event: _emit(channel, event))
    except KeyboardInterrupt:
        log.warning("recovery interrupted: continue it, or give it up")
        return INTERRUPTED


def _work(text: str, emit: Callable[[Event], None]) -> int:
    try:
        entry.check()
        from orchestration.recoveries.worker import Worker
        from streaming_jobs.catalog.topology import Topology
        from streaming_jobs.settings import Settings

        settings = Settings.load()
        Worker(settings, Topology.of_settings(settings), emit).run(Launch.decode(text))
        return 0
    except Exception as error:  # noqa: BLE001 - the outermost handler; the log has the traceback
        known = error if isinstance(error, RecourseError) else setup_error(error)
        if known is None:
            traceback.print_exc()
            words = f"this is a bug in recourse ({type(error).__name__}: {error})"
            emit(Failed(RecourseError.code, words, "report it, with the end of the log"))
            return BUG
        emit(Failed(known.code, known.found, known.next_step))
        return known.exit_code


def _take_standard_output() -> BinaryIO:
    """Our own descriptor for the events; what libraries and the JVM print goes to standard error from here on."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return channel


def _emit(channel: BinaryIO, event: Event) -> None:
    try:
        channel.write(encode(event))
    except BrokenPipeError:
        raise KeyboardInterrupt from None  # the reader, our parent, has ended


def _first_line() -> str:
    """The first line of standard input; raises KeyboardInterrupt if standard input ends before it."""
    text = b""
    while not text.endswith(b"\n"):  # the parent writes nothing after this line
        more = os.read(0, 65536)
        if not more:
            raise KeyboardInterrupt
        text += more
    return text.decode()


def _watch_parent() -> None:
    # os.read, not sys.stdin: a thread inside the buffered reader aborts the interpreter at exit.
    while os.read(0, 4096):
        pass
    log.warning("standard input ended: the parent is gone")
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt_on_signals() -> None:
    def interrupt(_: int, __: FrameType | None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second request must not cut the first one short
            signal.signal(number, signal.SIG_IGN)
        deadline = threading.Timer(GRACE, _kill_all)
        deadline.daemon = True
        deadline.start()
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)


def _kill_all() -> None:
    log.error("the recovery did not end in time and is killed", seconds=GRACE)
    leads = os.getpgrp() == os.getpid()
    if leads:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
