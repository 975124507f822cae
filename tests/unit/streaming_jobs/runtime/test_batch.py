"""One batch's way into the tables, step by step, with real tables and without Spark.

The fakes are Spark's alone: a frame is rows in memory, and staging hands them to deltalake's committer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from streaming_jobs.errors import CommitRefused, Fenced, LedgerConflict, OffsetsLost, TransientError
from streaming_jobs.ledger import CodeVersion, LedgerEntry, Txn
from streaming_jobs.positions import OffsetRange
from streaming_jobs.runtime import crash_points
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchFiles, BatchHooks, BatchReport, StopAtBorder
from streaming_jobs.runtime.batch_path import DriverPathAttempts, choose_path
from streaming_jobs.runtime.pace import Pace
from streaming_jobs.runtime.query_plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite, SinkSet
from streaming_jobs.sinks.delta import writers as staged
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.delta.output import DeltaOutput
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_setup import ensure_sink
from streaming_jobs.sinks.delta.writers import ArrowAppend, ParquetAppend, _parquet
from streaming_jobs.sources.base import Observed
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory
from tests.support.worlds import (
    CODE,
    DEAD_LETTERS,
    OUTPUT,
    PRIMARY,
    SECONDARY,
    STREAM,
    TOPIC,
    TOPIC_ID,
    Disk,
    append,
    entry,
    offsets,
    parity,
    plain,
)

PLAIN = PlanTraits(stateful=False, multiplies=False)
STATE = PlanTraits(stateful=True, multiplies=False)
MULTIPLYING = PlanTraits(stateful=False, multiplies=True)
UNKNOWN = PlanTraits(stateful=False, multiplies=False, unknown=("RememberThings",))

# which way


@pytest.mark.parametrize(
    ("traits", "records", "bytes_per_record", "died", "way"),
    [
        (PLAIN, 300_000, 512, False, "driver"),
        (PLAIN, 524_288, 512, False, "driver"),  # 256 MB to the byte
        (PLAIN, 524_289, 512, False, "executor"),
        (PLAIN, 300_000, 4096, False, "executor"),
        (PLAIN, 10, 512, True, "executor"),
        (STATE, 10_000_000, 512, False, "driver"),  # what state emits does not follow the records that come in
        (STATE, 10, 512, True, "executor"),
        (MULTIPLYING, 10_000, 512, False, "driver"),
        (MULTIPLYING, 10_001, 1, False, "executor"),
        (UNKNOWN, 1, 1, False, "executor"),
    ],
)
def test_a_batch_goes_through_the_driver_when_it_surely_fits(
    traits: PlanTraits, records: int, bytes_per_record: float, died: bool, way: str
) -> None:
    chosen = choose_path(StreamSettings(), traits, records=records, bytes_per_record=bytes_per_record, died_before=died)
    assert chosen == way


@pytest.mark.parametrize("path", ["driver", "executor"])
def test_a_path_that_was_set_holds_whatever_the_batch_is(path: Any) -> None:
    settings = StreamSettings(path=path)
    for traits in (PLAIN, STATE, MULTIPLYING, UNKNOWN):
        for died in (True, False):
            assert choose_path(settings, traits, records=10**9, bytes_per_record=1e6, died_before=died) == path


def test_a_batch_that_died_in_the_driver_is_remembered_and_no_other_one(tmp_path: Path) -> None:
    attempts = DriverPathAttempts(tmp_path / "attempt")
    assert not attempts.died(Txn(1, 7))
    attempts.begin(Txn(1, 7))
    again = DriverPathAttempts(tmp_path / "attempt")  # as the next driver finds it
    assert again.died(Txn(1, 7))
    assert not again.died(Txn(1, 8))
    assert not again.died(Txn(2, 7))


# the way itself


@dataclass
class Frame:
    """Rows in memory where Spark has a frame."""

    rows: pa.Table
    log: list[str]
    sparkSession: None = None

    def where(self, condition: str) -> Frame:
        """Rows whose n leaves the remainder that the condition ends with."""
        mask = [n % 2 == int(condition[-1]) for n in self.rows["n"].to_pylist()]
        return Frame(self.rows.filter(pa.array(mask, pa.bool_())), self.log)

    def persist(self) -> Frame:
        self.log.append("persist")
        return self

    def unpersist(self) -> None:
        self.log.append("unpersist")

    @property
    def write(self) -> Frame:
        """Stands for Spark's writer too."""
        return self

    def format(self, name: str) -> Frame:
        self.log.append(f"write {name}")
        return self

    def mode(self, name: str) -> Frame:
        return self

    def save(self) -> None:
        """Runs the plan."""


