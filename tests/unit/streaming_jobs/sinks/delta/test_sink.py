"""A stream's table is committed to exactly once, whoever else commits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from streaming_jobs.errors import CommitRefused, Fenced, ForeignWrite, PermanentError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.delta_log import read_commit
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_files import table_files
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.delta_table import ROWS, TABLE, Make, rows_in, shorten_log
from tests.support.worlds import STREAM, append, entry


@pytest.mark.parametrize(
    ("plain", "special"),
    [
        ('"configuration":{', '"configuration":{"delta.columnMapping.mode":"name",'),
        (r"\"name\":\"n\",\"type\":\"long\",\"nullable\":true,\"metadata\":{", None),
        ('"minWriterVersion":2}', '"minWriterVersion":7,"writerFeatures":["appendOnly","identityColumns"]}'),
    ],
    ids=["column mapping", "generated column", "feature outside the profile"],
)
def test_a_table_with_features_outside_the_profile_is_not_for_deltalake(
    make: Make, plain: str, special: str | None
) -> None:
    first = make().path / "_delta_log" / f"{0:020d}.json"
    text = first.read_text()
    assert plain in text
    first.write_text(text.replace(plain, special or plain + r"\"delta.generationExpression\":\"1\""))
    sink = DeltaSink(first.parent.parent, Declared(TABLE), STREAM, DeltaTable(first.parent.parent))
    assert not sink.direct


def test_a_batch_before_the_newest_one_is_in_the_table_and_a_new_generation_starts_with_its_batch_0(make: Make) -> None:
    sink = make()
    append(sink, entry(0), ROWS)
    append(sink, entry(5), ROWS)
    assert append(sink, entry(3), ROWS) is None
    assert append(sink, entry(0, generation=2), ROWS) is not None
    assert sink.position == Txn(2, 0)


def test_a_driver_that_loses_the_race_inside_the_commit_finds_its_batch_done(make: Make) -> None:
    one, other = make(), make()

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        append(other, entry(0), ROWS)
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    assert one.commit(entry(0), write) is None
    assert len(rows_in(one)) == 2


def test_a_fence_that_comes_inside_the_commit_stops_it(make: Make) -> None:
    old, new = make(), make()

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        new.commit(entry(-1, kind="fence", generation=2), lambda *_: None)
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    with pytest.raises(Fenced, match=f"table {TABLE} is in generation 2, this driver belongs to 1"):
        old.commit(entry(0), write)
    assert rows_in(old) == []


def test_a_foreign_commit_without_rows_between_is_passed_and_the_batch_is_there_once(make: Make) -> None:
    sink = make()
    attempts: list[int] = []

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        attempts.append(handle.version())
        if len(attempts) <= 2:
            nothing = DeltaTable(sink.path)
            nothing.create_write_transaction([], mode="append", schema=nothing.schema())
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    assert sink.commit(entry(0), write) == 3
    assert attempts == [0, 1, 2]
    assert sorted(row["k"] for row in rows_in(sink)) == ["x", "y"]


def test_rows_that_somebody_else_writes_during_a_batch_are_refused(make: Make) -> None:
    sink = make()

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        write_deltalake(sink.path, pa.table({"k": ["foreign"], "n": [0]}), mode="append")
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    with pytest.raises(ForeignWrite, match="version 1 of table") as raised:
        sink.commit(entry(0), write)
    assert "streams accept" in raised.value.next_step
    assert [row["k"] for row in rows_in(sink)] == ["foreign"]


def test_a_compaction_by_hand_between_two_batches_is_no_foreign_row(make: Make) -> None:
    sink = make()
    for batch in range(3):
        append(sink, entry(batch), ROWS)
    DeltaTable(sink.path).optimize.compact()
    append(sink, entry(3), ROWS)
    assert len(rows_in(sink)) == 8


def test_any_other_failure_of_the_write_goes_up_and_leaves_nothing(make: Make) -> None:
    sink = make()

    def write(*_: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        sink.commit(entry(0), write)
    assert make().position == Txn(1, -1)


def test_the_log_is_read_again_only_when_there_is_something_new(
    make: Make, home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, reads = make(), []
    reading = DeltaTable.update_incremental
    monkeypatch.setattr(DeltaTable, "update_incremental", lambda self: (reads.append(1), reading(self)))
    sink.refresh()
    assert not reads
    write_deltalake(sink.path, ROWS, mode="append")
    sink.refresh()
    assert len(reads) == 1 and sink.handle.version() == 1


def test_a_log_that_went_on_past_a_sleeping_driver_is_read_again(make: Make) -> None:
    sink = make()
    for _ in range(3):
        write_deltalake(sink.path, ROWS, mode="append")
    shorten_log(sink.path)  # neither our version nor the one after it is left
    sink.refresh()
    assert sink.handle.version() == 3


def test_a_commit_that_can_never_be_made_is_told_at_once(make: Make) -> None:
    """An append-only table takes no removal: that is no race with somebody else, and is not tried again."""
    sink = make()
    ArrowAppend(sink, ROWS).commit(entry(0))
    sink.handle.alter.set_table_properties({"delta.appendOnly": "true"})
    sink.refresh()
    sink.committed()
    file = next(iter(table_files(sink.path, sink.handle.version()).values()))
    tries = []

    def write(_: DeltaTable, properties: CommitProperties) -> None:
        tries.append(1)
        sink.commit_actions([file.remove(1)], properties)

    with pytest.raises(PermanentError, match="append-only"):
        sink.commit(entry(1), write)
    assert len(tries) == 1


def test_a_commit_that_lost_a_race_is_tried_again(make: Make) -> None:
    sink = make()
    tries = []

    def write(handle: DeltaTable, properties: CommitProperties) -> None:
        tries.append(1)
        if len(tries) < 3:
            DeltaTable(sink.path).alter.set_table_properties({"delta.checkpointInterval": str(90 + len(tries))})
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    assert sink.commit(entry(0), write) is not None
    assert len(tries) == 3 and len(rows_in(sink)) == ROWS.num_rows


def test_a_table_that_never_holds_still_is_given_up_for_now(make: Make) -> None:
    sink = make()
    attempts: list[int] = []

    def write(*_: object) -> None:
        attempts.append(1)
        DeltaTable(sink.path).alter.set_table_properties({"delta.checkpointInterval": str(90 + len(attempts))})
        raise CommitFailedError("somebody was first")

    with pytest.raises(CommitRefused, match="committed to by others"):
        sink.commit(entry(0), write)
    assert len(attempts) > 3
    assert sink.position == Txn(1, -1)


# Appends without deltalake.


def as_deltalake(sink: DeltaSink) -> DeltaTable:
    """The table as another program opens it."""
    return DeltaTable(sink.path)


def beside(sink: DeltaSink, happens: Callable[[], object]) -> Callable[[], list[AddAction]]:
    """New files of `ROWS`, before which something happens to the table, once."""
    left = [happens]

    def files() -> list[AddAction]:
        while left:
            left.pop()()
        return list(ArrowAppend(sink, ROWS)._files())

    return files


def test_an_append_says_what_one_of_deltalake_says(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for appends in (True, False):
        monkeypatch.setattr(DeltaSink, "appends", appends)
        sink = make()
        at = sink.append(ROWS, entry(len(told)))
        table = as_deltalake(sink)
        assert at == sink.version == table.version()
        assert table.transaction_version(sink.app_id) == entry(len(told)).txn.version
        commit = read_commit(sink.path, sink.version)
        (added,) = commit.adds
        stats = json.loads(added["stats"])
        known = LedgerEntry.decode(commit.user_metadata) == entry(len(told))
        bounds = (stats["minValues"]["n"], stats["maxValues"]["n"], stats["nullCount"]["n"])
        names = pq.read_schema(f"{sink.path}/{added['path']}").names
        said = (added["dataChange"], added["partitionValues"], stats["numRecords"])
        told.append((commit.operation, known, *said, *bounds, names))
    assert told == [("WRITE", True, True, {}, 2, 1, 2, 0, ["k", "n"])] * 2
    assert [row["k"] for row in rows_in(sink)] == ["x", "x", "y", "y"]


@pytest.mark.parametrize(
    ("happens", "raised"),
    [
        (lambda sink, _: write_deltalake(sink.path, ROWS, mode="append"), ForeignWrite),
        (lambda _, other: other.commit(entry(-1, kind="fence", generation=2), lambda *_: None), Fenced),
    ],
    ids=["rows of another program", "a newer generation"],
)
def test_an_append_that_loses_a_race_is_refused(
    make: Make, happens: Callable[[DeltaSink, DeltaSink], object], raised: type[Exception]
) -> None:
    sink, other = make(), make()
    sink.append(ROWS, entry(0))
    before = len(rows_in(sink))
    with pytest.raises(raised):
        sink.append_files(entry(1), beside(sink, lambda: happens(sink, other)))
    assert as_deltalake(sink).transaction_version(sink.app_id) != entry(1).txn.version
    assert len(rows_in(sink)) - before == (ROWS.num_rows if raised is ForeignWrite else 0)


def test_an_append_that_loses_a_race_to_a_commit_without_rows_or_to_itself_is_there_once(make: Make) -> None:
    sink, other = make(), make()
    nothing = lambda: as_deltalake(sink).alter.set_table_properties({"delta.checkpointInterval": "7"})  # noqa: E731
    assert sink.append_files(entry(0), beside(sink, nothing)) == 2
    assert sink.append_files(entry(1), beside(sink, lambda: other.append(ROWS, entry(1)))) is None
    assert len(rows_in(sink)) == 2 * ROWS.num_rows and sink.position == Txn(1, 1)
    assert [file.name for file in (sink.path / "_delta_log").iterdir() if file.suffix == ".tmp"] == []  # type: ignore[union-attr]


def test_a_commit_of_deltalake_after_appends_passes_over_no_commit_of_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not over one that comes between the check of the table and the commit."""
    sink = make()

    def library(handle: DeltaTable, properties: CommitProperties) -> None:
        write_deltalake(handle, ROWS, mode="append", commit_properties=properties)

    sink.append(ROWS, entry(0))
    sink.append(ROWS, entry(1))
    assert sink.commit(entry(2), library) == 3
    sink.append(ROWS, entry(3))
    holds = sink.holds

    def held(of: LedgerEntry) -> bool:
        found = holds(of)
        if sink.version == as_deltalake(sink).version() == 4:
            write_deltalake(sink.path, pa.table({"k": ["foreign"], "n": [0]}), mode="append")
        return found

    monkeypatch.setattr(sink, "holds", held)
    with pytest.raises(ForeignWrite, match="version 5 of table"):
        sink.commit(entry(4), library)
    assert as_deltalake(sink).version() == 5


