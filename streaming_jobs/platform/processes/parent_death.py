"""Children that end when the process that started them does, however that ends: also by kill -9.

There are two kinds of children, and a mechanism for each.

`ChildReaper` kills. It is for a child that loses nothing by it and has no children of its own: the embedded broker,
whose acknowledged records survive. A tiny shell waits at the end of a pipe that only this process holds; when this
process is gone the pipe closes, and the shell sends SIGKILL to the child. It needs a POSIX shell only, and follows the
process, not one thread of it: a broker may be started by a thread that ends. The pipe is closed on exec, so children of
this process do not hold it; one that forks without exec (multiprocessing with `fork`) does, and the watched child then
lives until that one has ended too.

`terminated_with_parent` asks. It is for a child that has to end its own children in order: Dagster's code server,
webserver and daemon. The kernel sends them SIGTERM (PR_SET_PDEATHSIG, prctl(2)), and a command whose parent has died
before that was arranged does not start. The signal comes when the *thread* that started the child ends, so that thread
has to live as long as the process. Linux only: elsewhere the child outlives a kill -9.

A session's driver needs neither: it reads its standard input, a pipe of its parent's, and stops at a batch border when
the pipe ends (`orchestration/sessions/driver.py`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_WAIT_THEN_KILL = 'read -r pid || exit 0; read -r _; kill -9 "$pid"'
_PR_SET_PDEATHSIG = 1


class ChildReaper:
    """Kills one child when this process is gone. Make it before the child, then `watch` the child.

    `release` it when the child has ended.
    """

    def __init__(self) -> None:
        # A session of its own: Ctrl-C must not end the shell before the child.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT_THEN_KILL, "recourse-lifeline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Kill this process when we are gone."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{pid}\n".encode())
        self._shell.stdin.flush()

    def release(self) -> None:
        """Stop without killing: the child has ended, and its pid may soon be another's."""
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()


def terminated_with_parent(parent: int, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` until process `parent` ends; `parent` has to start it.

    SIGINT, SIGTERM and SIGHUP are back to their defaults in it: under a shell that ignores SIGINT, Dagster would ignore
    SIGTERM as well, because it maps the one to the other.
    """
    # As a file, not as a module: that imports no package. -P: the modules beside it hide none of Python's own.
    return [sys.executable, "-P", __file__, str(parent), *command]


def main() -> None:
    """Set the death signal, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() != parent:  # it died before the signal was set
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  (no shell is wanted)


if __name__ == "__main__":
    main()
