"""The peers that are written in Python, each a program of its own: it prints READY, and ends when its input does."""

import os
import sys
import threading
from collections.abc import Callable


def at_end_of_input(end: Callable[[], object]) -> None:
    """Call `end` in a thread when standard input ends."""

    def read_all() -> None:
        while os.read(0, 4096):
            pass
        end()

    threading.Thread(target=read_all, daemon=True).start()


def say_ready() -> None:
    sys.stdout.write("READY\n")
    sys.stdout.flush()
