"""Which records prove that a topic has no batch behind the one that the primary table lists."""

from __future__ import annotations

import pytest

from reprocessing.topics.lost_marker import _may_be_later
from streaming_jobs.ledger.entry import Txn


def of(stream: str, generation: int, batch: int) -> dict[str, bytes | None]:
    values = {"stream": stream, "generation": generation, "batch": batch}
    return {f"recourse.{name}": str(value).encode() for name, value in values.items()}


@pytest.mark.parametrize(
    ("headers", "later"),
    [
        (of("mine", 2, 7), False),
        (of("mine", 1, 9), False),
        (of("mine", 2, 8), True),
        (of("mine", 3, 0), True),
        (of("another", 5, 5), False),
        ({}, True),
        ({"recourse.stream": b"mine"}, True),
        ({**of("mine", 2, 7), "recourse.batch": None}, True),
    ],
)
def test_a_record_is_of_an_earlier_batch_of_another_stream_or_may_be_later(
    headers: dict[str, bytes | None], later: bool
) -> None:
    assert _may_be_later(headers, "mine", Txn(2, 7)) == later
