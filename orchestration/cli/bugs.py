"""The file with the traceback of an unexpected exception."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path


def write_traceback(error: BaseException) -> Path:
    """Write the traceback, readable by its owner alone, and return the file's path.

    Arguments are left out: a secret may have been given with --set.
    """
    text = [f"python {sys.version}\n", f"at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n\n"]
    text += traceback.format_exception(error)
    descriptor, name = tempfile.mkstemp(prefix="recourse-bug-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(text)
    return Path(name)
