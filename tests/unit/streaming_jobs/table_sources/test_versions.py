"""The rows that each version of a table has for a reader: every kind of commit, what is gone, what is never read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import ForeignWrite, OffsetsLost, PermanentError, PreflightRefused, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Accepted
from streaming_jobs.storage.object_files import ObjectHandle
from streaming_jobs.stream import DeltaTable, Stream
from streaming_jobs.table_sources.planner import FileToRead, RowBlocks
from streaming_jobs.table_sources.topics import table_info
from streaming_jobs.table_sources.versions import RebuiltRows, TableVersions, replaced_since
from tests.conftest import SettingsFactory
from tests.support.written_table import WrittenTable

COLUMNS = StructType([StructField("k", StringType()), StructField("n", LongType())])


@pytest.fixture
def table(tmp_path: Path) -> WrittenTable:
    return WrittenTable(tmp_path / "numbers").make()


def numbers(versions: TableVersions, start: int, end: int) -> list[int]:
    """The numbers in the rows of a range, in their order."""
    files = [FileToRead(v.number, v.at, file) for v in versions.between(start, end) for file in v.files]
    blocks = RowBlocks(DeltaSource("things", COLUMNS), versions, "all")
    return [row["n"] for block in blocks.of_files(files) for row in block["_record"].to_pylist()]


def test_a_reader_gets_each_row_of_the_batches_once_whatever_comes_between(table: WrittenTable) -> None:
    versions = TableVersions(table.path, "count")
    table.batch(1, 2)
    first = table.batch(3)
    table.compact()
    table.batch()
    table.publish(10, 20, 30)
    table.batch(4)
    table.publish(1, 2, 3, 4, new=(5, 6))
    table.delete("n >= 5")
    table.slice(40, 50)
    last = table.batch(7)
    assert numbers(versions, 1, last + 1) == [1, 2, 3, 4, 5, 6, 7]
    assert numbers(versions, first + 1, last + 1) == [4, 5, 6, 7]
    assert sorted(numbers(versions, 0, last + 1)) == [7, 40, 50], "the whole content, as it is at that version"


def test_a_replay_reads_rebuilt_rows_in_place_of_the_versions_that_its_plan_writes_anew(
    table: WrittenTable, tmp_path: Path
) -> None:
    first = table.batch(1)
    table.batch(20)
    table.batch(30)
    last = table.compact()
    staged = WrittenTable(tmp_path / "staged").make()
    for number in (1, 2, 3):
        end = staged.batch(number)
    files = tuple(replace(file, root=staged.path) for file in TableVersions(staged.path).content(end).files)
    rows = RebuiltRows(first + 1, last + 1, files[1:], files)
    versions = TableVersions(table.path, "count", in_place=rows)
    assert numbers(versions, first, last + 1) == [1, 2, 3]
    assert numbers(versions, first + 1, last + 1) == [2, 3] and numbers(versions, first, first + 1) == [1]
    assert sorted(numbers(versions, 0, last + 1)) == [1, 2, 3], "the whole content as it will be"
    table.publish(1, 2, 3, 4, new=(4,))
    assert versions.newest() == last, "a replay reads up to the fence, its stream goes on with the publish"
    assert numbers(TableVersions(table.path, "count"), last + 1, last + 2) == [4]


def test_a_publish_that_does_not_say_which_rows_are_new_is_refused_only_if_it_has_any(table: WrittenTable) -> None:
    versions = TableVersions(table.path, "count")
    table.batch(1)
    assert versions.version(table.publish(10, known=False)).files == ()
    further = table.publish(10, 2, known=False, to=9)
    with pytest.raises(PreflightRefused, match=f"version {further} of table numbers, published by recovery r1"):
        versions.version(further)


def test_a_batch_that_rewrote_rows_or_a_publish_that_takes_back_what_may_have_been_read_is_refused(
    table: WrittenTable,
) -> None:
    """An abort after a crash: the last batch is in the table and not committed, so it is taken out and repeated."""
    versions = TableVersions(table.path, "count")
    table.batch(1)
    table.batch(2)
    aborted = table.publish(1, to=1)
    with pytest.raises(PreflightRefused, match=f"version {aborted} of table numbers, by plan r1, took rows back"):
        versions.version(aborted)
    table.batch(1)
    rewritten = table.append(table.rows(5), table._moving(table.entry(batch=1)), mode="overwrite")
    with pytest.raises(PreflightRefused, match="rewrote rows"):
        TableVersions(table.path, "count").version(rewritten)


def test_rows_of_another_program_are_taken_once_they_are_accepted(
    table: WrittenTable, settings: SettingsFactory
) -> None:
    home = settings()
    versions = TableVersions(table.path, "count", (_record(home, "count"), _record(home, "reader")))
    added = table.foreign(8)
    table.batch()
    rewritten = table.foreign(9, mode="overwrite")
    for version in (added, rewritten):
        with pytest.raises(ForeignWrite, match=f"streams accept count --table numbers --version {version}"):
            _raise_with_step(versions, version)
    _accept(home, "count", added)
    _accept(home, "reader", rewritten)
    assert numbers(versions, added, rewritten + 1) == [8]


def test_rows_of_another_program_that_were_taken_back_are_not_delivered(
    table: WrittenTable, settings: SettingsFactory
) -> None:
    """The reader waits for the writer's next commit, and then reads what was left at it."""
    home = settings()
    versions = TableVersions(table.path, "count", (_record(home, "count"),))
    table.batch(1)
    undone, undo, kept = table.foreign(8), table.delete("n = 8"), table.foreign(9)
    record = stream_record.first("count")
    accepted = tuple(Accepted("numbers", version, "right", 0.0) for version in (undone, undo, kept))
    stream_record.save(home, replace(record, accepted=accepted))
    table.compact()
    assert [versions.version(number).settled for number in (undone, undo, kept)] == [False, True, False]
    last = table.batch(2)
    assert [versions.version(number).settled for number in (undone, undo, kept)] == [True] * 3
    table.delete("n = 9")
    assert numbers(versions, undone, last + 1) == [9, 2], "what is removed later was in the table"


