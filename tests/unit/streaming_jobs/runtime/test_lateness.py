"""The declared lateness of airport_hours is measured: no way of reading that we promise loses a row."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.feeder import CHUNK, PARTITIONS
from streaming_jobs.examples.flights.streams import FLIGHTS_BY_SCHEDULE
from tests.support import ROOT

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def lateness() -> ModuleType:
    path = ROOT / "benchmarks" / "lateness.py"
    spec = importlib.util.spec_from_file_location("lateness", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def dropped(event_ms: np.ndarray, batches: list[np.ndarray], delay_ms: int) -> int:
    """Count row by row what a watermark drops; slow, and written apart from the benchmark."""
    watermark, count = None, 0
    for batch in batches:
        for event in event_ms[batch]:
            end = (int(event) // HOUR_MS + 1) * HOUR_MS
            count += watermark is not None and end <= watermark
        for event in event_ms[batch]:
            watermark = max(int(event) - delay_ms, watermark if watermark is not None else -(10**18))
    return count


def test_needed_lateness_drops_nothing_and_a_millisecond_less_drops_a_row(lateness: ModuleType) -> None:
    random = np.random.default_rng(7)
    for _ in range(20):
        event_ms = random.integers(0, 40 * HOUR_MS, size=300)
        batches = np.split(random.permutation(300), [50, 90, 200])
        needed = round(lateness.needed_hours(event_ms, batches) * HOUR_MS)
        assert dropped(event_ms, batches, needed) == 0
        assert dropped(event_ms, batches, needed - 1) > 0


def test_rows_in_order_need_no_lateness(lateness: ModuleType) -> None:
    event_ms = np.arange(10) * HOUR_MS
    assert lateness.needed_hours(event_ms, lateness.live(10, 1)) == 0


def test_backlog_is_cut_as_spark_cuts_it(lateness: ModuleType) -> None:
    partitions = np.array([0] * 60 + [1] * 30 + [2] * 10)
    batches = list(lateness.backlog(partitions, 25))
    sizes = [[int((partitions[batch] == p).sum()) for p in range(3)] for batch in batches]
    # 25 * 60/100 = 15, 25 * 30/100 = 7.5, 25 * 10/100 = 2.5, floored; then the same of what remains.
    assert sizes[0] == [15, 7, 2]
    assert sizes[1] == [14, 7, 2]
    assert sorted(np.concatenate(batches).tolist()) == list(range(100))


@pytest.fixture(scope="module")
def event_ms() -> np.ndarray:
    return dataset.departures()["sched_dep"].to_numpy(dtype="datetime64[ms]").astype(np.int64)


@pytest.fixture(scope="module")
def partitions() -> np.ndarray:
    return dataset.partitions(PARTITIONS)


def test_declared_lateness_drops_nothing_of_a_backlog(
    lateness: ModuleType, event_ms: np.ndarray, partitions: np.ndarray
) -> None:
    delay = FLIGHTS_BY_SCHEDULE.delay
    assert delay
    for limit in (1_000, 100_000, 300_000):
        needed = lateness.needed_hours(event_ms, lateness.backlog(partitions, limit))
        assert needed * 1.5 < delay.total_seconds() / 3600


def test_declared_lateness_drops_nothing_while_the_feeder_runs(
    lateness: ModuleType, event_ms: np.ndarray, partitions: np.ndarray
) -> None:
    delay = FLIGHTS_BY_SCHEDULE.delay
    assert delay

    def worst() -> Iterator[float]:
        for first in range(PARTITIONS):
            yield lateness.needed_hours(event_ms, lateness.split_chunks(partitions, CHUNK, first))

    assert max(worst()) * 1.5 < delay.total_seconds() / 3600
