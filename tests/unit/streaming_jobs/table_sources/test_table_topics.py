"""A table in the place of a topic: which one can be read, and where it begins and ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.errors import PermanentError, PreflightRefused
from streaming_jobs.table_sources.topics import table_info
from streaming_jobs.table_sources.versions import TableVersions
from tests.support.written_table import WrittenTable

VECTOR = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "sizeInBytes": 10, "cardinality": 1}


@pytest.fixture
def table(tmp_path: Path) -> WrittenTable:
    return WrittenTable(tmp_path / "numbers").make()


def rewrite(table: WrittenTable, version: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each action of a commit."""
    file = table.path / "_delta_log" / f"{version:020d}.json"
    actions = [json.loads(line) for line in file.read_text().splitlines()]
    for action in actions:
        change(action)
    file.write_text("".join(f"{json.dumps(action)}\n" for action in actions))


def with_vector(action: dict[str, Any]) -> None:
    if "add" in action:
        action["add"]["deletionVector"] = VECTOR


def with_feature(action: dict[str, Any]) -> None:
    if "protocol" in action:
        features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
        action["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, **features}


def test_rows_that_a_deletion_vector_marks_as_deleted_are_never_read(table: WrittenTable) -> None:
    versions = TableVersions(table.path, None)
    added = table.foreign(1, 2)
    assert versions.content(added).rows == 2
    rewrite(table, added, with_vector)
    for read in (versions.version, versions.content):
        with pytest.raises(PermanentError, match="has deletion vectors"):
            read(added)


@pytest.mark.parametrize("path", ["{here}/outside", "../outside", "%2e%2e/outside", "sub/%252E%252E/../outside"])
def test_a_path_of_the_log_that_leads_out_of_the_tables_folder_is_not_read(
    table: WrittenTable, tmp_path: Path, path: str
) -> None:
    """The file there exists: it is another program's."""
    (tmp_path / "outside").write_text("secret")
    (table.path / "sub").mkdir()
    with pytest.raises(PermanentError, match="not in the table's folder"):
        TableVersions(table.path, None).on_disk(path.format(here=tmp_path))


def test_two_dots_within_a_name_are_no_way_out(table: WrittenTable) -> None:
    """A partition value may have them, encoded."""
    for name in ("k=..", "k=a..b", "k=a%2F..%2Fb"):
        (table.path / name).mkdir()
    for path in ("k=..", "k=a..b", "k=a%252F..%252Fb"):
        assert TableVersions(table.path, None).on_disk(path) is not None


def test_a_table_whose_writers_may_use_deletion_vectors_is_refused(table: WrittenTable) -> None:
    versions = TableVersions(table.path, None)
    info = table_info(versions)
    assert info is not None and info.name == "numbers"
    rewrite(table, 0, with_feature)
    with pytest.raises(PreflightRefused, match="table numbers has deletion vectors") as refused:
        table_info(versions)
    assert "DROP FEATURE deletionVectors" in refused.value.next_step
