"""A worker names the row on which a Python function raises."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import worker
from pyspark.taskcontext import TaskContext

from streaming_jobs.platform.failures import classify, with_traceback
from streaming_jobs.platform.processes import failing_row as module
from streaming_jobs.platform.processes.failing_row import LOCATES, failing_row, name_rows, without_row

KINDS = worker.PythonEvalType
PLAIN, PANDAS, ARROW = KINDS.SQL_BATCHED_UDF, KINDS.SQL_MAP_PANDAS_ITER_UDF, KINDS.SQL_SCALAR_ARROW_UDF
GROUPED = KINDS.SQL_GROUPED_MAP_PANDAS_UDF
Batch = pa.RecordBatch | list[pd.Series]
Function = Callable[[int, Iterator[Any]], Iterator[Any]]


@dataclass(frozen=True)
class Frozen(Exception):
    why: str


class GatewayTimeout(Exception): ...


class Serializer:
    """Writes what the function returns, as those of PySpark do."""

    def dump_stream(self, results: Iterable[Any], stream: IO[bytes]) -> None:
        for result in results:
            stream.write(b"%d" % len(result))


@dataclass
class Worker:
    """PySpark's worker with `name_rows`, and with the parts of it that speak to the JVM left out."""

    function: Function
    written: list[str]

    def text_of(self, kind: int, rows: Iterable[Any]) -> str:
        """What the worker reports if the function raises on these rows or batches."""
        function, *_, serializer = worker.read_udfs(None, None, kind)
        try:
            with open("/dev/null", "wb") as stream:  # noqa: PTH123 - a stream
                serializer.dump_stream(function(0, iter(rows)), stream)
        except Exception as error:  # noqa: BLE001 - as the worker does
            worker.handle_worker_exception(error, self.written)
        return self.written.pop() if self.written else ""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Function], Worker]:
    def handle(error: BaseException, outfile: list[str]) -> None:
        outfile.append("".join(traceback.format_exception(error)))

    def start(function: Function, *, locates: bool = True) -> Worker:
        monkeypatch.setattr(worker, "read_udfs", lambda *_: (function, None, Serializer(), Serializer()))
        monkeypatch.setattr(worker, "handle_worker_exception", handle)
        monkeypatch.setattr(worker, "main", lambda task, _: task())
        monkeypatch.setattr(
            TaskContext, "_taskContext", TaskContext(localProperties={LOCATES: "true"} if locates else {})
        )
        name_rows()
        return Worker(function, [])

    return start


def refuse(number: int) -> str:
    if number == 70:
        raise ValueError("no place for 70")
    if number == 80:
        raise GatewayTimeout("no answer")
    if number == 200:
        raise Frozen("takes no note")
    return str(number)


def each(_: int, rows: Iterator[int]) -> Iterator[str]:
    return map(refuse, rows)


def batch(kind: int, begin: int, end: int) -> Batch:
    numbers = range(begin, end)
    return [pd.Series(numbers)] if kind == PANDAS else pa.RecordBatch.from_pydict({"n": list(numbers)})


def numbers_of(given: Batch) -> list[int]:
    if isinstance(given, list):
        assert list(given[0].index) == list(range(len(given[0]))), "as Spark sends them"
        return given[0].tolist()
    return given.column(0).to_pylist()


def in_batches(_: int, batches: Iterator[Batch]) -> Iterator[list[str]]:
    for given in batches:
        yield [refuse(number) for number in numbers_of(given)]


def test_a_plain_function_that_raises_names_the_row_and_a_dead_letter_does_not(start: Callable[..., Worker]) -> None:
    started = start(each, locates=False)
    assert started.text_of(PLAIN, range(10)) == ""
    text = started.text_of(PLAIN, range(10, 100))
    assert failing_row(text) == 60
    assert "Frozen: takes no note" in started.text_of(PLAIN, [200]), "the user's own exception"
    assert "no place for 70" in without_row(text) and failing_row(without_row(text)) is None
    raised = classify(RuntimeError(f"An exception was thrown from the Python worker: {text}"))
    assert failing_row(with_traceback(raised)) is None and "in refuse" in with_traceback(raised)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [PANDAS, ARROW])
