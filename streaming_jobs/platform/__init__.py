"""The platform under a stream: Spark, the embedded broker, Java, jars, the log of a table. Read `spark.py` first."""
