"""The comparison of a table with the truth that the user has declared for it (`streaming_jobs/catalog/truths.py`)."""

from __future__ import annotations

import inspect
import json
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache, partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from streaming_jobs.catalog.truths import NotComparable, Record, Truth
from streaming_jobs.declare.format import BlockReader, HeaderFrame, Refusal, Refused, Schemas
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.platform import table_rows
from streaming_jobs.storage.locations import Location
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.dead_letters import OF_ROWS, Refusals
from streaming_jobs.verification.lineage import Batch, Coverage
from streaming_jobs.verification.offset_ranges import Ranges, merged, place_of
from streaming_jobs.verification.subject import Comparison, ComparisonOutcome
from streaming_jobs.verification.topic import CommittedTopic, RawRecord, RecordReader, blocks

Watermarks = Mapping[Batch, datetime]
"""By batch the watermark with which Spark ran it: windows that end at or before it are in the table."""


def watermarks(state: Location, stream: str) -> dict[Batch, datetime]:
    """The watermarks in the checkpoints; Spark keeps the newest hundred batches."""
    by_batch = {}
    folders = [each / "offsets" for each in (state / stream).glob("g*")]
    for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        if not path.name.isdigit():
            continue
        try:
            ms = json.loads(path.read_text(encoding="utf-8").splitlines()[1])["batchWatermarkMs"]
        except (OSError, ValueError, IndexError, KeyError):  # removed meanwhile, or being written
            continue
        by_batch[int(path.parent.parent.name[1:]), int(path.name)] = datetime.fromtimestamp(ms / 1000, UTC)
    return by_batch


@dataclass(frozen=True)
class ReadRecords:
    """The records that a stream has read, for its truths: `coverage` has their offsets, `sources` read them by topic.

    `code` has the hashes of the code of the formats, which do not decide on records that other code has read: there
    only the dead letters count. Empty: the formats decide on all records.
    """

    stream: Stream
    coverage: Coverage
    topics: Mapping[str, CommittedTopic]
    sources: Mapping[str, RecordReader]
    refusals: Refusals | None = None
    code: frozenset[str] = frozenset()
    schemas: Schemas | None = None

    def arguments(self, truth: Truth, refused: Mapping[str, frozenset[int]]) -> dict[str, Iterator[Record]]:
        """By parameter the records of one topic, or of all where there is one parameter, without those refused."""
        parameters = list(inspect.signature(truth.function).parameters)
        if sorted(parameters) == sorted(self.stream.sources):
            sources = self.stream.sources.items()
            return {name: self._of(s, refused) for name, s in sources if isinstance(s, KafkaTopic)}
        if len(parameters) == 1:
            return {parameters[0]: chain.from_iterable(self._of(source, refused) for source in self.stream.topics)}
        raise UsageError(
            f"the truth of table {truth.table} takes {parameters}, the sources are {list(self.stream.sources)}",
            "take one argument for all records, or one for each source, named like it",
        )

    def _of(self, declared: KafkaTopic, refused: Mapping[str, frozenset[int]]) -> Iterator[Record]:
        source = declared if self.schemas is None else declared.bound(self.schemas)
        reader = cache(source.records.reader)
        letters = refused.get(source.name, frozenset())
        by_format = self.refusals.found.get(source.name, {}) if self.refusals is not None else {}
        now = Ranges.of(self.coverage.read_by(self.code) if self.code else self.coverage.spans)

        spans = [span for span in merged(self.coverage.spans) if span.topic == source.name]
        for block in blocks(self.sources[source.name].records(spans)):
            ours, others = ValueBlock(reader, source.header_frame), ValueBlock(reader, source.header_frame)
            records = []
            for raw in block:
                today = now.has(raw.topic, raw.partition, raw.offset)
                if not (raw.place in letters or (today and raw.place in by_format)):
                    read = ours.value_of(raw) if today else partial(_read_of_other_code, others.value_of(raw), raw)
                    records.append(
                        Record(raw.topic, raw.partition, raw.offset, raw.timestamp, raw.key, raw.value, read)
                    )
            yield from records


class BlockValue:
    """The value of one record, which is decoded with those of its block."""

    __slots__ = ("__weakref__", "_block", "raw", "value")

    def __init__(self, block: ValueBlock, raw: RawRecord) -> None:
        self._block, self.raw = block, raw
        self.value: dict[str, Any] | Refusal | None = None

    def __call__(self, _: bytes) -> dict[str, Any]:
        """The value; raises Refused."""
        if self.value is None:
            self._block.decode()
        assert self.value is not None
        if isinstance(self.value, Refusal):
            raise Refused(self.value.reason, self.value.detail)
        return self.value


