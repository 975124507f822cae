"""Lag: measured against the end of the topics now, and true in seconds without looking at record timestamps."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from orchestration import cli
from streaming_jobs.errors import BrokerUnreachable
from streaming_jobs.runtime import lag
from streaming_jobs.runtime.lag import EndOffsets, Ends, LagClock, position_in, position_on_disk
from streaming_jobs.state.status import Status, write_status
from tests.conftest import SettingsFactory
from tests.support.worlds import STREAM, TOPIC, Disk, FakeTopics

pytestmark = pytest.mark.slow


def at(now: float, *ends: int) -> Ends:
    return Ends(now, {"t": dict(enumerate(ends))})


def upto(*offsets: int) -> dict[str, dict[int, int]]:
    return {"t": dict(enumerate(offsets))}


def test_lag_counts_what_lies_behind_the_ends_and_keeps_a_bounded_number_of_looks() -> None:
    lag = LagClock().measure(upto(40, 20), at(100.0, 100, 20, 7))
    assert (lag.records, lag.partitions) == (67, {"t": {0: 60, 1: 0, 2: 7}})
    assert LagClock().measure(upto(40), at(100.0, 39)).records == 0
    clock = LagClock()
    for n in range(20_000):
        lag = clock.measure(upto(0), at(float(n), n + 1))
    assert len(clock._looks) < 2_000 and lag.seconds == 19_999.0
    assert clock.measure(upto(15_000), at(20_000.0, 20_001)).seconds == pytest.approx(5_000, abs=100)


def test_seconds_are_those_since_all_was_read_also_over_a_restart_and_a_clock_that_was_set_back() -> None:
    clock = LagClock()
    assert clock.measure(upto(10), at(100.0, 10)).seconds == 0.0
    assert clock.measure(upto(10), at(102.0, 30)).seconds == 2.0
    assert clock.measure(upto(10), at(104.0, 50)).seconds == 4.0
    assert clock.measure(upto(30), at(106.0, 70)).seconds == 4.0, "what was there at 102 has been read"
    caught_up = clock.measure(upto(70), at(108.0, 70))
    assert (caught_up.seconds, caught_up.read_up_to) == (0.0, 108.0)
    assert LagClock(read_up_to=40.0).measure(upto(1), at(100.0, 9)).seconds == 60.0
    new = LagClock()
    assert [new.measure(upto(0), at(100.0 + n, 9)).seconds for n in (0, 5)] == [0.0, 5.0]
    clock = LagClock(read_up_to=10_000.0)
    assert clock.measure(upto(0), at(10_002.0, 9)).seconds == 2.0
    assert clock.measure(upto(0), at(6_400.0, 9)).seconds == 0.0
    assert clock.measure(upto(0), at(6_500.0, 9)).seconds == 100.0
    read = clock.measure(upto(9), at(6_600.0, 20))
    assert (read.seconds, read.read_up_to) == (100.0, 6_500.0)
    assert clock.measure(upto(20), at(6_700.0, 20)).read_up_to == 6_700.0


def test_a_stream_that_keeps_pace_is_never_late_although_it_is_never_at_the_end() -> None:
    clock = LagClock()
    lags = [clock.measure(upto(10 * n), at(2.0 * n, 10 * n + 5)).seconds for n in range(1, 5000)]
    assert max(lag for lag in lags if lag is not None) <= 2.0


class Broker:
    """Answers until it is away."""

    def __init__(self) -> None:
        self.away = False
        self.ends = {"a": {0: 5}, "b": {0: 7}}
        self.in_transactions = 0
        self.asked: list[str] = []

    def latest(self, name: str) -> dict[int, int]:
        if self.away:
            raise BrokerUnreachable("nobody answers", "wait")
        return self.ends[name]

    def high_watermarks(self, name: str) -> dict[int, int]:
        return {p: end + self.in_transactions for p, end in self.latest(name).items()}


def test_ends_are_known_once_each_topic_was_seen_and_the_thread_looks_by_itself() -> None:
    broker = Broker()
    looking = EndOffsets(broker, ["a", "b", "a"])
    assert looking.newest(["a"]) is None
    looking.look()
    first = looking.newest(["a", "b"])
    assert first is not None and first.offsets == {"a": {0: 5}, "b": {0: 7}}
    assert looking.newest(["a", "c"]) is None
    broker.away = True
    looking.look()
    assert looking.newest(["a", "b"]) == first
    looking = EndOffsets(Broker(), ["a"], every=0.01).start()
    deadline = threading.Event()
    for _ in range(500):
        if looking.newest(["a"]):
            break
        deadline.wait(0.01)
    assert looking.newest(["a"]) is not None
    looking.close()
    looking._thread.join(5)
    assert not looking._thread.is_alive()


def test_a_cluster_that_is_away_hides_the_ends_of_its_own_topics_only_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clusters(Broker):
        def latest(self, name: str) -> dict[int, int]:
            self.asked.append(name)
            self.away = name.endswith("@eu")
            return super().latest(name)

    broker = Clusters()
    broker.ends["c"] = {0: 9}
    looking = EndOffsets(broker, ["a@eu", "b", "b@eu", "c"])
    log = CapturingLogger()
    monkeypatch.setattr(lag, "log", log)
    looking.look()
    looking.look()
    assert looking.newest(["b", "c"]) is not None and looking.newest(["a@eu"]) is None
    assert broker.asked.count("b@eu") == 0, "nobody waits twice for one cluster"
    assert [call.kwargs["topic"] for call in log.calls] == ["a@eu"]


def test_the_position_is_that_of_the_last_committed_batch(settings: SettingsFactory) -> None:
    disk = Disk(settings())
    assert position_on_disk(disk.settings, STREAM) is None
    disk.open()
    assert position_on_disk(disk.settings, STREAM) == {TOPIC: {0: 0, 1: 0}}
    disk.run(0, 1).plan(2)
    snapshot = disk.snapshot()
    assert position_on_disk(disk.settings, STREAM) == position_in(snapshot) == snapshot.checkpoint.ends[1]


FLOWS = """
from tests.support.worlds import parity
"""


@pytest.fixture
def stopped(settings: SettingsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The stream `parity` after two batches, stopped at an end that lies behind it by now."""
    (tmp_path / "lag_test_flows.py").write_text(FLOWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECOURSE_FLOWS", '["lag_test_flows"]')
    monkeypatch.setenv("RECOURSE_KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:1")
    disk = Disk(settings()).open().run(0, 1)
    write_status(
        disk.settings,
        Status(STREAM, "stopped", 17, generation=1, batch=1, heartbeat=1.0, lag_records=0, ended_by="anna"),
    )
    return disk


def status_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    cli.main(["streams", "status", STREAM, "-o", "json"])
    (status,) = json.loads(capsys.readouterr().out)
    return dict(status)


def test_the_lag_of_a_stopped_stream_is_the_one_of_now(
    stopped: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeTopics, "latest", lambda *_: {0: 1000, 1: 1000}, raising=False)
    for ends in ("latest", "high_watermarks"):
        monkeypatch.setattr(f"streaming_jobs.sources.topics.Topics.{ends}", lambda *_: {0: 1000, 1: 1000})
    position = stopped.snapshot().checkpoint.ends[1][TOPIC]
    status = status_of(capsys)
    assert status["lag_records"] == 2000 - sum(position.values())
    assert status["lag_partitions"] == {TOPIC: {str(p): 1000 - o for p, o in position.items()}}
    assert status["lag_age_s"] < 5


@pytest.mark.usefixtures("stopped")
def test_without_a_broker_the_last_known_lag_has_no_age_that_it_does_not_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = status_of(capsys)
    assert (status["lag_records"], status["lag_age_s"]) == (0, None)
    cli.main(["streams", "status", STREAM])
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:8] == [STREAM, "stopped", "-", "0", "1", "-", "-", "-"], "a lag of unknown age is not shown"


