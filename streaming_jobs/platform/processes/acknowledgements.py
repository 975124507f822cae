"""What the JVM sends, acknowledged as soon as it arrives.

The JVM writes in pieces: a task for Python code in two at least, the command and the rows, an answer over Py4J of more
than 8 KB in several. Each waits until the piece before is acknowledged (Nagle's algorithm), unless it is long. Linux
acknowledges after 40 ms, unless it is told to for the next read (TCP_QUICKACK, tcp(7)).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from importlib import import_module
from typing import IO, Any


def acknowledge_at_once(connected: socket.socket) -> None:
    """Have what arrives next at a connection acknowledged at once, where the system can."""
    if hasattr(socket, "TCP_QUICKACK"):
        with suppress(OSError):  # a kernel without it, or a socket that is not of TCP
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def acknowledge_tasks() -> None:
    """Have the workers that are forked from this process acknowledge each task at once."""
    worker: Any = import_module("pyspark.worker")
    main = worker.main

    def prompt(infile: IO[bytes], outfile: IO[bytes]) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(infile.fileno())) as connected:
            connected.setblocking(True)  # a user's default timeout would hold for the task's own reads
            acknowledge_at_once(connected)
        main(infile, outfile)

    worker.main = prompt
