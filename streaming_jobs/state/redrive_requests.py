"""Redrives, and redrives that wait for their commit, as objects beside the stream's state (`change_requests.py`).

<state>/<stream>/redrives/waiting/<id>.json        a redrive that the driver commits at its next batch border
<state>/<stream>/redrives/<id>.json                the outcome, with what became of each record; these objects stay
<state>/<stream>/redrives/rows/<id>/<table>.parquet   the rows that the redrive adds to a table, until its outcome
<state>/<stream>/redrives/running                  a lock, held by the process that redrives; one per stream
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from streaming_jobs.errors import PermanentError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.redriven import Kind, RedrivenRecord, RedrivenRow
from streaming_jobs.state.change_requests import ChangeRequest, ChangeRequests

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class RedrivePart:
    """The commit of a redrive to one table: `add` rows, or `take_out` what was set aside; `version` once it is there.

    The ledger entry counts rows: `before` and `after` are those of what the part changes, so that the table has
    `after - before` more of them.
    """

    table: str
    action: Literal["add", "take_out"]
    entry: str
    version: int | None = None

    @property
    def ledger(self) -> LedgerEntry:
        entry = LedgerEntry.decode(self.entry)
        assert entry is not None, "it was encoded by us"
        return entry


@dataclass(frozen=True)
class RedriveRequest(ChangeRequest):
    """One redrive of what is set aside in `table`; `parts` are committed in this order, `table` itself last.

    `expires` in seconds since 1970: nothing is committed after it unless a part was committed before. `rows` are those
    of each output, by what became of them, for people.

    `windows` are quarantined rows that name no record; their slices were rebuilt, so there are no parts.
    """

    kind: Kind
    table: str
    records: tuple[RedrivenRecord, ...]
    parts: tuple[RedrivePart, ...]
    expires: float
    rows: Mapping[str, int]
    windows: tuple[RedrivenRow, ...] = ()

    @property
    def redriven(self) -> tuple[RedrivenRecord | RedrivenRow, ...]:
        """Everything that was redriven, records and rows without one."""
        return (*self.records, *self.windows)

    @property
    def taken_out(self) -> tuple[RedrivenRecord, ...]:
        """The records that leave the table, and dead letters that stay with another reason."""
        stays = ("dead again",) if self.kind == "dead letters" else ("dead again", "quarantined")
        return tuple(each for each in self.records if each.outcome not in stays or each.reason_now)

    def committed(self, versions: Mapping[str, int | None]) -> RedriveRequest:
        """The outcome of a redrive whose parts are all there; `versions` by table."""
        parts = tuple(replace(part, version=versions.get(part.table)) for part in self.parts)
        return self._ended("committed", "", parts=parts)


def _built(**values: Any) -> RedriveRequest:
    records = tuple(RedrivenRecord(**each) for each in values.pop("records"))
    parts = tuple(RedrivePart(**each) for each in values.pop("parts"))
    windows = tuple(RedrivenRow(**each) for each in values.pop("windows", ()))
    values.pop("ranges", None)  # of earlier versions
    return RedriveRequest(**values, records=records, parts=parts, windows=windows)


class RedriveRequests(ChangeRequests[RedriveRequest]):
    kind = "redrives"
    build = staticmethod(_built)
    busy = "records of stream {} are being redriven already", "run it again when that has ended"

    def keep_rows(self, redrive: str, table: str, rows: pa.Table) -> None:
        """Keep the rows that a redrive adds to a table; durable when this returns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer = pa.BufferOutputStream()
        pq.write_table(rows, buffer)
        self.files.put(_rows(redrive, table), buffer.getvalue().to_pybytes())

    def rows(self, redrive: str, table: str) -> pa.Table:
        """The rows that a redrive adds to a table; raises PermanentError if they are gone."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        found = self.files.read(_rows(redrive, table))
        if found is None:
            raise PermanentError(
                f"the rows of redrive {redrive} for table {table} are gone: {self.files.where(_rows(redrive, table))}",
                "put the state back from a copy",
            )
        return pq.read_table(pa.BufferReader(found.data))

    def remove_rows(self, needed: Sequence[str] = ()) -> None:
        """Remove the rows of all redrives but the needed ones."""
        for name in self.files.names("rows"):
            if name.split("/")[1] not in needed:
                self.files.delete(name)


def _rows(redrive: str, table: str) -> str:
    return f"rows/{redrive}/{table}.parquet"
