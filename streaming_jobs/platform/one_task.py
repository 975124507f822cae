"""A job of one small task runs in the thread that waits for it, without Spark's scheduler.

Spark's scheduler hands a job from thread to thread six times, and serialises the task for its own process. Of a live
batch with 400 records, one partition of state and two busy cores, that took as long as the task. Here the thread does
around the task what Spark's executor does: memory, locks of blocks, listeners, which close the state's stores.

A job is Spark's, with its scheduler, if it has an exchange or several tasks; if its records are not in Spark's memory,
so that the task would wait for a broker; if it runs Python code, whose process an interrupted task ends; or if the
session has executors elsewhere.
"""

ONE_TASK = """
class OneTask {
    private static final java.util.concurrent.atomic.AtomicLong IDS = // far from those of Spark's own tasks
        new java.util.concurrent.atomic.AtomicLong(1L << 40);
    private static final java.util.regex.Pattern PYTHON = java.util.regex.Pattern.compile("Python|Pandas|Arrow|PySpark");

    static boolean suffices(org.apache.spark.rdd.RDD rows) {
        return rows.sparkContext().isLocal() && rows.getNumPartitions() == 1 && isSmall(rows);
    }

    private static boolean isSmall(org.apache.spark.rdd.RDD rows) {
        scala.Option operator = rows.scope();
        if (operator.isDefined()
            && PYTHON.matcher(((org.apache.spark.rdd.RDDOperationScope) operator.get()).name()).find()) return false;
        scala.collection.Iterator below = rows.dependencies().iterator();
        if (!below.hasNext()) return isInMemory(rows);
        while (below.hasNext()) {
            org.apache.spark.Dependency on = (org.apache.spark.Dependency) below.next();
            if (!(on instanceof org.apache.spark.NarrowDependency) || !isSmall(on.rdd())) return false;
        }
        return true;
    }

    private static boolean isInMemory(org.apache.spark.rdd.RDD records) {
        if (!(records instanceof org.apache.spark.sql.execution.datasources.v2.DataSourceRDD)) return false;
        org.apache.spark.Partition[] parts = records.partitions();
        for (int at = 0; at < parts.length; at++) {
            scala.Option part =
                ((org.apache.spark.sql.execution.datasources.v2.DataSourceRDDPartition) parts[at]).inputPartition();
            if (part.isEmpty() || !(part.get()
                instanceof org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition)) return false;
            if (((org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition) part.get())
                .blockId().isEmpty()) return false;
        }
        return true;
    }

    /** The rows, each of them bytes; raises what the task raises. */
    static byte[][] run(org.apache.spark.rdd.RDD rows) throws Exception {
        org.apache.spark.SparkContext context = rows.sparkContext();
        org.apache.spark.SparkEnv env = org.apache.spark.SparkEnv.get();
        long id = IDS.incrementAndGet();
        org.apache.spark.memory.TaskMemoryManager memory =
            new org.apache.spark.memory.TaskMemoryManager(env.memoryManager(), id);
        java.util.Properties properties = (java.util.Properties) context.getLocalProperties().clone();
        org.apache.spark.TaskContextImpl task = new org.apache.spark.TaskContextImpl(0, 0, 0, id, 0, 1, memory, properties,
            env.metricsSystem(), org.apache.spark.executor.TaskMetrics.empty(), 1,
            (scala.collection.immutable.Map) org.apache.spark.TaskContextImpl.$lessinit$greater$default$12());
        env.blockManager().registerTask(id);
        org.apache.spark.TaskContext$.MODULE$.setTaskContext(task);
        try {
            java.util.ArrayList made = null;
            Throwable failure = null;
            try {
                long most = context.conf().getSizeAsBytes("spark.driver.maxResultSize", "1g");
                made = collected(rows.iterator(rows.partitions()[0], task), most);
            } catch (Throwable error) {
                failure = error;
                task.markTaskFailed(error);
            }
            task.markTaskCompleted(scala.Option.apply(failure)); // raises what its listeners raise
            if (failure instanceof Error) throw (Error) failure;
            if (failure != null) throw (Exception) failure;
            return (byte[][]) made.toArray(new byte[0][]);
        } finally {
            env.blockManager().releaseAllLocksForTask(id);
            memory.cleanUpAllAllocatedMemory();
            env.memoryManager().releaseAllExecutionMemoryForTask(id);
            org.apache.spark.TaskContext$.MODULE$.unset();
        }
    }

    private static java.util.ArrayList collected(scala.collection.Iterator rows, long most) throws Exception {
        java.util.ArrayList made = new java.util.ArrayList();
        long bytes = 0L;
        while (rows.hasNext()) {
            if (Thread.interrupted()) throw new InterruptedException();
            byte[] row = (byte[]) rows.next();
            bytes += row.length;
            if (most > 0L && bytes > most) throw new org.apache.spark.SparkException(
                "The result of a task is larger than spark.driver.maxResultSize (" + most + " bytes)");
            made.add(row);
        }
        return made;
    }
}
"""
"""A class of Java. It uses what Spark's executor does, which is private."""
