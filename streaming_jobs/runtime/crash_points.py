"""Named points at which a test can kill this process with SIGKILL, or stop it. Off unless `RECOURSE_CRASH` is set.

`RECOURSE_CRASH=totals:primary_committed:3` kills at that point of batch 3 of the stream `totals`, `...:3+` at that of
the first batch from 3 on that comes to it: a batch without rows opens no transaction. With `:stop` after it the process
is stopped there once, until somebody sends it SIGCONT. The points, in the order in which a batch reaches them:
"""

from __future__ import annotations

import os
import signal
import time

POINTS = (
    "batch_started",  # Spark has logged the offsets, nothing is written
    "staged",  # rows computed and files written, nothing committed
    "secondary_committed",  # one of two sinks has the batch
    "primary_committed",  # the tables have the batch, Spark has not written commits/N
    "batch_committed",  # Spark has written commits/N
)

ASIDE_POINTS = ("set_aside",)  # the list of records that raise is on disk, the batch is not repeated without them
"""The point of a batch on which the stream's function raises."""

TOPIC_POINTS = ("transaction_open",)  # the records of a batch are in its topic, the transaction is not committed
"""The point of a stream that writes a topic."""

SLICE_POINTS = (
    "slice_staged",  # the files of a rebuilt slice are written, nothing waits for the driver
    "slice_asked",  # the change is left for whoever may commit it
    "slice_linked",  # its files have their names in the table, which does not list them
    "slice_committed",  # the table has the slice, and no outcome is written
    "slice_ended",  # the outcome is written, the staged files are still there
)
"""The points of the rebuild of a slice. The batch is 0, but 1 of the links and the commit of a table whose quarantine
changes too, which has the number 0."""

REDRIVE_POINTS = (
    "redrive_rebuilt",  # the slices of a windowed stream are rebuilt, the records are still set aside
    "redrive_staged",  # the rows are computed and kept, nothing waits for the driver
    "redrive_asked",  # the redrive is left for whoever may commit it
    "redrive_next",  # before the first table takes it, and between two tables
    "redrive_ended",  # the outcome is written, the rows are still kept
)
"""The points of a redrive; the batch is 0, of `redrive_next` the number of tables that have taken it."""

SAVEPOINT_POINTS = ("savepoint_of_name",)  # a stream has its savepoint, the name of all of them is not written
"""The point of a savepoint of several streams; the batch is 0."""


_TAKES_HOLD = 0.5


def crash_point(name: str, stream: str, batch: int) -> None:
    """Kill or stop this process if the environment names this point of this batch."""
    wanted = os.environ.get("RECOURSE_CRASH")
    if wanted is None:
        return
    point = wanted.removesuffix(":stop")
    place, _, number = point.removesuffix("+").rpartition(":")
    later = point.endswith("+") and batch > int(number)
    if place != f"{stream}:{name}" or not (later or number == str(batch)):
        return
    if wanted == point:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        del os.environ["RECOURSE_CRASH"]
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(_TAKES_HOLD)  # another thread may take the signal, and this one continues for a moment
