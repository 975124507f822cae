"""A batch on which the function raises, with an error policy: what is set aside, dropped or stops the stream.

Tables, ledger and the list of set-aside records are real; Spark's frames are rows in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest

from streaming_jobs import ErrorPolicy
from streaming_jobs.errors import (
    ErrorBudgetExceeded,
    FunctionFailed,
    FunctionRaised,
    PermanentError,
    RecordRefused,
    TransientError,
)
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.platform.failures import classify
from streaming_jobs.runtime.batch_hooks import StopAtBorder
from streaming_jobs.runtime.isolation import Isolation
from streaming_jobs.runtime.kept_records import KeptRecords
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sources.base import Aside, SourceCounts
from streaming_jobs.state.set_aside import RaisingRecord, SetAside, SetAsideFile, Spent
from streaming_jobs.state.stream_folder import StreamFolder
from tests.support.batch_driver import STATE, Driver, Frame, Output, Source, Start, commits_of, newest_entry, numbers
from tests.support.worlds import DEAD_LETTERS, PRIMARY, SECONDARY, STREAM, TOPIC, Disk, parity

BATCH = 15
"""Offsets of a batch: ten of partition 0, then five of partition 1. Record i has the number i."""
_RANGE = re.compile(r"`partition` = (\d+) AND `offset` >= (\d+) AND `offset` < (\d+)")


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in memory have no plan that is made once: each part is run by itself."""
    monkeypatch.setattr(KeptRecords, "planned", lambda *_: None)


@dataclass
class Records(Frame):
    """Records of a batch; running their plan raises on numbers in `bad`."""

    bad: set[int] = field(default_factory=set)

    def where(self, condition: str) -> Records:
        if condition.startswith("n %"):
            return replace(self, rows=super().where(condition).rows)
        spans = [tuple(map(int, span)) for span in _RANGE.findall(condition)]
        places = zip(self.rows["partition"].to_pylist(), self.rows["offset"].to_pylist(), strict=True)
        kept = [any(p == q and begin <= o < end for q, begin, end in spans) for p, o in places]
        return replace(self, rows=self.rows.filter(pa.array(kept, pa.bool_())))

    def save(self) -> None:
        raise_on(self.rows, self.bad)

    def toArrow(self) -> pa.Table:
        return self.rows

    @property
    def _jdf(self) -> Records:
        """Stands for Spark's plan too."""
        return self

    queryExecution = executedPlan = lambda self: self
    executeCollect = save


def raise_on(rows: pa.Table, bad: set[int]) -> None:
    if met := sorted(bad & set(rows["n"].to_pylist())):
        raise RuntimeError(f"[DIVIDE_BY_ZERO] Division by zero at {met[0]}")


@dataclass
class Kept(Source):
    """The topic with its records in memory."""

    parameter: str = "things"
    bad: frozenset[int] = frozenset()
    aside: Aside = field(default_factory=dict)

    def judged(self, spark: None, start: Any, end: Any) -> Records:
        places = [(p, o) for p in sorted(end) for o in range(start.get(p, 0), end[p])]
        rows = [
            {"k": "x", "n": n, "partition": p, "offset": o, "_record": {"n": n}, "_bad": False}
            for n, (p, o) in enumerate(places)
        ]
        return Records(pa.Table.from_pylist(rows), [], bad=set(self.bad))

    def read(self, rows: str, offsets: OffsetRange) -> pa.Table:
        assert rows == "all"
        return self.judged(None, offsets.start, offsets.end).rows

    def held(self, spark: object, rows: pa.Table) -> Records:
        return Records(rows, [], bad=set(self.bad))

    def good(self, judged: Records) -> Records:
        return judged

    def counts(self, judged: Records) -> SourceCounts:
        return SourceCounts(0, None)

    def counts_held(self, rows: pa.Table) -> SourceCounts:
        assert rows.num_rows == BATCH
        return SourceCounts(0, None)


def with_policy(driver: Driver, policy: ErrorPolicy, bad: set[int], *, missing: tuple[int, ...] = ()) -> Driver:
    """A driver whose function raises on `bad` numbers; Spark's frame lacks those `missing`, as after a restart."""
    file = file_of(driver.disk)
    pipeline = driver.pipeline
    pipeline.stream = replace(parity, errors=policy)
    sources: Any = [Kept(bad=frozenset(bad))]
    pipeline.sources = sources
    pipeline.isolation = Isolation(
        STREAM,
        policy,
        file,
        sources,
        lambda r: [*pipeline.stream.outputs(**r).values()],
        file.load(),
        clock=lambda: 1e6,
    )
    in_memory = driver.in_memory

    def prepare(output: Output, frame: Frame, rows: Any) -> Any:
        raise_on(frame.rows, bad)
        keeps = [name for name in ("k", "n") if name in frame.rows.column_names]
        return in_memory(output, Frame(frame.rows.select(keeps), driver.log), rows)

    driver.prepare = prepare
    driver.bad = len(missing)
    return driver


