"""The version of the code that wrote each live file of an append table: file -> commit -> ledger entry -> code.

A file that compaction made has the code of the files that it replaced: of the same partition, of one commit. Files that
the log no longer adds are told by their time: a file is written before its batch's line in the ledger beside the state,
and after the line of the batch before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from quality.table_checks.base import CheckedTable
from streaming_jobs.ledger import CodeVersion

Codes = frozenset[CodeVersion]


@dataclass(frozen=True)
class LiveFile:
    """A file of the version that is looked at: its path as the log has it, its rows, and the code that wrote them.

    `codes` has several for a file that mixes rows of them, and none if nothing tells who wrote it.
    """

    path: str
    rows: int | None
    partition: Mapping[str, object]
    codes: Codes


def code_versions(checked: CheckedTable) -> Sequence[CodeVersion]:
    """The versions of the code by their newest batches, the newest first, as far back as the ledger goes."""
    return list(dict.fromkeys(entry.code for _, entry in checked.batches))


def live_files(checked: CheckedTable) -> list[LiveFile]:
    """Every file of the version, the newest first."""
    by_path = _by_log(checked)
    times = sorted((commit.at, entry.code) for commit, entry in checked.batches)
    at = [time for time, _ in times]
    files = pa.table(checked.table.get_add_actions())
    partitions = files["partition"].to_pylist() if "partition" in files.column_names else [{}] * files.num_rows
    modified = files["modification_time"].to_pylist()
    live = []
    for path, rows, values, time in zip(
        files["path"].to_pylist(), files["num_records"].to_pylist(), partitions, modified, strict=True
    ):
        codes = by_path.get(path)
        if codes is None:
            place = bisect_left(at, time)
            # Before the first known line: the batch may be an older one.
            codes = frozenset({times[place][1]}) if 0 < place < len(times) else frozenset()
        live.append((time, path, LiveFile(path, rows, values, codes)))
    return [file for _, _, file in sorted(live, key=lambda each: each[:2], reverse=True)]


def _by_log(checked: CheckedTable) -> dict[str, Codes]:
    """The codes of the files that commits of the log added; without those of which nothing is known."""
    known: dict[str, Codes] = {}
    codes = {commit.version: entry.code for commit, entry in checked.batches}
    for commit in reversed(checked.commits):
        changes = checked.changes(commit.version)
        for file in changes.added:
            if commit.version in codes:
                known[file.path] = frozenset({codes[commit.version]})
            elif not file.new_rows:
                replaced = [path for path, partition in changes.removed if partition == file.partition]
                if replaced and all(path in known for path in replaced):
                    known[file.path] = frozenset().union(*(known[path] for path in replaced))
    return known