def test_every_commit_that_replaced_rows_which_a_reader_has_read_is_known(table: WrittenTable) -> None:
    start = table.batch(1, 2)
    table.batch(3)
    table.compact()
    table.foreign(8)
    removed, sliced, published = table.delete("n = 1"), table.slice(5), table.publish(6)
    rewritten = table.foreign(9, mode="overwrite")
    table.batch(7)
    replaced = [
        (rewritten, "another program"),
        (published, "plan r1"),
        (sliced, "plan s1"),
        (removed, "another program"),
    ]
    assert replaced_since(table.path, "count", start) == replaced
    assert replaced_since(table.path, None, published) == replaced[:2]


def test_the_next_commits_time_is_found_where_the_log_was_cleaned_up(
    table: WrittenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = TableVersions(table.path, "count")
    for number in range(4):
        table.batch(number)
    for version in range(3):
        _commit(table, version).unlink()
    assert versions.time_of_next(0) == versions.time_of(3)
    monkeypatch.setattr("streaming_jobs.table_sources.versions.versions_in_log", lambda _: [0, 1, 2, 3, 4])
    assert versions.time_of_next(0) == versions.time_of(3), "cleaned up since it was listed"
    assert versions.time_of_next(5) is None


def test_a_table_that_no_stream_writes_gives_what_is_added_and_refuses_what_is_rewritten(
    table: WrittenTable, settings: SettingsFactory
) -> None:
    home = settings()
    versions = TableVersions(table.path, None, (_record(home, "reader"),))
    added, removed = table.foreign(1, 2), table.delete("n > 0")
    rewritten = table.foreign(3)
    rewritten = table.foreign(4, mode="overwrite")
    assert numbers(versions, added, rewritten) == [1, 2, 3]
    assert versions.version(removed).files == ()
    with pytest.raises(ForeignWrite, match="rewrote rows"):
        versions.version(rewritten)
    _accept(home, "reader", rewritten)
    assert numbers(versions, added, rewritten + 1) == [1, 2, 3]


def test_the_first_version_is_the_one_after_which_nothing_is_missing_and_a_time_is_that_of_the_commit(
    table: WrittenTable,
) -> None:
    before = time.time() * 1000
    version = TableVersions(table.path, "count").version(table.batch(1))
    assert before - 1 <= version.at <= time.time() * 1000 and version.rows == 1 and version.size > 0
    versions = TableVersions(table.path, "count")
    first = table.batch(1)
    second = table.batch(2)
    compacted = table.compact()
    assert versions.first() == 0
    (gone,) = versions.version(first).files
    (table.path / gone.path).unlink()
    assert versions.first() == first + 1, "its rows are in the compacted file, but no longer apart"
    assert numbers(versions, second, compacted + 1) == [2]
    with pytest.raises(OffsetsLost, match="was deleted before it was read"):
        numbers(versions, first, second)
    _commit(table, second).unlink()
    assert versions.first() == second + 1
    with pytest.raises(OffsetsLost, match=f"version {second} of table numbers can no longer be read"):
        versions.version(second)
    for version in range(compacted + 1):
        _commit(table, version).unlink(missing_ok=True)
    assert versions.first() == 0 and versions.newest() is None


def _commit(table: WrittenTable, version: int) -> Path:
    return table.path / "_delta_log" / f"{version:020d}.json"


def _record(home: Settings, stream: str) -> ObjectHandle:
    return StreamFolder.of(home, stream).record


def _accept(home: Settings, stream: str, version: int) -> None:
    record = stream_record.first(stream)
    accepted = (Accepted("numbers", version, "right", 0.0),)
    stream_record.save(home, replace(record, accepted=accepted))


def _raise_with_step(versions: TableVersions, number: int) -> None:
    try:
        versions.version(number)
    except ForeignWrite as error:
        raise ForeignWrite(f"{error.found}; {error.next_step}") from error


def test_a_version_of_a_table_that_is_read_can_be_accepted_if_it_is_of_another_program(
    table: WrittenTable, settings: SettingsFactory
) -> None:
    home = settings()
    reader = Stream("reader", lambda rows: rows, {"rows": DeltaSource("numbers", COLUMNS)}, {"out": DeltaTable("out")})
    stream_record.save(home, stream_record.first("reader"))
    versions = TableVersions(table.path, "count", (_record(home, "reader"),))
    ours, theirs = table.batch(1), table.foreign(2)
    with pytest.raises(UsageError, match=f"version {ours} of table numbers is not in the table's log"):
        stream_record.accept(home, reader, "numbers", ours, "right", versions.commits_of_others())
    with pytest.raises(UsageError, match="has no table other"):
        stream_record.accept(home, reader, "other", theirs, "right")
    stream_record.accept(home, reader, "numbers", theirs, "right", versions.commits_of_others())
    assert numbers(versions, ours, theirs + 1) == [1, 2]


VECTOR = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "sizeInBytes": 10, "cardinality": 1}


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
