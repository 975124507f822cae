"""The command `recourse`, as installed: it looks whether its packages are its own before it imports them."""

from __future__ import annotations

import importlib
import sys

from streaming_jobs import collisions
from streaming_jobs.errors import UsageError


def main() -> int:
    """Run the command line; exit code 2 if a folder of the user's stands in its place."""
    try:
        collisions.check()
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # By name: this package does not depend on the command line, which may be somebody else's until it was looked at.
    return int(importlib.import_module("orchestration.cli").main())
