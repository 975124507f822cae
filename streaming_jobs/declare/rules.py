"""Row rules: conditions that every output row of a stream should meet, judged in the batch that makes the row.

    @stream(
        source=..., sink=DeltaTable("orders", ...),
        rules=[
            NotNull("customer", on_fail="quarantine"),
            Between("price", 0, 10_000),
            Holds("shipped_at >= ordered_at", on_fail="drop"),
        ],
    )

| on_fail      | a row that breaks the rule                                                          |
|--------------|-------------------------------------------------------------------------------------|
| `warn`       | is written and counted                                                              |
| `drop`       | is counted, and written nowhere                                                     |
| `quarantine` | goes to `<table>_quarantine`, with the rules that it breaks and its place           |
| `fail`       | stops the stream before its batch is visible, until a person acts                   |

A rule on columns passes a row whose value is null (say `NotNull` for that), as Great Expectations does. `Holds` is
broken unless its expression is true. A row that breaks several rules meets the strictest one. Rows that become dead
letters, and deletes, are not judged.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import instead
from streaming_jobs.text.sql import Dialect, Value, literal, quoted

if TYPE_CHECKING:
    from streaming_jobs.declare.table import DeclaredTable

OnFail = Literal["warn", "drop", "quarantine", "fail"]

_ON_FAIL: tuple[OnFail, ...] = ("warn", "drop", "quarantine", "fail")
_MOST = 62
"""Rules of a table: the verdict on a row is a number with a bit for each rule."""
_SHOWN = 10
_CHANGING = re.compile(
    r"\b(current_timestamp|current_date|current_time|localtimestamp|curdate|now|rand|randn|random|uuid|shuffle)\b(?!`)",
    re.I,
)
"""Functions of Spark whose value depends on when, or how often, they are called."""


@dataclass(frozen=True)
class Rule(ABC):
    """A condition on single rows. `name` is made of the column and the kind if it is not given."""

    on_fail: OnFail = field(default="warn", kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        if not self.name or any(c in self.name for c in "\n\r\0"):
            raise UsageError(f"a rule {type(self).__name__} has no usable name", "give it one: name='...'")
        if self.on_fail not in _ON_FAIL:
            raise UsageError(f"rule {self.name}: on_fail='{self.on_fail}'", instead(str(self.on_fail), _ON_FAIL))

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns that it names; none if it is an expression."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The breach in words, such as `price is not between 0 and 10000`."""

    @abstractmethod
    def condition(self, dialect: Dialect = "spark") -> str:
        """SQL that is true for a row that meets the rule, and false or null for a row that breaks it."""

    @abstractmethod
    def _default_name(self) -> str: ...


@dataclass(frozen=True)
class _ColumnRule(Rule):
    """A condition on the value of one column."""

    column: str
    kind: ClassVar[str]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def _default_name(self) -> str:
        return f"{self.column}_{self.kind}"


@dataclass(frozen=True)
class NotNull(_ColumnRule):
    """The column has a value."""

    kind = "not_null"

    @property
    def words(self) -> str:
        return f"{self.column} is null"

    def condition(self, dialect: Dialect = "spark") -> str:
        return f"{quoted(self.column, dialect)} IS NOT NULL"


@dataclass(frozen=True)
class Between(_ColumnRule):
    """The column's value lies between two values, both included; None: no bound on that side."""

    kind = "between"
    low: Value | None = None
    high: Value | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise UsageError(f"rule {self.name} has no bound", "give it a lowest or a highest value")
        try:
            exchanged = self.low is not None and self.high is not None and self.low > self.high  # type: ignore[operator]
        except TypeError as error:
            raise UsageError(f"rule {self.name}: {self.low!r} and {self.high!r} have no common order") from error
        if exchanged:
            raise UsageError(f"rule {self.name}: {self.low} is above {self.high}", "exchange them")

    @property
    def words(self) -> str:
        if self.low is None:
            return f"{self.column} is above {self.high}"
        if self.high is None:
            return f"{self.column} is below {self.low}"
        return f"{self.column} is not between {self.low} and {self.high}"

    def condition(self, dialect: Dialect = "spark") -> str:
        """It is null, or inside."""
        name = quoted(self.column, dialect)
        bounds = [f"{name} >= {literal(self.low, dialect)}"] if self.low is not None else []
        bounds += [f"{name} <= {literal(self.high, dialect)}"] if self.high is not None else []
        return f"{name} IS NULL OR ({' AND '.join(bounds)})"


@dataclass(frozen=True)
class InSet(_ColumnRule):
    """The column's value is one of some values."""

    kind = "in_set"
    values: Sequence[Value]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.values, str) or not isinstance(self.values, Iterable):
            raise UsageError(f"rule {self.name}: values is {self.values!r}, not a list", "write ['first', 'second']")
        values = self.values
        if isinstance(values, (set, frozenset)):  # the order of a set differs from process to process
            values = sorted(values, key=lambda value: (type(value).__name__, repr(value)))
        object.__setattr__(self, "values", tuple(values))
        if not self.values or any(value is None for value in self.values):
            raise UsageError(f"rule {self.name}: values is {self.values!r}", "name one value at least, and no None")

    @property
    def words(self) -> str:
        shown = ", ".join(str(value) for value in self.values[:_SHOWN])
        return f"{self.column} is not one of {shown}{', ...' if len(self.values) > _SHOWN else ''}"

    def condition(self, dialect: Dialect = "spark") -> str:
        """It is null, or one of them."""
        name = quoted(self.column, dialect)
        return f"{name} IS NULL OR {name} IN ({', '.join(literal(value, dialect) for value in self.values)})"


