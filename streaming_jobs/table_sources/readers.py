"""The streams that read a table, and the versions that they still need, by their checkpoints.

A batch of versions `[s, e)` needs them until it is committed, and until the next one is: a recovery may let its replay
end where the last batch began. A replay from the beginning reads the table's content at such a border, so the version
before it is needed too. Replays that run now count like the stream itself. Of a table that is looked up, a replay may
need any version of the last days.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Need
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder, state_files

log = structlog.get_logger()


@dataclass(frozen=True)
class TableReaders:
    settings: Settings
    table: str
    names: tuple[str, ...]
    table_id: str = ""
    looked_up: bool = False

    @classmethod
    def of(cls, settings: Settings, table: str, table_id: str = "") -> TableReaders:
        """Those among the declared streams, and later all whose record has the table's id."""
        streams = Topology.load(settings.flows)
        readers, looked_up = tuple(streams.table_readers(table)), bool(streams.looking_up(table))
        return cls(settings, table, readers, table_id, looked_up)

    def needs(self) -> list[Need]:
        """The versions that each reader still needs now; none for a reader that has never run.

        A replay of a stream that looks the table up may need any version: all stay, within the bounds of the settings.
        """
        needs = [need for folder in self._folders() if (need := self._need(folder)) is not None]
        return [Need(0, None), *needs] if self.looked_up else needs

    def _folders(self) -> Iterator[StreamFolder]:
        """The state folders of the readers, and of their replays."""
        files = state_files(self.settings)
        replays = [f"recoveries/{plan}/state" for plan in files.folders("recoveries")]
        streams = [*files.folders(), *(f"{state}/{each}" for state in replays for each in files.folders(state))]
        for folder in (StreamFolder.below(self.settings, each) for each in streams):
            if folder.path.name in self.names or self._reads(folder):
                yield folder

    def _reads(self, folder: StreamFolder) -> bool:
        """True if a stream that was not declared when the writer started reads the table, by its record."""
        try:
            record = stream_record.read(folder.record)
        except PreflightRefused:  # no table waits for it: its needs are unknown, and its next start reports the error
            return False
        return record is not None and self.table_id in {topic.topic_id for topic in record.topics}

    def _need(self, folder: StreamFolder) -> Need | None:
        try:
            record = stream_record.read(folder.record)
            if record is None:
                return None
            checkpoint = folder.checkpoint(record.generation)
            committed = checkpoint.last_committed
            batch = committed if committed is not None else checkpoint.last_planned
            if batch is None:
                start, end = record.starts.get(self.table, {}).get(0, 0), 0
            else:
                start = checkpoint.start(batch).get(self.table, {}).get(0, 0)
                end = checkpoint.end(batch).get(self.table, {}).get(0, 0)
        except PreflightRefused as error:  # its next start reports it; meanwhile nothing that it may need is removed
            log.warning(
                "the position of a reader cannot be read", table=self.table, folder=folder.path.name, reason=str(error)
            )
            return Need(0, None)
        if start:
            return Need(start - 1, end or start)
        return Need(max(end - 1, 0), max(end - 1, 0)) if batch is not None else None
