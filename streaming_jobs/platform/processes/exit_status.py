"""Words for the exit status of a process."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress

from streaming_jobs.errors import TransientError

JAVA_HEAP_FULL = 3
"""Exit code of a JVM under -XX:+ExitOnOutOfMemoryError."""


def ended_by(code: int) -> str:
    """The words for a return code as `subprocess` gives it: negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGKILL:
        return "killed by signal 9, perhaps because memory ran out (see `dmesg`)"
    name = ""
    with suppress(ValueError):  # a real-time signal has no name
        name = f" ({signal.Signals(-code).name})"
    return f"ended by signal {-code}{name}"


def jvm_gone(jvm: subprocess.Popen[bytes] | None, patience: float) -> TransientError | None:
    """The error that says how our JVM ended, if it has ended or does so within `patience` seconds."""
    try:
        code = None if jvm is None else jvm.wait(patience)
    except subprocess.TimeoutExpired:
        return None
    if code is None:
        return None
    full = "exit code 3: its heap was full; raise spark.driver_memory_mb"
    words = full if code == JAVA_HEAP_FULL else ended_by(code)
    return TransientError(f"Spark's JVM is gone: {words}", "the next session repeats its batches")