def test_a_function_of_batches_that_raises_names_the_row_that_raises_alone(
    start: Callable[..., Worker], kind: int
) -> None:
    batches = [batch(kind, 0, 30), batch(kind, 30, 60), batch(kind, 60, 100)]
    assert failing_row(text := start(in_batches).text_of(kind, batches)) == 70
    assert text.count("Traceback") == 1 and "no place for 70" in text
    assert failing_row(start(in_batches).text_of(kind, [batch(kind, 70, 71)])) == 0, "a batch of one row"
    for others in (
        start(in_batches).text_of(GROUPED, batches),
        start(in_batches, locates=False).text_of(kind, batches),
    ):
        assert "no place for 70" in others and failing_row(others) is None


def test_no_row_is_named_that_does_not_raise_alone_with_the_same_exception(start: Callable[..., Worker]) -> None:
    def two_at_least(_: int, batches: Iterator[Batch]) -> Iterator[list[int]]:
        for given in batches:
            if len(numbers := numbers_of(given)) < 2:
                raise ZeroDivisionError("no deviation of one number")
            yield [int(refuse(number)) for number in numbers]

    def over_all(_: int, batches: Iterator[Batch]) -> Iterator[list[int]]:
        seen = [number for given in batches for number in numbers_of(given)]
        yield seen
        if len(seen) > 1:
            raise ValueError("too many")

    def before_the_first(_: int, __: Iterator[Batch]) -> Iterator[list[int]]:
        raise ValueError("no set-up")
        yield [0]

    for function in (two_at_least, over_all, before_the_first):
        text = start(function).text_of(ARROW, [batch(ARROW, 0, 50), batch(ARROW, 50, 100)])
        assert "ValueError" in text and failing_row(text) is None, function.__name__


def test_a_worker_calls_a_function_again_no_longer_than_its_task_took_and_not_if_a_service_does_not_answer(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def noted(split: int, batches: Iterator[Batch]) -> Iterator[list[str]]:
        calls.append(split)
        yield from in_batches(split, batches)

    assert "GatewayTimeout" in start(noted).text_of(ARROW, [batch(ARROW, 75, 100)])
    assert len(calls) == 1
    start(noted).text_of(ARROW, [batch(ARROW, 0, 1_024)])
    assert len(calls) == 1 + 1 + 11, "ten halves, and the row"
    monkeypatch.setattr(module, "_LEAST", 0.0)
    calls.clear()

    def slow(split: int, batches: Iterator[Batch]) -> Iterator[list[str]]:
        clock[0] += 10.0 if not calls else 6.0
        yield from noted(split, batches)

    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    assert failing_row(start(slow).text_of(ARROW, [batch(ARROW, 0, 1_024)])) is None
    assert len(calls) == 1 + 2, "two of six seconds each in ten"


def test_a_worker_that_cannot_look_for_the_row_reports_the_functions_exception(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAST", "no number")
    text = start(in_batches).text_of(PANDAS, [batch(PANDAS, 0, 100)])
    assert "no place for 70" in text and failing_row(text) is None


def test_a_task_that_reads_no_function_names_no_row_of_the_task_before(start: Callable[..., Worker]) -> None:
    calls: list[int] = []

    def noted(split: int, batches: Iterator[Batch]) -> Iterator[list[str]]:
        calls.append(split)
        yield from in_batches(split, batches)

    started = start(noted)
    worker.main(lambda: started.text_of(ARROW, [batch(ARROW, 0, 10)]), None)
    worker.main(lambda: worker.handle_worker_exception(ValueError("no class of this name"), started.written), None)
    assert failing_row(started.written.pop()) is None and len(calls) == 1
