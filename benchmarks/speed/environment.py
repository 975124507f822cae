"""A Python environment for a contestant whose packages do not fit beside the product's: made once, then only used.

There is one for each list of requirements and version of Python. A list that changes makes a new one; old ones may be
deleted by hand.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.speed.process import ContestantFailed

_COMPLETE = "complete"
_INSTALL_SECONDS = 1800
Execute = Callable[[Sequence[str]], None]
"""Runs a command; raises ContestantFailed with what it printed."""


def python_of(name: str, requirements: Path, folder: Path, execute: Execute | None = None) -> Path:
    """The interpreter of the environment with these requirements, in `folder`; builds it if it is not there whole.

    Raises ContestantFailed with what pip says.
    """
    home = folder / f"{name}-{_digest(requirements)}"
    python = home / "bin" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two benchmarks at once: the second waits for what the first one builds
        if (home / _COMPLETE).exists():
            return python
        shutil.rmtree(home, ignore_errors=True)  # of a build that was stopped
        run = execute or _execute
        run([sys.executable, "-m", "venv", str(home)])
        run([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)])
        (home / _COMPLETE).touch()
    return python


def _digest(requirements: Path) -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    return hashlib.sha256(f"{version}\n{requirements.read_text()}".encode()).hexdigest()[:12]


def _execute(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    if done.returncode:
        raise ContestantFailed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
