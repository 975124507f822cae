"""The history of validations: a Delta table `<home>/quality/validations`, one row per outcome.

A validation is one commit (`AppendTable`), so it is there wholly or not at all, and once, also when a run is killed or
repeated.

Failing rows are in it: only the owner of the files can read them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quality.validation import Past, Validation, result_word
from streaming_jobs.platform.append_table import AppendTable
from streaming_jobs.settings import Settings
from streaming_jobs.storage.files import private_folder

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds


_RECENT = timedelta(days=30)


@dataclass(frozen=True)
class PastOutcome:
    """One row of the history: an outcome, and the validation that it belongs to; `started_at` is UTC."""

    validation: str
    started_at: datetime
    suite: str
    expectation: str
    kind: str
    table: str
    table_id: str
    stream: str
    version: int
    since: int | None
    slice: str
    narrowed: bool
    files: int
    rows: int
    engine: str
    passed: bool
    severity: str
    observed: str
    number: float | None
    looked_at: int | None
    failing: int | None
    sample: tuple[dict[str, Any], ...]
    error: str
    seconds: float
    code: str
    docs: str

    @property
    def word(self) -> str:
        """Its result: `ok`, `failed`, `warning` or `info`."""
        return result_word(self.severity, passed=self.passed)


def record(settings: Settings, validation: Validation) -> bool:
    """Add a validation; False if the history had it. Every now and then, old rows are removed."""
    rows = _rows(validation)
    if not rows.num_rows:
        return False
    make_quality_folder(settings)
    return _table(settings).append(rows, f"recourse:quality:{validation.id}", 1)


def history(
    settings: Settings,
    suite: str | None = None,
    expectation: str | None = None,
    last: int | None = None,
    since: datetime | None = None,
) -> list[PastOutcome]:
    """Past outcomes, newest first: of all suites or one, of all expectations or one, of the `last` validations or all.

    `since`: of the validations that began at this time (with zone) or later. With `last`, samples and texts of older
    validations are not read.
    """
    wanted = _of(suite=suite, expectation=expectation)
    if since is not None:
        wanted = _and(wanted, _begun(since))
    if last is not None:
        runs = _table(settings).read(wanted, ["validation", "started_at"])
        if runs is None or not runs.num_rows:
            return []
        newest = runs.group_by("validation").aggregate([("started_at", "max")])
        newest = newest.sort_by([("started_at_max", "descending"), ("validation", "ascending")]).slice(0, last)
        wanted = _and(wanted, _newest(newest["validation"], newest["started_at_max"]))
    table = _table(settings).read(wanted)
    if table is None:
        return []
    rows = table.sort_by([("started_at", "descending"), ("validation", "ascending"), ("place", "ascending")])
    return [_past(row) for row in rows.drop_columns(["place"]).to_pylist()]


def newest_before(
    settings: Settings, at: datetime, wanted: Collection[tuple[str, str]]
) -> dict[tuple[str, str], PastOutcome]:
    """The newest outcome before a time (with zone) of these expectations, by suite and expectation.

    It is mostly a recent one: files with older rows are read only if one of them has none in `_RECENT`.
    """
    import pyarrow.dataset as ds

    times: dict[tuple[str, str], datetime] = {}
    for since in (at - _RECENT, datetime.fromtimestamp(0, UTC)):
        between = _begun(since) & (ds.field("started_at") < at)
        table = _table(settings).read(between, ["suite", "expectation", "started_at"])
        if table is None:
            return {}
        newest = table.group_by(["suite", "expectation"]).aggregate([("started_at", "max")]).to_pylist()
        times = {(row["suite"], row["expectation"]): row["started_at_max"] for row in newest}
        if times.keys() >= set(wanted):
            break
    rows = _table(settings).read(ds.field("started_at").isin(sorted(set(times.values()))))
    found = [] if rows is None else [_past(row) for row in rows.drop_columns(["place"]).to_pylist()]
    return {key: each for each in found if times.get(key := (each.suite, each.expectation)) == each.started_at}


@dataclass(frozen=True)
class SuiteHistory:
    """The history of one suite, as its table checks ask for it."""

    settings: Settings
    suite: str

    def newest(self, expectation: str, limit: int) -> list[Past]:
        """The newest outcomes of one check that had no error, newest first."""
        return self._read(expectation, limit)

    def passed(self, expectation: str, limit: int) -> list[Past]:
        """The newest outcomes of one check that passed, newest first."""
        return self._read(expectation, limit, passed=True)

    def _read(self, expectation: str, limit: int, *, passed: bool | None = None) -> list[Past]:
        wanted = _of(suite=self.suite, expectation=expectation, error="", passed=passed)
        table = _table(self.settings).read(wanted, ["number", "observed", "started_at"])
        if table is None:
            return []
        newest = table.sort_by([("started_at", "descending")]).slice(0, limit).to_pylist()
        return [Past(each["number"], each["started_at"].timestamp(), each["observed"]) for each in newest]


@dataclass(frozen=True)
class SuiteProgress:
    """How far the runs of a suite have evaluated a table; runs of a partition or a range of times do not count.

    `newest`: the version of the newest run, None without one. `covered` has for each expectation the version up to
    which it has been evaluated on every row. `red`: the newest run has not passed; its rows came after `red_since`.
    """

    newest: int | None = None
    covered: Mapping[str, int] = field(default_factory=dict)
    red: bool = False
    red_since: int | None = None

    def since(self, expectations: Sequence[str]) -> int | None:
        """The version up to which all of these expectations have been evaluated; None if one never was."""
        if not expectations:
            return self.newest
        known = [self.covered.get(name) for name in expectations]
        return None if None in known else min(version for version in known if version is not None)


def suite_progress(settings: Settings, suite: str, table_id: str) -> SuiteProgress:
    """How far the runs of a suite have evaluated the table with this identifier.

    An outcome with an error covers nothing. Every run begins behind the least version that one of its expectations
    covers, so an expectation covers the greatest version at which it was evaluated.
    """
    import pyarrow.compute as pc

    columns = ["validation", "started_at", "expectation", "passed", "error", "version", "since"]
    table = _table(settings).read(_of(suite=suite, table_id=table_id, narrowed=False), columns)
    if table is None or not table.num_rows:
        return SuiteProgress()
    evaluated = table.filter(pc.equal(table["error"], "")).group_by("expectation").aggregate([("version", "max")])
    covered = dict(zip(evaluated["expectation"].to_pylist(), evaluated["version_max"].to_pylist(), strict=True))
    first = table.sort_by([("started_at", "descending"), ("validation", "ascending")]).slice(0, 1).to_pylist()[0]
    last = table.filter(pc.equal(table["validation"], first["validation"]))
    return SuiteProgress(
        newest=pc.max(table["version"]).as_py(),
        covered=covered,
        red=not pc.all(last["passed"]).as_py(),
        red_since=first["since"],
    )


def validated_before(settings: Settings, table: str) -> bool:
    """True if a table of this name is in the history."""
    known = _table(settings).read(_of(table=table), ["table"])
    return known is not None and known.num_rows > 0


def folder(settings: Settings) -> Path:
    return quality_folder(settings) / "validations"


def quality_folder(settings: Settings) -> Path:
    """The folder of history and pages, absolute; it may not exist yet."""
    return settings.home / "quality"


def make_quality_folder(settings: Settings) -> Path:
    """The folder of history and pages, which only its owner can open."""
    path = private_folder(quality_folder(settings))
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)
    return path


def _table(settings: Settings) -> AppendTable:
    return AppendTable(folder(settings), _schema(), "started_at", timedelta(days=settings.quality.history_days))


def _of(**values: str | bool | None) -> ds.Expression | None:
    """The rows with these values; None matches any value."""
    import pyarrow.dataset as ds

    wanted: ds.Expression | None = None
    for column, value in values.items():
        if value is not None:
            wanted = _and(wanted, ds.field(column) == value)
    return wanted


def _begun(since: datetime) -> ds.Expression:
    import pyarrow.dataset as ds

    return ds.field("started_at") >= since


def _and(one: ds.Expression | None, other: ds.Expression) -> ds.Expression:
    return other if one is None else one & other


def _newest(validations: pa.ChunkedArray, started_at: pa.ChunkedArray) -> ds.Expression:
    """The rows of these validations; the time leaves out files with older ones only."""
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    since: ds.Expression = ds.field("started_at") >= pc.min(started_at)
    return since & ds.field("validation").isin(validations.to_pylist())


def _schema() -> pa.Schema:
    """The fields of `PastOutcome`, and the outcome's number within its validation."""
    import pyarrow as pa

    kinds = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "datetime": pa.timestamp("us", "UTC")}
    columns = [
        (each.name, kinds.get(str(each.type).removesuffix(" | None"), pa.string())) for each in fields(PastOutcome)
    ]
    return pa.schema([*columns, ("place", pa.int64())])


def _rows(validation: Validation) -> pa.Table:
    import pyarrow as pa

    rows = [
        {
            **vars(validation),
            **vars(outcome),
            "validation": validation.id,
            "started_at": datetime.fromtimestamp(validation.started_at, UTC),
            "rows": validation.rows,
            "looked_at": outcome.rows,
            "sample": json.dumps(list(outcome.sample), default=_text, ensure_ascii=False),
            "place": number,
        }
        for number, outcome in enumerate(validation.outcomes)
    ]
    return pa.Table.from_pylist(rows, schema=_schema())


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _past(row: dict[str, Any]) -> PastOutcome:
    return PastOutcome(**{**row, "sample": tuple(json.loads(row["sample"] or "[]"))})
