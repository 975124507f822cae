"""A process that writes one batch to a topic, and kills or stops itself at a point: `before`, `after`, `stop`.

Exit code 23 if another writer has fenced it.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from streaming_jobs.errors import Fenced


def main() -> int:
    """Write the batch."""
    from tests.broker.test_topic_writer import Place

    bootstrap, topic, batch, point = sys.argv[1:]
    place = Place(bootstrap, topic)

    def hook(_: int) -> None:
        if point in ("before", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if point == "before" else signal.SIGSTOP)
            time.sleep(0.5)  # another thread may take the signal, and this one goes on for a moment

    writer = place.writer(before_commit=hook)
    try:
        writer.write(place.entry(int(batch)), place.batch(int(batch)))
    except Fenced:
        return 23
    if point == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
