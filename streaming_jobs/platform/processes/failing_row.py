"""The row on which a Python function raises, by the text of its exception.

Spark sends a function its rows in batches, and knows of whole batches that they came back. A plain function takes rows
one by one, and its worker counts them. Where a task has the property `LOCATES`, the worker looks for the row of other
functions, too: it calls the function anew on halves of the batch that it took last, until one row is left that raises
alone. It adds the row's number to the exception, as a note. The number is a hint: of two tasks each has its own.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

LOCATES = "recourse.locates_failing_row"
"""The property of a job whose functions may be called once more on rows on which they raised."""
_NOTE = re.compile(r"\n\(row (\d+) of its task\)")
_ELSEWHERE = re.compile(
    r"Connect|Timeout|TimedOut|Unavailable|Network|Socket|gaierror|URLError|HTTPError|OSError|IOError"
)
_LEAST = 3.0
"""Seconds that a worker looks for a row, at least; at most as long as its task took until the function raised."""


def failing_row(text: str) -> int | None:
    """The number of the row in the text of an exception, from 0 on; None if it names none."""
    found = _NOTE.search(text)
    return None if found is None else int(found[1]) - 1


def without_row(text: str) -> str:
    return _NOTE.sub("", text)


def is_of_a_service(exception: str) -> bool:
    """True if the name of an exception's class says that another machine is at fault: the exception may pass."""
    return _ELSEWHERE.search(exception) is not None


@dataclass
class _Batches:
    """The batches that a function takes in a task: record batches of Arrow, or lists of columns of pandas."""

    function: Callable[[int, Iterator[Any]], Any]
    write: Callable[[Any, Any], None]
    """Writes what the function returns to a stream, and so has the function run."""
    began: float
    last: Any = None
    before: int = 0
    """Rows of the batches before the last."""

    def taken(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.before += 0 if self.last is None else _rows(self.last)
            self.last = batch
            yield batch

    def row(self, error: BaseException) -> int | None:
        """The number of a row of the last batch on which the function raises alone, an exception of the same class.

        None if there is none, or the time is over.
        """
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return None
        low, high = 0, 0 if self.last is None else _rows(self.last)
        deadline = time.monotonic() + max(time.monotonic() - self.began, _LEAST)
        trace = error.__traceback__  # a function may raise the same object each time
        with Path(os.devnull).open("wb") as nowhere:

            def raises(begin: int, end: int) -> bool:
                try:
                    self.write(self.function(0, iter([_part(self.last, begin, end)])), nowhere)
                except BaseException as another:  # noqa: BLE001 - the first one is reported
                    return type(another) is type(error)
                finally:
                    error.__traceback__ = trace
                return False

            while high - low > 1 and time.monotonic() < deadline:
                middle = (low + high) // 2
                low, high = (low, middle) if raises(low, middle) else (middle, high)
            found = high - low == 1 and time.monotonic() < deadline and raises(low, high)
            return self.before + low if found else None


def _rows(batch: Any) -> int:
    return len(batch[0]) if isinstance(batch, list) else batch.num_rows


def _part(batch: Any, begin: int, end: int) -> Any:
    """Some rows of a batch, as if Spark had sent no others."""
    if isinstance(batch, list):
        return [column.iloc[begin:end].reset_index(drop=True) for column in batch]
    return batch.slice(begin, end - begin)


def name_rows() -> None:
    """Have the workers that are forked from this process name the row on which a function raises.

    Not of an exception that a service causes which does not answer, nor of a function of groups.
    """
    from pyspark.taskcontext import TaskContext

    worker: Any = import_module("pyspark.worker")
    kinds, work, read, handle = worker.PythonEvalType, worker.main, worker.read_udfs, worker.handle_worker_exception
    in_batches = {
        kinds.SQL_ARROW_BATCHED_UDF,
        kinds.SQL_SCALAR_ARROW_UDF,
        kinds.SQL_SCALAR_ARROW_ITER_UDF,
        kinds.SQL_SCALAR_PANDAS_UDF,
        kinds.SQL_SCALAR_PANDAS_ITER_UDF,
        kinds.SQL_MAP_ARROW_ITER_UDF,
        kinds.SQL_MAP_PANDAS_ITER_UDF,
    }
    rows: list[Callable[[BaseException], int | None]] = []
    """What names the row, in this task."""

    def main(infile: IO[bytes], outfile: IO[bytes]) -> None:
        try:
            work(infile, outfile)
        finally:
            rows.clear()

    def read_udfs(serializer: Any, stream: Any, kind: int, *options: Any) -> tuple[Any, ...]:
        function, *others = read(serializer, stream, kind, *options)

        def counted(split: int, taken: Iterator[Any]) -> Any:
            numbers = count()
            rows[:] = [lambda _: next(numbers) - 1]
            return function(split, map(itemgetter(0), zip(taken, numbers, strict=False)))

        def halved(split: int, batches: Iterator[Any]) -> Any:
            taken = _Batches(function, others[-1].dump_stream, time.monotonic())
            rows[:] = [taken.row]
            return function(split, taken.taken(batches))

        if kind == kinds.SQL_BATCHED_UDF:
            return counted, *others
        task = TaskContext.get()
        locates = kind in in_batches and task is not None and task.getLocalProperty(LOCATES) == "true"
        return halved if locates else function, *others

    def handle_worker_exception(error: BaseException, *options: Any, **named: Any) -> None:
        kind = type(error)
        with suppress(Exception):  # the user's own is reported, and its class is the user's
            of_a_service = is_of_a_service(f"{kind.__module__}.{kind.__qualname__}")
            if rows and not of_a_service and (number := rows[0](error)) is not None:
                error.add_note(f"(row {number + 1} of its task)")
        handle(error, *options, **named)

    worker.main, worker.read_udfs, worker.handle_worker_exception = main, read_udfs, handle_worker_exception
