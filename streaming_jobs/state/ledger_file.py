"""The ledger beside the state: one short line per batch, for days; the tables' own logs are there for hours only.

`<state>/<stream>/ledger/2026-11-21.jsonl`; the files of past days are compressed. The tables are the truth; a line that
a crash lost is simply missing. Preflight uses the newest line for tables whose log no longer shows the stream's last
commit.

A full line has all partitions of the topics that the batch read. A short line names a full line before it in the file
(`on`: generation, batch) and has only the partitions that have moved since; each of the others begins and ends where
it ends there. The first line of a driver, and of a day, is full, and so is one in 50. Whoever reads a line gets all
partitions. Commits of tables and markers of topics always have all of them: each of these is read alone.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import msgspec
import structlog

from streaming_jobs.errors import RecourseError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, TableVersion, Txn
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange, decode_ranges, encode_ranges
from streaming_jobs.platform import json_lines
from streaming_jobs.sinks.stored import Commit, entries
from streaming_jobs.storage.files import private_folder, sync
from streaming_jobs.storage.locations import Location, StorePath, files_below, remove_tree

log = structlog.get_logger()

_TAIL = 1 << 18
_FULL_EVERY = 50
_AT_ONCE, _AT_LATEST = 100, 60.0
"""Lines of an object, and seconds between two objects."""
_NEWEST = 3
"""Objects that are read for the newest lines."""
_PLACE = re.compile(rb'{"g":(\d+),"b":(\d+),(?:"on":\[(\d+),(\d+)\],)?')
_WHOLE = re.compile(rb'(?:\]|"ms":\d+)}\s*$')


@dataclass(frozen=True)
class LedgerLine:
    """One complete line: the entry, the time it was written (seconds since 1970), and the tables' versions after it.

    `seconds` is the duration of the batch; None in lines without it.
    """

    entry: LedgerEntry
    at: float
    versions: Mapping[str, int]
    seconds: float | None = None


class ReadOffsets(msgspec.Struct, gc=False):
    """The offsets that a batch read of one topic, by partition as text."""

    start: dict[str, int]
    end: dict[str, int]


class LineFields(msgspec.Struct, gc=False):
    """A line as it is in the file, decoded quickly: of a short one, the partitions alone that have moved."""

    g: int
    b: int
    t: float
    table: str
    versions: dict[str, int]
    offsets: dict[str, ReadOffsets]
    rows: dict[str, int]
    code: list[str]
    ms: int | None = None
    written: list[tuple[str, str, int, int, int, int]] = []


_DECODER = msgspec.json.Decoder(LineFields)


@dataclass(slots=True)
class _DayLines:
    """The lines of a file, which are read on demand: a day has up to a million."""

    file: IO[bytes]
    _full: tuple[int, dict[str, Any]] = (-1, {})

    def text(self, at: int) -> bytes:
        self.file.seek(at)
        return self.file.readline()

    def full(self, at: int) -> dict[str, Any]:
        """The full line that begins there; the newest one is remembered, since its short lines follow each other."""
        if self._full[0] != at:
            self._full = at, json.loads(self.text(at))
        return self._full[1]


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line of which only generation and batch were read; the rest is read from the file when it is needed."""

    txn: Txn
    stream: str
    _lines: _DayLines
    _at: int
    _on: int | None

    @property
    def text(self) -> bytes:
        return self._lines.text(self._at)

    def fields(self) -> LineFields | None:
        """The line as it is in the file; None if it is damaged."""
        try:
            return _DECODER.decode(self.text)
        except msgspec.DecodeError:
            return None

    def value(self) -> dict[str, Any]:
        """The line with all partitions."""
        line: dict[str, Any] = json.loads(self.text)
        return line if self._on is None else completed(line, self._lines.full(self._on))

    def read(self) -> LedgerLine:
        line = self.value()
        seconds = line["ms"] / 1000 if "ms" in line else None
        return LedgerLine(_entry(self.stream, line), float(line["t"]), line["versions"], seconds)


@dataclass
class _Appending:
    """The state of a driver that appends: the file, the newest full line, the lines since, the thread that rolls.

    For a store: the lines that wait, until when at most (the first line does not), and the day of the last object.
    """

    path: Path | None = None
    waiting: list[dict[str, Any]] = field(default_factory=list)
    due: float = 0.0
    day: str = ""
    full: dict[str, Any] = field(default_factory=dict)
    lines: int = 0
    rolling: threading.Thread | None = None


