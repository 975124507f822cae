"""The parent of a session's Python workers (`spark.python.daemon.module`), with what they import already imported.

PySpark's own daemon imports nothing and forks: each worker then imports by itself what it needs, for half a second,
and has 60 MB of its own in memory. Forked from here, workers start at once and share those pages.

A process with threads must not fork. PyArrow and NumPy start threads when they are imported, unless they are told not
to; `main` refuses if one is there.
"""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path

_ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
_IMPORTED = ("pyspark.worker", "pyspark.sql.worker.plan_data_source_read", "streaming_jobs.sources.kafka_data_source")


def main() -> None:
    """Import, then be PySpark's daemon."""
    for name, value in _ONE_THREAD.items():
        os.environ.setdefault(name, value)
    for module in _IMPORTED:
        importlib.import_module(module)
    if (threads := sum(1 for _ in Path("/proc/self/task").glob("*"))) > 1:
        raise RuntimeError(f"an import has started a thread ({threads} are there), so this process must not fork")
    gc.collect()
    gc.freeze()  # pages of objects that the collector leaves alone stay shared

    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
