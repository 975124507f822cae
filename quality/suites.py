"""The declaration of a suite: expectations on one output table, and how much of the table a run looks at.

A suite is declared in a module of the setting `flows`, beside its stream, or in one of `quality.suites`. Declaring it
imports nothing of Great Expectations; `build` does, when a run asks for the expectations.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from streaming_jobs.declare.names import checked_name, checked_names
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from quality.validation import CheckOutcome

SampleKind = Literal["new", "all"]
"""`new`: the rows that were added since the last run of the suite. `all`: the whole table."""


class TableCheck(Protocol):
    """A check of the whole table: freshness, counts against the history, reconciliation and others."""

    @property
    def name(self) -> str:
        """The name of its outcome."""

    def look(self, checked: Any) -> CheckOutcome:
        """Evaluate it on a `quality.table_checks.base.CheckedTable`."""


@dataclass(frozen=True)
class Suite:
    """Expectations on one table, built when they are needed; `key` are the columns that name a failing row.

    Default of `key`: the keys of the table. `slice` is the sample of a run whose request names none.
    """

    name: str
    table: str
    build: Callable[[], Sequence[Any]]
    key: Sequence[str] = ()
    slice: SampleKind = "new"
    checks: Sequence[TableCheck] = ()
    description: str = ""
    file: Path | None = None

    def __post_init__(self) -> None:
        checked_name("suite", self.name)
        checked_name("table", self.table)
        object.__setattr__(self, "key", checked_names(f"suite {self.name}", "key", self.key))


def suite(
    *,
    table: str,
    name: str | None = None,
    key: Sequence[str] = (),
    slice: SampleKind = "new",  # noqa: A002 - the word of the field
    checks: Sequence[TableCheck] = (),
) -> Callable[[Callable[[], Sequence[Any]]], Suite]:
    """Declare the decorated function, which returns expectations, as a suite; its name is the default name."""

    def declare(function: Callable[[], Sequence[Any]]) -> Suite:
        return Suite(
            name=name or function.__name__,
            table=table,
            build=function,
            key=key,
            slice=slice,
            checks=tuple(checks),
            description=inspect.getdoc(function) or "",
        )

    return declare


def suite_from_json(
    path: Path | str,
    *,
    table: str,
    name: str | None = None,
    key: Sequence[str] = (),
    slice: SampleKind = "new",  # noqa: A002 - the word of the field
    checks: Sequence[TableCheck] = (),
) -> Suite:
    """Declare a suite whose expectations are in a JSON file of Great Expectations; its name is the default name.

    Only the name is read now, and not even that if it is given. The file has the form
    `{"name": ..., "expectations": [{"type": ..., "kwargs": {...}, "severity": ..., "meta": {...}}]}`.
    """
    file = Path(path).absolute()
    return Suite(
        name=name or str(_read(file).get("name") or file.stem),
        table=table,
        build=lambda: _from_configurations(file),
        key=key,
        slice=slice,
        checks=tuple(checks),
        description=f"The expectations of {file.name}.",
        file=file,
    )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no suite at {file}", "correct the path in suite_from_json") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}", "correct the place named above") from error
    if not isinstance(value, dict) or not isinstance(value.get("expectations"), list):
        raise UsageError(f"{file} is no suite: it has no list `expectations`", "export it from Great Expectations 1.x")
    return value


def _from_configurations(file: Path) -> list[Any]:
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    expectations = []
    for position, each in enumerate(_read(file)["expectations"], 1):
        try:
            given = {field: each[field] for field in ("meta", "severity") if each.get(field) is not None}
            configuration = ExpectationConfiguration(type=each["type"], kwargs=each.get("kwargs") or {}, **given)
            expectations.append(configuration.to_domain_obj())
        except Exception as error:
            raise UsageError(
                f"expectation {position} of {file} cannot be used: {type(error).__name__}: {str(error)[:300]}",
                "its type and arguments are those of Great Expectations 1.x",
            ) from error
    return expectations
