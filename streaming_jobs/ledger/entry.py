"""The ledger: the entry that every commit to a sink carries about itself.

An entry is part of the commit's `userMetadata`, so it exists exactly when the rows do. The commit also has the Delta
transaction identifier (appId, version) of Delta's protocol, section "Transaction Identifiers", with

    appId   = recourse:<stream>:<table>              the same for ever
    version = generation << 32 | (batch + 1)         so generation << 32 means: open, nothing written

The version only grows: a driver of an older generation reads a newer one and stops. `sinks/delta/log.py` reads the
entries of a table back.

A second transaction identifier separates two drivers of the same generation. Its version is the epoch of the lease
under which the commit was made (`state/lease.py`):

    appId   = recourse-epoch:<stream>                version = epoch; a table without it is in epoch 0

A redrive moves neither: it has a transaction of its own, so that each of its tables takes it once:

    appId   = recourse-redrive:<stream>:<id>         version = 1
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

from streaming_jobs.errors import PermanentError
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange, decode_ranges, encode_ranges, is_packed

Kind = Literal["batch", "fence", "publish", "upkeep", "schema", "slice", "redrive"]
LEDGER_KEY = "recourse"
"""The key of an entry inside `userMetadata`; its value is the entry's format."""
PLAIN, PACKED = 1, 2
"""The formats: in the second one, offsets of topics with many partitions are packed (`positions.py`)."""


@dataclass(frozen=True, order=True, slots=True)
class Txn:
    """A position in a sink's history: generation (from 1) and batch (from 0; -1: nothing written yet)."""

    generation: int
    batch: int

    @property
    def version(self) -> int:
        """The Delta transaction version."""
        return self.generation << 32 | (self.batch + 1)

    @classmethod
    def of(cls, version: int) -> Txn:
        return cls(version >> 32, (version & 0xFFFF_FFFF) - 1)

    def __str__(self) -> str:
        return f"g{self.generation:04d} batch {self.batch}"


def app_id(stream: str, table: str) -> str:
    """The transaction appId of a stream's sink."""
    return f"recourse:{stream}:{table}"


def epoch_id(stream: str) -> str:
    """The transaction appId of the epochs of a stream's leases, the same in all of its tables."""
    return f"recourse-epoch:{stream}"


def change_name(last: str, at: datetime) -> str:
    """The name of a redrive or a slice, which table `last` gets after all other ones."""
    return f"{last}-{at:%Y%m%dT%H%M%S%f}"


def last_table_of(change: str) -> str:
    """The table to which the redrive or the slice of this name is committed last: then it is whole."""
    return change.rpartition("-")[0]


def redrive_id(stream: str, redrive: str | None) -> str:
    """The transaction appId of a redrive, the same in all tables that it writes."""
    return f"recourse-redrive:{stream}:{redrive}"


class CodeVersion(NamedTuple):
    """The code that wrote a batch: its hash (`runtime/code_version.py`), and the package's version.

    `formerly` is the hash of the same code by the scheme before. Savepoints and plans have these on disk as a list.
    """

    hash: str
    package: str
    formerly: str = ""

    @property
    def names(self) -> frozenset[str]:
        """The hashes by which entries name this code."""
        return frozenset({self.hash, self.formerly} - {""})

    def same_code(self, other: CodeVersion) -> bool:
        """True if both have the same hash, whatever the version of the package.

        A hash of the scheme before is compared with the other version's `formerly`.
        """
        return self.hash == other.hash or self.hash in other.names or other.hash in self.names

    def same_version(self, other: CodeVersion) -> bool:
        """True if both are the same code in the same version of the package."""
        return self.package == other.package and self.same_code(other)

    def __str__(self) -> str:
        return f"{self.hash} ({self.package})"


NO_CODE = CodeVersion("", "")
"""The code version of an entry that no batch has written."""


READ = "read"
"""The name under which an entry counts the rows that it read from tables, records from topics included."""
DROPPED, QUARANTINED = "dropped:", "quarantined:"
"""Prefixes of a table's name, under which an entry counts the rows that row rules, or the error policy, removed."""
LATE = "late:"
"""Prefix of a table's name, under which an entry counts the late records that are kept for it."""


def taken_out(rows: Mapping[str, int], how: str) -> int:
    """The rows of all tables that were dropped, or quarantined, by the `rows` of an entry."""
    return sum(number for name, number in rows.items() if name.startswith(how))


class TableVersion(NamedTuple):
    """A version of a Delta table; `table_id` tells the table from another one that was made under its name."""

    version: int
    table_id: str


