"""The parent of a session's Python workers (`spark.python.daemon.module`), with what they import already imported.

PySpark's own daemon imports nothing and forks: each worker then imports by itself what it needs, again,
and has it in memory once more. Forked from here, workers start at once and share those pages.

A process with threads must not fork. PyArrow and NumPy start threads when they are imported, unless they are told not
to. If there is one nevertheless, this process becomes PySpark's own daemon.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

_ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
_IMPORTED = ("pyspark.worker", "pyspark.sql.worker.plan_data_source_read", "streaming_jobs.sources.kafka_data_source")


def main() -> None:
    """Import, then be PySpark's daemon."""
    told = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    for module in _IMPORTED:
        importlib.import_module(module)
    if (threads := sum(1 for _ in Path("/proc/self/task").glob("*"))) > 1:
        print(f"{threads} threads after the imports: workers are forked without them", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])  # noqa: S606 - ourselves
    for name, value in told.items():  # a user's functions get what the user has set
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    gc.collect()
    gc.freeze()  # pages of objects that the collector leaves alone stay shared

    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