@dataclass(frozen=True)
class Matches(_ColumnRule):
    """A regular expression (Java's) matches somewhere in the column's text; `^` and `$` bind it to the whole."""

    kind = "matches"
    pattern: str

    @property
    def words(self) -> str:
        return f"{self.column} does not match {self.pattern}"

    def condition(self, dialect: Dialect = "spark") -> str:
        """It is null, or matches."""
        name, pattern = quoted(self.column, dialect), literal(self.pattern, dialect)
        matches = f"{name} RLIKE {pattern}" if dialect == "spark" else f"regexp_like({name}, {pattern})"
        return f"{name} IS NULL OR {matches}"


@dataclass(frozen=True)
class Holds(Rule):
    """A SQL expression on the row is true."""

    expression: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Unknown."""
        return ()

    @property
    def words(self) -> str:
        """The expression is false or null."""
        return f"not true: {self.expression}"

    def condition(self, dialect: Dialect = "spark") -> str:  # noqa: ARG002 - the user's own text
        return self.expression

    def __post_init__(self) -> None:
        super().__post_init__()
        if found := _CHANGING.search(self.expression):
            raise UsageError(
                f"rule {self.name} uses {found[0]}, which has another value when a batch is repeated",
                "compare with a column, such as the record's timestamp `_source.timestamp` under a name of its own",
            )

    def _default_name(self) -> str:
        return self.expression.strip()


@dataclass(frozen=True)
class Unique(Rule):
    """No other row of the same batch has the same values in these columns. Rows with a null pass."""

    columns_of: Sequence[str] | str

    def __post_init__(self) -> None:
        names = (self.columns_of,) if isinstance(self.columns_of, str) else tuple(self.columns_of)
        object.__setattr__(self, "columns_of", names)
        if not names:
            raise UsageError("the rule Unique names no column", "name one at least")
        if len(set(names)) < len(names):
            raise UsageError(f"the rule Unique names a column twice: {', '.join(names)}", "name it once")
        super().__post_init__()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.columns_of)

    @property
    def words(self) -> str:
        """Another row of the batch has the same values."""
        return f"{', '.join(self.columns)} {'is' if len(self.columns) == 1 else 'are'} not unique in the batch"

    def condition(self, dialect: Dialect = "spark") -> str:  # noqa: ARG002
        """A row alone cannot tell: it is judged beside the others of its batch."""
        return "true"

    def _default_name(self) -> str:
        return f"{'_'.join(self.columns)}_unique"


@dataclass(frozen=True)
class RowRules:
    """The rules of one table. The verdict on a row is a number: bit N is set if the row breaks rule N."""

    rules: tuple[Rule, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rules)

    @property
    def quarantines(self) -> bool:
        """True if a rule sets rows aside in the quarantine."""
        return bool(self.bits("quarantine"))

    @property
    def alone(self) -> tuple[tuple[int, Rule], ...]:
        """The rules that one row decides, with their bits."""
        return tuple((1 << n, rule) for n, rule in enumerate(self.rules) if not isinstance(rule, Unique))

    @property
    def unique(self) -> tuple[tuple[int, Unique], ...]:
        """The rules that the rows of a batch decide together, with their bits."""
        return tuple((1 << n, rule) for n, rule in enumerate(self.rules) if isinstance(rule, Unique))

    def bits(self, *on_fail: OnFail) -> int:
        return sum(1 << n for n, rule in enumerate(self.rules) if rule.on_fail in on_fail)

    def broken(self, verdict: int) -> list[Rule]:
        return [rule for n, rule in enumerate(self.rules) if verdict >> n & 1]


NO_RULES = RowRules()


def rules_by_sink(
    stream: str, rules: Mapping[str, Sequence[Rule]], sinks: Mapping[str, DeclaredTable]
) -> dict[str, tuple[Rule, ...]]:
    """The rules of a stream by the names of its sinks, checked; raises UsageError."""
    for name in rules:
        if name not in sinks:
            raise UsageError(f"stream {stream} has rules of '{name}', no sink of it", instead(name, sinks))
    columns = {name: None if sink.schema is None else sink.schema.fieldNames() for name, sink in sinks.items()}
    return {name: checked_rules(stream, sinks[name].name, each, columns[name]) for name, each in rules.items()}


def checked_rules(stream: str, table: str, rules: object, names: Sequence[str] | None) -> tuple[Rule, ...]:
    """The rules of a table; raises UsageError for a doubled name, or a column that the table does not have.

    `names` are the table's columns if they are declared.
    """
    where = f"stream {stream}, table {table}"
    listed = tuple(rules) if isinstance(rules, Iterable) and not isinstance(rules, (str, Mapping)) else (rules,)
    seen: set[str] = set()
    for rule in listed:
        if not isinstance(rule, Rule):
            raise UsageError(f"{where}: {rule!r} is no rule", "write rules=[NotNull('column'), ...]")
        if rule.name in seen:
            raise UsageError(f"{where}: two rules are named {rule.name}", "give one of them another name: name='...'")
        seen.add(rule.name)
        for column in rule.columns:
            if names is not None and column not in names:
                raise UsageError(f"{where}: rule {rule.name} is on '{column}'", instead(column, names))
    if len(listed) > _MOST:
        raise UsageError(f"{where} has {len(listed)} rules", f"{_MOST} at most: combine some in one expression")
    return tuple(rule for rule in listed if isinstance(rule, Rule))
