"""Rebuilt slices, and slices that wait for their commit, as objects beside the stream's state (`change_requests.py`).

<state>/<stream>/slices/waiting/<id>.json   a change that the driver commits at its next batch border
<state>/<stream>/slices/<id>.json           the outcome; these objects stay, as the history of rebuilt slices
<state>/<stream>/slices/running             a lock, held by the rebuild that runs; one per stream
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.state.change_requests import ChangeRequest, ChangeRequests, State


@dataclass(frozen=True)
class SliceCommitRequest(ChangeRequest):
    """One rebuilt slice. `change` is `SliceChange` as JSON; `expires` in seconds since 1970; `summary` is for people.

    `version` is that of the table after the commit; there is none if the rebuilt rows were those of the table.
    `begin` and `end` of its range are in seconds since 1970, 0 in requests of earlier versions. `quarantine` is the
    slice of the table's quarantine, as JSON of its own, which is committed first; its outcome is one of its own.
    """

    table: str
    entry: str
    change: Mapping[str, Any]
    expires: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    version: int | None = None
    begin: float = 0.0
    end: float = 0.0
    quarantine: Mapping[str, Any] | None = None

    @property
    def parts(self) -> list[SliceCommitRequest]:
        """The commits of the request, in their order."""
        return [*([] if self.quarantine is None else [SliceCommitRequest(**self.quarantine)]), self]

    @property
    def ledger(self) -> LedgerEntry:
        entry = LedgerEntry.decode(self.entry)
        assert entry is not None, "it was encoded by us"
        return entry

    def ended(self, state: State, *, version: int | None = None, reason: str = "") -> SliceCommitRequest:
        """The request with its outcome, without the files of the change."""
        return self._ended(state, reason, version=version, change={}, quarantine=None)


class SliceRequests(ChangeRequests[SliceCommitRequest]):
    kind = "slices"
    build = SliceCommitRequest
    busy = (
        "another slice of stream {} is being rebuilt",
        "run it again when that one has ended, or name a range of days",
    )