@dataclass(frozen=True)
class LedgerFile:
    """The ledger folder of one stream. One driver appends to it at a time."""

    folder: Location
    retention: timedelta = timedelta(days=14)
    _state: _Appending = field(default_factory=_Appending, compare=False, repr=False)

    def append(
        self,
        entry: LedgerEntry,
        versions: Mapping[str, int],
        seconds: float | None = None,
        *,
        durable: bool = False,
    ) -> None:
        """Add the primary table's entry, the current version of each table of the stream, and the batch's duration.

        `durable`: it is written when this returns. Otherwise a power cut may lose it, and on a store it may wait.
        """
        now = datetime.now(UTC)
        line = {
            "g": entry.generation,
            "b": entry.batch,
            "t": round(now.timestamp(), 3),
            "table": entry.table,
            "versions": dict(versions),
            "offsets": encode_ranges(entry.offsets),
            "rows": dict(entry.rows),
            "txns": dict(entry.txns),
            **({"rules": {table: dict(broken) for table, broken in entry.rules.items()}} if entry.rules else {}),
            **({"lookups": {table: list(each) for table, each in entry.lookups.items()}} if entry.lookups else {}),
            "code": list(entry.code),
        }
        if entry.written:
            line["written"] = [list(astuple(each)) for each in entry.written]
        if entry.note is not None:
            line["note"] = entry.note
        if seconds is not None:
            line["ms"] = round(seconds * 1000)
        self._append(now, [line], durable=durable)

    def _append(self, now: datetime, lines: list[dict[str, Any]], *, durable: bool = False) -> None:
        """Write lines of all partitions, short where that is possible; each whole or, after a crash, cut off."""
        if isinstance(self.folder, StorePath):
            self._state.waiting = [*self._state.waiting, *lines]
            if durable:
                self._write_waiting()
            elif len(self._state.waiting) >= _AT_ONCE or time.monotonic() >= self._state.due:
                self.flush()
            return
        state, path = self._state, private_folder(self.folder) / f"{now:%Y-%m-%d}.jsonl"
        if state.path != path or not path.exists():
            state.path, state.full = path, {}
            self._roll_aside(path)
        written = []
        for line in lines:
            short = _shortened(line, state.full) if state.full and state.lines < _FULL_EVERY else None
            if short is None:
                state.full, state.lines = line, 0
            state.lines += 1
            written.append(short or line)
        try:
            json_lines.append(path, written, durable=durable)
        except BaseException:
            state.full = {}  # it may not be there
            raise

    def flush(self) -> None:
        """Write the lines that wait, as one object; they wait on if the store does not answer."""
        try:
            self._write_waiting()
        except RecourseError as error:
            log.warning("lines of the ledger wait for the store", folder=str(self.folder), reason=error.found)

    def _write_waiting(self) -> None:
        if not isinstance(self.folder, StorePath) or not self._state.waiting:
            return
        lines, now = self._state.waiting, datetime.now(UTC)
        first, day = lines[0], f"{now:%Y-%m-%d}"
        name = f"g{first['g']:04d}-b{first['b']:09d}-{now:%H%M%S%f}.jsonl"
        self._state.due = time.monotonic() + _AT_LATEST
        (self.folder / day / name).write_bytes(json_lines.encoded(lines))
        self._state.waiting = self._state.waiting[len(lines) :]
        if self._state.day != day:
            for old in [each for each in _folders(self.folder) if each < f"{now - self.retention:%Y-%m-%d}"][:-1]:
                remove_tree(self.folder / old)
            self._state.day = day

    def newest(self, stream: str) -> tuple[LedgerEntry, Mapping[str, int]] | None:
        """The last complete line: the entry and the tables' versions after it."""
        for lines in itertools.chain([self._tail(stream)], self.days(stream)):
            if lines:
                read = lines[-1].read()
                return read.entry, read.versions
        return None

    def days(self, stream: str) -> Iterator[list[RawLine]]:
        """Yields the complete lines of each day in the order they were written, the newest day first.

        Lines without the full line that they name are left out, like lines that a crash has truncated.
        """
        for file in self._files():
            yield lines_of(stream, file)

    def _files(self) -> Iterator[IO[bytes]]:
        """The content of each day, the newest first; what waits belongs to the newest."""
        if isinstance(self.folder, StorePath):
            self.flush()
            for day in reversed(_folders(self.folder)):
                yield _content(self.folder / day)
            return
        for path in reversed(_by_day(self.folder)):
            yield _opened(path)

    def after(self, stream: str, txn: Txn | None, *, at_most: int) -> list[LedgerLine]:
        """The lines of later batches than `txn`, newest first, no more than `at_most`; one per batch, the newer."""
        newest: dict[Txn, RawLine] = {}
        for lines in itertools.chain([self._tail(stream)], self.days(stream)):  # whole days only if that is too short
            for line in reversed(lines):
                if len(newest) == at_most or (txn is not None and line.txn <= txn):
                    return [raw.read() for raw in newest.values()]
                newest.setdefault(line.txn, line)
        return [raw.read() for raw in newest.values()]

    def _tail(self, stream: str) -> list[RawLine]:
        """The last complete lines of the newest file: mostly enough, while a day may have a million lines."""
        if isinstance(self.folder, StorePath):
            self.flush()
            days = _folders(self.folder)
            return lines_of(stream, _content(self.folder / days[-1], _NEWEST)) if days else []
        newest = max(self.folder.glob("*.jsonl"), default=None)
        if newest is None:
            return []
        with _opened(newest) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
            return lines_of(stream, io.BytesIO(file.read()))

    def adopt(self, other: LedgerFile, written: Mapping[Txn, Sequence[WrittenRange]] = MappingProxyType({})) -> None:
        """Add the lines of another folder that are missing here: its generation has become this stream's.

        They are written to the newest file, whatever their day. Their versions are of other tables and are left out.
        `written` has the ranges in topics of batches whose lines lack them.
        """
        new: dict[tuple[Txn, float], RawLine] = {}
        for file in reversed([*other._files()]):
            new |= {_moment(line): line for line in lines_of("", file)}
        batches = {txn for txn, _ in new}
        for file in self._files() if new else ():
            for line in (each for each in lines_of("", file) if each.txn in batches):
                new.pop(_moment(line), None)
        if new:
            lines = [_with_ranges({**line.value(), "versions": {}}, written.get(line.txn, ())) for line in new.values()]
            self._append(datetime.now(UTC), lines, durable=True)

    def _roll_aside(self, today: Path) -> None:
        """Roll the files beside today's in a thread; after a kill, the next driver rolls the rest.

        They are listed before it begins: it may be slow, and would take tomorrow's file, to which lines are added, for
        one of the past. The thread is not a daemon: an interpreter that ends in order waits for it.
        """
        assert isinstance(self.folder, Path)
        past = [path for path in self.folder.glob("*.jsonl") if path != today]
        if past and self.rolled(0):
            self._state.rolling = threading.Thread(target=self._rolling, args=(past,), name="ledger")
            self._state.rolling.start()

    def rolled(self, seconds: float | None = None) -> bool:
        """Wait at most so long for the thread that rolls; True if none runs."""
        if self._state.rolling is not None:
            self._state.rolling.join(seconds)
        return self._state.rolling is None or not self._state.rolling.is_alive()

    def _rolling(self, past: Sequence[Path]) -> None:
        try:
            self.roll(datetime.now(UTC), past)
        except OSError as error:  # the day stays as it is, and the next driver or day tries again
            log.warning("the ledger of a past day was not compressed", folder=str(self.folder), reason=str(error)[:300])

    def roll(self, now: datetime, past: Sequence[Path]) -> None:
        """Compress files of past days and remove those older than the retention; the newest day stays."""
        assert isinstance(self.folder, Path)
        for path in sorted(past):
            packed = path.with_suffix(".jsonl.gz")
            partial = packed.with_suffix(".partial")
            partial.touch(mode=0o600)
            with path.open("rb") as plain, gzip.open(partial, "wb", compresslevel=6) as file:
                if packed.exists():  # the clock was set back over midnight, or a kill came before the unlink below
                    with gzip.open(packed, "rb") as before:
                        shutil.copyfileobj(before, file)
                shutil.copyfileobj(plain, file)
            sync(partial)
            partial.replace(packed)
            sync(self.folder)
            path.unlink()
        for path in sorted(self.folder.glob("*.jsonl.gz"))[:-1]:
            if path.name[:10] < f"{now - self.retention:%Y-%m-%d}":
                path.unlink(missing_ok=True)


