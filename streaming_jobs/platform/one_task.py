"""A job of one small task runs in the thread that waits for it, without Spark's scheduler.

Spark's scheduler hands a job from thread to thread six times, and serialises the task for its own process. Of a live
batch with 400 records, one partition of state and two busy cores, that took half as long as the task. Here the thread
does around the task what Spark's executor does: memory, locks of blocks, and listeners, which close the state's stores.

A job is Spark's, with its scheduler, if it has an exchange or several tasks; if its records are not in Spark's memory,
so that the task would wait for a broker; if it runs Python code, whose process an interrupted task ends; or if the
session has executors elsewhere.
"""

IMPORTS = """
import java.util.ArrayList;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicLong;
import java.util.regex.Pattern;
import org.apache.spark.Dependency;
import org.apache.spark.NarrowDependency;
import org.apache.spark.Partition;
import org.apache.spark.SparkContext;
import org.apache.spark.SparkEnv;
import org.apache.spark.SparkException;
import org.apache.spark.TaskContext$;
import org.apache.spark.TaskContextImpl;
import org.apache.spark.executor.TaskMetrics;
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
        return rows.sparkContext().isLocal() && rows.getNumPartitions() == 1 && isSmall(rows);
    }

    private static boolean isSmall(RDD rows) {
        Option operator = rows.scope();
        if (operator.isDefined() && PYTHON.matcher(((RDDOperationScope) operator.get()).name()).find()) return false;
        Iterator below = rows.dependencies().iterator();
        if (!below.hasNext()) return rows instanceof DataSourceRDD && areInMemory(rows.partitions());
        while (below.hasNext()) {
            Dependency on = (Dependency) below.next();
            if (!(on instanceof NarrowDependency) || !isSmall(on.rdd())) return false;
        }
        return true;
    }

    private static boolean areInMemory(Partition[] parts) {
        for (int at = 0; at < parts.length; at++) {
            Option part = ((DataSourceRDDPartition) parts[at]).inputPartition();
            if (part.isEmpty() || !(part.get() instanceof PythonStreamingInputPartition)) return false;
            if (((PythonStreamingInputPartition) part.get()).blockId().isEmpty()) return false;
        }
        return true;
    }

    /** The rows, each of them bytes; raises what the task raises. */
    static byte[][] run(RDD rows) throws Exception {
        SparkContext context = rows.sparkContext();
        SparkEnv env = SparkEnv.get();
        long id = IDS.incrementAndGet();
        TaskMemoryManager memory = new TaskMemoryManager(env.memoryManager(), id);
        Properties properties = (Properties) context.getLocalProperties().clone();
        TaskContextImpl task = new TaskContextImpl(0, 0, 0, id, 0, 1, memory, properties, env.metricsSystem(),
            TaskMetrics.empty(), 1, (scala.collection.immutable.Map) TaskContextImpl.$lessinit$greater$default$12());
        env.blockManager().registerTask(id);
        TaskContext$.MODULE$.setTaskContext(task);
        try {
            ArrayList made = null;
            Throwable failure = null;
            try {
                long most = context.conf().getSizeAsBytes("spark.driver.maxResultSize", "1g");
                made = collected(rows.iterator(rows.partitions()[0], task), most);
            } catch (Throwable error) {
                failure = error;
                task.markTaskFailed(error);
            }
            task.markTaskCompleted(Option.apply(failure)); // raises what its listeners raise
            if (failure instanceof Error) throw (Error) failure;
            if (failure != null) throw (Exception) failure;
            return (byte[][]) made.toArray(new byte[0][]);
        } finally {
            env.blockManager().releaseAllLocksForTask(id);
            memory.cleanUpAllAllocatedMemory();
            env.memoryManager().releaseAllExecutionMemoryForTask(id);
            TaskContext$.MODULE$.unset();
        }
    }

    private static ArrayList collected(Iterator rows, long most) throws Exception {
        ArrayList made = new ArrayList();
        long bytes = 0L;
        while (rows.hasNext()) {
            if (Thread.interrupted()) throw new InterruptedException();
            byte[] row = (byte[]) rows.next();
            bytes += row.length;
            if (most > 0L && bytes > most) throw new SparkException(
                "The result of a task is larger than spark.driver.maxResultSize (" + most + " bytes)");
            made.add(row);
        }
        return made;
    }
}
"""
"""A class of Java, and what it imports. It uses what Spark's executor does, which is private."""
