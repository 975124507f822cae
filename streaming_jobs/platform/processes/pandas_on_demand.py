"""PyArrow without pandas, until other code imports pandas.

`pyarrow.array` imports pandas, 36 MB and a third of a second, to see if it was given one of its objects. If there is no
pandas it remembers that, until it is asked to make a pandas object. So it is told that there is none; and as soon as a
user's code imports pandas, PyArrow looks again.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import IO, Any


class _Finder:
    """The first finder of this process: it denies pandas to PyArrow, and lets everybody else have it."""

    def __init__(self) -> None:
        self.denied_in: int | None = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of pandas as other finders have it; raises ModuleNotFoundError while it is denied."""
        if name != "pandas":
            return None
        if self.denied_in == threading.get_ident():
            raise ModuleNotFoundError("PyArrow is to do without pandas", name=name)
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                self.found()

            loader.exec_module = run
        return spec

    def found(self) -> None:
        """Have PyArrow look again."""
        import pyarrow as pa

        if self in sys.meta_path:
            sys.meta_path.remove(self)
            pa.array([None]).to_pandas()


def pandas_on_demand() -> None:
    """From now on PyArrow imports no pandas; nothing changes if pandas is imported already, or this was called before.

    Forked processes inherit it.
    """
    import pyarrow as pa

    if "pandas" in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([None])
    finally:
        finder.denied_in = None


def pandas_after_a_failure() -> None:
    """Workers that are forked from this process have pandas imported, once one of them failed and had it.

    A worker ends when the stream's function raises, and Spark has the next one forked: with pandas it would import for
    a third of a second. The process that forks imports pandas only where its libraries are bound to one thread, as
    Spark does by default (OMP_NUM_THREADS): a process with threads must not fork.
    """
    if os.environ.get("OMP_NUM_THREADS") != "1":
        return
    worker: Any = import_module("pyspark.worker")
    main, fork = worker.main, os.fork
    used = mmap.mmap(-1, 1)  # shared with the forked processes

    def noted(infile: IO[bytes], outfile: IO[bytes]) -> None:
        try:
            main(infile, outfile)
        except SystemExit:
            used[0] |= "pandas" in sys.modules
            raise

    def fork_with_pandas() -> int:
        if used[0] and "pandas" not in sys.modules:
            try:
                import_module("pandas")
            except Exception:  # noqa: BLE001 - it is in a worker's path alone: only speed is lost
                used[0] = 0
        pid = fork()
        if pid == 0:
            os.fork = fork
        return pid

    worker.main, os.fork = noted, fork_with_pandas
