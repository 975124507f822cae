"""All declared streams, with the topics and tables that they read and the tables that they write."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from streaming_jobs.catalog.truths import Truth
from streaming_jobs.declare.lookup import Lookup
from streaming_jobs.declare.postgres_table import POSTGRES_SINK
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import ConfigurationError, RecourseError, UsageError
from streaming_jobs.platform.extras import missing
from streaming_jobs.platform.main_module import seen_with_a_file
from streaming_jobs.settings import Settings, project_folder
from streaming_jobs.settings_files import FILES
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import instead, nearest

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# The graph of streams: which stream reads what another one writes, through a table or through a topic.


def refuse_cycles(streams: Iterable[Stream]) -> None:
    """Raise UsageError if a stream reads, directly or through others, what it writes; the error names the cycle."""
    every = list(streams)
    into = {stream.name: list(_feeds(stream, every)) for stream in every}
    done: set[str] = set()

    def visit(name: str, path: list[tuple[str, str]]) -> None:
        for through, reader in into[name]:
            begun = [index for index, (each, _) in enumerate(path) if each == reader]
            if begun or reader == name:
                cycle = [*path[begun[0] if begun else len(path) :], (name, through)]
                steps = " -> ".join(f"{each} -> {place}" for each, place in cycle)
                raise UsageError(
                    f"streams read what they write: {steps} -> {reader}",
                    "let one of them read another topic or table, or make the two streams one",
                )
            if reader not in done:
                visit(reader, [*path, (name, through)])
        done.add(name)

    for stream in every:
        if stream.name not in done:
            visit(stream.name, [])


def path_between(writer: str, reader: str, streams: Iterable[Stream]) -> list[str] | None:
    """The tables and topics through which one stream reads what another one writes, in order; None if it does not."""
    every = {stream.name: stream for stream in streams}
    paths: dict[str, list[str]] = {writer: []}
    waiting = [writer]
    for name in waiting:
        for through, other in _feeds(every[name], every.values()):
            if other not in paths:
                paths[other] = [*paths[name], through]
                waiting.append(other)
    return paths.get(reader) or None


def _feeds(stream: Stream, others: Iterable[Stream]) -> Iterable[tuple[str, str]]:
    """Yields what the stream writes and another one reads: (table or topic, name of the reader)."""
    topics = {sink.name for sink in stream.topic_sinks.values()}
    for other in others:
        for table in other.tables_read:
            if table.name in stream.table_names:
                yield f"table {table.name}", other.name
        for lookup in other.lookups.values():
            if lookup.path is None and lookup.name in stream.table_names:
                yield f"table {lookup.name}", other.name
        for topic in other.topics:
            if topic.name in topics:
                yield f"topic {topic.name}", other.name


def with_columns(stream: Stream, streams: Mapping[str, Stream], writers: Mapping[str, str]) -> Stream:
    """The stream, with the columns of the tables that it reads; raises UsageError for a table that it cannot read."""
    _refuse_without_order(stream)
    sources = {
        parameter: _checked(stream.name, source, streams.get(writers.get(source.name, "")))
        if isinstance(source, DeltaSource)
        else source
        for parameter, source in stream.sources.items()
    }
    lookups = {
        parameter: _looked_up(stream.name, lookup, streams.get(writers.get(lookup.name, "")))
        for parameter, lookup in stream.lookups.items()
    }
    same = all(sources[parameter] is source for parameter, source in stream.sources.items())
    same = same and all(lookups[parameter] is lookup for parameter, lookup in stream.lookups.items())
    return stream if same else replace(stream, sources=sources, lookups=lookups)


def _looked_up(reader: str, lookup: Lookup, writer: Stream | None) -> Lookup:
    """The lookup with its columns, those of the table's writer if it declares none itself."""
    table = None if writer is None or lookup.path is not None else _written(lookup.name, writer)
    declared = None if table is None else table.schema
    if lookup.schema is None:
        if declared is None:
            raise UsageError(
                f"stream {reader} looks up table {lookup.name}, whose columns no stream here declares",
                f'correct the name, or give the lookup its schema: Lookup("{lookup.name}", schema=...)',
            )
        return replace(lookup, schema=declared)
    if declared is not None:
        _same_types(reader, lookup.name, lookup.columns, declared)
    return lookup


