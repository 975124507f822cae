"""Runs as a JSON file: the machine, and the figures of every run. Several commands may add to one file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("pyspark", "delta-spark", "deltalake", "pyarrow", "confluent-kafka")

Run = dict[str, Any]


def machine() -> dict[str, object]:
    """What a reader has to know of where the runs were made."""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in _PACKAGES},
    }


def load(path: Path) -> list[Run]:
    """The runs in a file; none if there is no such file."""
    return list(json.loads(path.read_text())["runs"]) if path.exists() else []


def save(path: Path, runs: Sequence[Run]) -> None:
    """Write machine and runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    text = f'{{"machine": {json.dumps(machine())},\n "runs": [\n{lines}\n]}}\n'
    path.write_text(text)


@dataclass(frozen=True)
class Spread:
    """The median of a figure over the rounds, the least and the greatest."""

    median: float
    least: float
    greatest: float
    rounds: int

    @classmethod
    def of(cls, runs: Sequence[Run], figure: str) -> Spread | None:
        """Over these runs; None when none of them has the figure."""
        values = [float(run[figure]) for run in runs if figure in run]
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))


def select(runs: Sequence[Run], **wanted: str) -> list[Run]:
    """The runs with these values."""
    return [run for run in runs if all(run.get(key) == value for key, value in wanted.items())]


def distinct(runs: Sequence[Run], key: str) -> list[str]:
    """The values that occur, in the order of their first run."""
    return list(dict.fromkeys(str(run[key]) for run in runs))
