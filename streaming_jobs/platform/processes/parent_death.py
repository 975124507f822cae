"""Children that end when the process that started them ends in any way, also by kill -9.

There are two kinds of children, and a mechanism for each.

`ChildReaper` kills. It is for a child that loses nothing when killed and has no children: the embedded broker, whose
acknowledged records survive. A small shell reads from a pipe that only this process holds; when this process ends the
pipe closes, and the shell sends SIGKILL to the child. It needs only a POSIX shell, and follows the process, not one of
its threads: a broker may be started by a thread that ends. The pipe is closed on exec, so children of this process do
not hold it. A child that forks without exec (multiprocessing with `fork`) does, and the watched child then runs until
that one has ended too.

`terminated_with_parent` sends SIGTERM. It is for a child that has to end its children in order: Dagster's code server,
webserver and daemon. The kernel sends the signal (PR_SET_PDEATHSIG, prctl(2)); a command whose parent has ended before
that was set does not start. The signal comes when the *thread* that started the child ends, so that thread has to run
as long as the process. Linux only: on other systems the child survives a kill -9 of its parent.

A session's driver needs neither: it reads its standard input, a pipe of its parent's, and stops at a batch border when
the pipe ends (`orchestration/sessions/child_run.py`).
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
    """Kills one child when this process ends. Make it before the child, then `watch` the child.

    `release` it when the child has ended.
    """

    def __init__(self) -> None:
        # Its own process session: Ctrl-C must not end the shell before the child.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT_THEN_KILL, "recourse-lifeline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Kill the process `pid` when this process ends."""
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

    SIGINT, SIGTERM and SIGHUP have their default handlers in it: under a shell that ignores SIGINT, Dagster would
    ignore SIGTERM as well, because it gives SIGTERM the handler of SIGINT.
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
