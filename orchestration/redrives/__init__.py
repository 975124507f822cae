"""Redrives from the command line and from Dagster."""