@dataclass
class Recorded(ArrowAppend):
    """An append that says when it was committed."""

    log: list[str] = field(default_factory=list)

    def commit(self, made: LedgerEntry) -> int | None:
        self.log.append(f"commit {self.sink.name}")
        return super().commit(made)

    def close(self) -> None:
        self.log.append(f"close {self.sink.name}")


@dataclass
class Source:
    """The part of a Kafka source that the pipeline uses."""

    name: str = TOPIC
    observation: str = "recourse_things"
    lateness: timedelta | None = timedelta(seconds=10)

    def late_records(self, spark: object, offsets: OffsetRange, watermark_ms: int) -> int:
        """Reads the batch's own range again."""
        assert offsets.records == 15
        return watermark_ms // 1000

    def bad_records(self, spark: object, offsets: OffsetRange) -> Any:
        """The table of dead letters reads them, which is in memory here."""
        raise NotImplementedError


class Output(DeltaOutput):
    """A table whose rows are in memory already; it says what is asked of it."""

    def __init__(self, sink: DeltaSink, driver: Driver) -> None:
        super().__init__(sink, StreamSettings())
        self.driver = driver

    def prepare(self, frame: Frame, rows: BatchOfRows) -> PendingWrite:  # type: ignore[override]
        self.own = self.driver.pipeline.settings
        return self.driver.prepare(self, frame, rows)


class Letters(Output):
    """The table of dead letters; how many there are is what the driver's source counts."""

    def prepare_letters(self, spark: None, refused: Any, null_keys: Any, rows: BatchOfRows) -> PendingWrite:
        return self.driver.prepare_letters(self, refused, null_keys, rows)


