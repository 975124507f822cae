"""The comparisons of a stream's tables of PostgreSQL with the ledger entries of its primary table.

| comparison | of | says |
|---|---|---|
| position     | every table     | its row in `recourse_ledger` is at the batch that the entries lead to |
| row counts   | append tables   | there are as many rows as the entries say were written |
| keys         | upserts         | no key twice |

Position and rows are read in one transaction that sees one state of the database, while the stream runs. Values are not
compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from streaming_jobs.declare.postgres_table import LEDGER_TABLE, PostgresTable
from streaming_jobs.platform.extras import require
from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.lineage import Coverage
from streaming_jobs.verification.subject import Comparison


def compare_postgres(settings: Settings, stream: Stream, coverage: Coverage) -> Iterator[Comparison]:
    """Yields the comparisons; raises DatabaseUnavailable and DatabaseRefused."""
    if not stream.postgres_tables:
        return
    require("postgres-sink", f"the verification of stream {stream.name}")
    from psycopg import sql

    from streaming_jobs.sinks.postgres.database import Database

    database = Database(settings.postgres, stream.name)
    try:
        for table in stream.postgres_tables.values():
            place = database.name(table.name)
            keys = sql.SQL(", ").join(map(sql.Identifier, table.keys))
            doubled = sql.SQL("SELECT count(*) FROM (SELECT 1 FROM {} GROUP BY {} HAVING count(*) > 1) AS d")
            with database.transaction(f"verifying table {table.name}", snapshot=True) as connection:
                found = connection.execute(
                    sql.SQL("SELECT entry FROM {} WHERE table_name = %s AND stream = %s").format(
                        database.name(LEDGER_TABLE)
                    ),
                    [table.name, stream.name],
                ).fetchone()
                size = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(place)).fetchone()
                twice = connection.execute(doubled.format(place, keys)).fetchone() if table.keys else None
            assert size is not None
            entry = None if found is None else json.loads(found[0])
            yield from judged(table, entry, size[0], 0 if twice is None else twice[0], coverage)
    finally:
        database.close()


def judged(
    table: PostgresTable, entry: dict[str, Any] | None, rows: int, doubled: int, coverage: Coverage
) -> Iterator[Comparison]:
    """The comparisons of one table; `entry` is the newest batch in its ledger, as JSON has it."""
    name = table.ledger_name
    if entry is None:
        yield Comparison(name, "position", "wrong", f"{LEDGER_TABLE} has no row of it")
        return
    at = (entry["generation"], entry["batch"])
    known = {(each.generation, each.batch): each for each in coverage.entries}
    newest = max(known, default=None)
    ahead = newest is None or at > newest
    with_rows = [batch for batch, each in known.items() if each.rows.get(name)]
    last = max(with_rows, default=None)
    if not ahead and last is not None and at < last and not coverage.missing:
        text = f"it is at batch {at[1]} of generation {at[0]}, and the entries have rows of it up to batch {last[1]}"
        yield Comparison(name, "position", "wrong", text)
    else:
        yield Comparison(name, "position", "ok", f"generation {at[0]}, batch {at[1]}")
    if table.keys:
        text = f"{counted(doubled, 'key')} more than once" if doubled else f"{counted(rows, 'row')}, each key once"
        yield Comparison(name, "keys", "wrong" if doubled else "ok", text)
        return
    if coverage.missing:
        text = f"entries that are gone, by batches: {coverage.missing:,}"
        yield Comparison(name, "row counts", "unproved", text)
        return
    due = sum(each.rows.get(name, 0) for batch, each in known.items() if batch <= at)
    due += int(entry["rows"].get("written", 0)) if ahead else 0
    if due != rows:
        text = f"{counted(rows, 'row', 'is', 'are')} there, the entries say that {due:,} were written"
        yield Comparison(name, "row counts", "wrong", text)
    else:
        text = f"{counted(rows, 'row')}, as many as the entries say were written"
        yield Comparison(name, "row counts", "ok", text)
