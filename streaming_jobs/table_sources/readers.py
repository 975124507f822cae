"""The streams that read a table, and the versions that they still need, by their checkpoints.

A batch of versions `[s, e)` needs them until it is committed, and until the next one is: a recovery may let its replay
end where the last batch began. A replay from the beginning reads the table's content at such a border, so the version
before it is needed too. Replays that run now count like the stream itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.topology import Topology

log = structlog.get_logger()


@dataclass(frozen=True)
class TableReaders:
    """The streams that read one table."""

    settings: Settings
    table: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings, table: str) -> TableReaders:
        """Those among the declared streams."""
        return cls(settings, table, tuple(Topology.load(settings.flows).table_readers(table)))

    def first_needed(self) -> int | None:
        """The first version that one of them still needs; None if none needs any, as one that has never run."""
        needed = [version for folder in self._folders() if (version := self._needed(folder)) is not None]
        return min(needed, default=None)

    def _folders(self) -> Iterator[Path]:
        """The state folders of the readers, and of their replays."""
        for name in self.names:
            yield StreamFolder.of(self.settings, name).path
            yield from self.settings.state.glob(f"recoveries/*/state/{name}")

    def _needed(self, folder: Path) -> int | None:
        here = StreamFolder(folder)
        try:
            record = stream_record.read(here.record)
            if record is None:
                return None
            checkpoint = here.checkpoint(record.generation)
            batch = checkpoint.last_committed if checkpoint.last_committed is not None else checkpoint.last_planned
            if batch is None:
                start, end = record.starts.get(self.table, {}).get(0, 0), 0
            else:
                start = checkpoint.start(batch).get(self.table, {}).get(0, 0)
                end = checkpoint.end(batch).get(self.table, {}).get(0, 0)
        except PreflightRefused as error:  # its next start reports it; meanwhile nothing that it may need is removed
            log.warning(
                "the position of a reader cannot be read", table=self.table, folder=folder.name, reason=str(error)
            )
            return 0
        if start:
            return start - 1
        return max(end - 1, 0) if batch is not None else None
