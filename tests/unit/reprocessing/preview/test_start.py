"""Where a preview begins, by what was asked for, the savepoints, and the records that the topic still has."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from reprocessing.preview.start import StartView, Wanted, choose
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import NO_CODE, Txn
from streaming_jobs.ledger.positions import OffsetBounds, offsets_between
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import Generation

HOUR = 3600.0
NOW = 1_800_000_000.0


def saved(batch: int, hours_ago: float, generation: int = 1) -> Savepoint:
    """A savepoint after a batch; each batch reads ten offsets."""
    ends = {"things": {0: (batch + 1) * 10}}
    return Savepoint("things", generation, batch, NOW - hours_ago * HOUR, "time", "", ends, {}, NO_CODE, {}, ())


VIEW = StartView(
    stream="things",
    generations=[Generation(1, 0.0, "first start")],
    savepoints=[saved(2, 5), saved(5, 2), saved(7, 1), saved(9, 0.1)],
    starts={"things": {0: 0}},
    topics={"things": OffsetBounds({0: 0}, {})},
    end=Txn(1, 9),
    ends={"things": {0: 100}},
    now=NOW,
)
NOTHING_LEFT = replace(VIEW, topics={"things": OffsetBounds({0: 35}, {})})


@pytest.mark.parametrize(
    ("wanted", "batch"),
    [
        (Wanted(), 7),  # the newest of all has no records after it
        (Wanted(timedelta(minutes=1)), 9),
        (Wanted(timedelta(hours=1)), 7),
        (Wanted(timedelta(hours=2)), 5),
        (Wanted(timedelta(minutes=90)), 5),
        (Wanted(timedelta(hours=3)), 2),
        (Wanted(timedelta(hours=6)), None),
        (Wanted(savepoint="g0001-b000000005"), 5),
    ],
)
def test_it_is_the_newest_savepoint_that_fits(wanted: Wanted, batch: int | None) -> None:
    start = choose(wanted, VIEW)
    assert (start.savepoint.batch if start.savepoint else None) == batch
    assert start.ends == {"things": {0: 0 if batch is None else (batch + 1) * 10}} and start.why


def test_why_it_is_this_one_is_said() -> None:
    assert choose(Wanted(), VIEW).why == "the newest that has records after it"
    assert choose(Wanted(timedelta(hours=2)), VIEW).why == "the newest that is at least 2 hours old"
    assert choose(Wanted(timedelta(hours=6)), VIEW).why == "no savepoint is 6 hours old"
    assert choose(Wanted(), replace(VIEW, savepoints=[])).why == "there is no savepoint to begin at"


def test_a_savepoint_whose_records_are_gone_is_none() -> None:
    assert choose(Wanted(timedelta(hours=2)), NOTHING_LEFT).savepoint == saved(5, 2)
    with pytest.raises(UsageError, match="offsets 30 to 34 of topic things, partition 0, are gone"):
        choose(Wanted(savepoint="g0001-b000000002"), NOTHING_LEFT)
    with pytest.raises(UsageError, match="no savepoint is 3 hours old, and offsets 0 to 34") as refused:
        choose(Wanted(timedelta(hours=3)), NOTHING_LEFT)
    assert refused.value.next_step.endswith("--from-savepoint g0001-b000000005")
    with pytest.raises(UsageError, match="there is no savepoint to begin at") as refused:
        choose(Wanted(), replace(NOTHING_LEFT, savepoints=[]))
    assert refused.value.next_step.endswith("recourse savepoints create things")


def test_one_from_before_a_recovery_that_went_further_back_is_none() -> None:
    went_back = [*VIEW.generations, Generation(2, 1.0, "recovery", 1, 4)]
    view = replace(VIEW, generations=went_back, end=Txn(2, 9))
    assert choose(Wanted(), view).savepoint == saved(2, 5)
    with pytest.raises(UsageError, match="a recovery has replaced what came after it"):
        choose(Wanted(savepoint="g0001-b000000007"), view)


def test_a_name_that_no_savepoint_has_is_refused_and_one_without_records_after_it() -> None:
    with pytest.raises(UsageError, match="has no savepoint g0001-b000000006"):
        choose(Wanted(savepoint="g0001-b000000006"), VIEW)
    with pytest.raises(UsageError, match="no record came after it"):
        choose(Wanted(savepoint="g0001-b000000009"), VIEW)


def test_records_of_a_new_partition_count_from_its_first_offset() -> None:
    assert offsets_between({"things": {0: 30}}, {"things": {0: 35, 1: 4}, "more": {0: 2}}) == 11
