"""Giving a plan up before it has published: the tables are as they were, the stream goes on one generation later.

The fence has opened a generation that the old checkpoint is not of. So the one after it goes on from the savepoint of
stage `keep`, and a publish of just the files that the tables have says so in their ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reprocessing import workshop
from reprocessing.publish import contents_of, fence, publish
from reprocessing.work import Work
from streaming_jobs import generation as generations
from streaming_jobs import savepoints
from streaming_jobs.checkpoint_cut import copy
from streaming_jobs.ledger import CodeVersion, Txn


def abort(work: Work) -> Mapping[str, Any]:
    """Bring the stream to where it goes on; may be run again from its beginning after a kill."""
    number, record = work.plan.generation + 1, work.record
    if work.journal.begun("fence") and record.generation != number:
        kept = work.kept()
        target = generations.checkpoint(work.settings, work.stream.name, number).folder
        if not target.exists():
            copy(savepoints.checkpoint_of(work.settings, kept), target)
        # Of all tables: a kill may have left some without it.
        fence(work.settings, work.stream, work.plan.id, work.plan.generation, passed=True)
        publish(
            work.settings,
            work.stream,
            contents_of(work.settings, kept),
            plan=work.plan.id,
            at=Txn(number, kept.batch),
            offsets=kept.offsets,
            code=CodeVersion(*kept.code),
            between=lambda _: work.crash_point("recover_abort_between"),
        )
        work.crash_point("recover_abort_published")
        opened = replace(
            workshop.opened_by(work.plan, number=number, reason="abort of"),
            from_generation=kept.generation,
            from_batch=kept.batch,
        )
        generations.save(work.settings, replace(record, generations=(*record.generations, opened)))
    workshop.clear(work.settings, work.plan)
    return {"generation": work.record.generation}
