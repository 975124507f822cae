"""What a stream runs on: Spark, the embedded broker, Java, jars, processes, table files. Read `spark.py` first."""