class Driver:
    """A driver's pipeline over a stream on disk; a new one over the same disk is a restart.

    What a test wants to happen around a batch it puts into `before_commit`, `report`, `replan`, `at` or `prepare`.
    """

    def __init__(self, disk: Disk, code: CodeVersion = CODE) -> None:
        self.disk, self.log, self.reports = disk, [], []  # type: tuple[Disk, list[str], list[BatchReport]]
        self.bad = 0
        self.newest: int | None = 7_000_000
        self.watermark: int | None = None
        self.null_keys: pa.Table | None = None
        self.null_keys_of = PRIMARY
        self.noted = 0
        self.ways: list[tuple[bool, bool]] = []
        self.before_commit: Callable[[], object] = lambda: self.log.append("before_commit")
        self.report: Callable[[BatchReport], object] = self.reports.append
        self.replan: Callable[[Any, int], bool] = lambda *_: False
        self.at: Callable[[str, str, int], object] = lambda name, _, number: self.log.append(f"{name} {number}")
        self.prepare: Callable[[Output, Frame, BatchOfRows], PendingWrite] = self.in_memory
        self.prepare_letters: Callable[[Output, Any, Any, BatchOfRows], PendingWrite] = self.letters_in_memory
        self.sinks = Disk(disk.settings).open().sinks
        self.stop = threading.Event()
        self.pipeline = BatchPipeline(
            stream=parity,
            generation=1,
            topic_ids={TOPIC: TOPIC_ID},
            sources=[Source()],
            sinks=self.sink_set(),
            files=BatchFiles(
                StreamFolder.of(disk.settings, STREAM).checkpoint(1),
                disk.ledger_file,
                DriverPathAttempts(disk.settings.state / STREAM / "attempt"),
            ),
            hooks=BatchHooks(
                stop=self.stop,
                before_commit=lambda: self.before_commit() and None,
                report=lambda made: self.report(made) and None,
                between=lambda batch: self.log.append(f"between {batch}"),
                replan=lambda files, batch: bool(self.replan(files, batch)),
                at=lambda name, stream, number: self.at(name, stream, number) and None,
            ),
            code=code,
            settings=StreamSettings(),
            traits=PLAIN,
            upkeep=[type("TableMaintenance", (), {"after_commit": lambda _: self.log.append("upkeep")})()],
            query=self,
        )

    def sink_set(
        self, secondary: Sequence[str] = (SECONDARY,), deletes: Mapping[str, DeltaSink] | None = None
    ) -> SinkSet:
        """The tables of the stream."""
        return SinkSet(
            Output(self.sinks[PRIMARY], self),
            [Output(self.sinks[name], self) for name in secondary],
            Letters(self.sinks[DEAD_LETTERS], self),
            {table: Output(sink, self) for table, sink in (deletes or {}).items()},
        )

    def observed(self, observation: str) -> Observed:
        assert observation == "recourse_things"
        return Observed(self.bad, self.newest)

    def dropped_behind(self) -> int | None:
        self.log.append("ask for dropped rows")
        return self.watermark

    def in_memory(self, output: Output, frame: Frame, rows: BatchOfRows) -> Recorded:
        self.log.append(f"stage {output.name}")
        self.ways.append(output.way(rows))
        null_keys = self.null_keys if output.name == self.null_keys_of else None
        staged = Recorded(output.sink, frame.rows, null_keys, log=self.log)
        deletes = self.pipeline.sinks.deletes.get(output.name)
        if isinstance(deletes, Output):
            staged.deletes = Recorded(deletes.sink, frame.rows.slice(0, self.noted), log=self.log)  # type: ignore[misc]
        return staged

    def letters_in_memory(self, output: Output, refused: Any, null_keys: Any, rows: BatchOfRows) -> Recorded:
        count = sum(count for _, _, count in refused) + sum(rows.num_rows for rows in null_keys)
        self.log.append(f"stage {output.name}")
        letters = [{"topic": TOPIC, "offset": number, "reason": "not_json"} for number in range(count)]
        schema = pa.schema(output.sink.handle.schema().to_arrow())
        return Recorded(output.sink, pa.Table.from_pylist(letters, schema), log=self.log)

    def run(self, batch: int, numbers: list[int] | None = None) -> None:
        """Spark plans the batch and calls the pipeline."""
        self.disk.plan(batch)
        numbers = [1, 2, 3, 4] if numbers is None else numbers
        rows = pa.table({"k": pa.array(["x"] * len(numbers), pa.string()), "n": pa.array(numbers, pa.int64())})
        self.pipeline(Frame(rows, self.log), batch)  # type: ignore[arg-type]

    @property
    def commits(self) -> list[str]:
        """The tables in the order they were committed to."""
        return [line.removeprefix("commit ") for line in self.log if line.startswith("commit ")]


Start = Callable[..., Driver]


@pytest.fixture
def disk(settings: SettingsFactory) -> Disk:
    return Disk(settings()).open()


@pytest.fixture
def start(disk: Disk) -> Start:
    return lambda **options: Driver(disk, **options)


def numbers(disk: Disk, table: str) -> list[int]:
    return sorted(DeltaTable(disk.table(table)).to_pyarrow_table()["n"].to_pylist())


def newest_entry(disk: Disk, table: str) -> LedgerEntry:
    commit, _ = newest(disk.table(table), STREAM)
    assert commit is not None and commit.entry is not None
    return commit.entry


def commits_of(disk: Disk, table: str) -> int:
    return sum(1 for c in walk(disk.table(table)) if c.entry and c.entry.kind == "batch")


