"""The rows of one version of a table, as any reader of Delta tables sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from streaming_jobs.verification.subject import Elsewhere
from streaming_jobs.verification.table_rules import Packed, packed


@dataclass
class VersionRows:
    """Reads some columns of a table by version. A file is read once: it never changes, only its listing does."""

    table: Path
    columns: Sequence[str]
    _files: dict[str, pa.Table] = field(default_factory=dict, repr=False)

    def at(self, version: int | None = None) -> pa.Table:
        """The rows of that version, or of the newest; raises the errors of deltalake and pyarrow where unreadable."""
        listed = DeltaTable(self.table, version=version).file_uris()
        self._files = {uri: self._files[uri] if uri in self._files else self._read(uri) for uri in listed}
        empty = pa.table({name: pa.array([], pa.null()) for name in self.columns})
        return pa.concat_tables(self._files.values(), promote_options="permissive") if self._files else empty

    def _read(self, uri: str) -> pa.Table:
        rows = pq.ParquetFile(uri).read(columns=list(self.columns))
        # Each writer has a string type of its own, and Arrow cannot filter by all of them.
        return rows.cast(pa.schema([field.with_type(_plain(field.type)) for field in rows.schema]))


def _plain(kind: pa.DataType) -> pa.DataType:
    text = pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return pa.string() if text else kind


def places(tables: Path, elsewhere: Elsewhere) -> Packed:
    """Places of all rows of such a table now, a record in two rows twice; none when there is no such table."""
    if not DeltaTable.is_deltatable(str(tables / elsewhere.table)):
        return packed([], [])
    rows = VersionRows(tables / elsewhere.table, (elsewhere.partition, elsewhere.offset)).at()
    # A row without its key is a dead letter too, and may not name the record that it was made from.
    rows = rows.filter(pc.is_valid(rows[elsewhere.offset]))
    return packed(rows[elsewhere.partition], rows[elsewhere.offset])


def all_places(tables: Path, every: Iterable[Elsewhere]) -> Packed:
    return np.concatenate([packed([], []), *(places(tables, one) for one in every)])