def _with_ranges(line: dict[str, Any], written: Sequence[WrittenRange]) -> dict[str, Any]:
    """The line with ranges in topics, if it has none, in the place where `append` has them (`_WHOLE`)."""
    if not written or "written" in line:
        return line
    end: dict[str, Any] = {name: line.pop(name) for name in ("note", "ms") if name in line}
    return {**line, "written": [list(astuple(each)) for each in written], **end}


def _opened(path: Path) -> IO[bytes]:
    """The file of a day, which a running driver may have compressed since it was listed; any place in it can be read.

    A compressed one is unpacked beside it, to a file without a name, which is gone when it is closed.
    """
    try:
        if path.suffix != ".gz":
            return path.open("rb")
    except FileNotFoundError:
        path = path.with_suffix(".jsonl.gz")
    unpacked: IO[bytes] = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 - its lines close it
    with gzip.open(path, "rb") as packed:
        shutil.copyfileobj(packed, unpacked)
    unpacked.seek(0)
    return unpacked


def _folders(ledger: StorePath) -> list[str]:
    """The days of a ledger on a store, oldest first."""
    return sorted(each.name for each in ledger.iterdir())


def _content(day: StorePath, newest: int = 0) -> IO[bytes]:
    """The objects of a day by their first batches, or only the newest ones, as one file."""
    names = sorted(name for name, _ in files_below(day))
    return io.BytesIO(b"".join((day / name).read_bytes() for name in names[-newest:]))


