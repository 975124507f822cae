"""A check of a table, and its input: one version of the table, its commits, its ledger, earlier outcomes.

A check never raises because of a table: what it cannot evaluate becomes an outcome with `error`, which has not passed.

DataFusion reads the table through deltalake, without Spark. Rows are counted by a filter of the aggregate, not of the
scan: a scan skips files by their statistics, and statistics written by others may be wrong.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from quality.validation import CheckOutcome, Past, Severity
from streaming_jobs.declare.names import checked_name
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import PreflightRefused, RecourseError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Commit
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.state.ledger_file import Entry, LedgerFile, newest_entries
from streaming_jobs.state.provenance import Change, read_change
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.locations import delta_table
from streaming_jobs.stream import Stream
from streaming_jobs.text import sql
from streaming_jobs.text.durations import parse_duration
from streaming_jobs.text.spelling import instead

MOST_BATCHES = 20_000
"""Ledger entries that a check reads, at most."""

_MEMORY = "512M"
"""Memory of one query of DataFusion; groups that need more are written to temporary files."""
_SEVERITIES = ("critical", "warning", "info")


class PastOutcomes(Protocol):
    """The history of a suite's outcomes."""

    def newest(self, expectation: str, limit: int) -> Sequence[Past]:
        """The newest outcomes of one check that had no error, newest first."""

    def passed(self, expectation: str, limit: int) -> Sequence[Past]:
        """The newest outcomes of one check that passed, newest first."""


@dataclass(frozen=True)
class CheckedTable:
    """One version of a table of ours, for the checks of a suite; nothing here writes.

    `table` is fixed at `version`. `since` is the version of the suite's last validation, None if there was none. `now`
    is in seconds since 1970. `key`: the columns that name a row in samples.
    """

    settings: Settings
    stream: Stream
    declared: DeclaredTable
    table: DeltaTable
    version: int
    since: int | None
    now: float
    past: PastOutcomes
    key: Sequence[str] = ()

    @property
    def keys(self) -> Sequence[str]:
        """The columns that name a row: the key of the suite, else of the table."""
        return tuple(self.key or self.declared.keys)

    @property
    def is_primary(self) -> bool:
        """True for the table whose ledger decides which batches of the stream are done."""
        return self.declared.name == self.stream.primary.name

    @cached_property
    def types(self) -> Mapping[str, Any]:
        """The type of each column as Delta's schema has it: a text, or a dictionary for a nested one."""
        return types_of(self.table)

    def column(self, name: str) -> str:
        """The column's type, such as `long` or `struct`; raises UsageError for a column that the table lacks."""
        return type_of(self.table, self.declared.name, name)

    def sql(self, query: str, **others: DeltaTable) -> list[dict[str, Any]]:
        """The rows of a query on the fixed version, which is the table "t"; raises UsageError if it fails."""
        data = QueryBuilder().register("t", self.table)
        for name, table in others.items():
            data = data.register(name, table)
        try:
            data.execute(f"SET datafusion.runtime.memory_limit = '{_MEMORY}'").read_all()
            return list(pa.table(data.execute(query).read_all()).to_pylist())
        except Exception as error:  # errors while a query runs, deltalake raises as a plain Exception
            reason = " ".join(line for line in str(error).splitlines() if line and line != "caused by")
            raise UsageError(
                f"table {self.declared.name} cannot be queried: {reason[:300]}",
                "see that the columns of the check have types that it can compare",
            ) from error

    def rows(self) -> int:
        return int(self.sql('SELECT count(*) AS n FROM "t"')[0]["n"])

    def other(self, name: str) -> DeltaTable:
        """Another table of ours, its newest version; raises UsageError if there is none of that name."""
        folder = self.settings.tables
        if not (folder / name / "_delta_log").is_dir():
            there = sorted(path.parent.name for path in folder.glob("*/_delta_log"))
            raise UsageError(f"there is no table {name} in {folder}", instead(name, there))
        return delta_table(folder / name)

    def at_version(self, version: int) -> DeltaTable:
        """The table at another version."""
        return delta_table(self.settings.tables / self.declared.name, version)

    @cached_property
    def commits(self) -> Sequence[Commit]:
        """The commits of its log up to the version, newest first, as far back as the log goes without a gap."""
        return tuple(store_of(self.declared).commits(self.settings, self.declared, up_to=self.version))

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """The stream's ledger entries up to the version, newest first: from the log, then from the ledger file.

        The entries of the file are those of the primary table; `written` finds the rows of this table in them.
        """
        found = newest_entries(self.commits, self.declared.name, self.ledger_file, self.stream.name, MOST_BATCHES)
        return tuple((commit, entry) for commit, entry in found if commit.version <= self.version)

    @property
    def batches(self) -> Sequence[Entry]:
        """The entries of batches, newest first."""
        return [each for each in self.entries if each[1].kind == "batch"]

    @property
    def ledger_file(self) -> LedgerFile:
        return LedgerFile(StreamFolder.of(self.settings, self.stream.name).ledger)

    def written(self, entry: LedgerEntry) -> int:
        """The rows that a batch wrote to this table, by an entry of it or of the primary table."""
        if entry.table == self.declared.name:
            return entry.rows_written
        if self.declared.name == self.stream.dead_letters:
            return entry.dead_letters
        return entry.rows.get(self.declared.name, 0)

    def change(self, version: int) -> Change:
        """The files that a commit of the log added and removed; raises PreflightRefused if it is no longer there."""
        change = read_change(self.settings.tables / self.declared.name, version)
        if change is None:
            raise PreflightRefused(
                f"version {version} of table {self.declared.name} left its log while it was read", "run the check again"
            )
        return change


