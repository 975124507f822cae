"""A table's commits, read from its log: the JSON files of Delta's protocol, and the ledger entry in `userMetadata`.

The actions are interpreted here a second time, on purpose: a proof that used the reader of the code that writes the
entries would assume what it has to prove. Only the splitting of a commit file into actions is shared.
"""

from __future__ import annotations

import json
from base64 import b85decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streaming_jobs.platform.delta_log import actions
from streaming_jobs.storage.locations import Location
from streaming_jobs.verification.offset_ranges import Span

_DIGITS = 20


@dataclass(frozen=True)
class Range:
    """The offsets of one topic that a batch read: by partition the first offset and the one after the last."""

    topic: str
    topic_id: str
    start: Mapping[int, int]
    end: Mapping[int, int]

    @property
    def spans(self) -> list[Span]:
        """The offsets of each partition; one without a start begins at 0."""
        return [Span(self.topic, p, self.start.get(p, 0), end) for p, end in sorted(self.end.items())]


@dataclass(frozen=True)
class Entry:
    """The ledger entry of one commit; `code` is empty for a batch that two versions of the code wrote.

    `broken` has by table and row rule the rows that broke it.
    """

    kind: str
    stream: str
    table: str
    generation: int
    batch: int
    ranges: tuple[Range, ...]
    rows: Mapping[str, int]
    code: str = ""
    broken: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def spans(self) -> list[Span]:
        """The offsets that it read, of all topics."""
        return [span for read in self.ranges for span in read.spans]

    def __str__(self) -> str:
        return f"{self.kind} g{self.generation:04d} batch {self.batch}"


@dataclass(frozen=True)
class LoggedCommit:
    """One version of a table; `txns` are the transaction versions it sets, by appId."""

    version: int
    operation: str
    txns: Mapping[str, int]
    changes_rows: bool
    entry: Entry | None


def versions(table: Location) -> list[int]:
    """The versions whose commit files are still there, in order; none for a table that does not exist."""
    names = (table / "_delta_log").glob("*.json")
    return sorted(int(file.stem) for file in names if file.stem.isdigit() and len(file.stem) == _DIGITS)


def commit_file(table: Location, version: int) -> Location:
    """The file of a version's commit in the log."""
    return table / "_delta_log" / f"{version:0{_DIGITS}d}.json"


def read_commit(table: Location, version: int) -> LoggedCommit:
    """One commit; raises FileNotFoundError when the log no longer has it, ValueError when it cannot be read."""
    operation, entry, changes = "", None, False
    txns: dict[str, int] = {}
    for line in actions(commit_file(table, version)):
        (kind, action), *_ = line.items()
        if kind == "commitInfo":
            operation = str(action.get("operation", ""))
            entry = _entry(action.get("userMetadata"))
        elif kind == "txn":
            txns[action["appId"]] = int(action["version"])
        elif kind in ("add", "remove", "cdc"):
            changes = changes or bool(action.get("dataChange", True))
    return LoggedCommit(version, operation, txns, changes, entry)


def _entry(text: Any) -> Entry | None:
    try:
        value = json.loads(text or "")
    except (ValueError, TypeError):
        return None
    if not isinstance(value, dict) or "recourse" not in value:
        return None
    try:
        ranges = tuple(
            Range(topic, str(read["id"]), *_packed(read))
            if "packed" in read
            else Range(topic, str(read["id"]), numbers(read["start"]), numbers(read["end"]))
            for topic, read in value["offsets"].items()
        )
        return Entry(
            kind=str(value["kind"]),
            stream=str(value["stream"]),
            table=str(value["table"]),
            generation=int(value["generation"]),
            batch=int(value["batch"]),
            ranges=ranges,
            rows={name: int(count) for name, count in value["rows"].items()},
            code=code_of(str(value.get("code", {}).get("hash", "")), value.get("note")),
            broken={table: dict(rules) for table, rules in value.get("rules", {}).items()},
        )
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"a ledger entry without {error}") from error


def _packed(read: Mapping[str, Any]) -> tuple[dict[int, int], dict[int, int]]:
    """First offsets and ends by partition, from the short form: two rows of numbers in Rice's code."""
    size, middle, *widths = read["packed"]
    bits = (byte >> place & 1 for byte in b85decode(read["bits"].replace(".", "$")) for place in range(7, -1, -1))

    def number(width: int) -> int:
        value = 0
        while next(bits):
            value += 1
        for _ in range(width):
            value = 2 * value + next(bits)
        return value

    beside, counts = ([number(width) for _ in range(size)] for width in widths)
    end = {p: middle + (-1 if n % 2 else 1) * ((n + 1) // 2) for p, n in enumerate(beside)}
    return {p: end[p] - counts[p] for p in end if p not in read.get("new", ())}, end


def code_of(code: str, note: Any) -> str:
    """The code that an entry names; empty for a mixed batch, whose tables were written by different code."""
    return "" if str(note or "").startswith("mixed batch") else code


def numbers(offsets: Mapping[str, Any]) -> dict[int, int]:
    """Offsets by partition; in JSON the partition numbers are text."""
    return {int(partition): int(offset) for partition, offset in offsets.items()}
