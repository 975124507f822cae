"""The S3 server of the tests repeats answers to reads, and never one that a write has made old."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from tests.support.store_server import Answer, Answers


def request(path: str, method: str = "GET", query: str = "") -> dict[str, Any]:
    return {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}


@pytest.fixture
def numbers() -> Any:
    """Answers that can be told apart."""
    number = count()
    return lambda: (str(next(number)), [], [])


def test_a_read_is_repeated_until_its_object_or_for_a_listing_any_is_written(numbers: Any) -> None:
    answers = Answers()

    def read(*of: str) -> Answer:
        return answers.of_read(request(*of), numbers)

    reads = [("/lake/a",), ("/lake/b",), ("/lake/a", "HEAD"), ("/lake", "GET", "list-type=2"), ("/lake/", "GET", "x")]
    first = [read(*of) for of in reads]
    assert [read(*of) for of in reads] == first and len({status for status, _, _ in first}) == len(reads)
    answers.of_write(request("/lake/a", "PUT"), numbers)
    assert [read(*of) == before for of, before in zip(reads, first, strict=True)] == [False, True, False, False, False]
    answers.of_write(request("/lake", "POST", "delete"), numbers)
    assert read("/lake/b") != first[1], "a write without a key may be one of any"


def test_an_answer_to_a_read_that_a_write_overtook_is_not_kept(numbers: Any) -> None:
    answers, read, write = Answers(), request("/lake/a"), request("/lake/a", "PUT")

    def overtaken() -> Answer:
        old: Answer = numbers()
        answers.of_write(write, numbers)
        return old

    assert answers.of_read(read, overtaken) != answers.of_read(read, numbers)
    during: list[Answer] = []

    def written() -> Answer:
        during.append(answers.of_read(read, numbers))
        return during[0]

    answers.of_write(write, written)
    assert answers.of_read(read, numbers) not in during
