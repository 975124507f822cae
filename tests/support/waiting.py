"""Waiting in tests: for a condition, with a deadline; and what goes on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


PATIENCE = 240.0
"""Seconds for anything to happen; a quiet machine needs a tenth of it."""


def wait_for(condition: Callable[[], T], what: str) -> T:
    """Wait until the condition is true and return its value; an AssertionError names what did not come."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(0.05)
    return value


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs `work` in a thread during the block; it has to end once the event that it gets is set."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
