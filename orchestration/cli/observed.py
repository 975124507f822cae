"""What a stream is doing now, from its status file and its lease: neither alone can be believed.

A status file outlives a killed session and would say `running` for ever; a lease says who, not what.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orchestration.cli.output import ago, number

if TYPE_CHECKING:
    from streaming_jobs.lease import Owner
    from streaming_jobs.progress import Status
    from streaming_jobs.settings import Settings

ENDED = ("stopped", "failed")
"""States that a session writes as its last word."""

COLUMNS = ["stream", "state", "generation", "batch", "rows/s", "lag", "watermark", "dead letters", "heartbeat"]
RIGHT = ["generation", "batch", "rows/s", "lag", "dead letters", "heartbeat"]


@dataclass(frozen=True)
class Observed:
    """One stream at one moment (`at`, seconds since 1970)."""

    stream: str
    state: str
    at: float
    status: Status | None
    owner: Owner | None
    asked_to_stop: bool

    @property
    def live(self) -> bool:
        """Whether a session works on the stream."""
        return self.owner is not None and self.state not in ("dead", *ENDED)

    def as_json(self) -> dict[str, Any]:
        """The stable form: the status file's fields, with the state as observed and who holds the lease."""
        fields = asdict(self.status) if self.status else {"stream": self.stream}
        return {
            **fields,
            "state": self.state,
            "live": self.live,
            "holder_pid": self.owner.pid if self.owner else None,
            "heartbeat_age_s": round(self.at - self.status.heartbeat, 1) if self.status else None,
            "asked_to_stop": self.asked_to_stop,
        }

    def row(self) -> list[str]:
        """The cells of `COLUMNS`; figures of a session that is gone are not shown as if they held."""
        status = self.status
        if status is None:
            return [self.stream, self.state, *["-"] * (len(COLUMNS) - 2)]
        rate = status.processed_rows_per_s if self.live else None
        lag = status.lag_records if self.live else None
        return [
            self.stream,
            self.state,
            number(status.generation or None),
            number(status.batch),
            number(rate),
            number(lag),
            (status.watermark or "-")[:19].replace("T", " "),
            number(status.dead_letters),
            ago(self.at - status.heartbeat),
        ]

    def notes(self) -> list[str]:
        """What a person should know beyond the row: an error with its next step, warnings, a stop that was asked."""
        found = []
        if self.status and self.status.error and self.state != "stopped":
            error = self.status.error
            found.append(f"{self.stream}: {error['code']} {error['found']}")
            if error.get("next"):
                found.append(f"  next: {error['next']}")
        if self.state == "dead" and self.status:
            found.append(f"{self.stream}: its session (pid {self.status.pid}) ended without saying so")
        if self.state == "silent" and self.owner:
            found.append(f"{self.stream}: process {self.owner.pid} lives but has not written its status; see its log")
        if self.status and self.live:
            found += [f"{self.stream}: {warning}" for warning in self.status.warnings]
        if self.asked_to_stop:
            found.append(f"{self.stream}: was asked to stop and stays so until it is started again")
        return found


def observe(settings: Settings, stream: str) -> Observed:
    """Look at one stream now."""
    from streaming_jobs import stops
    from streaming_jobs.lease import holder
    from streaming_jobs.progress import read_status

    # The status first: a session that ends in between has then written its last word before its lease was seen free.
    status, owner, now = read_status(settings, stream), holder(settings, stream), time.time()
    if owner is None:
        status = read_status(settings, stream)
    stale_after = settings.dagster.stale_after.total_seconds()
    return Observed(
        stream, state_of(status, owner, now, stale_after), now, status, owner, stops.asked(settings, stream)
    )


def observe_all(settings: Settings, streams: Iterable[str]) -> list[Observed]:
    """Look at several streams now."""
    return [observe(settings, stream) for stream in streams]


def state_of(status: Status | None, owner: Owner | None, now: float, stale_after: float) -> str:
    """The state to show.

    The status file's own state, but `dead` if nobody holds the lease of a stream that says it runs (or only the
    JVM of a killed driver does), `silent` if the holder's heartbeat is older than `stale_after` seconds,
    `starting` if the holder has written nothing yet, and `never started` if there is nothing at all.
    """
    if owner is None:
        if status is None:
            return "never started"
        return status.state if status.state in ENDED else "dead"
    if owner.alive() == "jvm":
        return "dead"
    if status is None or status.pid != owner.pid:
        return "starting"
    if status.state not in ENDED and now - status.heartbeat > stale_after:
        return "silent"
    return status.state
