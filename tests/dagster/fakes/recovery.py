"""A process of a recovery as its run sees one: reads its launch, reports what the file `<home>/script` says.

Each line of the script is an event as JSON, or `wait` (until it is interrupted, or nobody started it any more), or
`exit N`, or `die` (of SIGKILL). Its pid is appended to `<home>/recoveries_begun`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from orchestration.recoveries import child


def main() -> int:
    home = Path(os.environ["RECOURSE_HOME"])
    channel = child._take_standard_output()
    child._interrupt_on_signals()
    launch = child._first_line()
    with (home / "recoveries_begun").open("a") as file:
        file.write(f"{os.getpid()} {launch}")
    print("of a library, no event", flush=True)
    try:
        for line in (home / "script").read_text().splitlines():
            word, _, number = line.partition(" ")
            if word == "wait":
                child._watch_parent()
                signal.pause()
            elif word == "exit":
                return int(number)
            elif word == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                channel.write(f"{line}\n".encode())
    except KeyboardInterrupt:
        return child.INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
