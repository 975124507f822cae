"""Tables of PostgreSQL in a plan that skips records, or that is given up: they keep their rows.

No recovery rebuilds them (`planner.NotRebuilt`). A skip opens a generation, so their rows of the ledger move there too.
"""

from __future__ import annotations

from collections.abc import Iterator

from reprocessing.stages.recovery import RecoveryContext
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.extras import require
from streaming_jobs.text import commands


def refuse_unfinished_tables(context: RecoveryContext, position: Txn) -> None:
    """Fence earlier drivers of the stopped stream; raises UsageError for a batch that only the database has.

    Its rows cannot be told from others, so nothing could repeat the batch.
    """
    for name, row in _taken_over(context):
        if row is not None and row.txn > position:
            raise UsageError(
                f"the PostgreSQL table {name} has {row.txn}, and the tables of stream {context.stream.name} lack it",
                f"let the stream finish it ({commands.run(context.stream.name, trigger='available-now')}), with the "
                "corrected code if need be; then resume",
            )


def refuse_to_repeat(context: RecoveryContext, committed: int) -> None:
    """Raise UsageError if an abort would repeat a batch whose rows a table of PostgreSQL has."""
    if context.stream.postgres_tables and context.stopped_at.batch != committed:
        raise UsageError(
            f"plan {context.plan.id} cannot be given up: stream {context.stream.name} would repeat batch "
            f"{context.stopped_at.batch}, whose rows the tables of PostgreSQL have",
            f"apply it: {commands.resume(context.plan.id)}",
        )


def continue_tables(context: RecoveryContext, at: Txn) -> None:
    """Let the tables continue at a position, with their rows; drivers of older generations write no more."""
    for _ in _taken_over(context, at):
        context.crash_point("recover_continue_table")


def _taken_over(context: RecoveryContext, at: Txn | None = None) -> Iterator[tuple[str, LedgerEntry | None]]:
    stream = context.stream
    if not stream.postgres_tables:
        return
    require("postgres-sink", f"stream {stream.name}")
    from streaming_jobs.sinks.postgres.ledger import take_over

    for table in stream.postgres_tables.values():
        entry = None
        if at is not None:
            entry = LedgerEntry("batch", stream.name, table.ledger_name, at.generation, at.batch, plan=context.plan.id)
        row = take_over(context.settings.postgres, stream.name, table.name, context.lease, entry)
        yield table.name, None if row is None else row.entry
