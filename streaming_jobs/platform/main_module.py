"""Imports of PySpark's Connect client, as Great Expectations has one, in a process that was started without a file.

Where the main module has neither a file nor a spec (`python -c`, a child of `multiprocessing`: Dagster's runs are such
children), `pyspark.sql.connect` takes the process for one of PySpark's own doctests. Unless it finds every package that
those need, it ends the process, with exit code 0 (PySpark 4.1, pyspark/sql/connect/utils.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def seen_with_a_file() -> Iterator[None]:
    """Within the block the main module has a file, so that a missing package is an ImportError, and no exit."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None or hasattr(main, "__file__"):
        yield
        return
    main.__file__ = "<no file>"
    try:
        yield
    finally:
        if vars(main).get("__file__") == "<no file>":
            del main.__file__
