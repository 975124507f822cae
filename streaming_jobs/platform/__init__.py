"""What a stream runs on: Spark, the embedded broker, Java, jars, processes. Read `spark.py` first."""
