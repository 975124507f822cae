"""The reader of Spark's checkpoint: the planned batches, the committed ones, and the offsets that each one read.

Layout and rules from Spark's `MicroBatchExecution` and `OffsetSeqLog`: `offsets/N` is written before batch N
runs and holds, after `v1` and a line of metadata, one line per source with the offsets where N **ends**;
`commits/N` is written after it. N starts where N-1 ends; batch 0 starts at `sources/<i>/0`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.positions import TopicOffsets, decode
from streaming_jobs.platform.spark_on_store import hadoop_path
from streaming_jobs.storage.files import hard_link, sync, sync_each, sync_tree, write_atomic
from streaming_jobs.storage.locations import Location, StorePath, copy_objects, files_below, remove_tree
from streaming_jobs.text import commands


class CheckpointDamaged(PreflightRefused):
    """A file of the stream's state cannot be read; `take_snapshot` adds the stream's folders to the next step."""

    def __init__(
        self, found: str, next_step: str = "put the checkpoint folder back from the newest copy, taken with the tables"
    ) -> None:
        super().__init__(found, next_step)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint folder of one generation of one stream."""

    folder: Location

    @property
    def planned(self) -> set[int]:
        """Every N of `offsets/N`."""
        return _entries(self.folder / "offsets")

    @property
    def committed(self) -> set[int]:
        """Every N of `commits/N`."""
        return _entries(self.folder / "commits")

    @property
    def last_planned(self) -> int | None:
        """The highest N of `offsets/N`."""
        return max(self.planned, default=None)

    @property
    def last_committed(self) -> int | None:
        """The highest N of `commits/N`."""
        return max(self.committed, default=None)

    @property
    def state_format(self) -> int:
        """The format of the state's files: Spark's first one, or 2, in which files have unique names."""
        last = self.last_committed
        return 1 if last is not None and _text(self.folder / "commits" / str(last)).startswith("v1") else 2

    @property
    def state_partitions(self) -> int | None:
        """The number of partitions of the state, which stays as it was at the first batch; None: no batch yet."""
        if (last := self.last_planned) is None:
            return None
        number = self.metadata(last).get("conf", {}).get("spark.sql.shuffle.partitions")
        return None if number is None else int(number)

    @property
    def exists(self) -> bool:
        """True if Spark has ever started here."""
        return (self.folder / "metadata").is_file()

    @property
    def has_state(self) -> bool:
        """True if an operator keeps state here."""
        return bool(_entries(self.folder / "state"))

    def end(self, batch: int) -> TopicOffsets:
        """The end of a batch: topic -> partition -> offset; raises PreflightRefused if the entry cannot be read."""
        ends: dict[str, Mapping[int, int]] = {}
        for index, line in enumerate(self.sources(batch)):
            text = line if line != "-" else self.initial(index)
            ends.update(_offsets(text, self.folder / "offsets" / str(batch)))
        return ends

    def start(self, batch: int) -> TopicOffsets:
        """The start of a batch: topic -> partition -> offset."""
        if batch > 0:
            return self.end(batch - 1)
        starts: dict[str, Mapping[int, int]] = {}
        for index in range(len(self.sources(batch))):
            starts.update(_offsets(self.initial(index), self.folder / "sources" / str(index) / "0"))
        return starts

    def entry_ending_at(self, batch: int, ends: TopicOffsets) -> str:
        """The text that the batch's entry would have if the batch had ended at `ends`."""
        version, metadata, *lines = self._entry(batch)
        for index, text in enumerate(self.sources(batch)):
            offsets = _offsets(text if text != "-" else self.initial(index), self.folder / "offsets" / str(batch))
            moved = {topic: {**each, **ends.get(topic, {})} for topic, each in offsets.items()}
            lines[index] = lines[index].removesuffix(text) + written(moved)  # a named source keeps its name
        return "\n".join([version, metadata, *lines])

    def metadata(self, batch: int) -> dict[str, Any]:
        """The batch's own metadata: batchWatermarkMs, batchTimestampMs, conf."""
        return dict(json.loads(self._entry(batch)[1]))

    @property
    def next_watermark(self) -> int:
        """The watermark after the last committed batch, in milliseconds since 1970; 0: none yet."""
        if (last := self.last_committed) is None:
            return 0
        path = self.folder / "commits" / str(last)
        try:
            return int(json.loads(_text(path).split("\n")[1]).get("nextBatchWatermarkMs", 0))
        except (IndexError, ValueError) as error:
            raise _damaged(path) from error

    def sources(self, batch: int) -> list[str]:
        """Where a batch ends, as each source wrote it, also in the format of named sources; `-`: nothing yet."""
        version, _, *lines = self._entry(batch)
        return [line.partition(":")[2] for line in lines] if version == "v2" else lines

    def initial(self, source: int) -> str:
        """Where a source began, as it wrote it; Spark's Kafka source begins the file with a zero byte."""
        path = self.folder / "sources" / str(source) / "0"
        lines = _text(path).lstrip("\0").split("\n")
        if len(lines) < 2 or lines[0] != "v1":
            raise _damaged(path)
        return lines[1]

    def begin_at(self, starts: TopicOffsets) -> None:
        """Note where the first batch starts, in the form of Spark's Kafka source, for a checkpoint without a batch."""
        for index, (topic, each) in enumerate(starts.items()):
            folder = self.folder / "sources" / str(index)
            _write(folder / "0", f"v1\n{written({topic: each})}")

    def check(self) -> None:
        """Raise PreflightRefused for entries that are missing or cannot be read where Spark needs them."""
        planned, committed = self.last_planned, self.last_committed
        if planned is None:
            if committed is not None:
                raise _damaged(self.folder / "offsets", "is empty, although batches were committed")
            return
        if committed is not None and committed > planned:
            raise _damaged(self.folder / "offsets" / str(committed), "is missing, although the batch was committed")
        if planned > 0 and (committed is None or committed < planned - 1):
            raise _damaged(
                self.folder / "commits" / str(planned - 1), "is missing, although the next batch was planned"
            )
        if not self.exists:
            raise _damaged(self.folder / "metadata", "is missing")
        for batch in range(max(planned - 1, 0), planned + 1):
            self.start(batch)
            self.end(batch)
        if committed is not None:
            text = _text(path := self.folder / "commits" / str(committed))
            version, _, rest = text.partition("\n")
            if version not in ("v1", "v2") or not _is_json(rest):  # v2 with state format 2: ids of state files
                raise _damaged(path)

    def _entry(self, batch: int) -> list[str]:
        """The lines of `offsets/N`: its version, its metadata, one for each source."""
        path = self.folder / "offsets" / str(batch)
        lines = _text(path).split("\n")
        if len(lines) < 3 or lines[0] not in ("v1", "v2") or not _is_json(lines[1]):
            raise _damaged(path)
        return lines