def _refuse_without_order(stream: Stream) -> None:
    """Raise UsageError for an upsert table without `order_by` of a stream that reads a table.

    The content of a table is read in the order of its files, which differs from the write order after a compaction.
    """
    for sink in stream.sinks.values() if stream.tables_read else ():
        if sink.keys and not sink.order_by:
            table = stream.tables_read[0].name
            raise UsageError(
                f"stream {stream.name} reads table {table} and writes upsert table {sink.name} without order_by: the "
                "rows may come in another order than they were written, so old values could win",
                "name the column that says which row is newer (for totals, their count): DeltaTable(..., order_by=...)",
            )


def _checked(reader: str, source: DeltaSource, writer: Stream | None) -> DeltaSource:
    if writer is None:
        if source.schema is None:
            raise UsageError(
                f"stream {reader} reads table {source.name}, which no stream writes, and its columns are not declared",
                "correct the name, or give the source its schema: DeltaSource(..., schema=...)",
            )
        return source
    table = _written(source.name, writer)
    if table is not None and (table.keys or not isinstance(table, DeltaTable)):
        why = f"is an upsert table (keys {', '.join(table.keys)}): its commits rewrite rows" if table.keys else ""
        raise UsageError(
            f"stream {reader} cannot read table {source.name}, which {why or 'is no Delta table'}",
            f"let {reader} read what {writer.name} reads, or let {writer.name} also write a table without keys",
        )
    if source.name in (each.name for each in writer.deletes):
        raise UsageError(
            f"stream {reader} cannot read table {source.name}: its commits rewrite rows",
            f"read what {writer.name} reads",
        )
    declared = None if table is None else table.schema
    if source.schema is None:
        if declared is None:
            raise UsageError(
                f"stream {reader} reads table {source.name}, whose columns stream {writer.name} does not declare",
                "give that table a schema, or the source: DeltaSource(..., schema=...)",
            )
        return replace(source, schema=declared)
    if declared is not None:
        _same_types(reader, source.name, source.schema, declared)
    return source


def _written(name: str, writer: Stream) -> DeclaredTable | None:
    """The sink of that name; None for the writer's other tables."""
    return next((sink for sink in writer.sinks.values() if sink.name == name), None)


def _same_types(reader: str, table: str, wanted: StructType, declared: StructType) -> None:
    kinds = {field.name: field.dataType for field in declared.fields}
    for field in wanted.fields:
        if field.name not in kinds:
            raise UsageError(
                f"stream {reader} reads column {field.name} of table {table}, which has none of that name",
                instead(field.name, kinds),
            )
        if kinds[field.name].jsonValue() != field.dataType.jsonValue():
            raise UsageError(
                f"stream {reader} reads column {field.name} of table {table} as {field.dataType.simpleString()}, and "
                f"its writer declares {kinds[field.name].simpleString()}",
                "leave the source's schema out, or give the column the writer's type",
            )


_UNKNOWN_ARGUMENT = re.compile(
    r"(?P<declaration>\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(?P<argument>\w+)'"
)
_NOT_IMPORTED = re.compile(r"tests?|test_\w+|conftest|__\w+__")
"""Modules below a package of `flows` that pytest or a command runs."""
_OF_PACKAGES = ("site-packages", "dist-packages")
_DECLARATIONS = (
    "stream",
    "KafkaTopic",
    "KafkaSink",
    "PostgresTable",
    "DeltaSource",
    "DeltaTable",
    "Json",
    "Lookup",
)


