"""A job of one task over records that were sent along runs in the thread that waits for it.

Spark's scheduler hands a job from thread to thread six times, and serialises the task although it stays in the
process. Of a live batch with 400 records, one partition of state and two busy cores, that took half as long as the
task. Here the thread does around the task what Spark's executor does: memory, locks of blocks, and listeners, which
close the state's stores.

A job is Spark's, with its scheduler, if it has an exchange or several tasks; if a task reads its records itself, and
may wait for a broker; if it runs Python code, whose process an interrupted task ends; or if the session has executors
elsewhere.
"""

IMPORTS = """
import java.io.InterruptedIOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicLong;
import java.util.regex.Pattern;
import org.apache.spark.Dependency;
import org.apache.spark.NarrowDependency;
import org.apache.spark.Partition;
import org.apache.spark.SparkEnv;
import org.apache.spark.SparkException;
import org.apache.spark.TaskContext$;
import org.apache.spark.TaskContextImpl;
import org.apache.spark.executor.TaskMetrics;
import org.apache.spark.memory.MemoryMode;
import org.apache.spark.memory.TaskMemoryManager;
import org.apache.spark.rdd.RDD;
import org.apache.spark.rdd.RDDOperationScope;
import org.apache.spark.sql.execution.datasources.v2.DataSourceRDD;
import org.apache.spark.sql.execution.datasources.v2.DataSourceRDDPartition;
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition;
import scala.Option;
import scala.collection.Iterator;
"""
ONE_TASK = """
class OneTask {
    private static final AtomicLong IDS = new AtomicLong(1L << 40); // far from those of Spark's own tasks
    private static final Pattern PYTHON = Pattern.compile("Python|Pandas|Arrow|PySpark");

    static boolean suffices(RDD rows) {
        return rows.sparkContext().isLocal() && rows.getNumPartitions() == 1 && needsOnlySentRecords(rows);
    }

    private static boolean needsOnlySentRecords(RDD rows) {
        Option operator = rows.scope();
        String name = operator.isDefined() ? ((RDDOperationScope) operator.get()).name() : "";
        if (PYTHON.matcher(name).find() || PYTHON.matcher(rows.getClass().getSimpleName()).find()) return false;
        Iterator below = rows.dependencies().iterator();
        if (!below.hasNext()) return rows instanceof DataSourceRDD && wereSent(rows.partitions());
        while (below.hasNext()) {
            Dependency on = (Dependency) below.next();
            if (!(on instanceof NarrowDependency) || !needsOnlySentRecords(on.rdd())) return false;
        }
        return true;
    }

    private static boolean wereSent(Partition[] parts) {
        for (int at = 0; at < parts.length; at++) {
            Option part = ((DataSourceRDDPartition) parts[at]).inputPartition();
            if (part.isEmpty() || !(part.get() instanceof PythonStreamingInputPartition)) return false;
            if (((PythonStreamingInputPartition) part.get()).blockId().isEmpty()) return false;
        }
        return true;
    }

    /** The rows, each of them bytes; raises what the task raises. */
    static byte[][] run(RDD rows) throws Exception {
        SparkEnv env = SparkEnv.get();
        long id = IDS.incrementAndGet();
        TaskMemoryManager memory = new TaskMemoryManager(env.memoryManager(), id);
        Properties properties = (Properties) rows.sparkContext().getLocalProperties().clone();
        Task task = new Task(id, memory, properties, env);
        env.blockManager().registerTask(id);
        TaskContext$.MODULE$.setTaskContext(task);
        try {
            return completed(rows, task);
        } finally {
            try {
                env.blockManager().memoryStore().releaseUnrollMemoryForThisTask(MemoryMode.ON_HEAP, Long.MAX_VALUE);
                env.blockManager().memoryStore().releaseUnrollMemoryForThisTask(MemoryMode.OFF_HEAP, Long.MAX_VALUE);
                memory.cleanUpAllAllocatedMemory();
                env.memoryManager().releaseAllExecutionMemoryForTask(id);
            } finally {
                TaskContext$.MODULE$.unset();
                env.blockManager().releaseAllLocksForTask(id);
            }
        }
    }

    private static byte[][] completed(RDD rows, Task task) throws Exception {
        byte[][] made = null;
        try {
            made = collected(rows, task);
        } catch (Throwable error) { // which listeners must not hide
            try {
                task.markTaskFailed(error);
            } catch (Throwable another) {
                error.addSuppressed(another);
            }
            try {
                task.markTaskCompleted(Option.apply(error));
            } catch (Throwable another) {
                error.addSuppressed(another);
            }
            if (error instanceof Exception) throw (Exception) error;
            if (error instanceof Error) throw (Error) error;
            throw new RuntimeException(error);
        }
        task.markTaskCompleted(Option.empty());
        return made;
    }

    private static byte[][] collected(RDD rows, Task task) throws Exception {
        long most = rows.sparkContext().conf().getSizeAsBytes("spark.driver.maxResultSize", "1g");
        long bytes = 0L;
        ArrayList made = new ArrayList();
        task.killTaskIfInterrupted();
        Iterator on = rows.iterator(rows.partitions()[0], task);
        while (on.hasNext()) {
            byte[] row = (byte[]) on.next();
            bytes += row.length;
            if (most > 0L && bytes > most) throw new SparkException(
                "The result of a task is larger than spark.driver.maxResultSize (" + most + " bytes)");
            made.add(row);
        }
        return (byte[][]) made.toArray(new byte[0][]);
    }

    public static class Task extends TaskContextImpl {
        Task(long id, TaskMemoryManager memory, Properties properties, SparkEnv env) {
            super(0, 0, 0, id, 0, 1, memory, properties, env.metricsSystem(), TaskMetrics.empty(), 1,
                (scala.collection.immutable.Map) TaskContextImpl.$lessinit$greater$default$12());
        }

        public void killTaskIfInterrupted() { // Spark asks before each record: a query that stops interrupts its thread
            if (Thread.interrupted()) throw new UncheckedIOException(new InterruptedIOException("the query stops"));
        }
    }
}
"""
"""A class of Java, and what it imports. It uses what Spark's executor does, which is private."""