def test_a_batch_meets_its_steps_in_the_order_of_the_contract(start: Start) -> None:
    driver = start()
    driver.bad = 2
    driver.run(0)
    assert driver.log == [
        "batch_committed -1",
        "between -1",
        "batch_started 0",
        "persist",
        f"stage {PRIMARY}",
        f"stage {SECONDARY}",
        "staged 0",
        "before_commit",
        f"stage {DEAD_LETTERS}",
        f"commit {DEAD_LETTERS}",
        f"commit {SECONDARY}",
        "secondary_committed 0",
        f"commit {PRIMARY}",
        f"close {DEAD_LETTERS}",
        f"close {SECONDARY}",
        f"close {PRIMARY}",
        "unpersist",
        "primary_committed 0",
        "upkeep",
    ]


def test_the_points_at_which_a_test_can_kill_are_those_that_a_batch_meets(start: Start) -> None:
    driver = start()
    driver.run(0)
    driver.run(1)
    met = [line.split()[0] for line in driver.log if line.split()[0] in crash_points.POINTS]
    assert tuple(met[1:]) == crash_points.POINTS + crash_points.POINTS[:4]


def test_each_row_is_in_its_table_and_each_entry_says_what_was_read_and_written(disk: Disk, start: Start) -> None:
    driver = start()
    driver.bad = 2
    driver.run(0)
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == ([2, 4], [1, 3])
    primary = newest_entry(disk, PRIMARY)
    assert primary == entry(0, rows={SECONDARY: 2, "dead_letters": 2, "written": 2})
    assert newest_entry(disk, SECONDARY) == entry(0, SECONDARY, rows={"written": 2})
    assert newest_entry(disk, DEAD_LETTERS) == entry(0, DEAD_LETTERS, rows={"written": 2})


def test_the_primary_names_the_transaction_of_every_other_table(disk: Disk, start: Start) -> None:
    driver = start()
    driver.run(0)
    driver.run(1, [2])
    txns = newest_entry(disk, PRIMARY).txns
    assert txns == {SECONDARY: Txn(1, 0).version, DEAD_LETTERS: Txn(1, -1).version}


def test_a_table_without_rows_in_a_batch_gets_no_commit_and_the_primary_always_one(disk: Disk, start: Start) -> None:
    driver = start()
    driver.run(0, [])
    assert driver.commits == [PRIMARY]
    assert newest_entry(disk, PRIMARY).rows == {SECONDARY: 0, "written": 0}
    assert commits_of(disk, PRIMARY) == 1


def test_rows_without_a_key_become_dead_letters(disk: Disk, start: Start) -> None:
    driver = start()
    driver.null_keys = pa.table({"k": pa.array([None], pa.string()), "n": [7]})
    driver.run(0)
    assert newest_entry(disk, PRIMARY).rows["dead_letters"] == 1
    assert commits_of(disk, DEAD_LETTERS) == 1


