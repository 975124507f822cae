"""A planner's part: what it says of its source, when, and to nobody if nobody listens."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import StructField, StructType, TimestampType

from streaming_jobs.errors import UsageError
from streaming_jobs.formats import Json
from streaming_jobs.sources.source_clock import SourceClock, TimedSource, newest_time
from streaming_jobs.stream import KafkaTopic

START = datetime(2026, 1, 1, tzinfo=UTC)
TIMED = Json(StructType([StructField("at", TimestampType())]))
MS = int(START.timestamp() * 1000)


def block(*seconds: float | None, bad: tuple[int, ...] = ()) -> pa.RecordBatch:
    times = [None if s is None else {"at": START + timedelta(seconds=s)} for s in seconds]
    records = pa.array(times, pa.struct([("at", pa.timestamp("us", "UTC"))]))
    return pa.record_batch([records, pa.array([i in bad for i in range(len(times))])], names=["_record", "_bad"])


class Listener:
    """Stands for the JVM: notes what it is told."""

    def __init__(self, path: Path) -> None:
        self.told: list[tuple[int, int, int]] = []
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        connection, _ = self.server.accept()
        with connection:
            while received := connection.recv(13):
                self.told.append(struct.unpack(">iqb", received))
                connection.sendall(struct.pack(">q", 0))


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "w")
    yield listener
    listener.server.close()


def clock(path: Path, now: list[float], idle_after: float | None = None) -> SourceClock:
    return SourceClock(TimedSource(str(path / "w"), 3, "at", 2_000, idle_after), monotonic=lambda: now[0])


def test_the_newest_time_is_that_of_good_records_rounded_down() -> None:
    assert newest_time([block(1, 5.0019, None, 99, bad=(3,)), block(4)], "at") == MS + 5_001
    assert newest_time([block(7, bad=(0,)), block(None)], "at") is None
    assert newest_time([], "at") is None
    old = pa.record_batch(
        [pa.array([{"at": datetime(1969, 12, 31, 23, 59, 59, 999_500)}]), pa.array([False])], names=["_record", "_bad"]
    )
    assert newest_time([old], "at") == -1
    text = pa.record_batch([pa.array([{"at": "x"}]), pa.array([False])], names=["_record", "_bad"])
    assert newest_time([text], "at") is None


def test_it_never_goes_back_and_says_what_it_knows_when_workers_read(tmp_path: Path, listener: Listener) -> None:
    told = clock(tmp_path, [0.0])
    told.batch(None)
    told.batch([block(10)])
    told.batch([block(4)])
    told.batch(None)
    assert listener.told == [(3, -(2**63), 0), *[(3, MS + 8_000, 0)] * 3]


def test_it_is_idle_once_after_its_time_and_until_the_next_record(tmp_path: Path, listener: Listener) -> None:
    now = [0.0]
    told = clock(tmp_path, now, idle_after=5.0)
    told.batch([block(10)])
    for now[0] in (4.9, 5.0, 6.0):
        told.nothing()
    told.batch([block(11)])
    now[0] = 10.9
    told.nothing()
    assert [idle for _, _, idle in listener.told] == [0, 1, 0]


def test_where_nobody_listens_it_asks_once(tmp_path: Path) -> None:
    told = clock(tmp_path, [0.0])
    told.batch([block(1)])
    late = Listener(tmp_path / "w")
    told.batch([block(2)])
    assert late.told == []
    late.server.close()


def test_a_listener_that_ends_is_not_asked_again(tmp_path: Path, listener: Listener) -> None:
    told = clock(tmp_path, [0.0])
    told.batch([block(1)])
    assert told._connection is not None
    told._connection.shutdown(socket.SHUT_RDWR)
    told.batch([block(2)])
    told.batch([block(3)])
    assert [to for _, to, _ in listener.told] == [MS - 1_000]


def test_a_source_without_event_times_cannot_be_idle() -> None:
    with pytest.raises(UsageError, match="idle_after is of the event time"):
        KafkaTopic("t", value=TIMED, idle_after="1 minute")
    with pytest.raises(UsageError, match="duration"):
        KafkaTopic("t", value=TIMED, event_time="at", lateness="1 minute", idle_after="soon")
