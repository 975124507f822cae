"""The process that started a session with `--supervised`: the session ends when that process has gone."""

from __future__ import annotations

import os
import threading

import structlog

log = structlog.get_logger()


def watch(stop: threading.Event) -> None:
    """Set `stop` when standard input ends: its other end is the parent's, and closed by the end of the parent."""
    threading.Thread(target=_until_it_has_gone, args=(stop,), name="parent", daemon=True).start()


def _until_it_has_gone(stop: threading.Event) -> None:
    # os.read, not sys.stdin: a thread inside the buffered reader aborts the interpreter at exit.
    while os.read(0, 4096):
        pass
    log.info("standard input ended: the parent is gone")
    stop.set()
