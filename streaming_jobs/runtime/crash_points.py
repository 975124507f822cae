"""Named points at which a test can kill this process with SIGKILL. Off unless `RECOURSE_CRASH` is set.

`RECOURSE_CRASH=totals:primary_committed:3` kills at that point of batch 3 of the stream `totals`. The points, in the
order in which a batch reaches them:
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "batch_started",  # Spark has logged the offsets, nothing is written
    "staged",  # rows computed and files written, nothing committed
    "secondary_committed",  # one of two sinks has the batch
    "primary_committed",  # the tables have the batch, Spark has not written commits/N
    "batch_committed",  # Spark has written commits/N
)


def crash_point(name: str, stream: str, batch: int) -> None:
    """Kill this process if the environment names this point of this batch."""
    wanted = os.environ.get("RECOURSE_CRASH")
    if wanted is not None and wanted == f"{stream}:{name}:{batch}":
        os.kill(os.getpid(), signal.SIGKILL)
