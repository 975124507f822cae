"""The ledger beside the state: one short line per batch, for days; the tables' own logs are there for hours only.

`<state>/<stream>/ledger/2026-11-21.jsonl`; the files of past days are compressed. The tables are the truth; a line that
a crash lost is simply missing. Preflight uses the newest line for tables whose log no longer shows the stream's last
commit.
"""

from __future__ import annotations

import collections
import gzip
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from streaming_jobs.files import private_folder, sync
from streaming_jobs.ledger import CodeVersion, LedgerEntry, Txn
from streaming_jobs.positions import OffsetRange, WrittenRange, decode_partitions

_TAIL = 1 << 18
_PLACE = re.compile(rb'{"g":(\d+),"b":(\d+),')
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


@dataclass(frozen=True, slots=True)
class RawLine:
    """A complete line of which only generation and batch were read."""

    txn: Txn
    stream: str
    text: bytes

    def read(self) -> LedgerLine:
        """The whole line."""
        line = json.loads(self.text)
        seconds = line["ms"] / 1000 if "ms" in line else None
        return LedgerLine(_entry(self.stream, line), float(line["t"]), line["versions"], seconds)


@dataclass(frozen=True)
class LedgerFile:
    """The ledger folder of one stream."""

    folder: Path
    retention: timedelta = timedelta(days=14)

    def append(self, entry: LedgerEntry, versions: Mapping[str, int], seconds: float | None = None) -> None:
        """Add the primary table's entry, the current version of each table of the stream, and the batch's duration."""
        now = datetime.now(UTC)
        line = {
            "g": entry.generation,
            "b": entry.batch,
            "t": round(now.timestamp(), 3),
            "table": entry.table,
            "versions": dict(versions),
            "offsets": {r.topic: {"id": r.topic_id, "start": r.start, "end": r.end} for r in entry.offsets},
            "rows": dict(entry.rows),
            "txns": dict(entry.txns),
            **({"rules": {table: dict(broken) for table, broken in entry.rules.items()}} if entry.rules else {}),
            "code": list(entry.code),
        }
        if entry.written:
            line["written"] = [list(astuple(each)) for each in entry.written]
        if entry.note is not None:
            line["note"] = entry.note
        if seconds is not None:
            line["ms"] = round(seconds * 1000)
        path = private_folder(self.folder) / f"{now:%Y-%m-%d}.jsonl"
        if not path.exists():
            self.roll(now)
        text = json.dumps(line, separators=(",", ":")) + "\n"
        with path.open("ab+") as file:
            # A line that a crash cut off must not take this one along.
            if file.tell() and _last_byte(file) != b"\n":
                text = "\n" + text
            file.write(text.encode())

    def newest(self, stream: str) -> tuple[LedgerEntry, Mapping[str, int]] | None:
        """The last complete line: the entry and the tables' versions after it."""
        for path in sorted(self.folder.glob("*.jsonl*"), reverse=True):
            for text in reversed(_last_lines(path)):
                try:
                    line = json.loads(text)
                except ValueError:  # cut off by a crash, or at the start of the part that was read
                    continue
                return _entry(stream, line), line["versions"]
        return None

    def days(self, stream: str) -> Iterator[list[RawLine]]:
        """Yields the complete lines of each day in the order they were written, the newest day first."""
        for path in reversed(_by_day(self.folder)):
            yield _raw(stream, _texts(path))

    def texts(self) -> Iterator[list[bytes]]:
        """Yields the lines of each day as they are on disk, the newest day first; a crash may have cut some off."""
        for path in reversed(_by_day(self.folder)):
            yield list(_texts(path))

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
        newest = max(self.folder.glob("*.jsonl"), default=None)
        return _raw(stream, (text.encode() for text in _last_lines(newest))) if newest else []

    def adopt(self, other: LedgerFile) -> None:
        """Add the lines of another folder that are missing here: its generation has become this stream's.

        They are written to the newest file, whatever their day. Their versions are of other tables and are left out.
        """
        new: dict[str, None] = {}
        for path in _by_day(other.folder):
            for text in _texts(path):
                try:
                    line = json.dumps({**json.loads(text), "versions": {}}, separators=(",", ":"))
                except ValueError:  # empty, or cut off by a crash
                    continue
                new[line] = None
        for path in _by_day(self.folder):
            for text in _texts(path):
                new.pop(text.decode(errors="replace").strip(), None)
        if new:
            now = datetime.now(UTC)
            path = private_folder(self.folder) / f"{now:%Y-%m-%d}.jsonl"
            if not path.exists():
                self.roll(now)
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" + "\n".join(new) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def roll(self, now: datetime) -> None:
        """Compress the files of past days and remove those older than the retention; the newest file stays."""
        for path in sorted(self.folder.glob("*.jsonl")):
            packed = path.with_suffix(".jsonl.gz")
            partial = packed.with_suffix(".partial")
            with path.open("rb") as plain, gzip.open(partial, "wb") as file:
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


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """The file of a day, which a running driver may have compressed since it was listed."""
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    except FileNotFoundError:
        return gzip.open(path.with_suffix(".jsonl.gz"), "rb")


def _by_day(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])


def _texts(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        yield from file


def _last_lines(path: Path) -> list[str]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as packed:
            return list(collections.deque(packed, maxlen=2))
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        return file.read().decode(errors="replace").split("\n")


def _raw(stream: str, texts: Iterable[bytes]) -> list[RawLine]:
    matches = ((_PLACE.match(text), text) for text in texts if _WHOLE.search(text, max(len(text) - 20, 0)))
    return [RawLine(Txn(int(at[1]), int(at[2])), stream, text) for at, text in matches if at]


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _entry(stream: str, line: Mapping[str, object]) -> LedgerEntry:
    offsets = line["offsets"]
    code = line["code"]
    assert isinstance(offsets, dict) and isinstance(code, list)
    return LedgerEntry(
        kind="batch",
        stream=stream,
        table=str(line["table"]),
        generation=int(str(line["g"])),
        batch=int(str(line["b"])),
        offsets=tuple(
            OffsetRange(
                topic,
                value["id"],
                decode_partitions(value["start"]),
                decode_partitions(value["end"]),
            )
            for topic, value in offsets.items()
        ),
        rows=line["rows"],  # type: ignore[arg-type]
        txns=line["txns"],  # type: ignore[arg-type]
        code=CodeVersion(*code),
        note=str(line["note"]) if "note" in line else None,
        rules=line.get("rules", {}),  # type: ignore[arg-type]
        written=tuple(WrittenRange(*each) for each in line.get("written", ())),  # type: ignore[attr-defined]
    )
