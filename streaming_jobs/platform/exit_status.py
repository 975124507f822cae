"""How a process ended, in words."""

from __future__ import annotations

import signal
from contextlib import suppress

JAVA_HEAP_FULL = 3
"""Exit code of a JVM under -XX:+ExitOnOutOfMemoryError."""


def ended_by(code: int) -> str:
    """The words for a return code as `subprocess` gives it: negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGKILL:
        return "killed by signal 9, perhaps because memory ran out (`dmesg` tells)"
    name = ""
    with suppress(ValueError):  # a real-time signal has no name
        name = f" ({signal.Signals(-code).name})"
    return f"ended by signal {-code}{name}"


def java_ended_by(code: int) -> str:
    """The same for a JVM that we started."""
    if code == JAVA_HEAP_FULL:
        return "exit code 3: its heap was full; raise spark.driver_memory_mb"
    return ended_by(code)
