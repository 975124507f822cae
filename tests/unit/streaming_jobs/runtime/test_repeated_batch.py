"""A batch that was begun before, by a driver that died or by another: each row is there once, or the stream stops.

And crash points: a test can kill a driver at one of them.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from streaming_jobs.errors import Fenced, LedgerConflict, PermanentError, TransientError
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.runtime import crash_points
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.writers import prepare_write
from tests.support.batch_driver import STATE, UNKNOWN, Driver, Output, Start, commits_of, newest_entry, numbers
from tests.support.delta_table import InProcess
from tests.support.worlds import DEAD_LETTERS, PRIMARY, SECONDARY, STREAM, TOPIC, Disk, append, entry, offsets

KILLED = {
    "batch_started": ([], []),
    "staged": ([], []),
    "secondary_committed": ([], [1, 3]),
    "primary_committed": ([2, 4], [1, 3]),
}


@pytest.mark.parametrize("point", KILLED)
def test_a_batch_killed_anywhere_is_repeated_and_every_row_is_there_once(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str, stream: str, number: int) -> None:
        if (name, stream, number) == (point, STREAM, 0):
            raise Killed

    driver = start()
    driver.bad = 2
    driver.at = kill
    with pytest.raises(Killed):
        driver.run(0)
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == KILLED[point]
    assert disk.findings() == []
    again = start()
    again.bad = 2
    again.run(0)
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == ([2, 4], [1, 3])
    assert [commits_of(disk, table) for table in (PRIMARY, SECONDARY, DEAD_LETTERS)] == [1, 1, 1]
    assert newest_entry(disk, PRIMARY).rows == {SECONDARY: 2, "dead_letters": 2, "written": 2}
    assert again.reports[-1].skipped == (point == "primary_committed")
    assert disk.findings() == []


def by_executors(
    sink: DeltaSink, rows: pa.Table, batch: tuple[int, int] = (1, 0), after: Callable[[], object] = lambda: None
) -> PendingWrite:
    """The rows in files that tasks wrote; `after` is called when a task has ended."""
    frame: Any = InProcess(rows, sink.schema, after)
    return prepare_write(sink, frame, driver=False, spark_commits=False, batch=batch)


def test_a_repeated_batch_keeps_the_files_of_the_dead_letters_that_it_has_committed(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_executors(driver: Driver) -> Driver:
        def staged_files(output: Output, refused: Any, rejected: Any, rows: BatchOfRows) -> PendingWrite:
            table = driver.letters_in_memory(output, refused, rejected, rows).table
            return by_executors(output, table, (rows.generation, rows.batch))

        driver.prepare_letters = staged_files
        driver.bad = 2
        return driver

    first = on_executors(start())
    monkeypatch.setattr(first.pipeline, "_late", lambda *_: (_ for _ in ()).throw(TransientError("Kafka is away")))
    with pytest.raises(TransientError):
        first.run(0)
    on_executors(start()).run(0)
    assert DeltaTable(disk.table(DEAD_LETTERS)).to_pyarrow_table().num_rows == 2
    assert newest_entry(disk, PRIMARY).rows["dead_letters"] == 2
    assert disk.findings() == []


ONE = pa.table({"k": ["x"], "n": pa.array([1], pa.int64())})


def test_files_that_are_in_the_table_are_no_leftover_and_rows_that_the_driver_does_not_see_are_refused(
    disk: Disk,
) -> None:
    sink = disk.sinks[PRIMARY]
    by_executors(sink, ONE)
    (died,) = (sink.path / "g0001").iterdir()
    by_executors(sink, ONE).commit(entry(0))
    assert not died.exists()
    by_executors(sink, ONE)
    assert numbers(disk, PRIMARY) == [1]
    # As on a cluster without a shared file system: committed, the batch would be empty and its records lost.
    with pytest.raises(PermanentError, match="the executors wrote 1 row for table .* have 0 as the driver sees them"):
        by_executors(sink, ONE, after=lambda: shutil.rmtree(sink.path / "g0001"))


def test_a_batch_is_refused_if_the_driver_does_not_see_the_file_of_one_task(disk: Disk) -> None:
    sink = disk.sinks[PRIMARY]
    three = pa.concat_tables([ONE] * 3)  # three tasks, each with a file
    by_executors(sink, three).commit(entry(0))
    assert numbers(disk, PRIMARY) == [1, 1, 1]

    def hide() -> None:
        next((sink.path / "g0001").glob("b000000001-*/*.parquet")).unlink()

    with pytest.raises(PermanentError, match="the executors wrote 3 rows for table .* have 2 as the driver sees them"):
        by_executors(sink, three, (1, 1), after=hide)


def test_a_batch_that_is_in_the_tables_computes_nothing(start: Start) -> None:
    start().run(0)
    again = start()
    again.run(0)
    assert not [line for line in again.log if line.startswith(("stage", "commit ", "persist", "upkeep"))]
    assert [(r.entry.batch, r.skipped, r.entry.rows_written) for r in again.reports] == [(0, True, 2)]


@pytest.mark.parametrize("traits", [STATE, UNKNOWN])
def test_a_batch_that_is_in_the_tables_computes_its_state_again_since_the_checkpoint_may_lack_it(
    start: Start, traits: PlanTraits
) -> None:
    start().run(0)
    again = start()
    again.pipeline.traits = traits
    again.run(0)
    assert "write noop" in again.log
    assert not [line for line in again.log if line.startswith(("stage", "commit "))]


def test_dead_letters_written_by_earlier_code_are_kept_counted_and_told(disk: Disk, start: Start) -> None:
    earlier = CodeVersion("000000000000", "0.0.9")
    letter = pa.table({"topic": [TOPIC], "offset": pa.array([1], pa.int64()), "reason": ["not_json"]})
    append(disk.sinks[DEAD_LETTERS], entry(0, DEAD_LETTERS, code=earlier, rows={"written": 1}), letter)
    driver = start()
    driver.run(0)  # the code of now refuses nothing
    made = newest_entry(disk, PRIMARY)
    assert made.rows["dead_letters"] == 1
    assert made.note == f"mixed batch: {DEAD_LETTERS} was written by an earlier version of the code"


@pytest.mark.parametrize("table", [PRIMARY, SECONDARY])
def test_a_batch_in_a_table_with_other_offsets_stops_the_stream_before_any_commit(
    disk: Disk, start: Start, table: str
) -> None:
    driver = start()
    other = replace(offsets(0), end={0: 99, 1: 5})
    append(driver.sinks[table], entry(0, table, offsets=(other,)), pa.table({"k": ["x"], "n": [2]}))
    text = rf"is in table {table} with offsets things .*99.* the checkpoint has things"
    with pytest.raises(LedgerConflict, match=text):
        driver.run(0)
    assert driver.commits == [] and driver.pipeline.failure is not None


def test_a_table_ahead_of_the_checkpoint_or_a_newer_generation_stops_the_stream(start: Start, disk: Disk) -> None:
    driver = start()
    append(driver.sinks[PRIMARY], entry(5), pa.table({"k": ["x"], "n": [2]}))
    with pytest.raises(LedgerConflict, match="its log does not show what g0001 batch 0 read"):
        driver.run(0)
    fence = entry(-1, kind="fence", generation=2, plan="r1")
    for sink in driver.sinks.values():
        sink.commit(replace(fence, table=sink.name), lambda *_: None)
    with pytest.raises(Fenced):
        driver.run(0)
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == ([2], []), "the driver has written nothing"


def test_a_batch_half_written_by_earlier_code_is_finished_and_told(disk: Disk, start: Start) -> None:
    earlier = CodeVersion("000000000000", "0.0.9")
    append(disk.sinks[SECONDARY], entry(0, SECONDARY, code=earlier), pa.table({"k": ["x"], "n": [1]}))
    driver = start()
    driver.run(0)
    note = f"mixed batch: {SECONDARY} was written by an earlier version of the code"
    assert newest_entry(disk, PRIMARY).note == note
    assert driver.reports[-1].entry.note == note
    assert numbers(disk, SECONDARY) == [1]


def test_a_second_driver_that_writes_the_same_batch_meanwhile_is_told(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start()
    other = Disk(disk.settings).open().sinks[PRIMARY]
    rows = pa.table({"k": ["x"], "n": [2]})
    driver.before_commit = lambda: append(other, entry(0), rows)
    with pytest.raises(LedgerConflict, match="appeared in table evens while this driver was writing it"):
        driver.run(0)
    assert numbers(disk, PRIMARY) == [2]
    assert driver.reports == []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that this process would have got."""
    signals: list[int] = []
    monkeypatch.setattr(crash_points.os, "kill", lambda pid, number: signals.append(number))
    monkeypatch.setattr(crash_points.time, "sleep", lambda _: None)
    return signals


