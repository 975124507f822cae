"""The rows that were added to a Delta table after one of its versions, added to another table: as files if possible.

Both versions are contents (`content.py`). Files that only the newer one has hold later rows; files that only the older
one has were compacted since, so their rows are in files of the newer one too, perhaps beside later rows. Such a file is
split: its later rows are written to new files. Every other file with later rows is added as it is, as a hard link.

DataFusion finds the files to split, and their later rows; only files that one of the versions lacks are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql.types import StructType

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.platform.table_rows import opened
from streaming_jobs.sinks.delta import column_bounds
from streaming_jobs.sinks.delta.content import DeltaContent, linked, make_table, shared
from streaming_jobs.sinks.delta.table_files import TableFile
from streaming_jobs.sinks.stored import LaterRows
from streaming_jobs.storage.locations import Location, StorePath, delta_table, local_scratch, remove_tree
from streaming_jobs.text.spelling import counted
from streaming_jobs.text.sql import quoted

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.sink import DeltaSink

_PLACE = "later"
_SCRATCH = "_later"
_PIECE = "__piece"
_FIRST_GENERATION = 0


def add_later_rows(sink: DeltaSink, now: DeltaContent, then: DeltaContent) -> LaterRows:
    """Add the rows that `now` has and `then` has not to a table, as multisets (`StoredTable.add_later_rows`)."""
    _widen(sink, now)
    came, gone = now.without(then), then.without(now)
    if not gone.files:
        _link(sink, came)
        _give_bounds(sink)
        return LaterRows(came.pieces, 0)
    folder = sink.path / _SCRATCH
    try:
        with local_scratch(folder) as spill:
            scratch = _Scratch(sink, folder, spill / "_spill")
            mixed = scratch.mixed(came, gone)
            whole = replace(came, files={path: file for path, file in came.files.items() if path not in mixed})
            _link(sink, whole)
            _give_bounds(sink)
            scratch.split(replace(came, files=mixed), gone)
    finally:
        remove_tree(folder)
    return LaterRows(whole.pieces, len(mixed))


def _widen(sink: DeltaSink, now: DeltaContent) -> None:
    """Add the columns that only `now` has; raises PreflightRefused for a column of two types."""
    columns = StructType.fromJson(json.loads(now.schema))
    here = {field.name: field.dataType.jsonValue() for field in sink.schema.fields}
    if other := [f.name for f in columns.fields if here.get(f.name, f.dataType.jsonValue()) != f.dataType.jsonValue()]:
        raise PreflightRefused(
            f"column {other[0]} of table {sink.name} has another type in the rebuilt rows than in those after them",
            "give the recovery up, and let the function return the type that the table has",
        )
    sink.widen(now.schema, _FIRST_GENERATION)


def _give_bounds(sink: DeltaSink) -> None:
    """Let the table and its new files have the bounds that all files have, those with later rows too."""
    bounded = column_bounds.wanted(sink.handle, sink.schema, sink.declared.partition_by, ())
    sink.set_properties({column_bounds.PROPERTY: bounded}, _FIRST_GENERATION)


def _link(sink: DeltaSink, content: DeltaContent) -> None:
    path = sink.path
    adds = shared(path, content) if isinstance(path, StorePath) else linked(path, content, below=f"{_PLACE}/")
    if adds:
        sink.commit_actions(adds, CommitProperties())


@dataclass(frozen=True)
class _Scratch:
    """Tables for queries below the folder of the table `sink`, of files that are linked there."""

    sink: DeltaSink
    folder: Location
    spill: Path

    def mixed(self, came: DeltaContent, gone: DeltaContent) -> dict[str, TableFile]:
        """The files of `came` that have a row of `gone`."""
        partitions = {_values(file.partition) for file in gone.files.values()}
        near = {path: file for path, file in came.files.items() if _values(file.partition) in partitions}
        if not near:
            return {}
        names = [field.name for field in self.sink.schema.fields]
        columns = _quoted(names)
        data = self._data(
            came=self._numbered("near", replace(came, files=near)),
            gone=self._table("gone", gone),
        )
        rows = (
            f'SELECT {_shown(names, came)}, CAST("{_PIECE}" AS BIGINT) AS "__p", 0 AS "__then" FROM came UNION ALL '
            f"SELECT {_shown(names, gone)}, NULL, 1 FROM gone"
        )
        groups = f'SELECT max("__then") AS t, array_agg(DISTINCT "__p") AS p FROM ({rows}) u GROUP BY {columns}'
        hits = pa.table(data.execute(f"SELECT DISTINCT unnest(p) AS p FROM ({groups}) g WHERE t = 1").read_all())
        paths = list(near)
        found = sorted(number for number in hits["p"].to_pylist() if number is not None)
        return {paths[number]: near[paths[number]] for number in found}

    def split(self, mixed: DeltaContent, gone: DeltaContent) -> None:
        """Write the rows of `mixed` without the rows of `gone`; raises PreflightRefused if `mixed` lacks one."""
        names = [field.name for field in self.sink.schema.fields]
        columns = _quoted(names)
        data = self._data(came=self._table("mixed", mixed), gone=self._table("gone", gone))
        rows = (
            f'SELECT {_shown(names, mixed)}, 0 AS "__then" FROM came UNION ALL '
            f"SELECT {_shown(names, gone)}, 1 FROM gone"
        )
        lost = f'SELECT sum(1 - 2 * "__then") AS n FROM ({rows}) u GROUP BY {columns} HAVING sum(1 - 2 * "__then") < 0'
        missing = pa.table(data.execute(f"SELECT coalesce(-sum(n), 0) AS n FROM ({lost}) l").read_all())
        if number := int(missing["n"][0].as_py()):
            raise PreflightRefused(
                f"{counted(number, 'row')} of table {self.sink.name} that came before are no longer in it: somebody "
                "else, or a rebuilt slice, has changed rows since",
                "only an ordinary recovery can go back before that change: plan again without --until",
            )
        # A row is taken as it is, and not from a group: grouping makes 0.0 of -0.0.
        numbered = (
            f'SELECT {columns}, "__then", row_number() OVER (PARTITION BY {columns}, "__then") AS "__n", '
            f'sum("__then") OVER (PARTITION BY {columns}) AS "__of" FROM ({rows}) u'
        )
        left = data.execute(f'SELECT {columns} FROM ({numbered}) r WHERE "__then" = 0 AND "__n" > "__of"')
        written = column_bounds.writer_properties(self.sink.schema)
        write_deltalake(self.sink.handle, left, mode="append", writer_properties=written)
        self.sink.update()

    def _table(self, name: str, content: DeltaContent) -> DeltaTable:
        path = self.folder / name
        if not path.exists():
            make_table(path, self.sink.name, content, self.sink.stream, CommitProperties())
        return delta_table(path)

    def _numbered(self, name: str, content: DeltaContent) -> DeltaTable:
        """A table of the files with one more column: the number of the row's file, a partition value in the log."""
        schema = json.loads(content.schema)
        schema["fields"].append({"name": _PIECE, "type": "long", "nullable": True, "metadata": {}})
        files = {
            path: replace(file, partition={**file.partition, _PIECE: str(number)})
            for number, (path, file) in enumerate(content.files.items())
        }
        partitions = (*content.partition_by, _PIECE)
        return self._table(name, replace(content, files=files, schema=json.dumps(schema), partition_by=partitions))

    def _data(self, **tables: DeltaTable) -> QueryBuilder:
        return opened(tables, self.spill)


def _values(partition: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(partition.items()))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(quoted(name, "datafusion") for name in names)


def _shown(names: Sequence[str], content: DeltaContent) -> str:
    """The columns in a query on a content, null if its table did not have them yet."""
    here = {field["name"] for field in json.loads(content.schema)["fields"]}
    shown = (quoted(name, "datafusion") for name in names)
    return ", ".join(q if name in here else f"NULL AS {q}" for name, q in zip(names, shown, strict=True))