class ValueBlock:
    """Values that are decoded together, when the first one is asked for: all whose records are still there.

    The block holds no record: a truth that keeps one of a thousand keeps that one only.
    """

    def __init__(self, reader: Callable[[], BlockReader], frame: HeaderFrame | None) -> None:
        self._reader, self._frame = reader, frame
        self._values: list[weakref.ref[BlockValue]] = []

    def value_of(self, raw: RawRecord) -> BlockValue:
        value = BlockValue(self, raw)
        self._values.append(weakref.ref(value))
        return value

    def decode(self) -> None:
        values = [value for reference in self._values if (value := reference()) is not None]
        block = self._reader().read([value.raw.framed(self._frame) for value in values])
        for number, (value, row) in enumerate(zip(values, block.columns.to_pylist(), strict=True)):
            value.value = block.refused.get(number, row)
        self._values = []


@dataclass(frozen=True)
class TableVersion:
    """The version of a table to compare, None without a table, and the watermark of its newest batch.

    `refused` has by topic the places of the records that the truth does not get, because they have no row. `unheld` is
    the number of further refused rows, which the truth may expect.
    """

    path: Location
    version: int | None
    watermark: datetime | None = None
    refused: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unheld: int = 0


def compare_truth(truth: Truth, records: ReadRecords, table: TableVersion) -> Comparison:
    """Compare one version of a table with its truth."""
    stream, coverage, watermark = records.stream, records.coverage, table.watermark

    def comparison(verdict: ComparisonOutcome, text: str) -> Comparison:
        return Comparison(truth.table, "truth", verdict, text)

    if reason := _hindrance(truth, records, table):
        return comparison("unproved", reason)
    try:
        result = truth.function(**records.arguments(truth, table.refused))
        rows_there = table_rows.rows(table.path, table.version)
        expected = _expected(result, rows_there.schema, truth)
    except NotComparable as error:
        return comparison("not compared", error.found)
    except (DeltaError, OSError) as error:
        return comparison("wrong", f"its rows cannot be read: {str(error)[:300]}")
    except RecourseError:
        raise
    except Exception as error:
        name = getattr(truth.function, "__name__", "it")
        raise UsageError(
            f"the truth of table {truth.table} failed: {name}: {type(error).__name__}: {str(error)[:300]}", "correct it"
        ) from error
    open_rows = 0
    if truth.final is not None and watermark is not None:
        due = pc.less_equal(expected[truth.final], pa.scalar(watermark, expected.schema.field(truth.final).type))
        open_rows = expected.num_rows - (pc.sum(due).as_py() or 0)
        expected = expected.filter(due)
    columns = expected.column_names
    difference = compare_rows(expected, rows_there.select(columns), truth.tolerance)
    left = [name for name in rows_there.column_names if name not in columns]
    notes = f"; not compared: the columns {', '.join(left)}" if left else ""
    if open_rows:
        after = f"their {truth.final} is after the watermark {watermark:%Y-%m-%d %H:%M:%S}"
        notes += f"; {counted(open_rows, 'row', 'is', 'are')} open: {after}"
    if difference:
        declared = next(sink for sink in stream.sinks.values() if sink.name == truth.table)
        keys = [key for key in declared.keys if key in columns]
        words = difference.words(keys if len(keys) == len(declared.keys) else ())
        if reason := too_late(coverage, stream, "the truth has them"):
            return comparison("unproved", f"{reason}; {differing(difference)}: {'; '.join(words)}{notes}")
        if not difference.extra and sum(difference.missing.values()) <= table.unheld:
            words.append(f"the table cannot hold {counted(table.unheld, 'row')}, see the dead letters")
            return comparison("unproved", f"{'; '.join(words)}{notes}")
        return comparison("wrong", f"{'; '.join(words)}{notes}")
    rows = counted(rows_there.num_rows, "row", "equals", "equal")
    return comparison("ok", f"{rows} the truth in {counted(len(columns), 'column')}{notes}")


