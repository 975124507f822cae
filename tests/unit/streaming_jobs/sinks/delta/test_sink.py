"""A stream's table is committed to exactly once, whoever else commits."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from streaming_jobs.errors import CommitRefused, Fenced, ForeignWrite, PermanentError
from streaming_jobs.ledger.entry import Txn
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
