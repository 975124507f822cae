"""The heap of a session's JVM: collected when its old objects have doubled, not when it is full.

Java's serial collector looks at its old generation only when there is no more room for it, so the process grows to the
largest heap allowed, although the objects in use are a small part of that. What gets old and dies in a session are
mostly broadcasts, maps and plans of batches: 5 MB per second with three busy streams. A full collection takes 0.1 to
0.3 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from streaming_jobs.platform.jvm_code import new_object

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()

_COLLECTION = """
public class EarlyCollection implements javax.management.NotificationListener {
    private static final long LEAST = 128L << 20;
    private java.lang.management.MemoryPoolMXBean old = null;

    public EarlyCollection() {
        java.util.Iterator pools = java.lang.management.ManagementFactory.getMemoryPoolMXBeans().iterator();
        while (pools.hasNext()) {
            java.lang.management.MemoryPoolMXBean pool = (java.lang.management.MemoryPoolMXBean) pools.next();
            if (pool.getName().equals("Tenured Gen")) {
                old = pool;
            }
        }
        if (old != null) {
            Object memory = java.lang.management.ManagementFactory.getMemoryMXBean();
            ((javax.management.NotificationEmitter) memory).addNotificationListener(this, null, null);
            expect(0L);
        }
    }

    public void handleNotification(javax.management.Notification notification, Object handback) {
        if (old.isUsageThresholdExceeded()) { // every other notification of the memory bean comes here too
            System.gc();
            expect(old.getUsage().getUsed());
        }
    }

    private void expect(long used) {
        old.setUsageThreshold(Math.min(Math.max(LEAST, 2L * used), old.getUsage().getMax()));
    }
}
"""


def collect_early(session: SparkSession) -> None:
    """Collect the old generation at 128 MB, or at twice what the last such collection left.

    Only the serial collector needs it, which is ours; a user's own choice of another one is left alone.
    """
    try:
        new_object(session, "EarlyCollection", _COLLECTION)
    except Exception as error:  # noqa: BLE001 - only memory is lost
        log.warning("the heap of the JVM grows until it is full", reason=str(error)[:300])
