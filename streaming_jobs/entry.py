"""The command `recourse`, as installed: it checks that no folder hides its packages, then imports them."""

from __future__ import annotations

import importlib
import sys

from streaming_jobs import collisions
from streaming_jobs.errors import UsageError


def main() -> int:
    """Run the command line; exit code 2 if a folder of the user hides one of its packages."""
    try:
        collisions.check()
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # By name: this package does not depend on the command line, and another package may hide it before the check.
    return int(importlib.import_module("orchestration.cli").main())