@dataclass(frozen=True)
class Topology:
    """The streams by name, checked against each other: one name, one writer per table, and no cycle.

    A source that declares no columns has the columns of the table's writer.
    """

    streams: dict[str, Stream]

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> Topology:
        """Check and index the streams.

        Raises UsageError for a doubled name, a table with two writers, one that cannot be read, and a cycle.
        """
        by_name: dict[str, Stream] = {}
        writers: dict[str, str] = {}
        for stream in streams:
            if by_name.setdefault(stream.name, stream) is not stream:
                raise UsageError(f"two streams are named {stream.name}", "rename one")
            for table in stream.table_names:
                if writers.setdefault(table, stream.name) != stream.name:
                    raise UsageError(
                        f"table {table} is written by {writers[table]} and {stream.name}", "give each its own table"
                    )
            for sink in stream.topic_sinks.values():
                if writers.setdefault(sink.ledger_name, stream.name) != stream.name:
                    raise UsageError(
                        f"topic {sink.name} is written by {writers[sink.ledger_name]} and {stream.name}",
                        "give each its own topic: a recovery of one stream has to know which records are its own",
                    )
            for declared in stream.postgres_tables.values():
                for name in declared.table_names:
                    if writers.setdefault(f"{POSTGRES_SINK}{name}", stream.name) != stream.name:
                        raise UsageError(
                            f"the PostgreSQL table {name} is written by {writers[f'{POSTGRES_SINK}{name}']} and "
                            f"{stream.name}",
                            "give each its own table: its ledger has the batches of one stream",
                        )
        refuse_cycles(by_name.values())
        return cls({name: with_columns(stream, by_name, writers) for name, stream in sorted(by_name.items())})

    @classmethod
    def of_settings(cls, settings: Settings) -> Topology:
        """The streams of the setting `flows`; raises UsageError if there are none, or none for a `streams.<name>`."""
        if not settings.flows:
            raise ConfigurationError(
                f"no streams are configured: neither {FILES}, looked for from {Path.cwd()} upwards, nor the "
                "environment, nor an entry point of an installed package names `flows`",
                f'write flows = ["my.flows"] in recourse.toml, or begin with `{commands.init()}`; '
                f"`{commands.up()}` shows the shipped streams without it",
            )
        topology = cls.load(settings.flows)
        for name in settings.streams:
            if name not in topology.streams:
                raise UsageError(
                    f"settings are given for stream '{name}', and no stream has that name",
                    instead(name, topology.streams),
                )
        return topology

    @classmethod
    def load(cls, modules: Iterable[str]) -> Topology:
        """Import the named modules or packages and collect the streams they declare."""
        project = project_folder()
        import_from(project)
        inherited = os.environ.get("PYTHONPATH", "")
        if project != Path.cwd() and str(project) not in inherited.split(os.pathsep):
            # Spark's Python processes have the working directory only.
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(project), inherited]))
        streams: dict[int, Stream] = {}
        modules = list(modules)
        for name in modules:
            for module in modules_of(name):
                streams.update((id(v), v) for v in vars(module).values() if isinstance(v, Stream))
        if modules and not streams:
            raise UsageError(
                f"`flows` declares no stream: none of {', '.join(modules)} has a function with @stream",
                "decorate one at the top level of a module with @stream(source=..., sink=...), or name another module",
            )
        return cls.of(streams.values())

    def __getitem__(self, name: str) -> Stream:
        try:
            return self.streams[name]
        except KeyError:
            known = ", ".join(self.streams) or "none"
            near = nearest(name, self.streams)
            meant = f"did you mean '{near}'? " if near else ""
            raise UsageError(f"no stream is named '{name}'", f"{meant}the streams are: {known}") from None

    def select(self, names: Iterable[str]) -> list[Stream]:
        """The named streams in that order, or all of them when no name is given."""
        return [self[name] for name in names] or list(self.streams.values())

    @property
    def topics(self) -> dict[str, KafkaTopic]:
        return {topic.name: topic for s in self.streams.values() for topic in s.topics}

    @property
    def tables_read(self) -> dict[str, DeltaSource]:
        return {table.name: table for s in self.streams.values() for table in s.tables_read}

    @property
    def tables_looked_up(self) -> dict[str, Lookup]:
        return {lookup.name: lookup for s in self.streams.values() for lookup in s.lookups.values()}

    def writer(self, table: str) -> Stream | None:
        """The stream that writes a table; None if none does."""
        return next((stream for stream in self.streams.values() if table in stream.table_names), None)

    @property
    def topics_written(self) -> dict[str, str]:
        """Every topic that a stream declares as a sink -> the stream's name."""
        return {sink.name: stream.name for stream in self.streams.values() for sink in stream.topic_sinks.values()}

    def readers(self, topic: str) -> list[str]:
        return [s.name for s in self.streams.values() if any(t.name == topic for t in s.topics)]

    def table_readers(self, table: str) -> list[str]:
        return [s.name for s in self.streams.values() if any(t.name == table for t in s.tables_read)]

    def looking_up(self, table: str) -> list[str]:
        """The streams that look up a table below `tables`."""
        return [
            stream.name
            for stream in self.streams.values()
            if any(lookup.name == table and lookup.path is None for lookup in stream.lookups.values())
        ]


