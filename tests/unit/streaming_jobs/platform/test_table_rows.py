"""Rows read as Arrow, by no file system that needs Python when the interpreter ends."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable, write_deltalake

import orchestration
import reprocessing
import streaming_jobs
from streaming_jobs.platform.table_rows import dataset, rows

VALUES: list[str | None] = [
    "a b",
    "ä",
    "日本",
    "a/b",
    "a%b",
    "a%20b",
    "a:b",
    "x=y",
    "a\u2028b",
    "😀",
    "a#b?c",
    "*",
    "a+b",
]
VALUES += [".", " ", None]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    held = pa.table({"p": pa.array(VALUES), "v": list(range(len(VALUES)))})
    write_deltalake(tmp_path / "table", held, partition_by=["p"])
    write_deltalake(tmp_path / "table", pa.table({"p": ["more"], "v": [-1]}), mode="append")
    return tmp_path / "table"


def test_the_rows_are_those_that_deltalake_reads_whatever_the_partitions_are_called(table: Path) -> None:
    read, known = rows(table).sort_by("v"), DeltaTable(table).to_pyarrow_table().sort_by("v")
    assert read.equals(known) and read["p"].to_pylist() == ["more", *VALUES]
    assert rows(table, 0, ["v"]).sort_by("v")["v"].to_pylist() == list(range(len(VALUES)))


def test_no_file_of_it_is_closed_by_python(table: Path) -> None:
    """Arrow closes files in threads of its own; one that needs Python while the interpreter ends aborts the process."""
    used = dataset(DeltaTable(table), table).filesystem
    assert isinstance(used, pafs.SubTreeFileSystem) and isinstance(used.base_fs, pafs.LocalFileSystem)


def test_nothing_reads_rows_in_another_way() -> None:
    modules = [
        path
        for package in (streaming_jobs, reprocessing, orchestration)
        for path in Path(str(package.__file__)).parent.rglob("*.py")
    ]
    others = [p.name for p in modules if re.search(r"\.to_pyarrow_(table|dataset)\(", p.read_text("utf-8"))]
    assert len(modules) > 150 and others == ["table_rows.py"]