@dataclass(frozen=True)
class LedgerEntry:
    """One commit's entry. `rows`: name -> number of rows written; `txns`: other sink -> its transaction version.

    `rows` of a batch's primary table: `written` are its own, `dead_letters`, `late`, and by name those of other tables;
    `quarantined:<table>` and `dropped:<table>` were taken out by row rules, or dropped by the error policy;
    `late:<table>` are the late records that are kept for a table, which `late` has as well; `read`
    counts the rows that were read, if offsets are the versions of a table. `rules`: table -> rule -> rows that broke
    it. `new`, of a publish: the files that have only rows of records that no batch had read before; None if that is not
    known. `written`: where the batch lies in the topics that it wrote. `lookups`: the version of each table that the
    batch looked up.
    """

    kind: Kind
    stream: str
    table: str
    generation: int
    batch: int
    offsets: tuple[OffsetRange, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    txns: Mapping[str, int] = field(default_factory=dict)
    code: CodeVersion = NO_CODE
    plan: str | None = None
    note: str | None = None
    rules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    new: tuple[str, ...] | None = None
    written: tuple[WrittenRange, ...] = ()
    lookups: Mapping[str, TableVersion] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """Records that it read: the offsets in its ranges, or the rows of the versions of a table."""
        return self.rows.get(READ, sum(each.records for each in self.offsets))

    @property
    def rows_written(self) -> int:
        """Rows that it wrote to its own table."""
        return self.rows.get("written", 0)

    @property
    def dead_letters(self) -> int:
        return self.rows.get("dead_letters", 0)

    @property
    def late_rows(self) -> int:
        """Records behind the watermark, if the stream's function dropped any of them."""
        return self.rows.get("late", 0)

    @property
    def dropped(self) -> int:
        """Rows of all tables that row rules or the error policy have dropped."""
        return taken_out(self.rows, DROPPED)

    @property
    def quarantined(self) -> int:
        """Rows of all tables that row rules have set aside."""
        return taken_out(self.rows, QUARANTINED)

    @property
    def txn(self) -> Txn:
        return Txn(self.generation, self.batch)

    def same_offsets(self, other: LedgerEntry) -> bool:
        """True if both read the same offsets of the same topics."""
        return len(self.offsets) == len(other.offsets) and all(
            mine.same_offsets(theirs) for mine, theirs in zip(self.offsets, other.offsets, strict=True)
        )

    def encode(self) -> str:
        """The text for `userMetadata`."""
        offsets = encode_ranges(self.offsets, packed=True)
        value: dict[str, Any] = {
            LEDGER_KEY: PACKED if is_packed(offsets) else PLAIN,
            "kind": self.kind,
            "stream": self.stream,
            "table": self.table,
            "generation": self.generation,
            "batch": self.batch,
            "offsets": offsets,
            "rows": dict(self.rows),
            "txns": dict(self.txns),
            "code": {name: text for name, text in self.code._asdict().items() if text or name != "formerly"},
        }
        value.update({k: v for k, v in (("plan", self.plan), ("note", self.note)) if v is not None})
        if self.rules:
            value["rules"] = {table: dict(broken) for table, broken in self.rules.items()}
        if self.new is not None:
            value["new"] = list(self.new)
        if self.written:
            value["written"] = [list(astuple(r)) for r in self.written]
        if self.lookups:
            value["lookups"] = {table: list(each) for table, each in self.lookups.items()}
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str | None) -> LedgerEntry | None:
        """The entry in a commit's `userMetadata`; None if there is none of ours."""
        try:
            value = json.loads(text or "")
        except ValueError:
            return None
        if not isinstance(value, dict) or LEDGER_KEY not in value:
            return None
        if value[LEDGER_KEY] not in (PLAIN, PACKED):
            raise PermanentError(
                f"a ledger entry has format {value[LEDGER_KEY]}, this version reads {PLAIN} and {PACKED}",
                "use the newer recourse-streams",
            )
        return cls(
            kind=value["kind"],
            stream=value["stream"],
            table=value["table"],
            generation=value["generation"],
            batch=value["batch"],
            offsets=decode_ranges(value["offsets"]),
            rows=value["rows"],
            txns=value["txns"],
            code=CodeVersion(**value["code"]),
            plan=value.get("plan"),
            note=value.get("note"),
            rules=value.get("rules", {}),
            new=tuple(value["new"]) if "new" in value else None,
            written=tuple(WrittenRange(*r) for r in value.get("written", ())),
            lookups={table: TableVersion(*each) for table, each in value.get("lookups", {}).items()},
        )
