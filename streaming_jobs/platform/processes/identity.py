"""The identity of a process: its pid and its start time, so that another process with the same pid is not taken for it.

On Linux the mark is the machine's boot and the clock ticks from boot to the process's start (`/proc/PID/stat`, field
22). Both stay the same when the clock is set. A start time in seconds since 1970, as psutil derives it from the boot
time, changes with the clock, so that every process would seem to be another one. On other systems, and in files of
earlier versions of this package, the mark is that time, compared with a tolerance.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

Mark = str | float
"""`<boot id>/<ticks>`, or seconds since 1970 as a number or as its text."""

TOLERANCE = 10.0
"""Seconds by which a mark in seconds may differ: the clock may have been set since it was written."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PIDS = Path("/proc/self/ns/pid")
_ENDED = ("Z", "X", "x")
_STATE, _START = 0, 19  # of the fields behind the command's closing bracket


def mark(pid: int | None = None) -> str:
    """The mark of a process, of this one without a pid. Raises psutil.NoSuchProcess."""
    pid = os.getpid() if pid is None else pid
    boot, fields = _boot(), _stat(pid)
    if boot and fields:
        return f"{boot}/{fields[_START]}"
    return f"{psutil.Process(pid).create_time():.2f}"


def is_alive(pid: int, started: Mark) -> bool:
    """True if that very process runs; a zombie does not count."""
    if isinstance(started, str) and "/" in started:
        fields = _stat(pid)
        return bool(fields) and fields[_STATE] not in _ENDED and f"{_boot()}/{fields[_START]}" == started
    try:
        process = psutil.Process(pid)
        apart = abs(process.create_time() - float(started))
        return process.status() != psutil.STATUS_ZOMBIE and apart < TOLERANCE
    except (psutil.NoSuchProcess, ValueError):
        return False


def machine() -> str:
    """The boot of this machine and the namespace of pids: among processes with the same text, pids can be compared.

    Empty where neither is known.
    """
    boot = _boot()
    try:
        return f"{boot}/{_PIDS.readlink()}" if boot else ""
    except OSError:
        return ""


def _boot() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the command, which may itself hold blanks and brackets; none if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
