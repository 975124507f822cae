"""The commits of a recovery on the published tables: the fence, and the one commit that replaces the rows.

Each is made once, however often it is tried, and refused if another writer has changed the table. Pieces that a table
has already stay where they are; others are added in the folder `r-<plan>`. Secondary tables come first and the primary
last; its entry names the positions of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from reprocessing.plan.journal import next_step
from streaming_jobs.errors import ForeignWrite, LedgerConflict, PreflightRefused
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import WriteLease
from streaming_jobs.sinks.stored import LATE, Content, StoredTable, committed_as, newest
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands


@dataclass(frozen=True)
class PublishPosition:
    """The position, offsets and code that a plan's publish gives to the tables."""

    at: Txn
    offsets: tuple[OffsetRange, ...]
    code: CodeVersion


@dataclass(frozen=True)
class PublishedTable:
    """One table's publish: its version, the numbers of pieces added, removed and unchanged, and the commit's seconds.

    The journal has these fields under these names.
    """

    table: str
    version: int
    came: int
    went: int
    stayed: int
    seconds: float


def tables_to_publish(settings: Settings, stream: Stream) -> list[StoredTable]:
    """The stream's tables in the order in which they are published: the primary last."""
    primary, *secondary = [open_table(settings, declared, stream.name) for declared, _ in all_tables(stream)]
    return [table for table in (*secondary, primary) if table is not None]


def _tables_under(lease: WriteLease | None, settings: Settings, stream: Stream, generation: int) -> list[StoredTable]:
    """The same tables, to be written under the lease of the stream that the recovery holds."""
    tables = tables_to_publish(settings, stream)
    if lease is not None:
        for table in tables:
            table.under(lease, generation)
    return tables


def fence(
    settings: Settings,
    stream: Stream,
    plan: str,
    generation: int,
    *,
    passed: bool = False,
    lease: WriteLease | None = None,
) -> None:
    """Open the generation on every table for this plan alone: no other start of the stream and no old driver can write.

    With `passed`, a table in a later generation is left as it is: an abort that was killed has already moved it there.
    Raises PreflightRefused for a table that another plan has fenced.
    """
    for table in _tables_under(lease, settings, stream, generation):
        if passed and (at := table.position) is not None and at.generation > generation:
            continue
        table.mark(LedgerEntry("fence", stream.name, table.name, generation, -1, plan=plan))
        commit, _ = newest(table.commits(), stream.name)
        if commit is not None and commit.entry is not None and commit.entry.plan != plan:
            other = commit.entry.plan
            raise PreflightRefused(
                f"table {table.name} is fenced by plan {other}", next_step(other or "PLAN", "applying")
            )


def fenced_by(settings: Settings, stream: Stream, plan: str) -> bool:
    """True if the plan has fenced a table, or has published to it."""
    marks = (newest(table.commits(), stream.name)[0] for table in tables_to_publish(settings, stream))
    return any(commit is not None and commit.entry is not None and commit.entry.plan == plan for commit in marks)


def publish(
    settings: Settings,
    stream: Stream,
    contents: Mapping[str, Content],
    *,
    record: StreamRecord,
    plan: str,
    position: PublishPosition,
    new: Mapping[str, Content] | None = None,
    between: Callable[[str], None] = lambda _: None,
    lease: WriteLease | None = None,
) -> list[PublishedTable]:
    """Replace each table's rows by those in `contents`, at `position`; a table that has them is left as it is.

    `new` has by table the pieces with nothing but rows of records that no batch had read before: a stream that reads
    the table gets these, and no others. A table that it does not have needs a rebuild of such streams, if it has any.
    `between` is called with a table's name after its commit. Raises LedgerConflict if a table has other content
    afterwards, ForeignWrite if another writer has changed one since the stream's newest commit, unaccepted.
    """
    at, done = position.at, []
    # Opened before the check for foreign changes: a later change makes the commit fail.
    tables = _tables_under(lease, settings, stream, at.generation)
    _refuse_foreign(tables, stream, record)
    topics = {sink.ledger_name: at.version for sink in stream.topic_sinks.values() if sink.exactly_once}
    databases = {table.ledger_name: at.version for table in stream.postgres_tables.values()}
    began_later = {declared.name for declared, role in all_tables(stream) if role in LATE}
    for table in tables:
        primary = table.name == stream.primary.name
        entry = LedgerEntry(
            kind="publish",
            stream=stream.name,
            table=table.name,
            generation=at.generation,
            batch=at.batch,
            offsets=position.offsets,
            txns={**{other.name: at.version for other in tables if other is not table}, **topics, **databases}
            if primary
            else {},
            code=position.code,
            plan=plan,
        )
        # A table of remembered deletes, or a quarantine, may be younger than the savepoint: then it had no rows.
        nothing = table.name in began_later and table.name not in contents
        content = table.no_rows() if nothing else contents[table.name]
        done.append(_publish(table, content, entry, f"r-{plan}", (new or {}).get(table.name)))
        between(table.name)
    return done


