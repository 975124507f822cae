"""The records that a batch has set aside because the stream's function raises on each of them.

The list is on disk before the batch is repeated without these records. So a batch that is repeated after a kill leaves
out the same records, whichever of its tables have the batch already. The list is that of one batch of one generation:
a later generation, such as that of a recovery, reads these offsets like all others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from streaming_jobs.declare.format import Refusal
from streaming_jobs.errors import PermanentError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.sources.base import Aside
from streaming_jobs.state.records import parsed_record, record_bytes
from streaming_jobs.storage.locations import Location
from streaming_jobs.storage.object_files import ObjectHandle

REASON = "function_raised"
"""The reason of their dead letters."""
MOST_DETAIL = 4_000
"""Characters of an error with its traceback."""


Action = Literal["dead_letter", "drop"]


@dataclass(frozen=True)
class RaisingRecord:
    """A record on which the function raised; `detail` is the error, with its traceback if it has one."""

    topic: str
    partition: int
    offset: int
    detail: str


@dataclass(frozen=True)
class Spent:
    """So many records and rows of a batch failed; `at` in seconds since 1970."""

    at: float
    generation: int
    batch: int
    number: int


@dataclass(frozen=True)
class SetAside:
    """The records of a batch that are set aside, and the failures of earlier batches, which an error budget counts."""

    generation: int = 0
    batch: int = -1
    action: Action = "dead_letter"
    records: tuple[RaisingRecord, ...] = ()
    spent: tuple[Spent, ...] = ()

    def in_generation(self, generation: int) -> SetAside:
        """The list for a generation; without records if it is an earlier one's."""
        return self if self.generation == generation else SetAside(spent=self.spent)

    def of(self, txn: Txn) -> tuple[RaisingRecord, ...]:
        """The records of this batch; none if the list is another batch's."""
        return self.records if (self.generation, self.batch) == (txn.generation, txn.batch) else ()

    def of_topic(self, topic: str) -> Aside:
        """The records of a topic that its readers leave out."""
        return {
            (record.partition, record.offset): Refusal(REASON, record.detail, MOST_DETAIL)
            if self.action == "dead_letter"
            else None
            for record in self.records
            if record.topic == topic
        }

    def spending(self, spent: Spent, since: float) -> SetAside:
        """The same with the failures of one more batch, or of a repeated one, without those before `since`."""
        kept = [
            each
            for each in self.spent
            if each.at >= since and (each.generation, each.batch) != (spent.generation, spent.batch)
        ]
        return replace(self, spent=(*kept, spent))

    def spent_since(self, since: float, other_than: Txn) -> int:
        """The failures since a time (s), without those of a batch."""
        return sum(
            each.number for each in self.spent if each.at >= since and Txn(each.generation, each.batch) != other_than
        )


def of_letters(table: Location, topic: str) -> Aside:
    """The records of a topic that are in a table of dead letters because the function raised; none without a table."""
    import pyarrow.compute as pc
    from deltalake.exceptions import TableNotFoundError

    from streaming_jobs.platform import table_rows

    try:
        letters = table_rows.rows(table, columns=("topic", "partition", "offset", "reason"))
    except TableNotFoundError:
        return {}
    mine = letters.filter(pc.and_(pc.equal(letters["topic"], topic), pc.equal(letters["reason"], REASON)))
    places = zip(mine["partition"].to_pylist(), mine["offset"].to_pylist(), strict=True)
    return dict.fromkeys(places)


@dataclass
class SetAsideFile:
    """The list on disk; no driver overwrites what another one has written since it read the list."""

    handle: ObjectHandle
    _tag: str | None = None

    def load(self) -> SetAside:
        """The list; an empty one if there is none. Raises PermanentError if it cannot be read."""
        found = self.handle.read()
        self._tag = None if found is None else found.tag
        if found is None:
            return SetAside()
        return parsed_record(self.handle, found, _decoded, partial(_damaged, self.handle))

    def save(self, aside: SetAside) -> None:
        """Write the list; it is durable when this returns. Raises TransientError if another driver has written it."""
        data = record_bytes(asdict(aside))
        self._tag = self.handle.create(data) if self._tag is None else self.handle.replace(data, self._tag)


def _decoded(value: dict[str, Any]) -> SetAside:
    records = tuple(RaisingRecord(**each) for each in value.pop("records"))
    return SetAside(**{**value, "records": records, "spent": tuple(Spent(**each) for each in value.pop("spent"))})


def _damaged(handle: ObjectHandle, error: Exception) -> PermanentError:
    return PermanentError(
        f"the list of records that are set aside cannot be read ({handle}): {error}",
        "put it back from a copy; without it, the batch that runs now may have a record twice or not at all",
    )
