"""The commits of redrives that wait: by a stream's driver between two batches, or by whoever holds the stream's lease.

    claim the request -> is everything still set aside? -> each table that takes rows -> the table of what was set aside

Each table takes a redrive once, by a transaction of its own. So a redrive that was begun is carried on after any kill,
with the rows that it has kept, and never with others. Until one table has it, it may still be refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from streaming_jobs.errors import Fenced, TransientError
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.sinks.redriven import RedrivenTable, RedriveOutdated, redriven
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.state.redrive_requests import RedrivePart, RedriveRequest, RedriveRequests
from streaming_jobs.text import commands

log = structlog.get_logger()


def carry_out_redrives(requests: RedriveRequests, tables: Mapping[str, StoredTable]) -> None:
    """Give every waiting redrive its outcome; the caller is the one who may write the tables.

    Raises the error of a redrive that one table has, and another one does not take yet: then no later one is begun.
    """
    for request in requests.waiting():
        if request.state == "waiting" and not requests.claim(request):
            continue
        withdrawn = request if request.state == "expired" else None
        ended = requests.outcome(request.id) or withdrawn or _carried_out(requests, request, tables)
        requests.end(ended)
        crash_point("redrive_ended", request.stream, 0)
        log.info("redrive", stream=request.stream, table=request.table, redrive=request.id, state=ended.state)


def refuse_begun(requests: RedriveRequests) -> None:
    """Raise TransientError while a redrive is begun: a table may have its rows, and another one not."""
    for each in requests.waiting():
        if each.state == "committing":
            raise TransientError(
                f"redrive {each.id} of stream {each.stream} is not in all of its tables yet",
                "see the stream's log; to carry it on while the stream is stopped: "
                f"{commands.redrive(each.stream, dry_run=True)}",
            )


@dataclass(frozen=True)
class _Part:
    part: RedrivePart
    table: RedrivenTable

    @property
    def is_there(self) -> bool:
        return self.table.has(self.part.ledger)


def _carried_out(
    requests: RedriveRequests, request: RedriveRequest, tables: Mapping[str, StoredTable]
) -> RedriveRequest:
    begun, parts = False, list[_Part]()
    try:
        parts = [_Part(part, redriven(_table(tables, part.table))) for part in request.parts]
        begun = any(each.is_there for each in parts)
        if not begun and time.time() > request.expires:
            return request.ended("expired", reason="nobody committed it in time")
        rows = {p.table: requests.rows(request.id, p.table) for p in request.parts if p.action != "take_out"}
        if not begun:
            redriven(_table(tables, request.table)).check(request.kind, request.taken_out)
            for each in parts:
                if each.part.table in rows:
                    each.table.check_rows(rows[each.part.table])
        for number, each in enumerate(parts):
            crash_point("redrive_next", request.stream, number)
            if each.part.action == "add":
                each.table.add(rows[each.part.table], each.part.ledger)
            else:
                each.table.take_out(request.kind, request.taken_out, each.part.ledger)
            begun = True
    except (RedriveOutdated, Fenced) as outdated:
        if begun:
            raise
        return request.ended("outdated", reason=outdated.found)
    except Exception as error:
        if begun or any(each.is_there for each in parts):
            raise
        return request.ended("failed", reason=f"{type(error).__name__}: {error}"[:500])
    return request.committed({part.table: tables[part.table].version for part in request.parts})


def _table(tables: Mapping[str, StoredTable], name: str) -> StoredTable:
    if name not in tables:
        raise RedriveOutdated(f"there is no table {name} yet: start the stream once with the code of today")
    return tables[name]
