"""The platform under a stream: Spark, the embedded broker, Java, jars, table files. Read `spark.py` first."""