def _by_day(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])


def lines_of(stream: str, file: IO[bytes]) -> list[RawLine]:
    """The whole lines of an open file, which is read again for each; a short one only with its full line."""
    lines, raw, full, at = _DayLines(file), list[RawLine](), (Txn(0, -1), -1), file.tell()
    for text in file:
        found = _PLACE.match(text) if _WHOLE.search(text, max(len(text) - 20, 0)) else None
        if found is not None:
            txn = Txn(int(found[1]), int(found[2]))
            if found[3] is None:
                full = txn, at
                raw.append(RawLine(txn, stream, lines, at, None))
            elif full[0] == Txn(int(found[3]), int(found[4])):
                raw.append(RawLine(txn, stream, lines, at, full[1]))
        at += len(text)
    return raw


def _moment(line: RawLine) -> tuple[Txn, float]:
    """The batch and the time of the line, which identify the line."""
    return line.txn, float(json.loads(line.text)["t"])


def _shortened(line: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any] | None:
    """The line with the partitions alone that have moved since a full line; None if it has to be full itself.

    A partition that is left out begins and ends where it ends in the full line.
    """
    offsets: dict[str, Any] = {}
    if list(line["offsets"]) != list(full["offsets"]):
        return None
    for topic, read in line["offsets"].items():
        before = full["offsets"][topic]["end"]
        start, end = read["start"], read["end"]
        if before.keys() - end.keys() or start.keys() - end.keys() or read["id"] != full["offsets"][topic]["id"]:
            return None
        moved = {p: last for p, last in end.items() if not start.get(p) == last == before.get(p)}
        if 2 * len(moved) > len(end):
            return None
        begun = {p: start[p] for p in moved if p in start}
        offsets[topic] = {"id": read["id"], "start": begun, "end": moved}
    head = {"g": line["g"], "b": line["b"], "on": [full["g"], full["b"]]}
    return {**head, **{key: value for key, value in line.items() if key not in head}, "offsets": offsets}


