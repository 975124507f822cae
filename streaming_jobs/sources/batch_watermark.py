"""The watermark of a batch includes the batch's own records, so that a window is written by the batch that closes it.

Spark keeps two watermarks for a batch: rows are late by that of the batch before, and state is closed by that of the
batch itself, which is taken after the sources have said where the batch ends, and is written to `offsets/N` beside
these offsets. Left alone, it is as old as the records of the batch before, so a window waits for one more batch, and
for one more record.

    planner (one process per source)      JVM                                      Spark
    decodes a small batch, and says  -->  sets the tracker to the least of    -->  plans the batch with it
    how far its event times are           all sources, never backwards

A batch of many records is decoded later, by workers, so its times are not known: then Spark's own way holds. So it does
if anything here fails. A repeated batch takes its watermark from `offsets/N`, as ever. A source that has had no record
for its `idle_after` holds the others back no longer: without it they would wait for its next record.

Trackers of a running query are a private interface of Spark; a Spark without it is told by one line in the log.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.text.durations import milliseconds, parse_duration

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from streaming_jobs.sources.data_source import FrameSource

log = structlog.get_logger()

_MESSAGE = struct.Struct(">iqb")
"""Source, watermark in milliseconds since 1970, and 1 if the source is idle."""
_ANSWER = struct.Struct(">q")
"""The query's watermark from now on."""
_UNKNOWN = -(2**63)
_PATIENCE = 5.0
"""Seconds that a planner waits for the JVM, which answers in less than a millisecond."""

_SERVER = """
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.nio.channels.Channels;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution;

public class BatchWatermarks implements Runnable {
    private static final long FIRST_WORD = 600L * 1000 * 1000 * 1000;
    private ServerSocketChannel server;
    private String path;
    private long[] reached;
    private boolean[] idle;
    private MicroBatchExecution query;

    public void listen(String path, int sources) throws Exception {
        this.path = path;
        reached = new long[sources];
        idle = new boolean[sources];
        java.util.Arrays.fill(reached, Long.MIN_VALUE);
        server = ServerSocketChannel.open(java.net.StandardProtocolFamily.UNIX);
        server.bind(java.net.UnixDomainSocketAddress.of(path));
        server.configureBlocking(false);
        begin(this);
    }

    public synchronized void of(Object query) {
        this.query = (MicroBatchExecution) query;
    }

    public void run() { // one connection of each source; then, or if none comes, nobody listens any more
        try {
            long until = System.nanoTime() + FIRST_WORD;
            for (int found = 0; found < reached.length && System.nanoTime() < until;) {
                SocketChannel planner = server.accept();
                if (planner == null) {
                    Thread.sleep(20);
                } else {
                    found++;
                    begin(new Planner(this, planner));
                }
            }
        } catch (Exception error) {
            System.err.println("the watermarks of batches: " + error);
        } finally {
            try {
                server.close();
            } catch (java.io.IOException error) {
                System.err.println("the watermarks of batches: " + error);
            }
            new java.io.File(path).delete();
            new java.io.File(path).getParentFile().delete();
        }
    }

    synchronized long move(int source, long to, boolean isIdle) {
        reached[source] = Math.max(reached[source], to);
        idle[source] = isIdle;
        if (query == null || query.watermarkTracker() == null) return Long.MIN_VALUE;
        long least = Long.MAX_VALUE;
        for (int i = 0; i < reached.length; i++) if (!idle[i]) least = Math.min(least, reached[i]);
        if (least != Long.MAX_VALUE && least > query.watermarkTracker().currentWatermark())
            query.watermarkTracker().setWatermark(least);
        return query.watermarkTracker().currentWatermark();
    }

    private static void begin(Runnable work) {
        Thread thread = new Thread(work, "recourse-batch-watermarks");
        thread.setDaemon(true);
        thread.start();
    }

    public static class Planner implements Runnable {
        private final BatchWatermarks all;
        private final SocketChannel channel;

        public Planner(BatchWatermarks all, SocketChannel channel) {
            this.all = all;
            this.channel = channel;
        }

        public void run() { // until the planner ends
            try {
                DataInputStream in = new DataInputStream(Channels.newInputStream(channel));
                DataOutputStream out = new DataOutputStream(Channels.newOutputStream(channel));
                while (true) {
                    int source = in.readInt();
                    long to = in.readLong();
                    out.writeLong(all.move(source, to, in.readByte() == 1));
                }
            } catch (java.io.EOFException end) {
            } catch (Throwable error) {
                System.err.println("the watermarks of batches: " + error);
            } finally {
                try {
                    channel.close();
                } catch (java.io.IOException error) {
                    System.err.println("the watermarks of batches: " + error);
                }
            }
        }
    }
}
"""


