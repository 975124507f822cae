"""A session that restarts in its own process, with the newest code and settings.

The process replaces itself (`execv`) when its JVM has ended and its leases are free. Its pid, its standard input and
its log stay, so that Dagster, or the service manager that started it, sees one session that continues. Streams that
somebody has stopped meanwhile stay stopped, and a stream that another session runs by now is left to that session.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import structlog

from streaming_jobs.errors import LeaseBusy
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import holder
from streaming_jobs.stream import Stream

log = structlog.get_logger()

AGAIN = "--again"
"""Option of a session that follows on another in its process."""

_SIGNALS = "_SIGNALS_OF_THE_SESSION_BEFORE"
"""Names the descriptor of a pipe with the signals that arrived after the session before had last checked for them."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def start(stop: threading.Event) -> None:
    """Replace this process by its next session; returns only if a stop was requested meanwhile."""
    # A signal between here and the next session's handlers must neither end the process in the middle of its start nor
    # get lost. This thread blocks it. The kernel then gives it to another thread (Kafka's, Arrow's, the one that reads
    # standard input), whose mask cannot be set from here; but the thread that takes it writes it to the pipe.
    left, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # runs the handlers of the signals so far
    if stop.is_set():
        signal.set_wakeup_fd(before)
        os.close(written)
        os.close(left)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.set_inheritable(left, True)
    os.environ[_SIGNALS] = str(left)
    os.execv(sys.executable, command(sys.orig_argv))  # noqa: S606 - the command of this very process


def command(arguments: Sequence[str]) -> list[str]:
    """The command line of the next session, from that of this one."""
    return [*arguments, *([] if AGAIN in arguments else [AGAIN])]


def take_signals(stop: threading.Event) -> None:
    """Unblock the signals that waited since the session before, and take those that it saw too late."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    left = os.environ.pop(_SIGNALS, None)
    if left is not None:
        with suppress(OSError), os.fdopen(int(left), "rb") as file:  # its other end was closed by the start
            if set(STOP_SIGNALS).intersection(file.read()):
                stop.set()


def free(settings: Settings, streams: Sequence[Stream]) -> list[Stream]:
    """The streams that no other session runs; raises LeaseBusy if there is none."""
    holders = {stream.name: holder(settings, stream.name) for stream in streams}
    # A recovery or a command releases the lease within moments, and is waited for.
    held = {name: owner for name, owner in holders.items() if owner is not None and owner.purpose == "session"}
    for name, owner in held.items():
        log.info("the stream runs elsewhere by now and is left there", stream=name, holder=owner.pid)
    if len(held) == len(streams):
        raise LeaseBusy("every stream of this session runs elsewhere by now", "see: recourse streams status")
    return [stream for stream in streams if stream.name not in held]