def too_late(coverage: Coverage, stream: Stream, where: str) -> str:
    """The reason why rows may differ although the table is right: records dropped behind the watermark; else empty."""
    if coverage.late:
        return f"{counted(coverage.late, 'late record', 'was', 'were')} dropped behind the watermark; {where}"
    if (coverage.missing or not coverage.entries) and any(source.event_time for source in stream.sources.values()):
        return "batches whose entry is gone may have dropped late records behind the watermark, how many is not known"
    return ""


def differing(difference: RowDifference) -> str:
    return counted(difference.rows, "row", "differs", "differ")


def _hindrance(truth: Truth, records: ReadRecords, table: TableVersion) -> str:
    """The reason why a table cannot be compared with its truth now; empty where it can."""
    if table.version is None:
        return "the table does not exist"
    for span in records.coverage.spans:
        topic = records.topics.get(span.topic)
        low = topic.low.get(span.partition, 0) if topic is not None else 0
        if span.start < low:
            where = f"{span.topic}-{span.partition} {low}"
            return f"the topic no longer holds the records before {where}, which the rows were made from"
    if truth.final is not None and table.watermark is None:
        return "the watermark of the newest batch is no longer known"
    return ""


def _read_of_other_code(read: Callable[[bytes], dict[str, Any]], raw: RawRecord, value: bytes) -> dict[str, Any]:
    try:
        return read(value)
    except Exception as error:
        where = f"{raw.topic}-{raw.partition} {raw.offset}"
        raise NotComparable(
            f"record {where} was read by other code, and the format of today refuses it: {str(error)[:200]}"
        ) from error


def _expected(result: Any, schema: pa.Schema, truth: Truth) -> pa.Table:
    """The rows that a truth returned, in the types of the table; raises UsageError where they do not fit."""
    import pandas as pd

    if isinstance(result, pa.Table):
        names, make = result.column_names, _of_arrow
    elif isinstance(result, pd.DataFrame):
        names, make = [str(name) for name in result.columns], _of_pandas
    else:
        result = list(result)
        names, make = list(dict.fromkeys(name for row in result for name in row)) or schema.names, _of_rows
    if unknown := [name for name in names if name not in schema.names]:
        raise UsageError(
            f"the truth of table {truth.table} returns the column {unknown[0]!r}",
            f"the table has: {', '.join(schema.names)}",
        )
    if truth.final is not None and truth.final not in names:
        raise UsageError(
            f"the truth of table {truth.table} does not return the column {truth.final}, its `final`", "return it"
        )
    wanted = pa.schema(
        [pa.field(name, table_rows.plain_text(schema.field(name).type)) for name in schema.names if name in names]
    )
    try:
        return make(result, wanted)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(
            f"the rows of the truth do not fit table {truth.table}: {str(error)[:300]}", "return the table's types"
        ) from error


def _of_arrow(result: pa.Table, schema: pa.Schema) -> pa.Table:
    return result.select(schema.names).cast(schema)


