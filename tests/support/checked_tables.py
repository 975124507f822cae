"""A stream of orders on disk whose batches have any rows, ledger lines and faults, and its table as checks see it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import (
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from quality.table_checks import Check, CheckedTable, Past
from quality.validation import CheckOutcome
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import noted
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, Stream
from tests.support.stream_on_disk import StreamOnDisk, append

ORDERS = StructType(
    [
        StructField("id", LongType()),
        StructField("place", StringType()),
        StructField("value", DoubleType()),
        StructField("price", DecimalType(10, 2)),
        StructField("at", TimestampType()),
    ]
)
ARROW = pa.schema(
    [
        ("id", pa.int64()),
        ("place", pa.string()),
        ("value", pa.float64()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
AT = 1_700_000_000.0
"""The time of the rows, unless a test says otherwise."""

Row = Mapping[str, Any]


@dataclass
class PastList:
    """The history of outcomes as a list, newest first."""

    outcomes: Sequence[Past] = field(default_factory=list)
    failed: Sequence[Past] = ()

    def newest(self, expectation: str, limit: int) -> Sequence[Past]:
        return self.outcomes[:limit]

    def passed(self, expectation: str, limit: int) -> Sequence[Past]:
        return [each for each in self.outcomes if each not in self.failed][:limit]


def orders(value: object) -> object:
    """The stream's function; nobody calls it here."""
    return value


def stream_of(*tables: Declared) -> Stream:
    """A stream with these tables; of none, with an append table `orders`."""
    named = {table.name: table for table in tables or (Declared("orders"),)}
    return Stream("orders", orders, {"value": KafkaTopic("orders", Json(ORDERS))}, named)


def row(number: int, **changes: Any) -> Row:
    """One order."""
    made = {"id": number, "place": "abcde"[number % 5], "value": float(number), "price": Decimal(number)}
    return {**made, "at": datetime.fromtimestamp(AT + number, UTC), **changes}


def rows(begin: int, end: int, **changes: Any) -> list[Row]:
    """Orders `begin` to `end`, exclusive."""
    return [row(number, **changes) for number in range(begin, end)]


class Orders(StreamOnDisk):
    """The stream on disk; `batch` writes one batch, right or wrong, and moves the topic's position by ten."""

    topic, topic_id, per_batch, columns = "orders", "topic-1", {0: 10}, ORDERS

    @classmethod
    def begin(cls, home: Path, *tables: Declared) -> Orders:
        """The first start."""
        return cls(Settings.load({"home": home}), stream_of(*tables)).make()

    def entry(self, batch: int, generation: int = 1) -> LedgerEntry:
        offsets = (self.offsets(batch),)
        return LedgerEntry("batch", "orders", self.stream.primary.name, generation, batch, offsets)

    def batch(
        self,
        number: int,
        content: Iterable[Row] | None = None,
        *,
        generation: int = 1,
        code: str = "a",
        said: int | None = None,
        line: bool = True,
        **changes: Any,
    ) -> None:
        """Write a batch; `said` is the ledger's number of rows if it is to be wrong, `changes` are of the entry."""
        data = pa.Table.from_pylist(
            list(content if content is not None else rows(number * 10, number * 10 + 10)), ARROW
        )
        written = {"written": data.num_rows if said is None else said}
        entry = replace(self.entry(number, generation), rows=written, code=CodeVersion(code, "1"), **changes)
        table = self.stored()
        if self.stream.primary.mode == "append":
            append(table, data, entry) if data.num_rows else table.mark(entry)
        else:
            keys = " AND ".join(f"t.{key} = s.{key}" for key in self.stream.primary.keys)
            table.commit(  # type: ignore[attr-defined]
                entry,
                lambda handle, how: (
                    handle.merge(data, keys, source_alias="s", target_alias="t", commit_properties=how)
                    .when_matched_update_all()
                    .when_not_matched_insert_all()
                    .execute()
                ),
            )
        if line:
            self.ledger_file.append(
                entry, {each.name: self.stored(each.name).version for each in self.stream.sinks.values()}
            )

    @property
    def path(self) -> Path:
        """The primary table."""
        return self.settings.tables / self.stream.primary.name

    def foreign(self, content: Iterable[Row]) -> None:
        """Another program appends rows."""
        write_deltalake(self.path, pa.Table.from_pylist(list(content), ARROW), mode="append")

    def compact(self) -> None:
        """Compaction as the stream does it: it changes no rows and names no batch."""
        upkeep = LedgerEntry("upkeep", "orders", self.stream.primary.name, 1, -1, note="compaction")
        DeltaTable(self.path).optimize.compact(commit_properties=noted(upkeep))

    def shorten(self) -> None:
        """Shorten the log to the newest version and its checkpoint."""
        table = DeltaTable(self.path)
        table.create_checkpoint()
        for file in (self.path / "_delta_log").glob("*.json"):
            if int(file.stem) < table.version():
                file.unlink()

    def other(self, name: str, data: pa.Table) -> None:
        """Another table of ours."""
        write_deltalake(self.settings.tables / name, data, mode="append")

    def checked(
        self, *, past: Sequence[Past] = (), since: int | None = None, version: int | None = None, **changes: Any
    ) -> CheckedTable:
        """The primary table as a check sees it; by default its newest version, now."""
        declared = changes.pop("declared", self.stream.primary)
        table = DeltaTable(self.settings.tables / declared.name, version=version)
        made = CheckedTable(
            self.settings, self.stream, declared, table, table.version(), since, time.time(), PastList(past)
        )
        return replace(made, **changes)

    def look(self, check: Check, **changes: Any) -> CheckOutcome:
        """The outcome of a check of `checked`."""
        return check.look(self.checked(**changes))


def edit_adds(table: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change what the log says of each file that it adds."""
    for path in (table / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            if "add" in action:
                edit(action["add"])
        path.write_text("\n".join(map(json.dumps, actions)) + "\n")
