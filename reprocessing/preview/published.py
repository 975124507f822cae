"""The published side of a preview: the stream's newest committed batch, and its tables as they were after it.

The stream runs on meanwhile. Its tables' files are linked at once, so that no compaction or clean-up of the live tables
can take them away before they are compared.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from reprocessing.plans.journal import next_step
from reprocessing.preview.folders import Folders
from streaming_jobs.errors import PreflightRefused, RecourseError, TransientError, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import TopicOffsets, ends_of, starts_of
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import newest
from streaming_jobs.sinks.tables import all_tables, existing_table, open_table, store_of
from streaming_jobs.state.savepoints import version_after
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream

_ATTEMPTS = 3


@dataclass(frozen=True)
class Published:
    """The newest committed batch of a stream: where it ended, where it began (if that is known), when it came.

    `versions`: the version of each table after it. `at` in seconds since 1970. `foreign`: table -> versions of its
    commits that are not the stream's, as far back as its log reaches.
    """

    txn: Txn
    ends: TopicOffsets
    begins: TopicOffsets | None
    at: float
    versions: Mapping[str, int]
    foreign: Mapping[str, tuple[int, ...]]


def published(folders: Folders, stream: Stream, record: StreamRecord) -> Published:
    """Find the newest batch, and link the tables as they are after it into the folder `published`.

    Raises UsageError before the stream's first batch, PreflightRefused while a recovery is under way, TransientError
    if the live tables change faster than they can be linked.
    """
    reason: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            found = _newest(folders.settings, stream, record)
            _link(folders, stream, found)
        except (FileNotFoundError, PreflightRefused) as error:
            if isinstance(error, _Recovering):
                raise
            reason = error  # the running stream has just removed a file or a part of its log
            shutil.rmtree(folders.with_tables("published").tables, ignore_errors=True)
        else:
            return found
    text = reason.found if isinstance(reason, RecourseError) else str(reason)
    raise TransientError(
        f"the tables of stream {stream.name} could not be held as they are: {text}",
        "try again; if it stays so, a table's files or its log are not complete",
    ) from reason


class _Recovering(PreflightRefused):
    """A recovery is under way; the fix is in the message."""


def _newest(settings: Settings, stream: Stream, record: StreamRecord) -> Published:
    primary = existing_table(settings, stream.primary, stream.name)
    commit, _ = newest(primary.commits(), stream.name)
    entry = commit.entry if commit is not None else None
    if commit is None or entry is None or (entry.kind == "batch" and entry.batch < 0):
        raise UsageError(f"stream {stream.name} has not written a batch yet", "there is nothing to compare with")
    if entry.kind == "fence" or (entry.kind == "publish" and entry.generation > record.generation):
        plan = entry.plan or "PLAN"
        raise _Recovering(f"the recovery plan {plan} of table {primary.name} is under way", next_step(plan, "applying"))
    if entry.kind == "publish" and entry.batch < 0:
        raise UsageError(f"stream {stream.name} has not written a batch yet", "there is nothing to compare with")
    versions, foreign = {}, {}
    for declared, _ in all_tables(stream):
        table = open_table(settings, declared, stream.name)
        if table is not None:
            versions[table.name] = version_after(table, stream.name, entry.txn)
            foreign[table.name] = tuple(each.version for each in table.commits() if each.foreign_to(stream.name))
    begins: TopicOffsets | None = starts_of(entry.offsets)
    if entry.kind == "publish":  # its range is that of the whole replay
        try:
            checkpoint = StreamFolder.of(settings, stream.name).checkpoint(entry.generation)
            begins = checkpoint.start(entry.batch)
        except PreflightRefused:
            begins = None
    return Published(entry.txn, ends_of(entry.offsets), begins, commit.at / 1000, versions, foreign)


def _link(folders: Folders, stream: Stream, found: Published) -> None:
    place = folders.with_tables("published")
    for declared, _ in all_tables(stream):
        version = found.versions.get(declared.name)
        if version is None:
            continue
        table = existing_table(folders.settings, declared, stream.name)
        store_of(declared).create(place, declared, stream.name, table.content(version), None)
