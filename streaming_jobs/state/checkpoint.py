"""The reader of Spark's checkpoint: the planned batches, the committed ones, and the offsets that each one read.

Layout and rules from Spark's `MicroBatchExecution` and `OffsetSeqLog`: `offsets/N` is written before batch N
runs and holds, after `v1` and a line of metadata, one line per source with the offsets where N **ends**;
`commits/N` is written after it. N starts where N-1 ends; batch 0 starts at `sources/<i>/0`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.files import write_atomic
from streaming_jobs.positions import TopicOffsets, decode


class CheckpointDamaged(PreflightRefused):
    """A file of the stream's state cannot be read; `take_snapshot` adds the stream's folders to the next step."""

    def __init__(
        self, found: str, next_step: str = "put the checkpoint folder back from the newest copy, taken with the tables"
    ) -> None:
        super().__init__(found, next_step)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint folder of one generation of one stream."""

    folder: Path

    @property
    def last_planned(self) -> int | None:
        """The highest N of `offsets/N`."""
        return self._last("offsets")

    @property
    def last_committed(self) -> int | None:
        """The highest N of `commits/N`."""
        return self._last("commits")

    @property
    def exists(self) -> bool:
        """True if Spark has ever started here."""
        return (self.folder / "metadata").is_file()

    def end(self, batch: int) -> TopicOffsets:
        """The end of a batch: topic -> partition -> offset; raises PreflightRefused if the entry cannot be read."""
        ends: dict[str, Mapping[int, int]] = {}
        for index, line in enumerate(self._lines(batch)):
            text = line if line != "-" else self._initial(index)
            ends.update(_offsets(text, self.folder / "offsets" / str(batch)))
        return ends

    def start(self, batch: int) -> TopicOffsets:
        """The start of a batch: topic -> partition -> offset."""
        if batch > 0:
            return self.end(batch - 1)
        starts: dict[str, Mapping[int, int]] = {}
        for index in range(len(self._lines(batch))):
            starts.update(_offsets(self._initial(index), self.folder / "sources" / str(index) / "0"))
        return starts

    def entry_ending_at(self, batch: int, ends: TopicOffsets) -> str:
        """The text that the batch's entry would have if the batch had ended at `ends`."""
        head = _text(self.folder / "offsets" / str(batch)).split("\n")[:2]
        lines = []
        for index, line in enumerate(self._lines(batch)):
            offsets = _offsets(line if line != "-" else self._initial(index), self.folder / "offsets" / str(batch))
            moved = {topic: {**each, **ends.get(topic, {})} for topic, each in offsets.items()}
            lines.append(written(moved))
        return "\n".join([*head, *lines])

    def metadata(self, batch: int) -> dict[str, Any]:
        """The batch's own metadata: batchWatermarkMs, batchTimestampMs, conf."""
        path = self.folder / "offsets" / str(batch)
        try:
            value = json.loads(_text(path).split("\n")[1])
        except (IndexError, ValueError) as error:
            raise _damaged(path) from error
        return dict(value)

    def begin_at(self, starts: TopicOffsets) -> None:
        """Note where the first batch starts, in the form of Spark's Kafka source, for a checkpoint without a batch."""
        for index, (topic, each) in enumerate(starts.items()):
            folder = self.folder / "sources" / str(index)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / "0", f"v1\n{written({topic: each})}")

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

    def _last(self, log: str) -> int | None:
        folder = self.folder / log
        if not folder.is_dir():
            return None
        return max((int(f.name) for f in folder.iterdir() if f.name.isdigit()), default=None)

    def _lines(self, batch: int) -> list[str]:
        path = self.folder / "offsets" / str(batch)
        lines = _text(path).split("\n")
        if len(lines) < 3 or lines[0] != "v1" or not _is_json(lines[1]):
            raise _damaged(path)
        return lines[2:]

    def _initial(self, source: int) -> str:
        path = self.folder / "sources" / str(source) / "0"
        lines = _text(path).lstrip("\0").split("\n")
        if len(lines) < 2 or lines[0] != "v1":
            raise _damaged(path)
        return lines[1]


def written(offsets: TopicOffsets) -> str:
    """Offsets as a source writes them into a checkpoint. Spark compares the text: the same offsets, the same text."""
    return json.dumps({topic: {str(p): each[p] for p in sorted(each)} for topic, each in offsets.items()})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except FileNotFoundError:
        raise _damaged(path, "is missing") from None
    except UnicodeDecodeError as error:
        raise _damaged(path) from error


def _offsets(text: str, path: Path) -> dict[str, dict[int, int]]:
    try:
        return decode(json.loads(text))
    except (ValueError, AttributeError, TypeError) as error:
        raise _damaged(path) from error


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _damaged(path: Path, how: str = "cannot be read") -> CheckpointDamaged:
    return CheckpointDamaged(f"the checkpoint is damaged: {path} {how}")
