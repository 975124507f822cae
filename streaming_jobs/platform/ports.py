"""Ports of this machine: the test if one is free, its listener, and the choice of a free one.

A free port is chosen below the range from which the system assigns ports to clients. In that range, a client that keeps
trying to reach a broker that was just killed can be assigned the broker's port, connect to itself, and so prevent the
broker's restart.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Container
from pathlib import Path

import psutil

from streaming_jobs.errors import SetupError

HOST = "127.0.0.1"
_RANGE = range(20_000, 30_000)
_TRIES = 200


def is_free(port: int, host: str = HOST) -> bool:
    """True if a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: lingering connections of the previous server do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str = HOST, but: Container[int] = ()) -> int:
    """A free port that is not in `but`; raises SetupError if none is found."""
    for port in random.sample(_RANGE, _TRIES):
        if port not in but and is_free(port, host):
            return port
    raise SetupError(
        f"no free port between {_RANGE.start} and {_RANGE.stop} on {host}", "end programs that listen there"
    )


def listener(port: int) -> psutil.Process | None:
    """The process that listens on the port; None if there is none or this user may not see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and connection.pid and address and address.port == port:
                return psutil.Process(connection.pid)
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        pass  # macOS shows this only to root
    return None


def listener_name(port: int) -> str:
    """The listener in words: `java (process 4711)`, or `another program`."""
    process = listener(port)
    if process is None:
        return "another program"
    try:
        return f"{Path(process.name()).name} (process {process.pid})"
    except psutil.Error:
        return "another program"