def completed(line: dict[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """A short line with all partitions, as it was before `_shortened`."""
    offsets = {}
    for topic, read in line["offsets"].items():
        before, moved = full["offsets"][topic]["end"], read["end"]
        still = {p: end for p, end in before.items() if p not in moved}
        offsets[topic] = {"id": read["id"], "start": {**still, **read["start"]}, "end": {**still, **moved}}
    return {**{key: value for key, value in line.items() if key != "on"}, "offsets": offsets}


def _entry(stream: str, line: Mapping[str, Any]) -> LedgerEntry:
    return LedgerEntry(
        kind="batch",
        stream=stream,
        table=line["table"],
        generation=line["g"],
        batch=line["b"],
        offsets=decode_ranges(line["offsets"]),
        rows=line["rows"],
        txns=line["txns"],
        code=CodeVersion(*line["code"]),
        note=line.get("note"),
        rules=line.get("rules", {}),
        written=tuple(WrittenRange(*each) for each in line.get("written", ())),
        lookups={table: TableVersion(*each) for table, each in line.get("lookups", {}).items()},
    )


# A table's ledger as far back as it is known: the table's log, then the ledger file beside the state.
#
# A table's log is retained for an hour or 500 versions, the file for days. The file has the batches of the primary
# table only; fences and publishes, which are few, are in the log alone.

FROM_FILE = "LEDGER FILE"
"""The operation of a commit that was read from the file beside the state."""

_CODE = re.compile(rb'"code":(\[[^\]]*\])')
_ALL = 1 << 60

Entry = tuple[Commit, LedgerEntry]


def newest_entries(commits: Iterable[Commit], table: str, file: LedgerFile, stream: str, limit: int) -> list[Entry]:
    """The newest entries of the stream's primary table, newest first; `commits` are its log's."""
    in_log = entries(commits, limit)
    return [
        *in_log,
        *(_history_entry(line, table) for line in islice(_older(in_log, file, stream), limit - len(in_log))),
    ]


def code_changes(commits: Iterable[Commit], table: str, file: LedgerFile, stream: str) -> list[Entry]:
    """The first batch of each version of the code, newest first, back to the oldest batch that is known."""
    log = [entry for entry in entries(commits, _ALL) if entry[1].kind == "batch"]
    firsts: list[Entry] = []
    for entry in log:
        _put(firsts, entry)
    last: tuple[bytes, RawLine] | None = None
    for line in _older(log, file, stream):
        code = match[1] if (match := _CODE.search(line.text)) else b""
        if last is not None and last[0] != code:
            _put(firsts, _history_entry(last[1], table))
        last = (code, line)
    if last is not None:
        _put(firsts, _history_entry(last[1], table))
    return firsts


def _put(firsts: list[Entry], entry: Entry) -> None:
    if firsts and firsts[-1][1].code == entry[1].code:
        firsts[-1] = entry
    else:
        firsts.append(entry)


def _older(newer: list[Entry], file: LedgerFile, stream: str) -> Iterator[RawLine]:
    """Yields the file's lines before the `newer` entries, newest first; of a batch written twice the newer line."""
    reached = min((entry.txn for _, entry in newer), default=Txn(1 << 31, 0))
    for day in file.days(stream):
        for line in reversed(day):
            if line.txn < reached:
                reached = line.txn
                yield line


def _history_entry(line: RawLine, table: str) -> Entry:
    read = line.read()
    return Commit(read.versions.get(table, -1), int(read.at * 1000), FROM_FILE, True, read.entry), read.entry


# When a stream first read a record, from its ledger, or from the record if a replay has written it.
#
# A replay writes records to topics a second time, later. Their readers measure `max_ahead` against the first time,
# which each record of a replay has in a header, so that they refuse the same records as before.

_A_DAY = 96
"""Ledger lines that are read per day: with more batches the times are exact to a quarter of an hour."""


@dataclass
class FirstReads:
    """Times for the batches of one replay, which are in order; `ledger` is the stream's own.

    `in_records` gives the time that the last records of a range have in their headers, None if they have none: the
    stream may read what a replay of another one has written, which its own ledger does not know.
    """

    ledger: LedgerFile
    stream: str
    in_records: Callable[[OffsetRange], int | None] = lambda _: None
    _seen: list[tuple[float, Sequence[OffsetRange]]] | None = field(default=None, init=False)
    _at: int = field(default=0, init=False)

    def __call__(self, batch: Sequence[OffsetRange]) -> int | None:
        """When all of the batch had been read once, in milliseconds since 1970; None if it had not been."""
        if self._seen is None:
            self._seen = sorted(self._since(batch), key=lambda seen: seen[0])
        while self._at < len(self._seen):
            at, ends = self._seen[self._at]
            if _covers(ends, batch):
                return int(at * 1000)
            self._at += 1
        return max((time for each in batch if (time := self.in_records(each)) is not None), default=None)

    def _since(self, batch: Sequence[OffsetRange]) -> Iterator[tuple[float, Sequence[OffsetRange]]]:
        begin = [replace(each, end=each.start) for each in batch]
        for day in self.ledger.days(self.stream):
            lines = [raw.read() for raw in day[:: max(1, len(day) // _A_DAY)]]
            yield from ((line.at, line.entry.offsets) for line in lines if line.entry.kind == "batch")
            if lines and lines[0].entry.generation == 1 and _covers(begin, lines[0].entry.offsets):
                return  # a later generation may have gone back


def _covers(read: Sequence[OffsetRange], wanted: Sequence[OffsetRange]) -> bool:
    """True if `read` ends at or after `wanted`, in each partition."""
    ends = {(each.topic, each.topic_id): each.end for each in read}
    return all(
        ends.get((each.topic, each.topic_id), {}).get(partition, 0) >= end
        for each in wanted
        for partition, end in each.end.items()
    )