def test_the_log_of_appends_has_checkpoints_and_is_read_from_the_newest(make: Make) -> None:
    sink = make()
    sink.set_properties({"delta.checkpointInterval": "10"}, 1)
    for batch in range(25):
        assert sink.append(ROWS, entry(batch)) == batch + 2
    log = sink.path / "_delta_log"
    assert sorted(file.name[:20] for file in log.glob("*.checkpoint.parquet")) == [f"{at:020d}" for at in (9, 19)]
    for version in range(19):
        (log / f"{version:020d}.json").unlink()
    assert len(rows_in(sink)) == 25 * ROWS.num_rows
    assert make().position == Txn(1, 24)


def test_an_append_after_a_pause_makes_no_version_that_the_log_has_cleaned_up(make: Make) -> None:
    sink, other = make(), make()
    sink.append(ROWS, entry(0))

    def meanwhile() -> None:
        other.update()
        for batch in range(1, 9):
            other.append(ROWS, entry(batch))
        shorten_log(sink.path, keep=2)

    assert sink.append_files(entry(3), beside(sink, meanwhile)) is None
    assert sorted(int(file.stem) for file in (sink.path / "_delta_log").glob("0*[0-9].json")) == [8, 9]
    assert len(rows_in(sink)) == 9 * ROWS.num_rows and sink.position == Txn(1, 8)


