"""Slices from the command line and from Dagster: one runner, one partitioned job, one schedule."""