def _of_pandas(result: Any, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pandas(result[schema.names], schema=schema, preserve_index=False)


def _of_rows(result: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(result, schema=schema)


def refused_whole(letters: pa.Table) -> dict[str, frozenset[int]]:
    """By topic the positions of dead letters that are records; dead letters of output rows do not count."""
    by_topic: dict[str, set[int]] = {}
    for row in letters.to_pylist():
        if row["reason"] not in OF_ROWS and row["offset"] is not None:
            by_topic.setdefault(row["topic"], set()).add(place_of(row["partition"], row["offset"]))
    return {topic: frozenset(places) for topic, places in by_topic.items()}


# Comparison of two multisets of rows: a row may occur several times, and order does not matter.

Row = tuple[Any, ...]
_SHOWN = 3
_TEXT = 120


@dataclass(frozen=True)
class RowDifference:
    """Rows that only one side has, with their number: `missing` are expected and not there, `extra` not expected."""

    columns: tuple[str, ...]
    missing: Mapping[Row, int]
    extra: Mapping[Row, int]

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)

    @property
    def rows(self) -> int:
        """Number of rows that differ: a missing and an unexpected row may be the same row, changed."""
        return max(sum(self.missing.values()), sum(self.extra.values()))

    def words(self, keys: Sequence[str] = ()) -> list[str]:
        """The differences in words, with the first rows; for rows of the same `keys`, the columns that differ."""
        missing, extra = Counter(self.missing), Counter(self.extra)
        texts = []
        if keys:
            texts = self._changed(missing, extra, [self.columns.index(key) for key in keys])
        for rows, what in ((missing, "rows missing"), (extra, "rows not expected")):
            if rows:
                first = " | ".join(self._shown(row) for row in sorted(rows, key=_sortable)[:_SHOWN])
                texts.append(f"{rows.total():,} {what}, first {first}")
        return texts

    def _changed(self, missing: Counter[Row], extra: Counter[Row], keys: list[int]) -> list[str]:
        by_key = {tuple(row[i] for i in keys): row for row in extra}
        changed = []
        for row in sorted(missing, key=_sortable):
            actual = by_key.pop(tuple(row[i] for i in keys), None)
            if actual is not None and missing[row] == extra[actual] == 1:
                changed.append((row, actual))
                del missing[row], extra[actual]
        if not changed:
            return []
        row, actual = changed[0]
        place = ", ".join(f"{self.columns[i]}={_cut(row[i])}" for i in keys)
        values = ", ".join(
            f"{name} is {_cut(there)} instead of {_cut(due)}"
            for name, due, there in zip(self.columns, row, actual, strict=True)
            if due != there
        )
        return [f"{counted(len(changed), 'row', 'differs', 'differ')}, first {place}: {values}"]

    def _shown(self, row: Row) -> str:
        return " ".join(f"{name}={_cut(value)}" for name, value in zip(self.columns, row, strict=True))


def compare_rows(expected: pa.Table, actual: pa.Table, tolerance: float = 0.0) -> RowDifference:
    """The difference of two tables of the same columns; floats may differ by `tolerance`, relative to their value.

    The tolerance holds inside arrays, structs and maps too. NaN equals NaN, -0.0 equals 0.0, null equals null; the
    entries of a map have no order.
    """
    due: Counter[Row] = Counter(rows_of(expected))
    extra: Counter[Row] = Counter()
    for row in rows_of(actual):
        if due.get(row, 0) > 0:
            due[row] -= 1
        else:
            extra[row] += 1
    missing = +due
    if tolerance and missing and extra:
        _match_nearly(missing, extra, tolerance)
    return RowDifference(tuple(actual.column_names), missing, extra)


def rows_of(table: pa.Table) -> Iterator[Row]:
    """The rows as values that can be counted."""
    for batch in table.to_batches(max_chunksize=20_000):
        columns = [[_countable(value) for value in column.to_pylist()] for column in batch.columns]
        yield from zip(*columns, strict=True)


def _countable(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value
    if isinstance(value, list):
        items = [_countable(item) for item in value]
        # Arrow returns a map as a list of pairs; no other type becomes tuples.
        return tuple(sorted(items, key=_by_key) if any(isinstance(item, tuple) for item in value) else items)
    if isinstance(value, tuple):
        return tuple(_countable(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _countable(item)) for name, item in value.items())
    return value


def _by_key(pair: tuple[Any, Any]) -> tuple[bool, Any, str]:
    key = pair[0]
    number = isinstance(key, int | float | Decimal)
    return (number, key if number else 0, "" if number else f"{type(key).__name__} {key}")


def _match_nearly(missing: Counter[Row], extra: Counter[Row], tolerance: float) -> None:
    """Remove pairs of rows that are equal except for floats within the tolerance."""
    by_rest: dict[Row, list[Row]] = {}
    for row in extra.elements():
        by_rest.setdefault(_rest(row), []).append(row)
    for row in list(missing.elements()):
        near = by_rest.get(_rest(row), [])
        match = next((other for other in near if _nearly(row, other, tolerance)), None)
        if match is not None:
            near.remove(match)
            _take(missing, row)
            _take(extra, match)


def _take(rows: Counter[Row], row: Row) -> None:
    rows[row] -= 1
    if not rows[row]:
        del rows[row]


def _rest(value: Any) -> Any:
    """The value with a placeholder for each float, at any depth."""
    if isinstance(value, tuple):
        return tuple(_rest(item) for item in value)
    return "a float" if isinstance(value, float) else value


def _nearly(one: Any, other: Any, tolerance: float) -> bool:
    """True if the floats of two values, which are otherwise equal, agree within the tolerance."""
    if isinstance(one, tuple):
        return all(_nearly(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return bool(one == other or abs(one - other) <= tolerance * max(abs(one), 1.0))
    return True


def _sortable(row: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    return tuple((type(value).__name__, str(value)) for value in row)


def _cut(value: Any) -> str:
    text = value.isoformat(sep=" ") if hasattr(value, "isoformat") and hasattr(value, "hour") else str(value)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
