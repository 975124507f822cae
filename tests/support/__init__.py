"""Parts that the tests of several rooms share: streams, their snapshots in memory and on disk, drivers, benches."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder of the project."""
