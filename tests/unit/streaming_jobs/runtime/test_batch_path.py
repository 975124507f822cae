"""The path of a batch: through the driver when it surely fits, otherwise through the executors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from streaming_jobs.errors import TransientError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.runtime.batch_hooks import DriverPathAttempts, choose_path
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import PendingWrite
from tests.support.batch_driver import PLAIN, STATE, UNKNOWN, Start
from tests.support.worlds import PRIMARY

MULTIPLYING = PlanTraits(stateful=False, multiplies=True)


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


def test_a_large_batch_that_does_not_fit_the_driver_is_repeated_through_the_executors(start: Start) -> None:
    def too_large(*_: object) -> PendingWrite:
        raise RuntimeError("Total size of serialized results is bigger than spark.driver.maxResultSize (768.0 MiB)")

    large = start()
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


@pytest.mark.parametrize(
    ("raised", "path"),
    [
        (RuntimeError("[CAST_INVALID_INPUT] The value 'x' of the type STRING cannot be cast to BIGINT"), "driver"),
        (RuntimeError("the JVM has no memory left"), "executor"),
        (ZeroDivisionError("in the stream's function"), "executor"),
    ],
    ids=["of Spark", "of the JVM", "of the function"],
)
def test_an_exception_of_the_function_goes_up_as_it_is_and_is_no_death_of_the_driver(
    start: Start, raised: Exception, path: str
) -> None:
    def broken(*_: object) -> PendingWrite:
        raise raised

    driver = start()
    driver.prepare = broken
    with pytest.raises(type(raised)):
        driver.run(0)
    assert driver.log[-2:] == ["persist", "unpersist"]
    driver.prepare = driver.in_memory
    driver.run(0)
    assert driver.reports[-1].path == path


def test_a_table_outside_the_profile_or_a_setting_sends_commits_through_spark(start: Start) -> None:
    driver = start()
    driver.pipeline.settings = StreamSettings(committer="spark")
    driver.run(0)
    assert driver.ways == [(True, True)] * 2
    driver.pipeline.settings = StreamSettings()
    driver.sinks[PRIMARY].handle.alter.add_constraint({"positive": "n > 0"})
    driver.ways.clear()
    driver.run(1)
    assert driver.ways == [(True, True), (True, False)]


def test_the_size_of_records_is_learnt_from_batches_that_are_large_enough(start: Start) -> None:
    large = start()
    before = large.pipeline._bytes_per_record
    wide = {"k": ["x" * 1000] * 2000, "n": list(range(2000))}
    staged: Any = SimpleNamespace(table=pa.table(wide))
    for traits, records, size in ((PLAIN, 999, before), (PLAIN, 2000, 1012), (STATE, 1000, 1012)):
        large.pipeline.traits = traits
        large.pipeline._learn(staged, records)
        assert large.pipeline._bytes_per_record == pytest.approx(size, rel=0.02)
