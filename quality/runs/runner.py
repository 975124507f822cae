"""One run of a suite: choose the sample, evaluate the expectations, find the first failing batch, record the result.

The table's version is fixed when the run begins: the stream may keep writing. Reading takes no lease and no lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat
from uuid import uuid4

from quality import history
from quality.engines.great_expectations import Evaluated
from quality.expectations import SQL_ONLY, NamedExpectation, built
from quality.sample import SampleFile, SampleRequest, SuiteSample, TimeRange, choose_sample, open_newest
from quality.sample_rows import file_and_row
from quality.suite_set import output_of
from quality.suites import SampleKind, Suite
from quality.table_checks.base import CheckedTable
from quality.validation import MOST_ROWS, CheckOutcome, Engine, FirstFailing, Validation
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.provenance import Change, TableLog, batch_during, read_change
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.locations import Location, opened_for_reading, path_below
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
    """The outcome of each table check; a check that raises has not passed, and does not affect other checks."""
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
    """Spark for more rows than the setting allows and for SQL, unless the request names an engine."""
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


# Outcomes from what an engine has evaluated: numbers in words, and failing rows with their keys.


Rows = Mapping[int, Mapping[str, Any]]


def outcome_of(evaluated: Evaluated, rows: Rows, key: Sequence[str], *, rows_in_sample: int) -> CheckOutcome:
    """The outcome of one expectation; `rows` has failing rows by their positions."""
    named = evaluated.named
    looked_at = evaluated.rows
    if looked_at is None and evaluated.failing is not None:
        looked_at = rows_in_sample
    number = _number(evaluated, looked_at)
    return CheckOutcome(
        expectation=named.name,
        kind=named.kind,
        passed=evaluated.passed and not evaluated.error,
        severity=named.severity,
        observed=_observed(evaluated, looked_at, number),
        number=number,
        rows=looked_at,
        failing=evaluated.failing,
        sample=tuple(_shown(rows[at], key, named.columns) for at in evaluated.positions[:MOST_ROWS] if at in rows),
        error=evaluated.error,
    )


def error_outcome(name: str, kind: str, error: Exception) -> CheckOutcome:
    """The outcome of something that raised an exception: it has not passed."""
    return CheckOutcome(name, kind, passed=False, error=f"{type(error).__name__}: {error}"[:500])


def _shown(row: Mapping[str, Any], key: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """The key's columns, then the expectation's columns; the whole row if the expectation has none."""
    wanted = dict.fromkeys([*key, *(columns or row)])
    return {column: row[column] for column in wanted if column in row}


def _number(evaluated: Evaluated, rows: int | None) -> float | None:
    """The observed value, or the failing rows in percent."""
    if evaluated.error:
        return None
    if evaluated.failing is not None and rows is not None:
        return 100 * evaluated.failing / rows if rows else 0.0
    return _as_float(evaluated.observed)


def _as_float(value: object) -> float | None:
    if value is None or isinstance(value, (str, bool)) or not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):  # pandas' NA
        return None
    return number if math.isfinite(number) else None


def _observed(evaluated: Evaluated, rows: int | None, number: float | None) -> str:
    if evaluated.error:
        return ""
    if evaluated.failing is not None and rows is not None:
        if not evaluated.failing:
            return f"none of {rows:,} rows failed" if rows else "no rows"
        return f"{evaluated.failing:,} of {rows:,} rows failed ({_percent(evaluated.failing, rows)})"
    return _value(evaluated.observed, number)


def _percent(part: int, whole: int) -> str:
    """A share that is not rounded to nothing, nor to everything."""
    if not whole or not part:
        return "0%"
    share = 100 * part / whole
    if share < 0.01:
        return "under 0.01%"
    text = f"{share:.2f}".rstrip("0").rstrip(".")
    return "over 99.99%" if text == "100" and part < whole else f"{text}%"


def _value(value: object, number: float | None) -> str:
    """An observed value as text, the same from both engines."""
    if value is None:
        return ""
    if number is not None:
        return f"{number:,.0f}" if number == int(number) else f"{number:,.6g}"
    if isinstance(value, (list, tuple, set)):
        return ", ".join(sorted(_value(each, _as_float(each)) for each in value))[:500]
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value)[:500]


# The batch that wrote the first failing row, by the row's file (`streaming_jobs/state/provenance.py`).
#
# Of a file that a compaction made, the files that it rewrote are read for the row's key, as long as they are on disk.


@dataclass(frozen=True)
class FailingRow:
    """The first failing row of an expectation: its position in the sample, and its key."""

    expectation: str
    position: int
    key: Mapping[str, Any]


RowOrigin = tuple[LedgerEntry | None, str]
"""The entry of the batch that wrote a row, and how sure that is; or None, and why it is not known."""


def find_first(
    settings: Settings, stream: str, chosen: SuiteSample, rows: Iterable[FailingRow], *, upsert: bool = False
) -> tuple[FirstFailing | None, str]:
    """The earliest batch that wrote one of these rows, and a note: how certain it is, or why there is none."""
    log = TableLog(chosen.table, chosen.version)
    found: list[tuple[LedgerEntry, FailingRow, str]] = []
    notes: list[str] = []
    for row in rows:
        file = chosen.files[file_and_row(row.position)[0]]
        entry, note = _origin(settings, stream, log, file, row)
        if entry is None:
            notes.append(note)
        else:
            found.append((entry, row, note))
    if not found:
        return None, next(iter(notes), "")
    entry, row, note = min(found, key=lambda each: each[0].txn)
    unsure = [note] if note else []
    if upsert:
        unsure.append("an upsert rewrites files: the row may be older than the batch that wrote its file")
    if notes:
        unsure.append(f"of other failing rows it is not known: {notes[0]}")
    command = commands.plan(stream, before_first_broken=row.expectation)
    first = FirstFailing(row.expectation, entry.generation, entry.batch, str(entry.code), command)
    return first, "; ".join(unsure)


def newest_code(settings: Settings, stream: str, table: Location, version: int) -> str:
    """The code of the newest batch in a version, as far as log and ledger show it; empty if they do not."""
    for number in range(version, -1, -1):
        if (change := read_change(table, number)) is None:
            break
        if change.entry is not None and change.entry.kind == "batch":
            return str(change.entry.code)
    newest = _ledger(settings, stream).newest(stream)
    return str(newest[0].code) if newest is not None else ""


def _origin(settings: Settings, stream: str, log: TableLog, file: SampleFile, row: FailingRow) -> RowOrigin:
    path = path_below(file.path, log.table)
    change = log.adding(path)
    if change is None:
        entry = batch_during(_ledger(settings, stream), stream, file.modified, file.rows)
        how = "by the time at which its file was written; the table's log no longer has it"
        return entry, how if entry is not None else "the table's log no longer has the version that added its file"
    originals = log.originals(path)
    if originals is None:
        return None, f"its file was compacted in version {change.version}, of files the log no longer shows"
    if path in change.added:
        return _of_commit(change, stream)
    batches = {entry.txn: entry for _, added in originals if (entry := _of_commit(added, stream)[0]) is not None}
    if len(batches) == 1 and len({added.version for _, added in originals}) == 1:
        return next(iter(batches.values())), ""
    for name, added in originals:
        if row.key and _has(log.table / name, row.key):
            return _of_commit(added, stream)
    first, last = (f"{end}" for end in (min(batches, default="?"), max(batches, default="?")))
    return None, f"its file was compacted: the row came with one of the batches from {first} to {last}"


def _of_commit(change: Change, stream: str) -> RowOrigin:
    entry = change.entry
    if entry is None or entry.stream != stream:
        return None, f"version {change.version} wrote it, and that is no commit of stream {stream}"
    if entry.kind == "batch":
        return entry, ""
    return entry, f"version {change.version} is a {entry.kind} up to that batch, not the batch itself"


def _has(file: Location, key: Mapping[str, Any]) -> bool:
    """True if a file, which a vacuum may have removed, has a row with this key."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        reader = pq.ParquetFile(opened_for_reading(file))
        names = [column for column in key if column in reader.schema_arrow.names]
        rows = reader.read(columns=names)
    except (FileNotFoundError, pa.ArrowException):
        return False
    mask: Any = None
    for column in names:
        values, wanted = rows[column], key[column]
        same = pc.is_null(values) if wanted is None else pc.equal(values, pa.scalar(wanted, values.type))
        mask = same if mask is None else pc.and_(mask, same)
    return bool(names) and bool(pc.any(mask).as_py())


def _ledger(settings: Settings, stream: str) -> LedgerFile:
    return LedgerFile(StreamFolder.of(settings, stream).ledger)


def first_rows(
    outcomes: Sequence[tuple[str, Sequence[int]]], rows: Mapping[int, Mapping[str, Any]], key: Sequence[str]
) -> list[FailingRow]:
    """One failing row for each file and expectation, with its key."""
    first: dict[tuple[str, int], FailingRow] = {}
    for name, positions in outcomes:
        for at in positions:
            values = rows.get(at, {})
            row = FailingRow(name, at, {column: values[column] for column in key if column in values})
            first.setdefault((name, file_and_row(at)[0]), row)
    return list(first.values())
