"""Start a command that ends with the process that started it, also after a kill -9.

    python -m orchestration.sessions.parent_death_signal COMMAND...

The command gets SIGTERM when its parent dies (PR_SET_PDEATHSIG, prctl(2)), and SIGINT back to its default: under
a shell that ignores SIGINT, Dagster would ignore SIGTERM as well, because it maps the one to the other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tethered(parent: int, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` tied to the life of process `parent`, which has to start it."""
    return [sys.executable, "-m", "orchestration.sessions.parent_death_signal", str(parent), *command]


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
