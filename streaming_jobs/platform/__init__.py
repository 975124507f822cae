"""What a stream runs on: Spark, the embedded broker, Java, jars, table files. Read `spark.py` first."""
