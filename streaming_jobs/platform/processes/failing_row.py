"""The row on which a plain Python function raises, by the text of its exception.

Spark sends such a function its rows in batches, and knows of whole batches that they came back. So the worker counts
the rows that the function takes, and adds a note to the exception. The number is a hint: of two tasks each has its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    plain, read = worker.PythonEvalType.SQL_BATCHED_UDF, worker.read_udfs

    def read_udfs(*options: Any) -> tuple[Any, ...]:
        function, *others = read(*options)
        return (_counting(function) if plain in options else function, *others)

    worker.read_udfs = read_udfs


def _counting(function: Any) -> Any:
    def counted(split: int, rows: Iterator[Any]) -> Iterator[Any]:
        taken = count()
        try:
            yield from function(split, map(itemgetter(0), zip(rows, taken, strict=False)))
        except Exception as error:
            error.add_note(f"(row {next(taken)} of its task)")
            raise

    return counted