@pytest.mark.parametrize("table", [PRIMARY, SECONDARY])
def test_what_is_remembered_of_deletes_is_committed_before_its_table_and_once(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    remembered = ensure_sink(disk.settings, Declared(f"{table}_deletes"), STREAM, OUTPUT, generation=1)

    def remembering(noted: int) -> Driver:
        driver = start()
        driver.pipeline.sinks, driver.noted = driver.sink_set(deletes={table: remembered}), noted
        return driver

    driver = remembering(1)

    def dies(name: str, _: str, number: int) -> None:
        if name == "secondary_committed":
            raise KeyboardInterrupt

    driver.at = dies
    with pytest.raises(KeyboardInterrupt):
        driver.run(0)
    assert driver.commits == [remembered.name, SECONDARY]
    again = remembering(1)
    again.run(0)
    assert again.commits == [PRIMARY]
    made = newest_entry(disk, PRIMARY)
    assert (
        made.rows == {remembered.name: 1, SECONDARY: 2, "written": 2}
        and made.txns[remembered.name] == Txn(1, 0).version
    )
    quiet = remembering(0)
    quiet.run(1)
    assert quiet.commits == [SECONDARY, PRIMARY]
    made = newest_entry(disk, PRIMARY)
    assert remembered.name not in made.rows and made.txns[remembered.name] == Txn(1, 0).version


def test_a_no_data_batch_asks_for_no_bad_records(disk: Disk, start: Start) -> None:
    """Spark runs batches without data when a watermark moves; observed counts are then of another batch."""
    driver = start()
    driver.run(0)
    driver.bad = 9
    driver.disk.plan(1)
    same = (disk.folder / "offsets" / "0").read_text()
    (disk.folder / "offsets" / "1").write_text(same)
    driver.run(1)
    assert DEAD_LETTERS not in driver.commits


def test_a_batch_is_reported_and_kept_in_the_ledger_beside_the_state(disk: Disk, start: Start) -> None:
    driver = start()
    driver.bad = 1
    driver.run(0)
    (report,) = driver.reports
    assert (report.batch, report.records, report.rows, report.dead_letters) == (0, 15, 2, 1)
    assert (report.path, report.committer, report.skipped, report.version) == ("driver", "direct", False, 1)
    newest = disk.ledger_file.newest(STREAM)
    assert newest is not None
    assert newest == (newest_entry(disk, PRIMARY), {PRIMARY: 1, SECONDARY: 1, DEAD_LETTERS: 1})


def test_several_batches_leave_a_world_that_preflight_lets_start(disk: Disk, start: Start) -> None:
    driver = start()
    for batch in range(4):
        driver.bad = batch % 2
        driver.run(batch, list(range(batch * 3, batch * 3 + 3)))
        assert disk.findings() == []
        disk.finish(batch)
        assert disk.findings() == []
    assert numbers(disk, PRIMARY) + numbers(disk, SECONDARY) == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]


# again


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


def write_as_executors(sink: DeltaSink, rows: pa.Table, target: Path) -> None:
    """Stands for Spark's writer."""
    target.mkdir(parents=True)
    pq.write_table(rows, target / "part-0.parquet")


