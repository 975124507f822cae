"""The version of the code that wrote each live file of an append table, by `streaming_jobs/state/provenance.py`.

Compaction in the time of an older version of the code may have put rows of still older ones beside its own; nothing
tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from quality.table_checks.base import CheckedTable
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.state.provenance import Codes, TableLog, codes_by_time


@dataclass(frozen=True)
class CodedFile:
    """A file of the version that is looked at: its path as the log has it, its rows, and the code that wrote them."""

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