def run(driver: Driver, *, missing: tuple[int, ...] = ()) -> None:
    driver.run(0, [number for number in range(BATCH) if number not in missing])


LETTERS = ErrorPolicy(function="dead_letter")
GOOD_EVEN, GOOD_ODD = [0, 2, 4, 6, 8, 10, 14], [1, 3, 5, 7, 9, 11, 13]
ELEVENTH = RaisingRecord(TOPIC, 1, 2, "[DIVIDE_BY_ZERO] Division by zero at 12")


def file_of(disk: Disk) -> SetAsideFile:
    return SetAsideFile(StreamFolder.of(disk.settings, STREAM).set_aside)


def on_disk(disk: Disk) -> SetAside:
    return file_of(disk).load()


@pytest.mark.parametrize("path", ["driver", "executor"])
def test_a_record_on_which_the_function_raises_is_a_dead_letter_and_the_batch_has_all_others(
    disk: Disk, start: Start, path: Any
) -> None:
    driver = with_policy(start(), LETTERS, {12})
    driver.pipeline.settings = StreamSettings(path=path)
    run(driver)
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == (GOOD_EVEN, GOOD_ODD)
    assert newest_entry(disk, PRIMARY).rows == {SECONDARY: 7, "dead_letters": 1, "written": 7}
    assert newest_entry(disk, DEAD_LETTERS).rows == {"written": 1}
    aside = on_disk(disk)
    assert (aside.generation, aside.batch, aside.records) == (1, 0, (ELEVENTH,))
    assert driver.log.index("set_aside 0") < driver.log.index(f"commit {DEAD_LETTERS}")
    (source,) = driver.pipeline.sources
    (place,) = source.aside.items()  # type: ignore[attr-defined]
    assert (place[0], place[1].reason) == ((1, 2), "function_raised")


@pytest.mark.parametrize("point", ["set_aside", "staged", "secondary_committed", "primary_committed"])
def test_a_kill_at_any_border_leaves_the_record_aside_once(disk: Disk, start: Start, point: str) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str, _: str, number: int) -> None:
        if name == point:
            raise Killed

    driver = with_policy(start(), LETTERS, {12})
    driver.at = kill
    with pytest.raises(Killed):
        run(driver)
    assert on_disk(disk).records == (ELEVENTH,), "the list is on disk before anything of the batch is"
    again = with_policy(start(), LETTERS, {12}, missing=(12,))
    run(again, missing=(12,))
    assert (numbers(disk, PRIMARY), numbers(disk, SECONDARY)) == (GOOD_EVEN, GOOD_ODD)
    assert [commits_of(disk, table) for table in (PRIMARY, SECONDARY, DEAD_LETTERS)] == [1, 1, 1]
    assert newest_entry(disk, PRIMARY).rows == {SECONDARY: 7, "dead_letters": 1, "written": 7}
    assert "set_aside 0" not in again.log


def test_a_batch_that_a_table_has_is_not_searched(disk: Disk, start: Start) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str, _: str, number: int) -> None:
        if name == "secondary_committed":
            raise Killed

    driver = start()
    driver.at = kill
    with pytest.raises(Killed):
        driver.run(0, [1, 2])
    again = with_policy(start(), LETTERS, {2})
    with pytest.raises(RuntimeError, match="DIVIDE_BY_ZERO"):
        again.run(0, [1, 2])
    assert on_disk(disk) == SetAside()


def test_with_state_the_query_begins_again_once_the_list_is_on_disk(disk: Disk, start: Start) -> None:
    driver = with_policy(start(), LETTERS, {12})
    driver.pipeline.traits = STATE
    with pytest.raises(StopAtBorder):
        run(driver)
    assert driver.pipeline.replanned and driver.pipeline.stopped_at_border and driver.pipeline.failure is None
    assert on_disk(disk).records == (ELEVENTH,)
    assert driver.commits == []