@dataclass(frozen=True)
class Check(ABC):
    """A check of a table; options are validated when it is declared."""

    def __post_init__(self) -> None:
        severity = self.severity
        if severity not in _SEVERITIES:
            raise UsageError(f"{self.kind}: severity is {severity!r}", instead(str(severity), _SEVERITIES))
        self._validate()

    @property
    @abstractmethod
    def severity(self) -> Severity:
        """What a failure means; each check has it as an option."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The stable word of the check."""

    @property
    def name(self) -> str:
        """The name of its outcome within a suite."""
        return self.kind

    def _validate(self) -> None:  # noqa: B027 - most checks have options
        """Raise UsageError for options that cannot be used."""

    @abstractmethod
    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        """The outcome; may raise what `look` turns into an error."""

    @final
    def look(self, checked: CheckedTable) -> CheckOutcome:
        """Evaluate it on one version of a table."""
        try:
            return self._judge(checked)
        except RecourseError as error:
            text = f"{error.found}; next: {error.next_step}" if error.next_step else error.found
        except (DeltaError, pa.ArrowException, OSError, ValueError) as error:
            text = f"table {checked.declared.name} cannot be read: {str(error)[:300]}"
        return replace(self.outcome(passed=False), error=text)

    def outcome(self, *, passed: bool, observed: str = "", number: float | None = None, **more: Any) -> CheckOutcome:
        return CheckOutcome(
            self.name, self.kind, passed=passed, severity=self.severity, observed=observed, number=number, **more
        )


def types_of(table: DeltaTable) -> dict[str, Any]:
    return {field["name"]: field["type"] for field in json.loads(table.schema().to_json())["fields"]}


def type_of(table: DeltaTable, name: str, column: str) -> str:
    """The type of a table's column; raises UsageError with the nearest name for a column that it lacks."""
    fields = types_of(table)
    if column not in fields:
        raise UsageError(f"table {name} has no column '{column}'", instead(column, fields))
    kind = fields[column]
    return str(kind["type"] if isinstance(kind, dict) else kind)


def quoted(name: str) -> str:
    """A column's name in the SQL of `CheckedTable.sql`."""
    return sql.quoted(name, "datafusion")


def checked_column(kind: str, option: str, value: object) -> None:
    """Raise UsageError for an option that is not the name of a column."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{kind}: {option} is {value!r}, not the name of a column", f"write {option}='my_column'")


def checked_table_name(kind: str, option: str, value: object) -> None:
    """Raise UsageError for an option that is not the name of a table."""
    if not isinstance(value, str):
        raise UsageError(f"{kind}: {option} is {value!r}, not the name of a table", f"write {option}='my_table'")
    checked_name("table", value)


def checked_number(kind: str, option: str, value: object, *, least: float, above: bool = False) -> None:
    """Raise UsageError for an option that is not a number of at least `least` (`above`: more than that)."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if not is_number or value < least or (above and value == least):  # type: ignore[operator]
        bound = f"above {least:g}" if above else f"of {least:g} or more"
        raise UsageError(f"{kind}: {option} is {value!r}", f"write a number {bound}")


def seconds_of(kind: str, option: str, value: object) -> float:
    """The seconds of a duration such as '10 minutes'; raises UsageError for anything else, and for none."""
    if not isinstance(value, str):
        raise UsageError(f"{kind}: {option} is {value!r}, not a duration", "write a text such as '10 minutes'")
    seconds = parse_duration(value).total_seconds()
    if seconds <= 0:
        raise UsageError(f"{kind}: {option} is '{value}'", "write a duration above zero, such as '10 minutes'")
    return seconds


def in_words(values: Sequence[str], most: int = 5) -> str:
    """The first few texts, and the number of the others."""
    rest = f" and {len(values) - most:,} more" if len(values) > most else ""
    return "; ".join(values[:most]) + rest
