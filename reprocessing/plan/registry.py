"""All plans of a home: which plan of a stream is unfinished, which undid another, and which may be removed.

A plan that is over stays as long as a savepoint that it refers to, and until it has been over for
`savepoint.keep_plans`. The newest plan of each stream stays, and the last of each name, so that no name is given twice;
an undo stays as long as the plan that it took back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

from reprocessing.plan.journal import OVER, journal_of
from reprocessing.plan.plan import RecoveryPlan
from reprocessing.plan.plan_file import (
    forget,
    load,
    names,
    names_of,
    only_operator,
    remove,
    stream_of,
    undos_of,
    unfinished,
)
from streaming_jobs.errors import LeaseBusy, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.state import savepoints

_ENOUGH = 1_000
"""Records of an append that tell its rate; of fewer, the start of the producer is most of the time."""


def under_way(settings: Settings, stream: str) -> RecoveryPlan | None:
    """The plan of this stream that was begun and is not over."""
    for name in names_of(settings, stream):
        if journal_of(settings, name).outcome not in OVER:
            return load(settings, name)
    return None


def append_rate(settings: Settings, stream: str) -> float | None:
    """Records per second at which the newest recovery of a stream that says so has appended its staged records."""
    for name in reversed(names_of(settings, stream)):
        done = journal_of(settings, name).done("append_records", stream) or {}
        if done.get("appended", 0) >= _ENOUGH and done["seconds"] > 0:
            return round(float(done["appended"]) / float(done["seconds"]), 1)
    return None


def undone_by(settings: Settings, plan: RecoveryPlan) -> str | None:
    """The plan that has undone a published one and was not undone itself."""
    for name in undos_of(settings, plan.id):
        if journal_of(settings, name).outcome == "published" and undone_by(settings, load(settings, name)) is None:
            return name
    return None


def refuse_if_held(settings: Settings, plan: RecoveryPlan) -> None:
    """Raise LeaseBusy while another process works on a plan, whatever its outcome is so far."""
    with only_operator(settings, plan.id):
        pass


def needed_savepoints(settings: Settings, stream: str) -> dict[str, str]:
    """Savepoints of a stream that an unfinished plan needs, with the plan's name."""
    plan = under_way(settings, stream)
    return {} if plan is None else dict.fromkeys(_savepoints_of(settings, plan, stream), plan.id)


def _savepoints_of(settings: Settings, plan: RecoveryPlan, stream: str) -> list[str]:
    """The savepoints that a plan goes back to or ends at, and that its undo would go back to."""
    of_stream, before = plan.of(stream), journal_of(settings, plan.id).done("take_savepoint", stream)
    found = (of_stream.base.savepoint, of_stream.until and of_stream.until.savepoint, before and before["savepoint"])
    return [name for name in found if name]


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
        remove(settings, name)
    return gone


def _readable(settings: Settings) -> Iterator[RecoveryPlan]:
    """Yields the plans, oldest first; skips unreadable plans, which stay on disk."""
    for name in names(settings):
        with suppress(UsageError):
            yield load(settings, name)


def _remove(settings: Settings, plan: RecoveryPlan) -> bool:
    """Remove a plan if nothing needs it any longer; False if it stays."""
    try:
        with only_operator(settings, plan.id):
            over = _over_since(settings, plan)
            young = over is None or timedelta(seconds=time.time() - over) <= settings.savepoint.keep_plans
            if young or any(
                savepoints.find(settings, stream, name)
                for stream in plan.names
                for name in _savepoints_of(settings, plan, stream)
            ):
                return False
            forget(settings, plan.id)
            remove(settings, plan.id)
            return True
    except LeaseBusy:
        return False


def _over_since(settings: Settings, plan: RecoveryPlan) -> float | None:
    """The time of a plan's end, or, if it was never begun, of its making; None while it stops a stream."""
    journal = journal_of(settings, plan.id)
    if journal.outcome not in OVER:
        return None
    return max([plan.made_at, *(line.at for line in journal.lines())])
