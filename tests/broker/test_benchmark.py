"""The benchmark's own short form: the product does each work of it, and what it wrote is the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed.contestants import Recourse
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.measure import Place, backlog, live
from benchmarks.speed.records import generate
from streaming_jobs.platform.broker import Broker


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM that lives for seconds is quicker without its optimising compiler."""
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")


def test_a_backlog_becomes_the_truth_and_gives_figures(broker: Broker, tmp_path: Path, topic: str) -> None:
    place = Place(broker.start(), tmp_path)
    records = generate(5_000, seed=3)
    create_topic(place.bootstrap, topic)
    feed_backlog(place.bootstrap, topic, records)
    figures = backlog(Recourse(), "windowed", place, topic, records)
    assert figures.records == 5_002
    assert figures.rate is not None
    assert figures.rate > 50
    assert figures.first_batch_s is not None
    assert 0 < figures.first_batch_s < 60
    assert figures.cpu_s > 0
    assert figures.peak_mb > 100


@pytest.mark.long
def test_live_records_become_the_truth_and_give_latencies(broker: Broker, tmp_path: Path) -> None:
    place = Place(broker.start(), tmp_path)
    figures = live(Recourse(), "stateless", place, seed=3, seconds=1, warm_up=1)
    assert figures.records == 4_002
    assert figures.p50_ms is not None
    assert figures.p99_ms is not None
    assert figures.worst_ms is not None
    assert 0 < figures.p50_ms <= figures.p99_ms <= figures.worst_ms < 60_000
