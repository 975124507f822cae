"""The fork server of a session: Spark's Python processes are forked from it, with their imports already done.

Spark starts a Python process for each request to Python: one takes a data source apart, one plans the
batches of a query, one forks workers. Each would import the same packages for half a second, and have them in memory
once more. So Spark's Python command is a small client, which requests the process from the server:

    driver
    |- python -m ...fork_server          imports while the JVM starts; ends when its standard input does
    |    `- python -m pyspark...         forked, with the client's arguments, environment, folder, standard streams
    `- JVM
         `- python fork_client.py        what Spark takes for that process: they end together

A client that gets no answer becomes the process that it was to ask for, so a server that is gone costs time only.
Linux only: elsewhere Spark starts its Python processes itself.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from streaming_jobs.platform.processes.fork_client import SOCKET, address

SERVER = ("streaming_jobs.platform.processes.fork_server",)
_CLOSE = 10.0


@dataclass(frozen=True)
class ForkServer:
    """A server, seen from the driver that has started it."""

    process: subprocess.Popen[bytes]
    executable: Path
    """A program that does what Python does, by asking the server."""

    def close(self) -> None:
        """End it, and what was forked from it. Spark's JVM should have ended before."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_CLOSE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_CLOSE)


def start(folder: Path, output: IO[bytes] | None = None, server: Sequence[str] = SERVER) -> ForkServer | None:
    """Start a server with its socket in `folder`, which is this user's alone; `output` receives what it prints.

    `server` is its module with arguments, after which comes the number of the listening socket.

    None where it cannot work: not on Linux, or programs or sockets cannot be in the folder.
    """
    executable = folder / "python"
    client = shlex.join([sys.executable, "-IS", str(Path(__file__).with_name("fork_client.py")), str(folder)])
    executable.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    executable.chmod(stat.S_IRWXU)
    if sys.platform != "linux" or not os.access(executable, os.X_OK):
        return None
    try:
        socket_of_server = _listening(folder)
    except OSError:  # a file system without sockets
        return None
    with socket_of_server as listening:
        process = subprocess.Popen(
            [sys.executable, "-m", *server, str(listening.fileno())],
            # As the JVM and PySpark have it: a value's hash is the same in all processes.
            env={**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[listening.fileno()],
            process_group=0,  # Ctrl-C is for the driver
        )
    return ForkServer(process, executable)


def _listening(folder: Path) -> socket.socket:
    """A socket that accepts clients from now on; they wait until the server answers."""
    listening = socket.socket(socket.AF_UNIX)
    (folder / SOCKET).unlink(missing_ok=True)
    descriptor, path = address(str(folder))
    try:
        listening.bind(path)
    finally:
        os.close(descriptor)
    listening.listen()
    return listening