def written(offsets: TopicOffsets) -> str:
    """Offsets as a source writes them into a checkpoint. Spark compares the text: the same offsets, the same text."""
    return json.dumps({topic: {str(p): each[p] for p in sorted(each)} for topic, each in offsets.items()})


def _text(path: Location) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except FileNotFoundError:
        raise _damaged(path, "is missing") from None
    except UnicodeDecodeError as error:
        raise _damaged(path) from error


def _offsets(text: str, path: Location) -> dict[str, dict[int, int]]:
    try:
        return decode(json.loads(text))
    except (ValueError, AttributeError, TypeError) as error:
        raise _damaged(path) from error


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _damaged(path: Location, how: str = "cannot be read") -> CheckpointDamaged:
    return CheckpointDamaged(f"the checkpoint is damaged: {path} {how}")


# The sync of Spark's checkpoint to disk, in step with the tables.
#
# Spark writes its files under another name and renames them (`CheckpointFileManager`), but does not sync them. So
# the pipeline syncs them where the order matters:
#
# 1. before a table gets batch N: `offsets/N`, or the offsets of a batch in the table would be unknown; and
#    `commits/N-1`, without which Spark would not continue with N;
# 2. before the pipeline returns, which lets Spark write `commits/N`: the state files that batch N has written.
#
# `commits/N` itself may be lost: then the batch is repeated, and the tables show that they have it.


