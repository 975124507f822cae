"""The watermark of a batch includes the batch's own records, so that a window is written by the batch that closes it.

Spark keeps two watermarks for a batch: rows are late by that of the batch before, and state is closed by that of the
batch itself, which is taken after the sources have said where the batch ends, and is written to `offsets/N` beside
these offsets. Left alone, it is as old as the records of the batch before, so a window waits for one more batch, and
for one more record.

    planner (one process per source)      JVM                                      Spark
    decodes a small batch, and says  -->  sets the tracker to the least of    -->  plans the batch with it
    how far its event times are           all sources, never backwards

A left semi join does not keep a row that the batch's watermark has passed already (Spark 4.2; other joins do, since
SPARK-49829). With a watermark of the batch's own records, such a row would miss its partners in the same batch. So a
query with a semi join has the watermark of the records of the batches before.

A batch of many records is decoded later, by workers, so its times are not known: then Spark's own way holds. So it does
if anything here fails. A repeated batch takes its watermark from `offsets/N`, as ever. A source that has had no record
for its `idle_after` holds the others back no longer: without it they would wait for its next record.

Trackers of a running query are a private interface of Spark; a Spark without it is told by one line in the log.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.sources.source_clock import TimedSource
from streaming_jobs.text.durations import milliseconds, parse_duration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from streaming_jobs.sources.data_source import FrameSource

log = structlog.get_logger()

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
    private long[] before;
    private boolean[] idle;
    private MicroBatchExecution query;

    public void listen(String path, int sources, boolean itsOwn) throws Exception {
        this.path = path;
        reached = new long[sources];
        before = itsOwn ? reached : new long[sources];
        idle = new boolean[sources];
        java.util.Arrays.fill(reached, Long.MIN_VALUE);
        java.util.Arrays.fill(before, Long.MIN_VALUE);
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
        before[source] = reached[source];
        reached[source] = Math.max(reached[source], to);
        idle[source] = isIdle;
        if (query == null || query.watermarkTracker() == null) return Long.MIN_VALUE;
        long least = Long.MAX_VALUE;
        for (int i = 0; i < reached.length; i++) if (!idle[i]) least = Math.min(least, before[i]);
        if (least != Long.MAX_VALUE && least > query.watermarkTracker().currentWatermark()) {
            query.watermarkTracker().setWatermark(least);
            // While nothing was new, Spark has asked whether the next batch would write anything without records, and
            // has noted that batch's watermark as it was. The query's thread waits for the planner meanwhile.
            if (query.lastExecution() != null) query.lastExecution().watermarkPropagator().purge(Long.MAX_VALUE);
        }
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

    def listen(self, spark: SparkSession, sources: int, *, its_own: bool = True) -> None:
        """Begin to listen, in a folder that only this user can open.

        Without `its_own`, a batch's watermark does not count the batch's own records.
        """
        folder = Path(self.path).parent
        try:
            folder.mkdir(mode=0o700)
            java = new_object(spark, "BatchWatermarks", _SERVER)
            java.listen(self.path, sources, its_own)
            self._java = java
        except Exception as error:  # noqa: BLE001 - Spark's own way is right too
            shutil.rmtree(folder, ignore_errors=True)
            log.warning("windows wait for the batch after the one that closes them", reason=str(error)[:300])

    def bind(self, query: StreamingQuery) -> None:
        """Name the query; sources that speak before that move nothing."""
        if self._java is not None:
            self._java.of(query._jsq.streamingQuery())
