"""The declaration of a stream: sources, one function on DataFrames, sinks. Open this file first.

    @stream(
        source=KafkaTopic("flights", value=Json(FLIGHT), event_time="sched_dep", lateness="10 days"),
        sink=DeltaTable("carrier_totals", schema=CARRIER_TOTALS, keys=["carrier"]),
    )
    def carrier_totals(flights: DataFrame) -> DataFrame: ...

`@stream` makes a frozen `Stream`, which is still the ordinary callable it wraps: called with batch
DataFrames it returns batch DataFrames, with streaming ones a streaming one. Nothing here starts Spark,
opens Kafka or touches a file. How a stream runs (trigger, rate, paths) is in `settings.py` and the job YAML.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from streaming_jobs.declare.error_policy import DEFAULT_POLICY, ErrorPolicy
from streaming_jobs.declare.lookup import Lookup, checked_lookups
from streaming_jobs.declare.names import checked_choice, checked_name, checked_names, checked_parts, checked_schema
from streaming_jobs.declare.postgres_table import PUT_RIGHT, PostgresTable, checked_postgres_tables
from streaming_jobs.declare.rules import NO_RULES, RowRules, Rule, rules_by_sink
from streaming_jobs.declare.slices import Slices, check_slices
from streaming_jobs.declare.table import (
    DELETES,
    LATE,
    DeclaredTable,
    Emit,
    LateRows,
    Mode,
    check_options,
    is_declared_table,
)
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.declare.topic import MAX_AHEAD, KafkaTopic
from streaming_jobs.declare.topic_sink import KafkaSink, checked_topic_sinks
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import instead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


__all__ = ["MAX_AHEAD", "DeltaTable", "KafkaTopic", "Stream", "StreamSource", "stream"]

_QUARANTINE, _BATCHES = "_quarantine", "_batches"


StreamSource = KafkaTopic | DeltaSource
"""A declared source of a stream."""


@dataclass(frozen=True)
class DeltaTable:
    """A Delta table as a sink: append, or with `keys` upsert (one row per key).

    With `order_by` the row with the greatest values in these columns wins over the table's whole life, in whatever
    order rows arrive; without it the last record read wins. Rows for which the SQL condition `delete_when` holds delete
    their key. With both, a delete is remembered for `deletes_kept`, so that an older row cannot return.
    `schema` is the table's contract: the function's output must have exactly these columns; a column that is
    new in it is added to the table at the next start. Code that only lacks columns of the table, as after a deploy that
    was taken back, leaves them null in its rows. Any other change is refused. Column comments show in the UI. Without a
    schema, the table gets the columns that the function returns in the first run. With `slices`, a range of its rows
    can be rebuilt alone (`slices.py`). `emit` says when an operator with state emits: `update`, at each change of a
    result, is the default with keys and needs them; `close`, once the watermark has closed it, is the other default.
    `fresh_within`, such as "5 minutes", is the freshness objective: the age that the newest committed rows may reach
    before the stream's health names the table. With `late_rows="keep"`, records that come too late for their window are
    kept in `<table>_late`, and `recourse late` rebuilds the slices that lack them; "count" only counts them.
    """

    name: str
    schema: StructType | None = None
    keys: Sequence[str] = ()
    order_by: Sequence[str] = ()
    delete_when: str | None = None
    deletes_kept: str = "7 days"
    partition_by: Sequence[str] = ()
    description: str = ""
    owners: Sequence[str] = ()
    slices: Slices | None = None
    emit: Emit | None = None
    fresh_within: str | None = None
    late_rows: LateRows = "count"

    def __post_init__(self) -> None:
        checked_name("table", self.name)
        object.__setattr__(self, "schema", checked_schema(f"table {self.name}", self.schema))
        check_slices(self.name, self.slices, self.schema, upsert=bool(self.keys))
        for option in ("keys", "order_by", "partition_by", "owners"):
            object.__setattr__(self, option, checked_names(f"table {self.name}", option, getattr(self, option)))
        check_options(self)
        checked_choice(f"table {self.name}", "late_rows", self.late_rows, get_args(LateRows))
        if self.late_rows == "keep" and self.slices is None:
            raise UsageError(
                f"table {self.name}: late_rows='keep' keeps records for a rebuild of their slices, and it has none",
                "declare slices=Slices(column, reach=...), for windows of event time; or write late_rows='count'",
            )

    @property
    def mode(self) -> Mode:
        """`upsert` when the table has keys."""
        return "upsert" if self.keys else "append"

    @property
    def deletes(self) -> DeltaTable | None:
        """The table that remembers this one's deletes, if `order_by` and `delete_when` are set."""
        if not (self.order_by and self.delete_when):
            return None
        return DeltaTable(
            f"{self.name}{DELETES}",
            keys=self.keys,
            order_by=self.order_by,
            deletes_kept=self.deletes_kept,
            description=f"Deleted keys of table {self.name}, so that older rows do not come back",
            owners=self.owners,
        )


