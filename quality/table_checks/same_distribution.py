"""Whether a new version of the code writes values with the distribution of the previous version.

The code of a file is that of its batches (`streaming_jobs/state/provenance.py`). A compaction in the time of an older
version of the code may have put rows of still older ones beside its own; nothing shows that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quality.table_checks.base import Check, CheckedTable, checked_column, checked_number
from quality.table_checks.statistics import (
    Numbers,
    index_by_chance,
    kolmogorov_smirnov,
    ks_by_chance,
    quantile_counts,
    stability_index,
)
from quality.validation import CheckOutcome, Severity
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.sinks.delta.table_files import on_disk
from streaming_jobs.state.provenance import Codes, TableLog, codes_by_time
from streaming_jobs.storage.locations import opened_for_reading
from streaming_jobs.text.spelling import counted, instead

_METHODS = ("ks", "psi")
_LIMITS = {"ks": 0.1, "psi": 0.2}
_WORDS = {"ks": "Kolmogorov-Smirnov distance", "psi": "population stability index"}
_NUMBERS = ("byte", "short", "integer", "long", "float", "double", "date", "timestamp", "timestamp_ntz")
_TEXTS = ("string", "boolean")
_UNREADABLE = ("deletionVectors", "columnMapping")


@dataclass(frozen=True)
class SameDistribution(Check):
    """Values of `column` written by the newest code are distributed like those written by the code before it.

    Numbers, dates and times: `method="ks"` (default), or `"psi"` on `bins` quantiles of the old rows. Texts and
    booleans: `"psi"` over the `bins` most frequent old values, and all others as one. Null and NaN are values too:
    null is below all numbers, NaN above. It fails if the distance is above `threshold` (default 0.1 for ks, 0.2 for
    psi) and above what chance gives once in a thousand cases. With fewer than `at_least` rows on a side it passes and
    says so. At most `at_most` rows of each side are read, of the newest files.

    For append tables only: a merge rewrites rows of every version of the code. Files that mix rows of several are left
    out.
    """

    column: str
    method: Literal["ks", "psi"] | None = None
    threshold: float | None = None
    bins: int = 10
    at_least: int = 200
    at_most: int = 1_000_000
    severity: Severity = "critical"

    kind = "same_distribution"

    @property
    def name(self) -> str:
        """One per column."""
        return f"{self.kind} of {self.column}"

    def _validate(self) -> None:
        checked_column(self.kind, "column", self.column)
        if self.method is not None and self.method not in _METHODS:
            raise UsageError(f"{self.kind}: method is {self.method!r}", instead(str(self.method), _METHODS))
        if self.threshold is not None:
            checked_number(self.kind, "threshold", self.threshold, least=0, above=True)
        checked_number(self.kind, "bins", self.bins, least=2)
        checked_number(self.kind, "at_least", self.at_least, least=2)
        checked_number(self.kind, "at_most", self.at_most, least=self.at_least)

    def _judge(self, checked: CheckedTable) -> CheckOutcome:
        texts = self._refuse(checked)
        codes = code_versions(checked)
        if len(codes) < 2:
            return self.outcome(passed=True, observed="not judged: the ledger knows only one version of the code")
        files = live_files(checked)
        new, old = (self._values(checked, [f for f in files if f.codes == {code}]) for code in codes[:2])
        mixed = sum(1 for file in files if len(file.codes) != 1)
        note = f"; {counted(mixed, 'file')} with rows of several or unknown versions left out" if mixed else ""
        who = f"{counted(len(new), 'row')} of code {codes[0].hash} and {len(old):,} of {codes[1].hash}"
        if min(len(new), len(old)) < self.at_least:
            text = f"not judged: {who}, {self.at_least} of each are needed{note}"
            return self.outcome(passed=True, observed=text)
        method = self.method or ("psi" if texts else "ks")
        distance, chance = _of_texts(old, new, self.bins) if texts else _of_numbers(old, new, method, self.bins)
        limit = max(_LIMITS[method] if self.threshold is None else self.threshold, chance)
        text = f"{_WORDS[method]} {distance:.3f} between {who}, up to {limit:.3f} is allowed{note}"
        return self.outcome(passed=distance <= limit, observed=text, number=distance, rows=len(new))

    def _refuse(self, checked: CheckedTable) -> bool:
        """Raise UsageError for a table or a column that cannot be compared; returns True for a column of texts."""
        kind = checked.column(self.column)
        texts = kind in _TEXTS
        if not texts and kind not in _NUMBERS and not kind.startswith("decimal"):
            raise UsageError(f"column {self.column} has the type {kind}, which has no distribution", "name another")
        if texts and self.method == "ks":
            raise UsageError(f"column {self.column} has the type {kind}, which has no order for ks", "use method='psi'")
        if checked.declared.mode == "upsert":
            raise UsageError(
                f"table {checked.declared.name} is an upsert: merges rewrite rows, so files do not tell their code",
                "declare it on an append table",
            )
        if hidden := set(checked.table.protocol().reader_features or ()) & {*_UNREADABLE}:
            raise UsageError(f"table {checked.declared.name} has the feature {min(hidden)}", "use another check")
        return texts

    def _values(self, checked: CheckedTable, files: Sequence[CodedFile]) -> pa.ChunkedArray:
        """The column's values in these files, at most `at_most`."""
        kind = pa.schema(checked.table.schema().to_arrow()).field(self.column).type
        chunks: list[pa.Array] = []
        left = self.at_most
        for file in files:
            if left <= 0:
                break
            for chunk in self._read(checked, file, kind).slice(0, left).chunks:
                chunks.append(chunk)
                left -= len(chunk)
        return pa.chunked_array(chunks, type=kind)

    def _read(self, checked: CheckedTable, file: CodedFile, kind: pa.DataType) -> pa.ChunkedArray:
        path = on_disk(checked.settings.tables / checked.declared.name, file.path)
        if self.column in file.partition:
            value = pa.scalar(file.partition[self.column], type=kind)
            return pa.chunked_array([pa.repeat(value, pq.read_metadata(opened_for_reading(path)).num_rows)])
        with pq.ParquetFile(opened_for_reading(path)) as parquet:
            if self.column not in parquet.schema_arrow.names:  # added to the table after this file
                return pa.chunked_array([pa.nulls(parquet.metadata.num_rows, kind)])
            return parquet.read(columns=[self.column])[self.column].cast(kind)