def import_from(project: Path) -> None:
    """Let modules of the project be imported: after the standard library's, before those of installed packages.

    `python -m`, which starts sessions, has put the working directory first.
    """
    here = str(project)
    path = [entry for entry in sys.path if entry != here]
    path.insert(next((n for n, entry in enumerate(path) if Path(entry).name in _OF_PACKAGES), len(path)), here)
    if path != sys.path:
        sys.path[:] = path  # at once: other threads import meanwhile


def truths_in(modules: Iterable[str], tables: Iterable[str]) -> list[Truth]:
    """The truths in these modules of `flows` and their submodules.

    Raises UsageError for a truth of a table that no stream writes, and for a second truth of one table.
    """
    known = set(tables)
    truths: dict[str, Truth] = {}
    for module in (module for name in modules for module in modules_of(name)):
        for truth in (value for value in vars(module).values() if isinstance(value, Truth)):
            if truth.table not in known:
                raise UsageError(
                    f"there is a truth of table {truth.table} ({module.__name__}), and no stream writes that table",
                    instead(truth.table, sorted(known)),
                )
            if truths.setdefault(truth.table, truth) is not truth:
                raise UsageError(f"table {truth.table} has two truths", "keep one")
    return list(truths.values())


def modules_of(name: str) -> Iterator[ModuleType]:
    """A module or package of the setting `flows`, and all that is below it, imported; no tests, and no `__main__`."""
    module = _imported(name)
    yield module
    for below in sorted({child for folder in getattr(module, "__path__", ()) for child in _children(Path(folder))}):
        if not _NOT_IMPORTED.fullmatch(below):
            yield from modules_of(f"{name}.{below}")


def _children(folder: Path) -> Iterator[str]:
    """The names of the modules and packages in a folder of a package, also of packages without an `__init__.py`."""
    yield from (module.name for module in pkgutil.iter_modules([str(folder)]))
    for child in folder.iterdir() if folder.is_dir() else ():
        if child.name.isidentifier() and child.is_dir() and any(child.glob("*.py")):
            yield child.name


def _imported(name: str) -> ModuleType:
    """The module; an exception of its code becomes a UsageError that names the place."""
    try:
        with seen_with_a_file():
            return importlib.import_module(name)
    except RecourseError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            where = f"looked for in {project_folder()} and among the installed packages"
            raise UsageError(f"there is no module named '{name}'; {where}", "check the setting `flows`") from error
        raise _unusable(name, error) from error
    except Exception as error:
        raise _unusable(name, error) from error


def _unusable(name: str, error: Exception) -> RecourseError:
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ImportError) and (extra := missing(error, f"module '{name}'")) is not None:
        return extra
    if "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error) or (
        isinstance(error, AssertionError) and not str(error) and "/pyspark/" in frames[-1].filename
    ):
        line = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if "/pyspark/" not in f.filename), "no line")
        return UsageError(
            f"module '{name}' uses Spark while it is imported, when there is no Spark yet ({line})",
            "give a UDF's type as an object, @F.udf(DoubleType()) in place of @F.udf('double'), and make columns "
            "(F.col, F.lit, F.expr) in the stream's function",
        )
    theirs = [f"{f.filename}:{f.lineno}" for f in frames if "importlib" not in f.filename and f.filename != __file__]
    place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else next(iter(theirs), "no line")
    return UsageError(
        f"module '{name}' cannot be imported: {type(error).__name__}: {error} ({place})",
        _instead_of_argument(str(error)) or "correct it",
    )


def _instead_of_argument(message: str) -> str:
    """The next step for an argument that a declaration does not have; empty for any other message."""
    import streaming_jobs  # here: the format Json needs Spark's types

    match = _UNKNOWN_ARGUMENT.search(message)
    if match is None or match["declaration"] not in _DECLARATIONS:
        return ""
    declaration = getattr(streaming_jobs, match["declaration"])
    return instead(match["argument"], inspect.signature(declaration).parameters)
