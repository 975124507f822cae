"""A child process that does not outlive this one, however this one ends.

A tiny shell waits at the end of a pipe that only this process holds; when this process is gone, killed or not,
the pipe closes and the shell kills the child. Linux has a signal for it (PR_SET_PDEATHSIG), but it fires when
the *thread* that started the child ends, which is not what a broker started from a worker thread wants, and
other systems do not have it. The pipe works wherever there is a POSIX shell.

The pipe is closed on exec, so children of this process do not hold it; one that forks without exec
(multiprocessing with `fork`) does, and the child then lives until that one has ended too.
"""

from __future__ import annotations

import subprocess

_WAIT_THEN_KILL = 'read -r pid || exit 0; read -r _; kill -9 "$pid"'


class Lifeline:
    """Hold it for as long as the child may live. Start it first, then the child, then `tie` them."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C must not cut the line.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT_THEN_KILL, "recourse-lifeline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tie(self, pid: int) -> None:
        """From now on this process dies with us."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{pid}\n".encode())
        self._shell.stdin.flush()

    def cut(self) -> None:
        """Let go without killing: the child has ended, and its pid may soon be another's."""
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()