@pytest.mark.parametrize("raises", [None, TransientError("the disk is away"), FunctionRaised("it raises anew", "")])
def test_with_state_the_plan_of_the_batch_runs_again_where_it_can_and_else_the_query_begins_again(
    disk: Disk, start: Start, monkeypatch: pytest.MonkeyPatch, raises: Exception | None
) -> None:
    driver = with_policy(start(), LETTERS, bad := {12})
    driver.pipeline.traits = STATE
    sent = list[dict[str, Any]]()

    def send_anew(records: Any) -> bool:
        assert on_disk(disk).records == (ELEVENTH,), "a driver that is killed now leaves the record aside"
        sent.extend(records[TOPIC].rows.to_pylist())
        bad.clear()
        if raises is not None:
            monkeypatch.setattr(driver, "prepare", failing)
        return True

    def failing(*_: object) -> Any:
        raise raises  # type: ignore[misc]

    monkeypatch.setattr(driver, "send_anew", send_anew)
    if raises is None:
        run(driver)
        assert newest_entry(disk, DEAD_LETTERS).rows == {"written": 1}
        assert newest_entry(disk, PRIMARY).rows["dead_letters"] == 1
        (source,) = driver.pipeline.sources
        assert [*source.aside] == [(1, 2)]  # type: ignore[attr-defined]
    else:
        with pytest.raises(StopAtBorder if isinstance(raises, FunctionRaised) else TransientError):
            run(driver)
        assert driver.commits == [] and on_disk(disk).records == (ELEVENTH,)
    assert driver.pipeline.replanned is isinstance(raises, FunctionRaised)
    assert [row["n"] for row in sent if row["_bad"]] == [row["n"] for row in sent if row["_record"] is None] == [12]


@pytest.mark.parametrize("state", [False, True])
def test_a_search_that_kills_its_driver_is_known_to_the_next_one_and_no_other_is(start: Start, *, state: bool) -> None:
    driver = with_policy(start(), LETTERS, {12})
    attempts, search, noted = driver.pipeline.files.attempts, driver.pipeline.isolation, list[bool]()
    assert search is not None
    runs = search.runs

    def watched(records: Any) -> Any:
        noted.append(attempts.died(Txn(1, 0)))
        return runs(records)

    search.runs = watched
    if state:
        driver.pipeline.traits = STATE
        with pytest.raises(StopAtBorder):
            run(driver)
        assert not attempts.died(Txn(1, 0)), "the query begins again, on the driver's path"
    else:
        run(driver)
    assert noted and all(noted)
    failed = with_policy(start(), ErrorPolicy(function="dead_letter", budget="1 per hour"), {3, 5, 12})
    with pytest.raises(FunctionFailed):
        failed.run(1)
    assert not attempts.died(Txn(1, 1))


def test_without_a_policy_the_function_stops_the_stream_as_before(disk: Disk, start: Start) -> None:
    driver = with_policy(start(), ErrorPolicy(), {12})
    with pytest.raises(RuntimeError, match="DIVIDE_BY_ZERO"):
        run(driver)
    assert on_disk(disk) == SetAside() and driver.commits == []


def test_an_error_that_no_record_raises_alone_and_one_of_a_connection_set_nothing_aside(
    disk: Disk, start: Start
) -> None:
    driver = with_policy(start(), LETTERS, {12})
    driver.pipeline.isolation.sources = [Kept()]  # type: ignore[union-attr,list-item]
    with pytest.raises(FunctionRaised, match=r"at 12; no record of the batch raises it alone"):
        run(driver)
    again = with_policy(start(), LETTERS, {12})

    def away(records: object) -> Any:
        raise TransientError("the service is away")

    again.pipeline.isolation.runs = away  # type: ignore[union-attr]
    with pytest.raises(TransientError, match="the service is away"):
        run(again)
    assert on_disk(disk) == SetAside()


def test_more_records_than_the_budget_stop_the_stream_and_nothing_is_set_aside(disk: Disk, start: Start) -> None:
    driver = with_policy(start(), ErrorPolicy(function="dead_letter", budget="2 per hour"), {3, 5, 12})
    with pytest.raises(FunctionFailed, match=r"at least 3 records of a batch of 15, and the error budget leaves 2"):
        run(driver)
    assert on_disk(disk) == SetAside() and driver.commits == []
    run(with_policy(start(), ErrorPolicy(function="dead_letter", budget="3 per hour"), {3, 5, 12}))
    assert newest_entry(disk, PRIMARY).rows["dead_letters"] == 3


