"""Paths that stand in the log as they are: their files get others, in a commit that changes no row."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from streaming_jobs.errors import CommitRefused
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.delta.replace_rows import rename_unencoded
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_files import table_files
from tests.support.delta_table import ROWS, Make, rows_in
from tests.support.worlds import append, entry


def lay_raw_paths(sink: DeltaSink) -> None:
    """A commit as delta-spark made it before: partition values that are not ASCII stand in the paths as they are."""
    adds = []
    for number, value in enumerate(("日本", "日本", "gö", "plain", "plain")):
        file = sink.path / f"k={value}" / f"part-{number}.parquet"
        file.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"n": pa.array([number], pa.int64())}), file)
        stats = {"numRecords": 1, "minValues": {"n": number}, "maxValues": {"n": number}, "nullCount": {"n": 0}}
        add = {"path": str(file.relative_to(sink.path)), "partitionValues": {"k": value}, "size": file.stat().st_size}
        adds.append({"add": {**add, "modificationTime": 1, "dataChange": True, "stats": json.dumps(stats)}})
    info = {"commitInfo": {"operation": "WRITE", "userMetadata": entry(0).encode()}}
    txn = {"txn": {"appId": sink.app_id, "version": entry(0).txn.version}}
    lines = [json.dumps(action, ensure_ascii=False) for action in (info, txn, *adds)]
    (sink.path / "_delta_log" / f"{sink.handle.version() + 1:020d}.json").write_text("\n".join(lines), encoding="utf-8")
    sink.refresh()


@pytest.mark.parametrize("shortened", [False, True], ids=["commits", "checkpoint"])
def test_files_with_unencoded_paths_get_others_before_deltalake_removes_them(make: Make, shortened: bool) -> None:
    sink = make(partition_by=["k"])
    lay_raw_paths(sink)
    if shortened:
        sink.handle.create_checkpoint()
    there = rows_in(sink)
    sink = make(partition_by=["k"])
    assert rows_in(sink) == there
    assert not [path for path in table_files(sink.path, sink.handle.version()) if not path.isascii()]
    renamed = sink.handle.version()
    assert make(partition_by=["k"]).handle.version() == renamed
    assert not any(commit.changes_data for commit in walk(sink.path) if commit.version > 1)
    sink.handle.optimize.compact()
    assert rows_in(sink) == there
    assert DeltaTable(sink.path).to_pyarrow_table(filters=[("k", "=", "日本")]).num_rows == 2
    sink.refresh()
    assert append(sink, entry(1), ROWS) is not None
    assert len(rows_in(sink)) == len(there) + ROWS.num_rows


def refuse_links_into(folder: Path) -> Callable[[Path, Path], None]:
    link = os.link

    def refusing(source: Path, target: Path) -> None:
        if target.parent == folder:
            raise FileExistsError(target)
        link(source, target)

    return refusing


def test_a_commit_that_comes_first_leaves_the_paths_as_they_were(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = make(partition_by=["k"])
    lay_raw_paths(sink)
    monkeypatch.setattr(os, "link", refuse_links_into(sink.path / "_delta_log"))
    with pytest.raises(CommitRefused, match="by somebody else"):
        rename_unencoded(sink, 1)
    assert len(rows_in(sink)) == 5 and not list((sink.path / "_delta_log").glob("*.tmp"))
