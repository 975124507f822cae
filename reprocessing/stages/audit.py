"""The stages before publishing: the comparison of what was rebuilt, and the confirmation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from reprocessing.plans.journal import NOT_CONFIRMED, next_step
from reprocessing.plans.plan import StreamPlan
from reprocessing.rebuild.audit import Difference, compare
from reprocessing.rebuild.audit_checks import checks_of
from reprocessing.rebuild.context import Recovery, RecoveryContext
from reprocessing.rebuild.publish import refuse_foreign
from reprocessing.rebuild.replay_end import kept_table
from reprocessing.stages.stage import Findings
from streaming_jobs.errors import PermanentError
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.spelling import counted


class AuditRefused(PermanentError):
    """The rebuilt rows break a rule, or differ by more than the plan allows; nothing was published.

    Look at the report that `recourse recover show PLAN` names. Then `recourse recover abort PLAN` lets the stream
    continue as it was; correct the code, or the rule, and plan anew.
    """

    code = "REC-030"


@dataclass(frozen=True)
class Audit:
    """The checks and differences of every rebuilt stream, and the request to confirm the publish."""

    name: ClassVar[str] = "audit"
    stream: ClassVar[None] = None
    plans: tuple[StreamPlan, ...]

    def explain(self) -> str:
        """One line of the plan's text."""
        words = dict.fromkeys(check.words() for plan in self.plans for check in checks_of(plan))
        return "; ".join(
            ["compare staging with the published tables, as of where these end in the topics", *filter(None, words)]
        )

    def run(self, recovery: Recovery) -> Findings:
        """Compare; raises AuditRefused, after which the plan can be aborted or resumed."""
        recovery.differences = []
        refusals: list[str] = []
        for plan in self.plans:
            context = recovery.of(plan.stream)
            refuse_foreign(context.settings, context.stream, context.record)
            recovery.events.tell(_as_of(context))
            differences = list(_differences(context))
            recovery.differences += differences
            refusals += [words for check in checks_of(plan) for words in check.refusals(context, differences)]
        if refusals:
            raise AuditRefused(
                "; ".join(refusals),
                f"give it up, correct the function and plan again: recourse recover abort {recovery.plan.id}",
            )
        _ask(recovery)
        return {"differences": [dataclasses.asdict(replace(d, sample=())) for d in recovery.differences]}


@dataclass(frozen=True)
class Confirm:
    """The request to confirm, if nothing is rebuilt that could be compared."""

    name: ClassVar[str] = "confirm"
    stream: ClassVar[None] = None
    plans: tuple[StreamPlan, ...]

    def explain(self) -> str:
        """One line of the plan's text."""
        records = sum(end - begin for plan in self.plans for _, _, begin, end in plan.skipped())
        return f"ask whether {'this one record' if records == 1 else f'these {records:,} records'} may be left out"

    def run(self, recovery: Recovery) -> Findings:
        """Ask for confirmation; raises AuditRefused without it."""
        _ask(recovery)
        return {}


def _differences(context: RecoveryContext) -> Iterator[Difference]:
    published, staged = context.published(), context.staged()
    for declared, role in all_tables(context.stream):
        if role != "deletes":  # they follow from the rows, and depend on the batches that noted them
            rebuilt = kept_table(context, declared) or staged[declared.name]
            yield compare(declared.name, published[declared.name].readable(), rebuilt.readable(), declared.keys)


def _ask(recovery: Recovery) -> None:
    if not recovery.events.confirm(recovery):
        raise AuditRefused(NOT_CONFIRMED, next_step(recovery.plan.id, "waits for confirmation"))


def _as_of(context: RecoveryContext) -> str:
    """The moment of the replay that is compared with the published tables, in words."""
    since = context.found("replay").get("since", 0)
    if since is None:
        return (
            "  the replay has no batch that ends where the published tables do: what came since shows as a difference"
        )
    if not since:
        return "  compared where the published tables end"
    came = counted(since, "record")
    return (
        f"  compared where the published tables end; {came} that came since {'is' if since == 1 else 'are'} rebuilt too"
    )