def test_a_budget_per_time_counts_earlier_batches_of_its_time_also_after_a_restart_and_none_in_a_replay(
    disk: Disk, start: Start
) -> None:
    policy = ErrorPolicy(function="dead_letter", budget="2 per hour")
    run(with_policy(start(), policy, {3}))
    file = file_of(disk)
    assert on_disk(disk).spent == (Spent(1e6, 1, 0, 1),)
    made = Isolation(STREAM, policy, file, [], list, file.load(), clock=lambda: 1e6 + 3_599)  # type: ignore[arg-type]
    assert made.allowed(Txn(1, 1), 100) == 1
    assert made.allowed(Txn(1, 0), 100) == 2, "a repeated batch does not count twice"
    made.spend(Txn(1, 1), 1)
    assert on_disk(disk).spent == (Spent(1e6, 1, 0, 1), Spent(1e6 + 3_599, 1, 1, 1))
    assert replace(made, in_replay=True).allowed(Txn(2, 1), 100) == 2
    later = replace(made, aside=on_disk(disk), clock=lambda: 1e6 + 3_601)
    assert later.allowed(Txn(1, 2), 100) == 1


def test_what_is_dropped_is_counted_and_written_nowhere(disk: Disk, start: Start) -> None:
    run(with_policy(start(), ErrorPolicy(function="drop"), {12, 3}))
    assert numbers(disk, PRIMARY) == GOOD_EVEN and numbers(disk, SECONDARY) == [1, 5, 7, 9, 11, 13]
    assert commits_of(disk, DEAD_LETTERS) == 0
    dropped = {f"dropped:{PRIMARY}": 2, f"dropped:{SECONDARY}": 2}
    assert newest_entry(disk, PRIMARY).rows == {SECONDARY: 6, "written": 7, **dropped}


def test_records_and_rows_that_fail_in_other_layers_are_dropped_or_stop_the_stream(disk: Disk, start: Start) -> None:
    places = {"__partition": [0, 0, 0], "__offset": [7, 8, 9]}
    rejected = pa.table({"k": pa.nulls(3, pa.string()), "n": [7, 8, 9], **places})
    dropping = with_policy(start(), ErrorPolicy(decode="drop", write="drop"), set())
    dropping.bad, dropping.rejected = 2, rejected
    run(dropping)
    assert commits_of(disk, DEAD_LETTERS) == 0
    rows = newest_entry(disk, PRIMARY).rows
    assert (rows[f"dropped:{PRIMARY}"], rows[f"dropped:{SECONDARY}"]) == (5, 2)
    failing = with_policy(start(), ErrorPolicy(write="fail"), set())
    failing.rejected = rejected
    first = "the first with the reason null_key, made of the record in partition 0 at offset 7"
    with pytest.raises(RecordRefused, match=rf"{PRIMARY} cannot hold 3 rows of batch 1, {first}"):
        failing.run(1)
    bounded = with_policy(start(), ErrorPolicy(budget="20%"), set())
    bounded.bad, bounded.rejected = 2, rejected
    with pytest.raises(ErrorBudgetExceeded, match=r"5 records and rows of batch 1 \(15 records\) failed.* leaves 3"):
        bounded.run(1)
    assert commits_of(disk, PRIMARY) == 1
    bounded.rejected = None
    bounded.run(1)
    assert newest_entry(disk, PRIMARY).rows["dead_letters"] == 2


def test_a_list_of_another_generation_holds_no_record_and_a_damaged_one_stops_the_start(disk: Disk) -> None:
    file = file_of(disk)
    aside = SetAside(1, 0, records=(ELEVENTH,), spent=(Spent(1.0, 1, 0, 1),))
    file.save(aside)
    assert file.load() == aside == aside.in_generation(1)
    assert aside.in_generation(2) == SetAside(spent=aside.spent)
    assert aside.of(Txn(1, 0)) == (ELEVENTH,) and aside.of(Txn(1, 1)) == aside.of(Txn(2, 0)) == ()
    assert list(aside.of_topic(TOPIC)) == [(1, 2)] and aside.of_topic("other") == {}
    assert replace(aside, action="drop").of_topic(TOPIC) == {(1, 2): None}
    file.handle.put(b'{"format": 1, "records": 7}')
    with pytest.raises(PermanentError, match="cannot be read"):
        file.load()


def test_a_driver_does_not_overwrite_the_list_that_another_has_written_meanwhile(disk: Disk) -> None:
    stale, other = file_of(disk), file_of(disk)
    assert stale.load() == other.load() == SetAside()
    other.save(SetAside(1, 0, records=(ELEVENTH,)))
    with pytest.raises(TransientError):
        stale.save(SetAside(1, 0))
    stale.load()
    other.save(SetAside(1, 1, records=(ELEVENTH,)))
    with pytest.raises(TransientError):
        stale.save(SetAside(1, 0))
    assert on_disk(disk).batch == 1


def test_the_error_of_a_division_is_one_of_the_function() -> None:
    with pytest.raises(RuntimeError) as raised:
        raise_on(pa.table({"n": [1]}), {1})
    assert isinstance(classify(raised.value), FunctionRaised)
