"""Tables that a stream of a plan reads and another one rebuilds: what is refused, since a reader would lose rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reprocessing.stages import replay, void_ranges
from reprocessing.stages.void_ranges import RebuiltTable, refuse_ahead, refuse_left
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.stream import DeltaTable, Stream

READER = Stream("reader", lambda rows: rows, {"rows": DeltaSource("t", schema={"n": "bigint"})}, {"r": DeltaTable("r")})


def context(**values: Any) -> Any:
    plan = SimpleNamespace(id="writer-0001", wrong_versions={"t": 3})
    stream = SimpleNamespace(name="writer")
    whole = SimpleNamespace(left=("reader",))
    return SimpleNamespace(settings=None, plan=plan, stream=stream, whole=whole, **values)


@pytest.mark.parametrize("lagged", [True, False])
def test_a_stream_that_is_left_alone_would_miss_rows_if_the_writer_had_not_read_all(
    monkeypatch: pytest.MonkeyPatch, lagged: bool
) -> None:
    monkeypatch.setattr(void_ranges, "all_streams", lambda *_: {"reader": READER})
    monkeypatch.setattr(void_ranges, "lagged", lambda _: lagged)
    if not lagged:
        refuse_left(context())
        return
    with pytest.raises(PreflightRefused, match="stream reader, which the plan leaves alone, would miss some of") as no:
        refuse_left(context())
    assert "recover abort writer-0001" in no.value.next_step


@pytest.mark.parametrize(("batch", "refused"), [(4, False), (5, True)])
def test_a_table_that_others_read_may_not_be_ahead_of_the_primary_one(
    monkeypatch: pytest.MonkeyPatch, batch: int, refused: bool
) -> None:
    monkeypatch.setattr(void_ranges, "_read_by_others", lambda _: {"t": SimpleNamespace(position=Txn(1, batch))})
    if not refused:
        refuse_ahead(context(), Txn(1, 4))
        return
    with pytest.raises(UsageError, match="table t has g0001 batch 5, and the primary table of stream writer lacks it"):
        refuse_ahead(context(), Txn(1, 4))


def test_rows_that_came_since_have_to_be_told_from_the_rebuilt_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "rebuilt_tables", lambda _: [RebuiltTable("writer", "t", 3, 8)])
    writer = SimpleNamespace(result=lambda _: {"since": None})
    with pytest.raises(PreflightRefused, match="replay of stream writer has no batch that ends where its table t"):
        replay.rebuilt_rows(context(other=lambda _: writer))