class CheckpointSync:
    """Syncs the files of one checkpoint; a new one for each start of a query. On a store all of them are durable."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder if isinstance(checkpoint.folder, Path) else None
        self._whole = False
        self._known: dict[Path, frozenset[str]] = {}

    def planned(self, batch: int) -> None:
        """Sync the entries from which Spark continues once the tables have this batch."""
        if self._folder is None:
            return
        if not self._whole:  # an earlier driver may have left files that are not synced
            sync_tree(self._folder)
            self._whole = True
            return
        offsets, commits = self._folder / "offsets", self._folder / "commits"
        sync_each([offsets / str(batch), commits / str(batch - 1), offsets, commits])

    def state(self) -> None:
        """Sync the state files that are new since the last call."""
        if self._folder is None:
            return
        wanted: list[Path] = []
        for folder, below, names in os.walk(self._folder / "state"):
            here = Path(folder)
            if here.name == "SSTs":  # a snapshot's files are complete once its own file exists
                continue
            now = frozenset((*names, *below))
            fresh = now - self._known.get(here, frozenset())
            self._known[here] = now
            if "SSTs" in below and any(name.endswith(".zip") for name in fresh):
                sync_tree(here / "SSTs")
            if fresh:
                wanted += [*(here / name for name in fresh), here]
        sync_each(wanted)


# A checkpoint cut: a checkpoint that ends after batch K, made from a later one of the same query.
#
# To continue from K, Spark needs the log entries of K and just before it, the first offsets of the sources, and the
# state files that lead to state version K+1 (version = batch + 1). Log entries are copied; state files, which Spark
# never changes once they are written, are hard links. The cut has a new query id. A store copies all of them itself,
# and `metadata` comes last: a checkpoint is whole once it has that.

_VERSIONED = re.compile(r"(\d+)(?:_[^.]+)?\.(changelog|zip|delta|snapshot)(?:\.crc)?")
_FULL = ("zip", "snapshot")
_BEFORE = 2
"""Number of entries before the one of the batch: Spark needs one; preflight also checks the start of the one before."""


def cuttable(checkpoint: Checkpoint) -> range:
    """The batches after which a cut can be made: their log entries and those just before still exist."""
    committed, planned = checkpoint.committed, checkpoint.planned
    last = max(committed & planned, default=-1)
    first = last
    while first - 1 in committed and first - 1 in planned:
        first -= 1
    return range(first if first == 0 else first + _BEFORE, last + 1)


def copied(source: Path, target: Path) -> None:
    """A copy of a state file, and the folders above it; its caller syncs them."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copy2(source, target)


def cut(checkpoint: Checkpoint, batch: int, target: Location, keep: Callable[[Path, Path], None] = hard_link) -> None:
    """Make `target` a checkpoint that ends after `batch`; an existing cut is left as it is.

    `keep` makes the state files: `copied` for a checkpoint that is not ours, or lies on another disk. Raises UsageError
    when Spark's log no longer holds what the cut needs. A kill leaves a folder `target`.partial, or, on a store, a
    target without its metadata.
    """
    if is_made(target):
        return
    possible = cuttable(checkpoint)
    if batch not in possible:
        choice = f"batches {possible[0]} to {possible[-1]}" if possible else "no batch"
        raise UsageError(
            f"the checkpoint {checkpoint.folder.name} can be cut after {choice}, not after batch {batch}",
            f"choose one of them, or a savepoint (`{commands.savepoints()}`)",
        )
    numbers = range(max(batch - _BEFORE, 0), batch + 1)
    names = [f"{log}/{number}" for log in ("offsets", "commits") for number in numbers]
    names += [f"sources/{name}" for name, _ in files_below(checkpoint.folder / "sources")]
    state = [f"state/{name}" for name in needed_state(checkpoint.folder / "state", batch + 1)]
    _made(checkpoint.folder, target, names, state, {"metadata": json.dumps({"id": str(uuid.uuid4())})}, keep)