StreamSink = DeclaredTable | KafkaSink | PostgresTable
"""A declared sink of a stream."""


def quarantine_name(table: str) -> str:
    """The table for the rows of another one that its rules set aside."""
    return f"{table}{_QUARANTINE}"


def _is_sink(part: object) -> bool:
    return isinstance(part, (KafkaSink, PostgresTable)) or is_declared_table(part)


@dataclass(frozen=True)
class Stream:
    """One named flow. Several sources bind to parameters by name; with several sinks the function returns a mapping.

    Topics among `sinks` are moved to `topic_sinks`, tables of PostgreSQL to `postgres_tables`. The first table of the
    others is the primary sink: its ledger decides which batches are done. A stream without any has a primary table
    `<stream>_batches`, with a ledger entry for each batch, and where the batch lies in its topics.
    `rules` has the row rules of a table by its name in `sinks`; `files`, by name, what the function reads and is code.
    `errors` says what happens to a record that fails. `lookups`, by parameter, are tables that the function joins.
    """

    name: str
    function: Callable[..., Any]
    sources: Mapping[str, StreamSource]
    sinks: Mapping[str, DeclaredTable]
    description: str = ""
    owners: Sequence[str] = field(default=())
    rules: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    topic_sinks: Mapping[str, KafkaSink] = field(default_factory=dict)
    postgres_tables: Mapping[str, PostgresTable] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    errors: ErrorPolicy = DEFAULT_POLICY
    lookups: Mapping[str, Lookup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_name("stream", self.name)
        object.__setattr__(self, "owners", checked_names(f"stream {self.name}", "owners", self.owners))
        if not self.sources or not self.sinks:
            raise UsageError(f"stream {self.name} needs a source and a sink")
        checked_parts(
            self.name, "source", self.sources.values(), "KafkaTopic", lambda p: isinstance(p, (KafkaTopic, DeltaSource))
        )
        checked_parts(self.name, "sink", self.sinks.values(), "DeltaTable", _is_sink)
        self._separate_sinks()
        parameters = list(inspect.signature(self.function).parameters)
        if sorted(parameters) != sorted([*self.sources, *self.lookups]):
            lookups = f", its lookups {list(self.lookups)}" if self.lookups else ""
            raise UsageError(
                f"stream {self.name}: the function takes {parameters}, its sources are {list(self.sources)}{lookups}",
                f"name the parameters like the sources{' and the lookups' if lookups else ''}",
            )
        names = [source.name for source in self.sources.values()]
        if len(set(names)) < len(names):
            raise UsageError(f"stream {self.name} reads a topic or table twice: {names}", "declare it once")
        object.__setattr__(self, "rules", rules_by_sink(self.name, self.rules, self.sinks))
        self._check_errors()
        self._check_late()
        for name in (*self.quarantines.values(), *self.late_tables.values()):
            checked_name("table", name)
        if len(set(self.table_names)) < len(self.table_names):
            raise UsageError(f"stream {self.name} names a table twice: {list(self.table_names)}")
        checked_lookups(self.name, self.lookups, {t.name for t in self.tables_read}, set(self.table_names))

    def _check_errors(self) -> None:
        if not isinstance(self.errors, ErrorPolicy):
            raise UsageError(
                f"stream {self.name}: errors is {self.errors!r}, not an ErrorPolicy",
                'write errors=ErrorPolicy(function="dead_letter")',
            )
        if self.errors.function != "fail" and self.tables_read:
            raise UsageError(
                f"stream {self.name} reads table {self.tables_read[0].name}, and errors has "
                f"function='{self.errors.function}': only records of topics have an offset by which they are set aside",
                "let the function return null where it would raise (try_cast, try_divide), with a rule on the column",
            )

    def _check_late(self) -> None:
        if not self.late_tables:
            return
        table, untimed = next(iter(self.late_tables)), [s.name for s in self.sources.values() if s.event_time is None]
        if untimed or len(self.sources) > 1 or self.tables_read or self.lookups:
            raise UsageError(
                f"stream {self.name}: late_rows='keep' of table {table} needs one source, a topic with event_time and "
                "lateness, and no lookups: only of such a stream a slice can be rebuilt",
                f"declare event_time and lateness of {untimed[0]}" if untimed else "write late_rows='count'",
            )

    def _separate_sinks(self) -> None:
        topics = {**self.topic_sinks, **{n: s for n, s in self.sinks.items() if isinstance(s, KafkaSink)}}
        postgres = {**self.postgres_tables, **{n: s for n, s in self.sinks.items() if isinstance(s, PostgresTable)}}
        tables = {name: sink for name, sink in self.sinks.items() if name not in topics and name not in postgres}
        checked_topic_sinks(self.name, topics, self.rules, [topic.name for topic in self.topics])
        checked_postgres_tables(self.name, postgres, self.rules)
        own = DeltaTable(self.batches, description=f"The ranges of offsets that stream {self.name} wrote, by batch")
        object.__setattr__(self, "topic_sinks", topics)
        object.__setattr__(self, "postgres_tables", postgres)
        object.__setattr__(self, "sinks", tables or {self.batches: own})

    def __call__(self, *frames: DataFrame, **named: DataFrame) -> Any:
        """Call the function itself, on batch or streaming frames."""
        return self.function(*frames, **named)

    def outputs(self, **frames: DataFrame) -> dict[str, DataFrame]:
        """Call the function and return a frame for each sink, by the sink's name in `sinks`."""
        result = self.function(**frames)
        if result is None:
            place = f"{self.function.__code__.co_filename}:{self.function.__code__.co_firstlineno}"
            raise UsageError(f"the function of stream {self.name} returned None ({place})", "return a DataFrame")
        names = self.output_names
        by_sink = dict(result) if isinstance(result, Mapping) else {names[0]: result}
        if by_sink.keys() != set(names):
            unknown = [name for name in by_sink if name not in names]
            raise UsageError(
                f"stream {self.name} returned {sorted(by_sink)}, its sinks are {sorted(names)}",
                instead(str(unknown[0]), names) if unknown else "return a frame for every sink",
            )
        return cast("dict[str, DataFrame]", by_sink)

    @property
    def topics(self) -> tuple[KafkaTopic, ...]:
        return tuple(source for source in self.sources.values() if isinstance(source, KafkaTopic))

    @property
    def tables_read(self) -> tuple[DeltaSource, ...]:
        return tuple(source for source in self.sources.values() if isinstance(source, DeltaSource))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The sinks for which the function returns a frame: Delta tables, then topics, then tables of PostgreSQL."""
        return (*(() if self.batches_only else self.sinks), *self.topic_sinks, *self.postgres_tables)

    @property
    def external_words(self) -> tuple[str, ...]:
        """The sinks that are no Delta tables, for messages."""
        topics = (f"topic {sink.name}" for sink in self.topic_sinks.values())
        return (*topics, *(f"the PostgreSQL table {table.name}" for table in self.postgres_tables.values()))

    @property
    def batches_only(self) -> bool:
        """True if the only table that it writes is that of its batches, beside topics and tables of PostgreSQL."""
        return bool(self.topic_sinks or self.postgres_tables) and list(self.sinks) == [self.batches]

    @property
    def batches(self) -> str:
        """Name of the primary table of a stream that writes no other Delta table."""
        return f"{self.name}{_BATCHES}"

    def rebuild_step(self, after: int = -1) -> str:
        """The next step that rebuilds the rows after a batch: a recovery, or what stands in for it."""
        return PUT_RIGHT if self.postgres_tables else commands.plan(self.name, to_batch=after)

    @property
    def primary(self) -> DeclaredTable:
        """The sink whose ledger decides whether a batch is done."""
        return next(iter(self.sinks.values()))

    @property
    def secondary(self) -> tuple[DeclaredTable, ...]:
        """The declared sinks after the primary one, in order."""
        return tuple(self.sinks.values())[1:]

    @property
    def deletes(self) -> tuple[DeclaredTable, ...]:
        """The tables that remember the deletes of its sinks, in their order."""
        return tuple(table for sink in self.sinks.values() if (table := sink.deletes) is not None)

    def rules_of(self, table: str) -> RowRules:
        rules = (self.rules.get(name, ()) for name, sink in self.sinks.items() if sink.name == table)
        return RowRules(tuple(next(rules, ()))) or NO_RULES

    @property
    def quarantines(self) -> Mapping[str, str]:
        """The tables with a rule that sets rows aside -> the tables of these rows."""
        names = (sink.name for sink in self.sinks.values())
        return {name: quarantine_name(name) for name in names if self.rules_of(name).quarantines}

    @property
    def late_tables(self) -> Mapping[str, str]:
        """The tables whose late records are kept -> the tables of these records."""
        kept = (sink.name for sink in self.sinks.values() if getattr(sink, "late_rows", "count") == "keep")
        return {name: f"{name}{LATE}" for name in kept}

    @property
    def table_names(self) -> tuple[str, ...]:
        """Every table that it writes: its sinks, what is kept or set aside beside each of them, its dead letters."""
        return (
            *(sink.name for sink in self.sinks.values()),
            *(table.name for table in self.deletes),
            *self.quarantines.values(),
            *self.late_tables.values(),
            self.dead_letters,
        )

    @property
    def dead_letters(self) -> str:
        """Name of the table of records that could not be decoded."""
        return f"{self.name}_dead_letters"


def stream(
    *,
    source: StreamSource | Mapping[str, StreamSource],
    sink: StreamSink | Mapping[str, StreamSink],
    name: str | None = None,
    owners: Sequence[str] = (),
    rules: Sequence[Rule] | Mapping[str, Sequence[Rule]] = (),
    files: Sequence[str] = (),
    errors: ErrorPolicy = DEFAULT_POLICY,
    lookups: Mapping[str, Lookup] | None = None,
) -> Callable[[Callable[..., Any]], Stream]:
    """Declare the decorated function as a stream; its docstring is the description, its name the default name.

    `rules` are the sink's; with several sinks, a mapping of each sink's name to its rules. `files` are data that
    is code, such as a query or a table of rates that the function reads: their content is part of the code's version.
    Their paths are relative to the function's module. `errors` says what happens to a record that fails. `lookups` are
    Delta tables by the parameters of the function that get their content (`declare/lookup.py`).
    """

    def declare(function: Callable[..., Any]) -> Stream:
        if isinstance(source, Mapping):
            sources = dict(source)
        else:
            parameters = [name for name in inspect.signature(function).parameters if name not in (lookups or {})]
            sources = {(parameters or ["source"])[0]: source}
        sinks: dict[str, Any] = dict(sink) if isinstance(sink, Mapping) else {sink.name: sink}
        if isinstance(rules, Mapping):
            by_sink = dict(rules)
        elif len(sinks) > 1 and rules:
            raise UsageError("rules of a stream with several sinks name no sink", "write rules={'sink': [...]}")
        else:
            by_sink = {next(iter(sinks)): rules} if rules else {}
        return Stream(
            name=name or function.__name__,
            function=function,
            sources=sources,
            sinks=sinks,
            description=inspect.getdoc(function) or "",
            owners=owners,
            rules=by_sink,
            files=_declared_files(name or function.__name__, function, files),
            errors=errors,
            lookups=dict(lookups or {}),
        )

    return declare


def _declared_files(stream: str, function: Callable[..., Any], files: Sequence[str]) -> dict[str, Path]:
    """The files by their declared names; raises UsageError for a missing file."""
    module = getattr(sys.modules.get(function.__module__), "__file__", None)
    folder = Path(module).resolve().parent if module else Path.cwd()
    by_name = {name: folder / name for name in checked_names(f"stream {stream}", "files", files)}
    for name, path in by_name.items():
        if not path.is_file():
            found = "is a folder" if path.is_dir() else "does not exist"
            raise UsageError(
                f"stream {stream}: its file '{name}' {found} ({path})",
                f"name a file relative to the folder of the module {function.__module__}",
            )
    return by_name