def test_records_of_an_open_transaction_count_as_unread_and_say_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream behind the transaction of a program that hangs reads nothing: it is neither at the end nor well."""
    broker, looking = (made := Broker()), EndOffsets(made, ["a"])
    broker.in_transactions, position = 5_000, {"a": {0: 5}}
    for now in (100.0, 102.0, 104.0):
        monkeypatch.setattr("streaming_jobs.runtime.lag.time.time", lambda now=now: now)
        looking.look()
        ends = looking.newest(["a"])
        assert ends is not None
        assert ends.blocked(position) == ({"a": {0: 100.0}} if now > 100 else {})  # one look: a producer at work
        assert ends.blocked({"a": {0: 4}}) == {}  # it has records to read before the transaction
        assert LagClock().measure(position, ends).records == 5_000
    broker.ends["a"][0] += 10  # that one has ended, and another one is open
    monkeypatch.setattr("streaming_jobs.runtime.lag.time.time", lambda: 106.0)
    looking.look()
    ends = looking.newest(["a"])
    assert ends is not None and ends.blocked({"a": {0: 15}}) == {}
    broker.in_transactions = 0
    looking.look()
    ends = looking.newest(["a"])
    assert ends is not None and not ends.open_since and ends.offsets == {"a": {0: 15}}