@pytest.mark.parametrize(
    ("wanted", "met", "signals"),
    [
        (None, [("staged", "s", 3)], []),
        ("s:staged:3", [("staged", "s", 2), ("staged", "s", 33), ("staged", "other", 3)], []),
        ("s:staged:3", [("primary_committed", "s", 3)], []),
        ("s:staged:3", [("staged", "s", 3)], [signal.SIGKILL]),
        ("s:transaction_open:3+", [("staged", "s", 3), ("transaction_open", "s", 2)], []),
        ("s:transaction_open:3+", [("transaction_open", "s", 3)], [signal.SIGKILL]),
        ("s:transaction_open:3+", [("transaction_open", "s", 12)], [signal.SIGKILL]),
        ("s:transaction_open:3:stop", [("transaction_open", "s", n) for n in (2, 3, 3)], [signal.SIGSTOP]),
        ("s:transaction_open:3+:stop", [("transaction_open", "s", n) for n in (2, 5, 6)], [signal.SIGSTOP]),
    ],
    ids=[
        "nothing dies unasked",
        "at no other batch or stream",
        "at no other point",
        "at one point of one batch",
        "not before a later batch",
        "at a batch",
        "or at a later one",
        "stopped once, and the batch goes on later",
        "stopped once at a later one",
    ],
)
def test_a_test_can_kill_or_stop_a_driver_at_one_point_and_nothing_else_dies(
    monkeypatch: pytest.MonkeyPatch,
    sent: list[int],
    wanted: str | None,
    met: list[tuple[str, str, int]],
    signals: list[int],
) -> None:
    if wanted is not None:
        monkeypatch.setenv("RECOURSE_CRASH", wanted)
    for place in met:
        crash_points.crash_point(*place)
    assert sent == signals
