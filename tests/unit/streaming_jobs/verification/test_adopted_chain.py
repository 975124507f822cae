"""An adoption that was undone and repeated begins the chain of a table again; a batch that is repeated never does."""

from __future__ import annotations

from typing import Any

import pytest

from streaming_jobs.verification.delta_log import Entry, LoggedCommit, Range
from streaming_jobs.verification.ledger_chain import Chain

APP = "recourse:orders:orders"


def commit(version: int, kind: str, batch: int, start: int, end: int, *, rows: bool = False) -> LoggedCommit:
    reads = (Range("orders", "t1", {0: start}, {0: end}),)
    entry = Entry(kind, "orders", "orders", 1, batch, reads, {})
    return LoggedCommit(version, "", {APP: 1 << 32 | (batch + 1)}, rows, entry)


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 5), (5, 2), (-1, -1)])
def test_an_adoption_may_be_repeated_before_the_first_batch(first: int, second: int) -> None:
    chain = Chain("orders", "orders")
    commits = [
        commit(4, "publish", first, 7, 7),
        commit(6, "publish", second, 9, 9),
        commit(7, "batch", second + 1, 9, 12, rows=True),
    ]
    assert [fault for each in commits for fault in chain.take(each)] == [] and chain.skipped == []


@pytest.mark.parametrize("options", [{"rows": True}, {"rows": False}])
def test_no_publish_of_the_same_position_follows_a_batch(options: dict[str, Any]) -> None:
    chain = Chain("orders", "orders")
    assert chain.take(commit(4, "publish", 2, 7, 7)) == []
    assert chain.take(commit(5, "batch", 3, 7, 9, rows=True)) == []
    [fault] = chain.take(commit(6, "publish", 3, 9, 9, **options))
    assert fault.kind == "order"