def test_a_mark_that_loses_a_race_is_not_made_on_top_of_a_fence(make: Make) -> None:
    old, new = make(), make()

    def write(*_: object) -> None:
        new.commit(entry(-1, kind="fence", generation=2), lambda *_: None)

    with pytest.raises(Fenced):
        old.commit(entry(0), write)
    assert make(generation=2).position == Txn(2, -1)


def test_columns_that_are_missing_are_null_with_their_bounds_and_unknown_ones_are_refused(make: Make) -> None:
    sink = make()
    sink.append(ROWS.select(["k"]), entry(0))
    (added,) = read_commit(sink.path, sink.version).adds
    assert json.loads(added["stats"])["nullCount"] == {"n": 2}
    sink.append(ROWS.set_column(1, "n", pa.array([1, 2], pa.int16())), entry(1))
    assert [row["n"] for row in as_deltalake(sink).to_pyarrow_table().to_pylist()].count(None) == 2
    with pytest.raises(Exception, match="number of fields does not match"):
        sink.append(ROWS.append_column("more", ROWS["n"]), entry(2))
    assert as_deltalake(sink).version() == sink.version == 2


def test_columns_that_a_writer_has_to_check_are_left_to_deltalake(make: Make) -> None:
    assert make().appends
    first = make().path / "_delta_log" / f"{0:020d}.json"
    text = first.read_text()
    for mark in (r"\"nullable\":false", None):
        plain = r"\"name\":\"n\",\"type\":\"long\",\"nullable\":true"
        assert plain in text
        checked = r"\"metadata\":{\"delta.invariants\":\"n > 0\"}"
        first.write_text(
            text.replace(plain, plain.replace(r"\"nullable\":true", mark))
            if mark
            else text.replace(plain + r",\"metadata\":{}", f"{plain},{checked}")
        )
        assert first.read_text() != text
        sink = DeltaSink(first.parent.parent, Declared(TABLE), STREAM, DeltaTable(first.parent.parent))
        assert not sink.appends
        first.write_text(text)


def test_a_file_whose_name_has_to_be_encoded_is_found(make: Make) -> None:
    sink = make()
    (action,) = ArrowAppend(sink, ROWS)._files()
    name = "a b%20c.parquet"
    (sink.path / action.path).rename(sink.path / name)  # type: ignore[arg-type]
    assert sink.append_files(entry(0), lambda: [replace(action, path=name)]) == 1
    assert len(rows_in(sink)) == ROWS.num_rows
