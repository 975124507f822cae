"""What the tests of several rooms share: streams, worlds on disk, drivers and benches."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder of the project."""
