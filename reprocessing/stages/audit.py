"""The stages before publishing: the comparison of what was rebuilt, and the confirmation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from reprocessing.plans.journal import NOT_CONFIRMED, next_step
from reprocessing.plans.plan import StreamPlan
from reprocessing.rebuild.audit import stored
from reprocessing.rebuild.audit_checks import Rebuilt, checks_of
from reprocessing.rebuild.context import Recovery, RecoveryContext
from reprocessing.rebuild.publish import refuse_foreign
from reprocessing.rebuild.reopen import check_skip
from reprocessing.stages.stage import Findings
from streaming_jobs.errors import PermanentError
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted


class AuditRefused(PermanentError):
    """The rebuilt rows break a rule, or differ by more than the plan allows; nothing was published.

    Look at the report that `recourse recover show PLAN` names. Then `recourse recover abort PLAN` lets the stream
    continue as it was; correct the code, or the rule, and plan anew.
    """

    code = "REC-030"


@dataclass(frozen=True)
class Audit:
    """The checks and differences of every rebuilt stream, and the request to confirm all that the plan does.

    `skipping` are the plans of streams that skip records beside them: their tables are checked too, since no stream
    may be refused once another one has published.
    """

    name: ClassVar[str] = "audit"
    stream: ClassVar[None] = None
    plans: tuple[StreamPlan, ...]
    skipping: tuple[StreamPlan, ...] = ()

    def explain(self) -> str:
        """One line of the plan's text."""
        words = dict.fromkeys(check.words() for plan in self.plans for check in checks_of(plan))
        parts = [*dict.fromkeys(_compared_words(plan) for plan in self.plans), *filter(None, words)]
        return "; ".join([*parts, *([_ask_words(self.skipping)] if self.skipping else [])])

    def run(self, recovery: Recovery) -> Findings:
        """Compare; raises AuditRefused, after which the plan can be aborted or resumed."""
        recovery.differences = []
        refusals: list[str] = []
        for plan in self.plans:
            context = recovery.of(plan.stream)
            refuse_foreign(context.settings, context.stream, context.record)
            rebuilt = Rebuilt.of(context)
            for check in checks_of(plan, recovery.run_suite):
                refused = list(check.refusals(rebuilt))
                refusals += refused
                if check.words() and not refused:
                    recovery.events.tell(f"  passed: {check.words()}")
            recovery.events.tell(_as_of(context))
            recovery.differences += rebuilt.differences
        _check_skips(recovery, self.skipping)
        if refusals:
            raise AuditRefused(
                "; ".join(refusals),
                f"give it up, correct the function and plan again: {commands.abort(recovery.plan.id)}",
            )
        _ask(recovery)
        return {"differences": stored(recovery.differences)}


@dataclass(frozen=True)
class Confirm:
    """The request to confirm, if nothing is rebuilt that could be compared."""

    name: ClassVar[str] = "confirm"
    stream: ClassVar[None] = None
    plans: tuple[StreamPlan, ...]

    def explain(self) -> str:
        """One line of the plan's text."""
        return _ask_words(self.plans)

    def run(self, recovery: Recovery) -> Findings:
        """Ask for confirmation; raises AuditRefused without it."""
        _check_skips(recovery, self.plans)
        _ask(recovery)
        return {}


def _compared_words(plan: StreamPlan) -> str:
    end = "as of where these end in the topics" if plan.until is None else f"as of batch {plan.until.batch}"
    return f"compare staging with the published tables, {end}"


def _ask_words(plans: Sequence[StreamPlan]) -> str:
    records = sum(end - begin for plan in plans for _, _, begin, end in plan.skipped())
    return f"ask whether {'this one record' if records == 1 else f'these {records:,} records'} may be left out"


def _check_skips(recovery: Recovery, plans: Sequence[StreamPlan]) -> None:
    for plan in plans:
        check_skip(recovery.of(plan.stream))


def _ask(recovery: Recovery) -> None:
    if not recovery.events.confirm(recovery):
        raise AuditRefused(NOT_CONFIRMED, next_step(recovery.plan.id, "waits for confirmation"))


def _as_of(context: RecoveryContext) -> str:
    """The moment of the replay that is compared with the published tables, in words."""
    if context.plan.until is not None:
        return f"  compared as of batch {context.plan.until.batch}; the rows after it are not part of the difference"
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