def is_made(target: Location) -> bool:
    """True if a copy or a cut is there, whole: in a folder it gets its name last, on a store its metadata."""
    return target.exists() if isinstance(target, Path) else Checkpoint(target).exists


def copy(source: Location, target: Location, *, ends: TopicOffsets | None = None) -> None:
    """A second checkpoint like the cut `source`, for a query to run on; state files are hard links.

    With `ends`, its last batch ends there: the query skips the records in between.
    """
    made, texts = Checkpoint(source), {}
    if ends is not None and (last := made.last_planned) is not None:
        texts[f"offsets/{last}"] = made.entry_ending_at(last, ends)
    if made.exists:
        texts["metadata"] = (source / "metadata").read_text(encoding="utf-8")
    names = [name for name, _ in files_below(source) if name not in texts]
    state = [name for name in names if name.startswith("state/")]
    _made(source, target, [name for name in names if not name.startswith("state/")], state, texts)


def _made(
    source: Location,
    target: Location,
    names: Sequence[str],
    state: Sequence[str],
    texts: Mapping[str, str],
    keep: Callable[[Path, Path], None] = hard_link,
) -> None:
    """Make a checkpoint of files of another one and of texts, of which the last is written last."""
    if isinstance(source, StorePath) and isinstance(target, StorePath):
        remove_tree(target)  # of an attempt that was killed
        copy_objects(source, target, [*names, *state])
        for name, text in texts.items():
            (target / name).write_bytes(text.encode())
        return
    assert isinstance(source, Path)
    assert isinstance(target, Path)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for log in ("offsets", "commits", "sources"):
        (partial / log).mkdir(parents=True, mode=0o700)
    for name in names:
        (partial / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copy2(source / name, partial / name)
    for name in state:
        keep(source / name, partial / name)
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8")
    sync_tree(partial)  # Spark has synced none of the linked files
    partial.replace(target)
    sync(target.parent)


def move(source: Location, target: Location) -> None:
    """Let a checkpoint become another one, once: an existing target stays. On a store the source stays too."""
    if is_made(target):
        return
    if isinstance(source, Path) and isinstance(target, Path):
        source.rename(target)
        sync(target.parent)
    else:
        copy(source, target)


def needed_state(state: Location, version: int) -> Iterator[str]:
    """The state files that lead to a version, of every operator, partition and store, by their paths below `state`.

    From the version downwards: its changes, then those before it, down to the second full snapshot. The first snapshot
    is not enough, because an attempt that died may have left it. Then the RocksDB files that these snapshots name.
    """
    folders: dict[str, set[str]] = {}
    for path, _ in files_below(state):
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, set()).add(name)
    for folder, files in folders.items():
        if folder.rpartition("/")[2] == "SSTs":
            continue
        versioned = [(int(match[1]), match[2], name) for name in files if (match := _VERSIONED.fullmatch(name))]
        fulls = sorted({number for number, kind, _ in versioned if kind in _FULL and number <= version}, reverse=True)
        oldest = fulls[1] if len(fulls) > 1 else 0
        chosen = [name for number, _, name in versioned if oldest <= number <= version]
        others = [name for name in files if not _VERSIONED.fullmatch(name) and not name.startswith(".")]
        yield from (f"{folder}/{name}" if folder else name for name in (*chosen, *others))
        named = {each for name in chosen if name.endswith(".zip") for each in _tables_of(state / folder / name)}
        there = folders.get(f"{folder}/SSTs", set())
        for name in sorted(named):
            yield from (f"{folder}/SSTs/{each}" for each in (name, f"{name}.crc") if each in there)