def test_a_repeated_batch_keeps_the_files_of_the_dead_letters_that_it_has_committed(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_executors(driver: Driver) -> Driver:
        def staged_files(output: Output, refused: Any, null_keys: Any, rows: BatchOfRows) -> ParquetAppend:
            table = driver.letters_in_memory(output, refused, null_keys, rows).table
            return _parquet(output.sink, table, (rows.generation, rows.batch))

        driver.prepare_letters = staged_files
        driver.bad = 2
        return driver

    monkeypatch.setattr(staged, "_write_parquet", write_as_executors)
    first = on_executors(start())
    monkeypatch.setattr(first.pipeline, "_late", lambda *_: (_ for _ in ()).throw(TransientError("Kafka is away")))
    with pytest.raises(TransientError):
        first.run(0)
    on_executors(start()).run(0)
    assert DeltaTable(disk.table(DEAD_LETTERS)).to_pyarrow_table().num_rows == 2
    assert newest_entry(disk, PRIMARY).rows["dead_letters"] == 2
    assert disk.findings() == []


def test_files_that_are_in_the_table_are_no_leftover_of_their_batch(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = disk.sinks[PRIMARY]
    rows = pa.table({"k": ["x"], "n": pa.array([1], pa.int64())})

    monkeypatch.setattr(staged, "_write_parquet", write_as_executors)
    _parquet(sink, rows, (1, 0))
    (died,) = (sink.path / "g0001").iterdir()
    _parquet(sink, rows, (1, 0)).commit(entry(0))
    assert not died.exists()
    _parquet(sink, rows, (1, 0))
    assert numbers(disk, PRIMARY) == [1]


def test_a_batch_that_is_in_the_tables_computes_nothing(start: Start) -> None:
    start().run(0)
    again = start()
    again.run(0)
    assert not [line for line in again.log if line.startswith(("stage", "commit ", "persist", "upkeep"))]
    assert [(r.batch, r.skipped, r.rows) for r in again.reports] == [(0, True, 2)]


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


def test_rows_without_a_key_of_a_secondary_table_are_dead_letters_too(disk: Disk, start: Start) -> None:
    driver = start()
    driver.null_keys, driver.null_keys_of = pa.table({"k": pa.nulls(3, pa.string())}), SECONDARY
    driver.run(0)
    assert newest_entry(disk, PRIMARY).rows["dead_letters"] == 3


def test_dead_letters_written_by_earlier_code_are_kept_counted_and_told(disk: Disk, start: Start) -> None:
    earlier = CodeVersion("000000000000", "0.0.9")
    letter = pa.table({"topic": [TOPIC], "offset": pa.array([1], pa.int64()), "reason": ["not_json"]})
    append(disk.sinks[DEAD_LETTERS], entry(0, DEAD_LETTERS, code=earlier, rows={"written": 1}), letter)
    driver = start()
    driver.run(0)  # the code of now refuses nothing
    made = newest_entry(disk, PRIMARY)
    assert made.rows["dead_letters"] == 1
    assert made.note == f"mixed batch: {DEAD_LETTERS} was written by an earlier version of the code"


def test_a_batch_in_the_primary_with_other_offsets_stops_the_stream(disk: Disk, start: Start) -> None:
    driver = start()
    wider = replace(offsets(0), end={0: 99, 1: 5})
    append(driver.sinks[PRIMARY], entry(0, offsets=(wider,)), pa.table({"k": ["x"], "n": [2]}))
    with pytest.raises(LedgerConflict, match=r"is in table evens with offsets things .*99.* the checkpoint has things"):
        driver.run(0)
    assert driver.commits == []


def test_a_batch_in_a_secondary_table_with_other_offsets_stops_the_stream_before_the_primary(
    disk: Disk, start: Start
) -> None:
    driver = start()
    narrower = replace(offsets(0), end={0: 9, 1: 5})
    append(driver.sinks[SECONDARY], entry(0, SECONDARY, offsets=(narrower,)), pa.table({"k": ["x"], "n": [1]}))
    with pytest.raises(LedgerConflict, match=f"table {SECONDARY}"):
        driver.run(0)
    assert numbers(disk, PRIMARY) == []
    assert driver.pipeline.failure is not None


def test_a_table_that_is_ahead_of_the_checkpoint_stops_the_stream(start: Start) -> None:
    driver = start()
    append(driver.sinks[PRIMARY], entry(5), pa.table({"k": ["x"], "n": [2]}))
    with pytest.raises(LedgerConflict, match="its log does not show what g0001 batch 0 read"):
        driver.run(0)


def test_a_driver_of_an_older_generation_writes_nothing(disk: Disk, start: Start) -> None:
    driver = start()
    fence = entry(-1, kind="fence", generation=2, plan="r1")
    for sink in driver.sinks.values():
        sink.commit(replace(fence, table=sink.name), lambda *_: None)
    with pytest.raises(Fenced):
        driver.run(0)
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == ([], [])


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


# stopping and failing


def test_a_stop_is_obeyed_before_any_side_effect(disk: Disk, start: Start) -> None:
    driver = start()
    driver.stop.set()
    with pytest.raises(StopAtBorder):
        driver.run(0)
    assert driver.log == ["batch_committed -1"]
    assert driver.pipeline.stopped_at_border
    assert driver.pipeline.failure is None
    assert commits_of(disk, PRIMARY) == 0


def test_a_batch_that_is_to_end_elsewhere_is_not_begun(disk: Disk, start: Start) -> None:
    driver, checked = start(), []
    driver.replan = lambda _, batch: checked.append(batch) or len(checked) == 1
    with pytest.raises(StopAtBorder):
        driver.run(0)
    assert driver.pipeline.replanned and driver.pipeline.failure is None and commits_of(disk, PRIMARY) == 0
    driver.run(0)
    assert checked == [0, 0] and numbers(disk, PRIMARY) == [2, 4]


def test_a_batch_that_a_table_has_already_ends_where_it_ended(disk: Disk, start: Start) -> None:
    start().run(0)
    again = start()
    again.replan = lambda *_: pytest.fail("it was asked")
    again.run(0)
    assert numbers(disk, PRIMARY) == [2, 4]


def test_a_stop_that_comes_inside_a_batch_lets_it_end(disk: Disk, start: Start) -> None:
    driver = start()
    driver.before_commit = driver.stop.set
    driver.run(0)
    assert numbers(disk, PRIMARY) == [2, 4]
    with pytest.raises(StopAtBorder):
        driver.run(1)


def test_a_failure_is_kept_for_the_session_and_the_batch_can_come_again(disk: Disk, start: Start) -> None:
    def topic_gone() -> None:
        raise OffsetsLost("topic things was deleted")

    driver = start()
    driver.before_commit = topic_gone
    with pytest.raises(OffsetsLost):
        driver.run(0)
    assert isinstance(driver.pipeline.failure, OffsetsLost)
    assert not driver.pipeline.in_batch
    assert driver.log[-2:] == [f"close {PRIMARY}", "unpersist"]
    start().run(0)
    assert numbers(disk, PRIMARY) == [2, 4]


def test_whether_a_batch_is_under_way_is_known_outside(start: Start) -> None:
    driver = start()
    seen = []
    driver.before_commit = lambda: seen.append(driver.pipeline.in_batch)
    assert not driver.pipeline.in_batch
    driver.run(0)
    assert seen == [True]
    assert not driver.pipeline.in_batch


def test_a_table_that_others_keep_committing_to_is_tried_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start()

    def refuse(*_: object) -> None:
        raise CommitRefused("by others")

    monkeypatch.setattr(driver.sinks[PRIMARY], "commit", refuse)
    with pytest.raises(TransientError):
        driver.run(0)


# large batches


@pytest.fixture
def large(start: Start) -> Driver:
    """A driver whose first batch will not fit."""
    return start()


def test_a_large_batch_that_does_not_fit_the_driver_is_repeated_through_the_executors(
    large: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> PendingWrite:
        raise RuntimeError("Total size of serialized results is bigger than spark.driver.maxResultSize (768.0 MiB)")

    large.prepare = too_large
    with pytest.raises(TransientError, match="batch 0 did not fit the driver"):
        large.run(0)
    large.prepare = large.in_memory
    large.run(0)
    assert large.ways == [(False, False)] * 2
    assert large.reports[-1].path == "executor"
    large.run(1)
    assert large.reports[-1].path == "driver"
    large.run(1)
    assert large.reports[-1].path == "driver"


@pytest.mark.parametrize("traits", [STATE, UNKNOWN])
def test_the_state_of_a_batch_on_the_executors_is_computed_once(start: Start, traits: PlanTraits) -> None:
    driver = start()
    driver.pipeline.stream, driver.pipeline.sinks = plain, driver.sink_set(secondary=())
    driver.pipeline.settings = StreamSettings(path="executor")
    driver.run(0)
    assert "persist" not in driver.log
    driver.pipeline.traits = traits
    driver.run(1)
    assert driver.log.index("persist") < driver.log.index(f"stage {PRIMARY}", driver.log.index("persist"))
    assert driver.log.count("persist") == driver.log.count("unpersist") == 1


def test_any_other_failure_of_staging_goes_up_as_it_is(large: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> PendingWrite:
        raise ZeroDivisionError("in the stream's function")

    large.prepare = broken
    with pytest.raises(ZeroDivisionError):
        large.run(0)
    assert large.log[-2:] == ["persist", "unpersist"]


def test_a_table_outside_the_profile_or_a_setting_sends_commits_through_spark(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start()
    driver.pipeline.settings = StreamSettings(committer="spark")
    driver.run(0)
    assert driver.ways == [(True, True)] * 2
    driver.pipeline.settings = StreamSettings()
    driver.sinks[PRIMARY].handle.alter.add_constraint({"positive": "n > 0"})
    driver.ways.clear()
    driver.run(1)
    assert driver.ways == [(True, True), (True, False)]


def test_the_size_of_records_is_learnt_from_batches_that_are_large_enough(large: Driver) -> None:
    before = large.pipeline._bytes_per_record
    wide = {"k": ["x" * 1000] * 2000, "n": list(range(2000))}
    staged: Mapping[str, Any] = {"table": pa.table(wide)}
    large.pipeline._learn(type("Staged", (), staged)(), 999)
    assert large.pipeline._bytes_per_record == before
    large.pipeline._learn(type("Staged", (), staged)(), 2000)
    assert large.pipeline._bytes_per_record == pytest.approx(1012, rel=0.02)
    large.pipeline.traits = STATE
    large.pipeline._learn(type("Staged", (), staged)(), 1000)
    assert large.pipeline._bytes_per_record == pytest.approx(1012, rel=0.02)


# killing on purpose


def test_a_test_can_kill_at_one_point_of_one_batch_and_nothing_else_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(crash_points.os, "kill", lambda pid, number: killed.append(number))
    crash_points.crash_point("staged", "s", 3)
    monkeypatch.setenv("RECOURSE_CRASH", "s:staged:3")
    for name, stream, number in (
        ("staged", "s", 2),
        ("staged", "s", 33),
        ("staged", "other", 3),
        ("primary_committed", "s", 3),
        ("staged", "s", 3),
    ):
        crash_points.crash_point(name, stream, number)
    assert killed == [9]


@pytest.mark.parametrize(
    ("newest", "watermark_ms", "dropped_behind", "late"),
    [
        (7_000_000, 6_000, 6_000, 6),
        (7_000_000, 6_000, 4_000, 4),  # Spark judges late rows by the watermark of the batch before
        (7_000_000, 6_000, None, 0),  # behind the watermark, and nothing was dropped: their windows are open
        (7_000_000, 0, 0, 0),  # no watermark yet
        (None, 6_000, 6_000, 0),  # no good record
    ],
)
def test_records_behind_the_watermark_are_counted_when_state_dropped_some(
    disk: Disk, start: Start, newest: int | None, watermark_ms: int, dropped_behind: int | None, late: int
) -> None:
    driver = start()
    driver.pipeline.traits = STATE
    driver.newest, driver.watermark = newest, dropped_behind
    disk.plan(0)
    path = disk.folder / "offsets" / "0"
    path.write_text(path.read_text().replace('"batchWatermarkMs": 0', f'"batchWatermarkMs": {watermark_ms}'))
    driver.run(0)
    assert driver.reports[-1].late == newest_entry(disk, PRIMARY).rows.get("late", 0) == late
    line = disk.ledger_file.newest(STREAM)
    assert line is not None and line[0].rows.get("late", 0) == late
    assert driver.reports[-1].newest_record == newest
    possible = newest is not None and watermark_ms > 0
    assert ("ask for dropped rows" in driver.log) == possible, "the plan is looked through only if there may be some"


def after_the_first(longest: float) -> Pace:
    """The pace of a stream that has made its first batch."""
    pace = Pace(timedelta(seconds=longest))
    assert pace.after(1, time.monotonic()) == 0.0
    return pace


def test_a_batch_of_few_records_is_followed_by_a_pause_that_a_stop_ends(start: Start) -> None:
    driver = start()
    waits: list[float] = []
    driver.stop.wait = waits.append  # type: ignore[method-assign,assignment]
    driver.run(0)
    assert waits == [], "no pace, no pause: a replay goes on at once"
    driver.pipeline.pace = after_the_first(0.001)
    driver.run(1)
    assert waits == [pytest.approx(0.001, rel=0.1)]
    assert driver.log[-1] == "upkeep", "the pause comes after everything that the batch does"
    driver.pipeline.settings = StreamSettings(max_offsets_per_trigger=15)  # a batch here reads 15 offsets
    driver.run(2)
    assert len(waits) == 1, "a batch that is full says that more is waiting"
    driver.pipeline.settings = StreamSettings(max_offsets_per_trigger=16)
    driver.run(3)
    assert len(waits) == 2
    driver = start()
    driver.pipeline.pace = after_the_first(60)
    driver.report = lambda _: driver.stop.set()
    began = time.monotonic()
    driver.run(4)
    assert time.monotonic() - began < 30
