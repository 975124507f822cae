"""The row on which a plain Python function raises, by the text of its exception.

Spark sends such a function its rows in batches, and knows of whole batches that they came back. So the worker counts
the rows that the function takes, and adds a note to the exception. The number is a hint: of two tasks each has its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import count
from operator import itemgetter
from typing import Any

_NOTE = re.compile(r"\n\(row (\d+) of its task\)")


def failing_row(text: str) -> int | None:
    """The number of the row in the text of an exception, from 0 on; None if it names none."""
    found = _NOTE.search(text)
    return None if found is None else int(found[1]) - 1


def without_row(text: str) -> str:
    return _NOTE.sub("", text)


def count_rows() -> None:
    """Have the workers that are forked from this process name the row on which a plain Python function raises."""
    worker: Any = import_module("pyspark.worker")
    plain, read, handle = worker.PythonEvalType.SQL_BATCHED_UDF, worker.read_udfs, worker.handle_worker_exception
    taken: list[Iterator[int]] = []

    def read_udfs(*options: Any) -> tuple[Any, ...]:
        function, *others = read(*options)
        taken.clear()

        def counted(split: int, rows: Iterator[Any]) -> Any:
            taken[:] = [count()]
            return function(split, map(itemgetter(0), zip(rows, *taken, strict=False)))

        return (counted if plain in options else function, *others)

    def handle_worker_exception(error: BaseException, *options: Any, **named: Any) -> None:
        for rows in taken:
            with suppress(Exception):  # the class of the exception is the user's
                error.add_note(f"(row {next(rows)} of its task)")
        handle(error, *options, **named)

    worker.read_udfs, worker.handle_worker_exception = read_udfs, handle_worker_exception