def _tables_of(snapshot: Location) -> Iterator[str]:
    """Yields the names of a snapshot's RocksDB files, which are in `SSTs` beside it (Spark's RocksDBFileManager)."""
    for file in _metadata(snapshot)["sstFiles"]:
        yield file["dfsSstFileName"]


def _metadata(snapshot: Location) -> dict[str, Any]:
    """What Spark writes into a full snapshot about it."""
    with zipfile.ZipFile(BytesIO(snapshot.read_bytes())) as packed:
        _, _, text = packed.read("metadata").decode().partition("\n")
    return dict(json.loads(text))


def state_skew(checkpoint: Checkpoint) -> float | None:
    """Keys of the fullest partition of an operator's state, divided by those of an average one; of all the greatest.

    Read from the newest full snapshots, which Spark makes every few batches; None while a partition has none. Of a
    store it is not read, since each snapshot would be a request.
    """
    folder = checkpoint.folder
    if isinstance(folder, StorePath):
        return None
    try:
        skews = [_skew(folder / "state" / str(operator)) for operator in _entries(folder / "state")]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # removed, or not whole yet
        return None
    return max((skew for skew in skews if skew is not None), default=None)


def _skew(operator: Path) -> float | None:
    keys = []
    for partition in (operator / str(number) for number in _entries(operator)):
        newest: dict[Path, tuple[int, Path]] = {}  # by store: a join has several in a partition
        for snapshot in partition.rglob("*.zip"):
            if match := _VERSIONED.fullmatch(snapshot.name):
                found = int(match[1]), snapshot
                newest[snapshot.parent] = max(newest.get(snapshot.parent, found), found)
        if not newest:
            return None
        keys.append(sum(int(_metadata(snapshot)["numKeys"]) for _, snapshot in newest.values()))
    return round(max(keys) * len(keys) / sum(keys), 2) if sum(keys) > 0 else None


def _entries(log: Location) -> set[int]:
    try:
        return {int(file.name) for file in log.iterdir() if file.name.isdigit()}
    except FileNotFoundError:
        return set()


def _write(file: Location, text: str) -> None:
    if isinstance(file, Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    else:
        file.write_bytes(text.encode())


# The paths of state schemas in a checkpoint that was moved or copied.
#
# For `transformWithState`, Spark writes into `state/<operator>/_metadata/v2/<batch>` the absolute paths of the
# schemas of its state, `state/<operator>/_stateSchema/...` in the same checkpoint. A savepoint, a recovery and a
# home that was moved have them elsewhere, and the folder that they name may be gone.

_PATH = re.compile(r'"(?:file:[^"]*|s3a?://[^"]*)/state/(\d+)/_stateSchema/')


def point_to(checkpoint: Location) -> list[Location]:
    """Let a checkpoint's metadata name the schemas beside them; returns the rewritten files.

    They are replaced, not written to: other checkpoints may share them as hard links.
    """
    here = f"file:{checkpoint.absolute()}" if isinstance(checkpoint, Path) else hadoop_path(checkpoint)
    start = json.dumps(here, ensure_ascii=False)[:-1]
    rewritten: list[Location] = []
    folders = [checkpoint / "state" / str(each) / "_metadata" / "v2" for each in _entries(checkpoint / "state")]
    for file in (folder / str(batch) for folder in folders for batch in _entries(folder)):
        text = file.read_text(encoding="utf-8")
        right = _PATH.sub(lambda found: f"{start}/state/{found[1]}/_stateSchema/", text)
        if right == text:
            continue
        if isinstance(checkpoint, Path) and isinstance(file, Path):
            fresh = checkpoint / ".state-metadata"  # Spark takes names beside it
            file.with_name(f".{file.name}.crc").unlink(missing_ok=True)  # the checksum of what is replaced
            write_atomic(fresh, right)
            fresh.replace(file)
            sync(file.parent)
        else:
            _write(file, right)
        rewritten.append(file)
    return rewritten
