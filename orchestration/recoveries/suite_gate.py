"""Suites in a recovery: they judge the rebuilt rows before these are published, and name what a plan looks for.

`reprocessing` knows no suites, and `quality` no recoveries; here they meet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from streaming_jobs.declare.rules import Holds, Rule, Unique
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.text.spelling import counted, instead

if TYPE_CHECKING:
    from quality.suite_set import SuiteSet
    from quality.suites import Suite, TableCheck
    from quality.validation import CheckOutcome
    from reprocessing.stages.recovery import RebuiltTables, RunSuite
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.settings import Settings
    from streaming_jobs.stream import Stream

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def suites_of(settings: Settings, topology: Topology, stream: Stream) -> list[Suite]:
    """The suites on a stream's tables that judge rebuilt rows, without suites that have only other table checks."""
    return [suite for suite in _on_tables_of(settings, topology, stream) if _judges_rebuilt_rows(suite)]


def _on_tables_of(settings: Settings, topology: Topology, stream: Stream) -> list[Suite]:
    tables = {sink.name for sink in stream.sinks.values()}
    return [suite for suite in _suites(settings, topology).suites.values() if suite.table in tables]


def _judges_rebuilt_rows(suite: Suite) -> bool:
    """False for a suite without expectations whose table checks need the history or another table."""
    from quality.expectations import built

    if len(_checks_of_rebuilt_rows(suite)) or not suite.checks:
        return True
    try:
        return bool(built(suite))
    except Exception:  # noqa: BLE001 - of a user's suite: the gate refuses with the reason
        return True


def _checks_of_rebuilt_rows(suite: Suite) -> list[TableCheck]:
    """The table checks that need neither the history nor another table: keys, and the ledger."""
    from quality.table_checks import Reconciled, UniqueKey

    return [check for check in suite.checks if isinstance(check, (UniqueKey, Reconciled))]


@contextmanager
def suite_runner(settings: Settings, topology: Topology) -> Iterator[RunSuite]:
    """Gives the function that runs suites on staging tables; Spark is started only if one needs it.

    An expectation that cannot be evaluated refuses, whatever its severity.
    """
    from streaming_jobs.platform.runtime import spark_on_demand

    def run(context: RebuiltTables, name: str) -> Iterable[str]:
        from quality.runs.runner import RunRequest, run_suite

        (declared,) = _suites(settings, topology).select([name])
        suite = replace(declared, checks=_checks_of_rebuilt_rows(declared))
        request = RunRequest(slice="all", record=False, docs=False, spark=spark)
        try:
            validation = run_suite(context.replay_settings, topology, suite, request)
        except RecourseError as error:
            return [f"it could not be run: {error.found}"]
        failed = [one for one in validation.outcomes if not one.passed]
        return [_words(one) for one in failed if one.severity == "critical" or one.error]

    with spark_on_demand(settings, "quality") as spark:
        yield run


def condition_named(settings: Settings, topology: Topology, stream: Stream, text: str) -> str:
    """The condition of a text: the name of a row rule or of a suite's expectation, else SQL itself.

    Raises UsageError for the name of an expectation that is not about single rows of the stream's primary table.
    """
    rules = stream.rules_of(stream.primary.name).rules
    for rule in rules:
        if rule.name == text:
            return _condition_of(rule)
    schema = stream.primary.schema
    if not _NAME.fullmatch(text) or (schema is not None and text in schema.fieldNames()):
        return text
    from quality.expectations import built
    from quality.shared_rules import condition_of

    known: list[str] = [rule.name for rule in rules]
    for suite in _on_tables_of(settings, topology, stream):
        for each in built(suite):
            known.append(each.name)
            if each.name != text:
                continue
            condition = condition_of(each) if suite.table == stream.primary.name else None
            if condition is None:
                what = "single rows" if suite.table == stream.primary.name else f"table {stream.primary.name}"
                raise UsageError(
                    f"expectation {text} of suite {suite.name} is not about {what}, so no first row can be looked for",
                    "write the condition as SQL: --before-first-bad '...', or name a batch: --to-batch N",
                )
            return condition
    raise UsageError(f"no rule and no expectation of stream {stream.name} is named '{text}'", instead(text, known))


def _condition_of(rule: Rule) -> str:
    """A row rule's condition for DataFusion; raises UsageError if DataFusion and Spark may evaluate it differently."""
    if isinstance(rule, Holds):
        raise UsageError(
            f"rule {rule.name} is in Spark's SQL, and rows are looked for with DataFusion, which may see it otherwise",
            "write the condition itself: --before-first-broken 'SQL'",
        )
    if isinstance(rule, Unique):
        raise UsageError(
            f"rule {rule.name} is about several rows, so no first one can be looked for",
            "name a batch: --to-batch N",
        )
    return rule.condition("datafusion")


def _suites(settings: Settings, topology: Topology) -> SuiteSet:
    from quality.suite_set import SuiteSet

    return SuiteSet.of_settings(settings, topology)


def _words(outcome: CheckOutcome) -> str:
    if outcome.error:
        return f"{outcome.expectation} could not be evaluated: {outcome.error}"
    rows = "" if outcome.failing is None else f", {counted(outcome.failing, 'row')} of {outcome.rows or 0:,}"
    shown = "; ".join(", ".join(f"{n} {v}" for n, v in list(row.items())[:4]) for row in outcome.sample[:2])
    return f"{outcome.expectation} fails{rows}{f' ({shown})' if shown else ''}"
