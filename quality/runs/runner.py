"""One run of a suite: choose the sample, evaluate the expectations, find the first failing batch, record the result.

The table's version is fixed when the run begins: the stream may keep writing. Reading takes no lease and no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from quality import history
from quality.engines.great_expectations import Evaluated
from quality.expectations import SQL_ONLY, NamedExpectation, built
from quality.runs.first_failing import find_first, first_rows, newest_code
from quality.runs.results import error_outcome, outcome_of
from quality.sample import SampleRequest, SuiteSample, TimeRange, choose_sample, open_newest
from quality.suite_set import output_of
from quality.suites import SampleKind, Suite
from quality.table_checks.base import CheckedTable
from quality.validation import CheckOutcome, Engine, Validation
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EngineChoice = Literal["auto", "pandas", "spark"]
SparkFactory = Callable[[], "SparkSession"]
"""Gives the Spark session of a run; whoever made it ends it."""


@dataclass(frozen=True)
class RunRequest:
    """How a suite is run; None: as it says itself. `id` of a run that may be repeated is the same each time.

    `record`: the result becomes part of the history. `docs`: an HTML page is written. `spark` is needed for Spark only.
    """

    slice: SampleKind | None = None
    partition: tuple[tuple[str, str], ...] = ()
    times: TimeRange | None = None
    engine: EngineChoice = "auto"
    id: str | None = None
    record: bool = True
    docs: bool = True
    spark: SparkFactory | None = None


@dataclass(frozen=True)
class _Evaluation:
    """What an engine has evaluated, and the failing rows by their positions."""

    engine: Engine
    rows: int
    results: Sequence[Evaluated] = ()
    sample: dict[int, dict[str, Any]] | None = None
    raised: CheckOutcome | None = None


def run_suite(settings: Settings, topology: Topology, suite: Suite, request: RunRequest | None = None) -> Validation:
    """Run a suite and return its validation, which is in the history then.

    Raises UsageError for a table that does not exist yet and a sample that it cannot have, PreflightRefused for a table
    or a file that is gone. An expectation or a check that raises an exception is an outcome, not an error.
    """
    request = request or RunRequest()
    started_at, begun = time.time(), time.monotonic()
    stream, declared = output_of(topology, suite)
    handle = open_newest(
        settings.tables / suite.table,
        stream.name,
        seen=lambda: history.validated_before(settings, suite.table),
    )
    expectations, raised = _built(suite)
    progress = history.suite_progress(settings, suite.name, str(handle.metadata().id))
    since = progress.since([each.name for each in expectations])
    asked = SampleRequest(request.slice or suite.slice, since, dict(request.partition), request.times)
    chosen = choose_sample(handle, settings.tables / suite.table, asked)
    if not chosen.rows and not chosen.whole and not asked.narrowed and progress.red:
        # Without new rows, what the last run has found still stands.
        again = SampleRequest("all" if progress.red_since is None else "new", progress.red_since)
        chosen = choose_sample(handle, settings.tables / suite.table, again)
    key = tuple(suite.key or declared.keys)
    evaluation = _evaluate(settings, suite, key, expectations, chosen, request)
    sample = evaluation.sample or {}
    outcomes = [outcome_of(each, sample, key, rows_in_sample=evaluation.rows) for each in evaluation.results]
    outcomes += [each for each in (raised, evaluation.raised) if each is not None]
    look = CheckedTable(
        settings=settings,
        stream=stream,
        declared=declared,
        table=handle,
        version=chosen.version,
        since=progress.newest,
        now=started_at,
        past=history.SuiteHistory(settings, suite.name),
        key=key,
    )
    outcomes += _outcomes_of_checks(suite, look)
    red = [each for each in evaluation.results if not each.passed]
    critical = [each for each in red if each.named.severity == "critical"]
    failed = [(each.named.name, each.positions) for each in critical or red if each.positions]
    rows = first_rows(failed, sample, key)
    first, note = find_first(settings, stream.name, chosen, rows, upsert=bool(declared.keys)) if rows else (None, "")
    if first is not None and not critical:
        first = replace(first, command="")
    validation = Validation(
        id=request.id or uuid4().hex,
        suite=suite.name,
        table=suite.table,
        stream=stream.name,
        table_id=chosen.table_id,
        version=chosen.version,
        since=chosen.since,
        slice=chosen.words,
        files=len(chosen.files),
        files_in_table=chosen.files_in_table,
        rows=evaluation.rows,
        engine=evaluation.engine,
        started_at=started_at,
        seconds=0.0,
        outcomes=tuple(outcomes),
        first_failing=first,
        first_failing_note=note,
        narrowed=asked.narrowed,
        code=newest_code(settings, stream.name, chosen.table, chosen.version),
    )
    docs = _page(settings, validation, evaluation.results) if request.docs else ""
    validation = replace(validation, docs=docs, seconds=round(time.monotonic() - begun, 3))
    if request.record:
        history.record(settings, validation)
    return validation


def _built(suite: Suite) -> tuple[list[NamedExpectation], CheckOutcome | None]:
    """The expectations, and the outcome of a suite that cannot be built or expects nothing: it has not passed."""
    try:
        expectations = built(suite)
    except Exception as error:  # noqa: BLE001 - of a user's suite: the outcome says so
        return [], error_outcome("build", "suite", error)
    if not expectations and not suite.checks:
        empty = UsageError("its function returned no expectation, and it has no table check")
        return [], error_outcome("empty", "suite", empty)
    return expectations, None


def _outcomes_of_checks(suite: Suite, checked: CheckedTable) -> list[CheckOutcome]:
    """The outcome of each table check; one that raises an exception has not passed and hides no other."""
    outcomes = []
    for check in suite.checks:
        try:
            outcomes.append(check.look(checked))
        except Exception as error:  # noqa: BLE001 - of a user's check: its outcome says so
            outcomes.append(error_outcome(check.name, type(check).__name__, error))
    return outcomes


def _evaluate(
    settings: Settings,
    suite: Suite,
    key: tuple[str, ...],
    expectations: Sequence[NamedExpectation],
    chosen: SuiteSample,
    request: RunRequest,
) -> _Evaluation:
    """Evaluate the expectations; none of them on a sample without rows, unless it is the whole table."""
    from quality.sample_rows import SampleReader, rows_at

    if not expectations or (not chosen.rows and not chosen.whole):
        return _Evaluation("none", chosen.rows, _without_rows(expectations))
    reader = SampleReader.of(chosen)
    engine = _engine(settings, chosen, expectations, request.engine)
    if engine == "spark":
        from quality.engines.spark_engine import evaluate_with_spark

        rows, results = evaluate_with_spark(_session(suite, request), reader, expectations, key)
    else:
        from quality.engines.pandas_engine import evaluate_with_pandas

        rows, results = evaluate_with_pandas(reader, expectations, key)
    if not rows and not chosen.whole:
        return _Evaluation("none", 0, _without_rows(expectations))
    results = sorted(results, key=lambda each: each.named.number)
    sample = rows_at(reader, [at for each in results for at in each.positions])
    missing = [column for column in key if column not in chosen.schema.names]
    raised = None
    if missing:
        lacking = UsageError(f"the key has a column that the table lacks: {', '.join(missing)}")
        raised = error_outcome("key", "suite", lacking)
    return _Evaluation(engine, rows, results, sample, raised)


def _without_rows(expectations: Sequence[NamedExpectation]) -> list[Evaluated]:
    """An expectation has passed on a sample without rows: every row up to the version was evaluated before."""
    return [Evaluated(each, passed=True, observed="no rows") for each in expectations]


def _engine(
    settings: Settings, chosen: SuiteSample, expectations: Sequence[NamedExpectation], asked: EngineChoice
) -> Literal["pandas", "spark"]:
    """Spark for more rows than the setting says and for SQL, if nothing else is asked for."""
    if asked != "auto":
        return asked
    sql = any(each.kind == SQL_ONLY for each in expectations)
    return "spark" if sql or chosen.rows > settings.quality.pandas_rows else "pandas"


def _session(suite: Suite, request: RunRequest) -> SparkSession:
    if request.spark is None:
        raise UsageError(
            f"suite {suite.name} needs Spark for this slice, and the caller gives none",
            f"run `{commands.run_suites()}`, or take a smaller slice",
        )
    return request.spark()


def _page(settings: Settings, validation: Validation, results: Sequence[Evaluated]) -> str:
    from quality.runs.data_docs import write_page

    shown = [each.result for each in results if each.result is not None]
    return str(write_page(settings, validation, shown)) if shown else ""
