"""The version of the code that wrote each live file of an append table: file -> commit -> ledger entry -> code.

A file that compaction made has the code of the files that it replaced: of the same partition, of one commit. Files that
the log no longer adds are told by their time: a file is written before its batch's line in the ledger beside the state,
and after the line of the batch before. Compaction in the time of an older version of the code may then have put rows
of still older ones beside its own; nothing tells.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from quality.table_checks.base import CheckedTable
from streaming_jobs.ledger.entry import CodeVersion

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
    files = pa.table(checked.table.get_add_actions())
    paths, modified, rows = (files[name].to_pylist() for name in ("path", "modification_time", "num_records"))
    partitions = files["partition"].to_pylist() if "partition" in files.column_names else [{}] * files.num_rows
    by_log = _by_log(checked)
    by_time = _by_time(
        checked, [(time, n) for path, time, n in zip(paths, modified, rows, strict=True) if path not in by_log]
    )
    live = [
        (time, path, LiveFile(path, n, values, by_log[path] if path in by_log else by_time.get(time, frozenset())))
        for path, time, n, values in zip(paths, modified, rows, partitions, strict=True)
    ]
    return [file for _, _, file in sorted(live, key=lambda each: each[:2], reverse=True)]


def _by_time(checked: CheckedTable, files: Sequence[tuple[int, int | None]]) -> dict[int, Codes]:
    """The codes of files by the times at which they were written; `files` have a time in ms, and rows.

    Between the lines of two batches the files of the later one were written, and those of a compaction before it. If
    there are as many rows as that batch wrote, they are its own. Otherwise the files are ambiguous where the code
    changed, and of no known code in the time of the newest one, since they may have older rows.
    """
    batches = sorted(checked.batches, key=lambda each: (each[0].at, each[1].txn))
    at = [commit.at for commit, _ in batches]
    newest = code_versions(checked)[:1]
    rows: dict[int, int] = {}
    places = {time: bisect_left(at, time) for time, _ in files}
    for time, count in files:
        rows[places[time]] = rows.get(places[time], 0) + (count or 0)
    codes: dict[int, Codes] = {}
    for time, place in places.items():
        if not 0 < place < len(batches):  # before the first known line, an older batch may have written it
            continue
        before, entry = batches[place - 1][1], batches[place][1]
        if rows[place] == checked.written(entry):
            codes[time] = frozenset({entry.code})
        elif before.code != entry.code:
            codes[time] = frozenset({before.code, entry.code})
        elif [entry.code] != newest:
            codes[time] = frozenset({entry.code})
    return codes


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
