"""Two small streams and a driver without Spark, for the tests of what stands above a driver."""
