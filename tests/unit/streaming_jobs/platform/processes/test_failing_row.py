"""A worker names the row on which a plain Python function raises."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark import worker

from streaming_jobs.platform.failures import classify, with_traceback
from streaming_jobs.platform.processes.failing_row import count_rows, failing_row, without_row

PLAIN, PANDAS = worker.PythonEvalType.SQL_BATCHED_UDF, worker.PythonEvalType.SQL_MAP_PANDAS_ITER_UDF


@dataclass(frozen=True)
class Frozen(Exception):
    why: str


def refuse(number: int) -> int:
    if number == 70:
        raise ValueError("no place for 70")
    if number == 200:
        raise Frozen("takes no note")
    return number


def test_a_plain_function_that_raises_names_the_row_and_a_dead_letter_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object, __: int) -> Any:
        return (lambda _, rows: map(refuse, rows)), None, "in", "out"

    def text_of(kind: int, rows: Iterator[int]) -> str:
        function, *others = worker.read_udfs(None, kind)
        assert others == [None, "in", "out"]
        try:
            list(function(0, rows))
        except (ValueError, Frozen) as error:
            assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
            assert error.__traceback__.tb_next.tb_frame.f_code.co_name == "refuse", "nothing is in between"
            worker.handle_worker_exception(error, written)
        return written.pop() if written else ""

    def handle(error: BaseException, outfile: list[str]) -> None:
        outfile.append("".join(traceback.format_exception(error)))

    written: list[str] = []
    monkeypatch.setattr(worker, "read_udfs", read)
    monkeypatch.setattr(worker, "handle_worker_exception", handle)
    count_rows()
    assert text_of(PLAIN, iter(range(10))) == ""
    text = text_of(PLAIN, iter(range(10, 100)))
    assert failing_row(text) == 60
    assert failing_row(text_of(PANDAS, iter(range(10, 100)))) is None, "it takes more than it has worked on"
    assert "Frozen: takes no note" in text_of(PLAIN, iter([200])), "the user's own exception"
    assert "no place for 70" in without_row(text) and failing_row(without_row(text)) is None
    raised = classify(RuntimeError(f"An exception was thrown from the Python worker: {text}"))
    assert failing_row(with_traceback(raised)) is None and "in refuse" in with_traceback(raised)  # type: ignore[arg-type]
