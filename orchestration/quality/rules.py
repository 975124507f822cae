"""The check `rules` of each table with row rules: how many rows broke which rule, from the stream's own files.

Row rules are judged in the batches, so nothing is evaluated here: a sensor reads the counts
that the batches have left and reports changes, as `sessions/health.py` does for `health`. A table is yellow while rows
broke a rule within the last hour, and red if that rule stops its stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import dagster as dg

from orchestration.sessions.names import table_key, table_of
from orchestration.sessions.reporting import shown
from orchestration.sessions.verdicts import LOOK_EVERY, CheckVerdict, checks_from_files
from streaming_jobs.declare.rules import RowRules
from streaming_jobs.errors import RuleBroken
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status

RULES = "rules"
"""The name of the check."""
RECENT = 3600.0
"""Seconds for which rows that broke a rule keep the check from being green."""

Breach = Literal["warn", "drop", "quarantine", "fail"]
_FATE: Mapping[Breach, str] = {
    "warn": "written all the same",
    "drop": "dropped",
    "quarantine": "in {table}_quarantine",
    "fail": "the stream stops",
}


@dataclass(frozen=True)
class RuleCount:
    """The rows that broke one rule of a table: `total` in all, the newest of them at `newest_at`, since 1970."""

    total: int
    newest_at: float | None = None
    on_fail: Breach = "warn"


RuleCounts = Callable[[Settings, str, str], Mapping[str, RuleCount]]
"""What each rule of a stream's table has counted, by the rule's name; quick, from files only."""


@dataclass(frozen=True)
class RuledTable:
    """A table with row rules, and the stream that writes it."""

    stream: str
    table: str
    rules: tuple[str, ...]

    def key(self, settings: Settings) -> dg.AssetCheckKey:
        return dg.AssetCheckKey(table_key(settings.dagster, self.table), RULES)


def verdict(table: str, counts: Mapping[str, RuleCount], now: float) -> CheckVerdict:
    """Red while a rule that stops the stream was broken lately, yellow for any other one, else green."""
    recent = {name: count for name, count in counts.items() if count.total and _is_recent(count, now)}
    total = sum(count.total for count in counts.values())
    figures = shown({"rows that broke a rule": total, **{f"broke {name}": c.total for name, c in counts.items()}})
    if recent:
        words = "; ".join(
            f"{name}: {count.total:,} so far, {_FATE[count.on_fail].format(table=table)}"
            for name, count in sorted(recent.items(), key=lambda item: -item[1].total)
        )
        severity = dg.AssetCheckSeverity["ERROR" if any(c.on_fail == "fail" for c in recent.values()) else "WARN"]
        text = f"rows of the last hour broke {len(recent)} of {len(counts)} rules: {words}"
        return CheckVerdict(False, severity, f"broken: {', '.join(sorted(recent))}", text, figures)
    text = f"no row of the last hour broke one of {len(counts)} rules; {total:,} in all"
    return CheckVerdict(True, dg.AssetCheckSeverity.ERROR, "well", text, figures)


def counts_in(status: Status | None, table: str, rules: RowRules) -> dict[str, RuleCount]:
    """The counts of a table's rules in the status of its stream, over all its sessions.

    A rule that stops the stream is not counted in any batch: there the stream's error names it.
    """
    totals = status.totals if status is not None else None
    counts = {
        rule.name: RuleCount(
            totals.broken.get(f"{table}.{rule.name}", 0) if totals else 0,
            totals.broken_at.get(f"{table}.{rule.name}") if totals else None,
            rule.on_fail,
        )
        for rule in rules.rules
    }
    error = status.error if status is not None else None
    if status is not None and error is not None and error.get("code") == RuleBroken.code:
        from streaming_jobs.sinks.row_rules import names_rule

        for name, count in counts.items():
            if count.on_fail == "fail" and names_rule(str(error.get("found", "")), table, name):
                counts[name] = RuleCount(count.total + 1, time.time(), "fail")
    return counts


def _is_recent(count: RuleCount, now: float) -> bool:
    return count.newest_at is not None and now - count.newest_at < RECENT


@dataclass(frozen=True)
class RuleChecks:
    tables: Sequence[RuledTable]
    settings: Settings
    counts: RuleCounts

    def definitions(self) -> dg.Definitions:
        """The checks, and the sensor that reads the counts; executing a check in the UI reads them at once."""
        return checks_from_files(
            RULES,
            {ruled.key(self.settings): _description(ruled) for ruled in self.tables},
            self.settings,
            lambda _, now: self.verdicts(now),
            sensor="row_rules",
            sensor_description=f"Reports the check `{RULES}` of tables with row rules, from the counts that batches "
            "leave.",
            all_well="no row of the last hour broke a rule",
            in_words=lambda key, verdict: f"{table_of(key.asset_key)}: {verdict.text}",
        )

    def verdicts(self, now: float) -> dict[dg.AssetCheckKey, CheckVerdict]:
        """The present verdict on every table with rules; unreadable counts fail the check."""
        return {ruled.key(self.settings): self._verdict(ruled, now) for ruled in self.tables}

    def _verdict(self, ruled: RuledTable, now: float) -> CheckVerdict:
        try:
            return verdict(ruled.table, self.counts(self.settings, ruled.stream, ruled.table), now)
        except Exception as error:  # noqa: BLE001 - the other tables are still to be reported
            text = f"the counts of stream {ruled.stream} cannot be read: {type(error).__name__}: {error}"[:1000]
            return CheckVerdict(False, dg.AssetCheckSeverity.ERROR, "unreadable", text)


def _description(ruled: RuledTable) -> str:
    told = f"Counted in the batches; read every {LOOK_EVERY} seconds."
    return f"Yellow while rows break a rule of stream {ruled.stream}: {', '.join(ruled.rules)}. {told}"
