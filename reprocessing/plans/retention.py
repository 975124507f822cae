"""Plans that are over leave the disk, with their journals and reports, when the next plan is made.

A plan stays as long as a savepoint that it refers to, and until it has been over for `savepoint.keep_plans`. The
newest plan of each stream stays, and the last of each name, so that no name is given twice; an undo stays as long as
the plan that it took back.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

from reprocessing.plans.journal import OVER, journal_of
from reprocessing.plans.plan import RecoveryPlan
from reprocessing.plans.plan_file import folder, forget, load, names, only_operator, stream_of, unfinished
from streaming_jobs.errors import LeaseBusy, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.state import savepoints


def prune_plans(settings: Settings) -> list[str]:
    """Remove plans past their age, and what a kill has left of them; returns the names of the removed."""
    gone = []
    plans = list(_readable(settings)) if settings.savepoint.keep_plans else []
    newest = {stream: plan.id for plan in plans for stream in plan.names}
    last = {stream_of(plan.id): plan.id for plan in sorted(plans, key=lambda plan: (len(plan.id), plan.id))}
    kept = {*newest.values(), *last.values()}
    for plan in plans:
        if plan.id not in kept and plan.undoes not in kept and _remove(settings, plan):
            gone.append(plan.id)
        else:
            kept.add(plan.id)
    for name in unfinished(settings):
        shutil.rmtree(folder(settings, name), ignore_errors=True)
    return gone


def _readable(settings: Settings) -> Iterator[RecoveryPlan]:
    """Yields the plans, oldest first, but for those that cannot be read: they stay."""
    for name in names(settings):
        with suppress(UsageError):
            yield load(settings, name)


def _remove(settings: Settings, plan: RecoveryPlan) -> bool:
    """Remove a plan if nothing needs it any longer; False if it stays."""
    try:
        with only_operator(settings, plan.id):
            over = _over_since(settings, plan)
            young = over is None or timedelta(seconds=time.time() - over) <= settings.savepoint.keep_plans
            if young or _has_savepoint(settings, plan):
                return False
            forget(settings, plan.id)
            shutil.rmtree(folder(settings, plan.id), ignore_errors=True)
            return True
    except LeaseBusy:
        return False


def _over_since(settings: Settings, plan: RecoveryPlan) -> float | None:
    """The time of a plan's end, or, if it was never begun, of its making; None while it stops a stream."""
    journal = journal_of(settings, plan.id)
    if journal.outcome not in OVER:
        return None
    return max([plan.made_at, *(line.at for line in journal.lines())])


def _has_savepoint(settings: Settings, plan: RecoveryPlan) -> bool:
    """True if a savepoint is kept that the plan goes back to or ends at, or that its undo would go back to."""
    journal = journal_of(settings, plan.id)
    for each in plan.streams:
        before = journal.done("keep", each.stream)
        referred = (each.base.savepoint, each.until and each.until.savepoint, before and before["savepoint"])
        if any(name and savepoints.find(settings, each.stream, name) for name in referred):
            return True
    return False
