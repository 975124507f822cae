"""The wait of a process beside a stream for the commit of a change that it has made."""

from __future__ import annotations

import time
from collections.abc import Callable

from streaming_jobs.errors import LeaseBusy, PreflightRefused
from streaming_jobs.settings import Settings
from streaming_jobs.state.change_requests import ChangeRequests, Request
from streaming_jobs.state.lease import Lease, take

_LOOK = 0.1


def committed_or_withdrawn(
    settings: Settings,
    requests: ChangeRequests[Request],
    request: Request,
    carry_out: Callable[[Lease], None],
    wait: float,
    tell: Callable[[str], None],
) -> Request:
    """The request with its outcome: the stream's driver has committed it, or `carry_out` has, if no driver runs.

    After `wait` seconds it is withdrawn, unless a driver has claimed it: then this waits on. Raises PreflightRefused if
    the driver could not read it.
    """
    deadline, told = time.monotonic() + wait, False
    while True:
        if (ended := requests.outcome(request.id)) is not None:
            return ended
        try:
            with take(settings, request.stream, purpose=requests.kind, wait=0.0) as lease:
                carry_out(lease)
        except LeaseBusy as busy:
            if not told:
                tell("the stream runs: its driver commits it at its next batch border")
                told = True
            if time.monotonic() > deadline:
                requests.withdraw(request, f"not committed in time: {busy.found}")
                if request.id not in requests.names_waiting() and requests.outcome(request.id) is None:
                    raise PreflightRefused(
                        f"the driver of stream {request.stream} has set change {request.id} aside as unreadable",
                        "it runs another version of Recourse: start the stream again with this one",
                    ) from busy
            time.sleep(_LOOK)
