"""The declaration of a suite: expectations on one output table, and how much of the table a run looks at.

A suite is declared in a module of the setting `flows`, beside its stream, or in one of `quality.suites`. Declaring it
imports nothing of Great Expectations; `build` does, when a run asks for the expectations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from streaming_jobs.stream import checked_name, checked_names

if TYPE_CHECKING:
    from quality.validation import Outcome

SliceKind = Literal["new", "all"]
"""`new`: the rows that came since the last run of the suite. `all`: the whole table."""


class TableCheck(Protocol):
    """A check that is no expectation on rows: freshness, counts against the history, reconciliation and others."""

    @property
    def name(self) -> str:
        """The name of its outcome."""

    def look(self, checked: Any) -> Outcome:
        """Evaluate it on a `quality.table_checks.base.CheckedTable`."""


@dataclass(frozen=True)
class Suite:
    """Expectations on one table, built when they are needed; `key` are the columns that name a failing row.

    Without `key` the keys of the table are taken. `slice` is what a run looks at if it is asked for nothing else.
    """

    name: str
    table: str
    build: Callable[[], Sequence[Any]]
    key: Sequence[str] = ()
    slice: SliceKind = "new"
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
    slice: SliceKind = "new",  # noqa: A002 - the word of the field
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
