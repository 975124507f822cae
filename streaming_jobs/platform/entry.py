"""The command `recourse`, as installed: it checks that no folder hides its packages, then imports them."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from streaming_jobs.errors import UsageError

# The check that no folder of the user hides one of this project's packages from imports.
#
# The packages have general names. A folder `quality` with an `__init__.py`, in the working directory or on
# PYTHONPATH, is found before the installed package of that name, and imports from it fail.

PACKAGES = ("orchestration", "quality", "reprocessing", "streaming_jobs")


def check() -> None:
    """Raise UsageError if an import of one of our packages finds, or has found, something else."""
    ours = Path(__file__).resolve().parents[2]
    path = [
        str(Path.cwd()),
        *sys.path,
    ]  # as for `python -m`, by which sessions are started, and for the streams' modules
    for name in PACKAGES:
        loaded = sys.modules.get(name)
        for spec in (loaded.__spec__ if loaded else None, PathFinder.find_spec(name, path)):
            if spec is not None and (place := _place(spec)) is not None and place != ours / name:
                raise UsageError(
                    f"{place} is found as the package '{name}', in the place of {ours / name}",
                    f"rename your {name}, or start recourse in another folder and without it on PYTHONPATH",
                )


def _place(spec: ModuleSpec) -> Path | None:
    """The package's folder, or a single module's file; None for a namespace, which hides nothing."""
    if spec.origin is None:
        return None
    origin = Path(spec.origin).resolve()
    return origin.parent if origin.name.startswith("__init__.") else origin


def main() -> int:
    """Run the command line; exit code 2 if a folder of the user hides one of its packages."""
    try:
        check()
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # By name: this package does not depend on the command line, and another package may hide it before the check.
    return int(importlib.import_module("orchestration.cli").main())
