"""What a command needs on this machine before it starts anything: checks, jars, the home for itself."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from orchestration.cli.output import say

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings


def quick_checks(settings: Settings) -> None:
    """Run the doctor's checks, say what is not in order; raises SetupError if one of them fails."""
    from streaming_jobs.platform.doctor import checks

    from orchestration.cli.doctor import verdict
    from streaming_jobs.errors import SetupError

    found = checks(settings)
    for check in found:
        if not check.ok:
            say(f"{verdict(check)}: {check.name}: {check.found}. {check.fix}")
    if failed := [check for check in found if check.ok is False]:
        raise SetupError(f"this machine is not ready: {', '.join(c.name for c in failed)}", failed[0].fix)


def fetch_spark_jars(settings: Settings) -> None:
    """Have the jars of the session, with a progress bar while they are fetched."""
    from streaming_jobs.platform import jars

    with _bar() as progress:
        jars.spark_jars(settings, progress=progress)


def fetch_broker_jars(settings: Settings) -> None:
    """Have the jars of the embedded broker, with a progress bar while they are fetched."""
    from streaming_jobs.platform import jars

    with _bar() as progress:
        jars.broker_jars(settings, progress=progress)


@contextmanager
def sole_use(settings: Settings) -> Iterator[None]:
    """Keep a second `recourse up` off this home; raises UsageError while one runs."""
    from streaming_jobs.errors import UsageError
    from streaming_jobs.files import private_folder

    path = private_folder(settings.home.expanduser().absolute()) / "up.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 20, 0).decode().strip() or "?"
            raise UsageError(
                f"`recourse up` runs already on {path.parent} (process {pid})",
                "end that one, or use another home: recourse --set home=FOLDER up",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt like Ctrl-C, also where a shell has made this process ignore SIGINT."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