def refuse_foreign(settings: Settings, stream: Stream, record: StreamRecord) -> None:
    """Raise ForeignWrite if another writer has changed a table since the stream's newest commit, unaccepted."""
    _refuse_foreign(tables_to_publish(settings, stream), stream, record)


def _refuse_foreign(tables: Iterable[StoredTable], stream: Stream, record: StreamRecord) -> None:
    for table in tables:
        _, foreign = newest(table.commits(), stream.name)
        for commit in foreign:
            if commit.version not in record.accepts(table.name):
                raise ForeignWrite(
                    f"version {commit.version} of table {table.name} ({commit.operation}) changed rows and was not "
                    f"written by stream {stream.name}",
                    "a recovery would drop that change: undo it, or accept it: "
                    f"{commands.accept(stream.name, table.name, commit.version)}",
                )


def misfit(table: StoredTable, staged: StoredTable) -> list[str]:
    """Reasons why staged rows should not be published to the table: a missing column, and those of `incompatible`."""
    there = staged.schema.fieldNames()
    gone = [field for field in table.schema.fields if field.name not in there]
    reasons = [
        f"column {field.name} of table {table.name} is {field.dataType.jsonValue()}, in the rebuilt one gone"
        for field in gone
    ]
    return reasons + incompatible(table, staged)


def incompatible(table: StoredTable, staged: StoredTable) -> list[str]:
    """Reasons why staged rows cannot be published to the table: another type, other partitions."""
    there = {field.name: field.dataType.jsonValue() for field in staged.schema.fields}
    reasons = [
        f"column {name} of table {table.name} is {kind}, in the rebuilt one {there[name]}"
        for name, kind in ((field.name, field.dataType.jsonValue()) for field in table.schema.fields)
        if there.get(name, kind) != kind
    ]
    if tuple(table.partition_by) != tuple(staged.partition_by):
        reasons.append(f"table {table.name} is partitioned by other columns than the rebuilt one")
    return reasons


def _publish(
    table: StoredTable, content: Content, entry: LedgerEntry, place: str, new: Content | None = None
) -> PublishedTable:
    made = table.replace_rows(content, entry, place, new)
    commit = committed_as(table.commits(), entry)
    version = table.version if commit is None else commit.version  # others may have committed since
    if made.version is None:
        made = replace(made, stayed=content.pieces)
    if not table.has_content(content, version):
        raise LedgerConflict(
            f"version {version} of table {table.name} does not hold the files that were published to it",
            f"publish them again: {next_step(entry.plan or 'PLAN', 'applying')}",
        )
    return PublishedTable(table.name, version, made.came, made.went, made.stayed, made.seconds)


def has_published(settings: Settings, stream: Stream, plan: str) -> bool:
    """True if the plan's commit is in the primary table, which is the last: then the plan can no longer be aborted."""
    commit, _ = newest(store_of(stream.primary).commits(settings, stream.primary), stream.name)
    entry = commit.entry if commit else None
    return entry is not None and entry.kind == "publish" and entry.plan == plan