@dataclass(frozen=True)
class CodedFile:
    """A file of the checked version: its path as in the log, its rows, and the code that wrote them."""

    path: str
    rows: int | None
    partition: Mapping[str, object]
    codes: Codes


def code_versions(checked: CheckedTable) -> Sequence[CodeVersion]:
    """The versions of the code by their newest batches, the newest first, as far back as the ledger goes."""
    return list(dict.fromkeys(entry.code for _, entry in checked.batches))


def live_files(checked: CheckedTable) -> list[CodedFile]:
    """Every file of the version, the newest first."""
    files = pa.table(checked.table.get_add_actions())
    paths, modified, rows = (files[name].to_pylist() for name in ("path", "modification_time", "num_records"))
    partitions = files["partition"].to_pylist() if "partition" in files.column_names else [{}] * files.num_rows
    log = TableLog(checked.settings.tables / checked.declared.name, checked.version)
    codes = {commit.version: entry.code for commit, entry in checked.batches}
    by_log = {path: of_file for path in paths if (of_file := _by_log(log, codes, path))}
    by_time = codes_by_time(
        [(time, n) for path, time, n in zip(paths, modified, rows, strict=True) if path not in by_log],
        [(commit.at, entry) for commit, entry in checked.batches],
        next(iter(code_versions(checked)), None),
        checked.written,
    )
    live = [
        (time, path, CodedFile(path, n, values, by_log[path] if path in by_log else by_time.get(time, frozenset())))
        for path, time, n, values in zip(paths, modified, rows, partitions, strict=True)
    ]
    return [file for _, _, file in sorted(live, key=lambda each: each[:2], reverse=True)]


def _by_log(log: TableLog, codes: Mapping[int, CodeVersion], path: str) -> Codes:
    """The codes of the commits behind a file; none if the log does not show all, or one of them is of no batch."""
    originals = log.originals(unquote(path)) or []
    found = [codes.get(change.version) for _, change in originals]
    return frozenset() if None in found else frozenset(code for code in found if code is not None)


def _of_numbers(old: pa.ChunkedArray, new: pa.ChunkedArray, method: str, bins: int) -> tuple[float, float]:
    """The distance of two samples of numbers, and what chance gives."""
    a, b = _numbers(old), _numbers(new)
    if method == "ks":
        # Ranks keep the order and are finite: null lowest, then numbers, NaN greatest.
        values = np.unique(np.concatenate((a[~np.isnan(a)], b[~np.isnan(b)])))
        ranks = [np.where(np.isnan(x), len(values), np.searchsorted(values, x)).astype(np.float64) for x in (a, b)]
        with_nulls = [np.concatenate((r, np.full(x.null_count, -1.0))) for r, x in zip(ranks, (old, new), strict=True)]
        return kolmogorov_smirnov(*with_nulls), ks_by_chance(len(old), len(new))
    finite = a[~np.isnan(a)], b[~np.isnan(b)]
    counts = quantile_counts(*finite, bins) if len(finite[0]) else ([0], [len(finite[1])])
    extra = [(old.null_count, new.null_count), (int(np.isnan(a).sum()), int(np.isnan(b).sum()))]
    return _index(
        [*counts[0], *(before for before, after in extra if before or after)],
        [*counts[1], *(after for before, after in extra if before or after)],
    )


def _of_texts(old: pa.ChunkedArray, new: pa.ChunkedArray, bins: int) -> tuple[float, float]:
    """The distance of two samples of texts over the most frequent old values, and what chance gives."""
    before, after = _counted(old), _counted(new)
    top = [value for value, _ in before.most_common(bins)]
    counts = [[each[value] for value in top] for each in (before, after)]
    rest = [len(old) - sum(counts[0]), len(new) - sum(counts[1])]
    if any(rest):
        counts = [[*each, other] for each, other in zip(counts, rest, strict=True)]
    return _index(counts[0], counts[1])


def _index(old: list[int], new: list[int]) -> tuple[float, float]:
    return stability_index(old, new), index_by_chance(sum(old), sum(new), len(old))


def _counted(values: pa.ChunkedArray) -> Counter[Any]:
    return Counter({row["values"]: row["counts"] for row in pc.value_counts(values).to_pylist()})


def _numbers(values: pa.ChunkedArray) -> Numbers:
    """The values that are not null as floats; of times the microseconds since 1970."""
    present = values.drop_null()
    kind = present.type
    if pa.types.is_date(kind):
        present = present.cast(pa.int32())
    elif pa.types.is_timestamp(kind):
        present = present.cast(pa.int64())
    numbers: Numbers = np.asarray(present.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    return numbers
