"""The program that Spark starts instead of Python: requests a process of the fork server, and lives as long as it.

It runs as a file, and imports little, so that it starts at once:

    python -IS fork_client.py FOLDER -m MODULE ARGUMENT...
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from contextlib import suppress
from typing import NoReturn

SOCKET = "fork-server"
"""The name of the server's socket in its folder."""
NUMBER = 4
"""Bytes of a length, a pid and an exit code, big-endian."""
_PATIENCE = 4.0  # Spark waits 10 s for a process, and without the server it takes some seconds


def main() -> None:
    """Ask, then end as the forked process ends."""
    folder, *arguments = sys.argv[1:]
    try:
        server = _connected(folder)
        _ask(server, arguments)
        pid = _number(server)
    except OSError as error:
        print(f"Python is started without the fork server: {error}", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - ourselves
    server.settimeout(None)
    _end_with(pid, server)


def address(folder: str) -> tuple[int, str]:
    """The address of the server's socket, and the descriptor to close after its use.

    The folder by its descriptor, because a path in an address has 107 bytes at most.
    """
    descriptor = os.open(folder, os.O_PATH)
    return descriptor, f"/proc/self/fd/{descriptor}/{SOCKET}"


def _connected(folder: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(_PATIENCE)
    descriptor, path = address(folder)
    try:
        server.connect(path)
    finally:
        os.close(descriptor)
    return server


def _ask(server: socket.socket, arguments: list[str]) -> None:
    here = os.getcwd()  # noqa: PTH109 - pathlib takes a tenth of our time
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": here}).encode()
    socket.send_fds(server, [len(request).to_bytes(NUMBER)], [0, 1, 2])
    server.sendall(request)


def exactly(connection: socket.socket, size: int) -> bytes:
    """The next bytes of a connection; raises OSError if it ends before."""
    data = b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise ConnectionResetError("the connection has ended")
        data += part
    return data


def _number(server: socket.socket) -> int:
    return int.from_bytes(exactly(server, NUMBER), signed=True)


def _end_with(pid: int, server: socket.socket) -> NoReturn:
    """Wait for the process; the server sends its exit code, negative for a signal."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # they are the process's now: who reads them learns that they end with it
            os.dup2(nothing, number)
        select.select([process], [], [])
    try:
        code = _number(server)
    except OSError:  # the server was killed before
        code = 1
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