@dataclass(frozen=True)
class TimedSource:
    """One source with a watermark: where its planner says how far it is, and how that is computed.

    `number` counts the query's sources with a watermark. `column` of the record is its event time, `delay_ms` its
    lateness. `idle_after`: seconds without a record after which it holds the other sources back no longer.
    """

    path: str
    number: int
    column: str
    delay_ms: int
    idle_after: float | None = None


@dataclass
class WatermarkServer:
    """The driver's part: sources say where it listens, and `bind` names the query whose watermark they move."""

    path: str = field(default_factory=lambda: f"{tempfile.gettempdir()}/recourse-{os.urandom(8).hex()}/watermark")
    _java: Any = None

    def timed(self, sources: Iterable[FrameSource]) -> dict[str, TimedSource]:
        """How each source with a watermark says how far it is, by its parameter."""
        made: dict[str, TimedSource] = {}
        for source in sources:
            if source.event_time is not None and source.lateness is not None:
                delay, idle = milliseconds(source.lateness), source.declared.idle_after
                seconds = parse_duration(idle).total_seconds() if idle is not None else None
                made[source.parameter] = TimedSource(self.path, len(made), source.event_time, delay, seconds)
        return made

    def listen(self, spark: SparkSession, sources: int) -> None:
        """Begin to listen, in a folder that only this user can open."""
        folder = Path(self.path).parent
        try:
            folder.mkdir(mode=0o700)
            java = new_object(spark, "BatchWatermarks", _SERVER)
            java.listen(self.path, sources)
            self._java = java
        except Exception as error:  # noqa: BLE001 - Spark's own way is right too
            shutil.rmtree(folder, ignore_errors=True)
            log.warning("windows wait for the batch after the one that closes them", reason=str(error)[:300])

    def bind(self, query: StreamingQuery) -> None:
        """Name the query; sources that speak before that move nothing."""
        if self._java is not None:
            self._java.of(query._jsq.streamingQuery())


@dataclass
class SourceClock:
    """A planner's part: tells the query how far the event times of its source are, while a batch is planned."""

    source: TimedSource
    monotonic: Callable[[], float] = time.monotonic
    _connection: socket.socket | None = field(default=None, init=False)
    _lost: bool = field(default=False, init=False)
    _newest: int = field(default=_UNKNOWN, init=False)
    _seen: float = field(init=False)
    _idle: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._seen = self.monotonic()

    def batch(self, records: Sequence[pa.RecordBatch] | None) -> None:
        """The source has a batch: its records, or None if workers will read it."""
        self._seen, self._idle = self.monotonic(), False
        newest = None if records is None else newest_time(records, self.source.column)
        if newest is not None:
            self._newest = max(self._newest, newest - self.source.delay_ms)
        self._tell()

    def nothing(self) -> None:
        """The source has no new record."""
        after = self.source.idle_after
        if not self._idle and after is not None and self.monotonic() - self._seen >= after:
            self._idle = True
            self._tell()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._lost = True

    def _tell(self) -> None:
        if self._lost:
            return
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._connection.settimeout(_PATIENCE)
                self._connection.connect(self.source.path)
            self._connection.sendall(_MESSAGE.pack(self.source.number, self._newest, self._idle))
            received = b""
            while len(received) < _ANSWER.size:
                if not (more := self._connection.recv(_ANSWER.size - len(received))):
                    raise ConnectionResetError("the JVM has closed the connection")
                received += more
        except OSError:  # nobody listens: the query has no state, or the driver has said why
            self.close()


def newest_time(records: Sequence[pa.RecordBatch], column: str) -> int | None:
    """The greatest event time of the good records in milliseconds, rounded down as Spark does; None without one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    newest = None
    for block in records:
        times = pc.struct_field(block.column("_record"), column)
        if not pa.types.is_timestamp(times.type):
            return None
        good = pc.if_else(pc.fill_null(block.column("_bad"), True), None, times)
        if (latest := pc.max(good).cast(pa.int64()).as_py()) is not None:
            unit = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[times.type.unit]
            newest = max(latest * 1_000 // unit, newest if newest is not None else _UNKNOWN)
    return newest
