"""What preflight says of the topics that a stream writes: the marker against primary table and checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import ShardsSnapshot, StreamSnapshot, TopicSinkSnapshot
from streaming_jobs.sources.topics import TopicInfo
from tests.support.worlds import PRIMARY, STREAM, checkpoint_world, fresh, opened, settled, with_table

NAME, TOPIC = "topic:orders", "orders"
SHARDS = "__recourse.s.orders.shards-2"
INFO = TopicInfo(TOPIC, "its id", 3, -1, "delete")
MARKERS = TopicInfo("__recourse.s.orders", "markers' id", 1, -1, "compact")


def marker(batch: int, generation: int = 1) -> LedgerEntry:
    written = (WrittenRange(TOPIC, "its id", 0, 0, 5, 5),) if batch >= 0 else ()
    return LedgerEntry("batch", STREAM, NAME, generation, batch, written=written)


def writing(snapshot: StreamSnapshot, at: LedgerEntry | None, listed: Txn | None, **changes: Any) -> StreamSnapshot:
    """The snapshot of a stream that writes a topic too: where its marker is, and what the primary's entry lists."""
    sink = TopicSinkSnapshot(NAME, TOPIC, INFO, True, marker_topic="__recourse.s.orders", marker=at)
    made = replace(snapshot, topic_sinks=(replace(sink, **changes),), external_known=True)
    newest = next(t.entry for t in made.tables if t.name == PRIMARY)
    if newest is None or listed is None:
        return made
    return with_table(made, PRIMARY, entry=replace(newest, txns={**newest.txns, NAME: listed.version}))


def in_flight() -> StreamSnapshot:
    """Killed in batch 8: Spark has planned it, and no table has it."""
    return replace(settled(7), checkpoint=checkpoint_world(8, 7))


BEHIND_OR_LEVEL = [
    (fresh(), None, None),
    (opened(), None, None),
    (opened(), -1, None),
    (settled(7), -1, Txn(1, -1)),
    (settled(7), 7, Txn(1, 7)),
    (settled(7), 3, Txn(1, 3)),
    (in_flight(), 7, Txn(1, 7)),
    (in_flight(), 8, Txn(1, 7)),
]
"""The stream, the batch at which a sink beside its tables is, and what the primary's entry lists: nothing is wrong."""


@pytest.mark.parametrize(("snapshot", "at", "listed"), BEHIND_OR_LEVEL)
def test_a_marker_where_it_should_be_lets_the_stream_start(
    snapshot: StreamSnapshot, at: int | None, listed: Txn | None
) -> None:
    assert check_start(writing(snapshot, None if at is None else marker(at), listed)) == []


@pytest.mark.parametrize(
    ("snapshot", "at", "listed", "text"),
    [
        (settled(7), None, Txn(1, 7), "the marker of topic orders is gone"),
        (settled(7), None, None, "the marker of topic orders is missing"),
        (in_flight(), None, Txn(1, 7), "the marker of topic orders is gone"),
        (settled(7), marker(6), Txn(1, 7), "topic orders is at g0001 batch 6, but table evens says"),
        (settled(7), marker(8), Txn(1, 7), "topic orders is at g0001 batch 8"),
        (in_flight(), marker(9), Txn(1, 7), "topic orders is at g0001 batch 9"),
        (settled(7), marker(7), None, "it should be at no batch"),
        (settled(7), marker(-1, 2), Txn(1, 7), "is in generation 2, the stream's state in 1"),
        (fresh(), marker(4), None, "but the stream's record is gone"),
    ],
)
def test_a_marker_elsewhere_forbids_the_start(
    snapshot: StreamSnapshot, at: LedgerEntry | None, listed: Txn | None, text: str
) -> None:
    (finding,) = check_start(writing(snapshot, at, listed))
    assert finding.severity == "refuse" and text in finding.found and finding.next_step


@pytest.mark.parametrize(
    ("snapshot", "at", "listed"),
    [(fresh(), marker(4), None), (settled(7), None, Txn(1, 7)), (settled(7), marker(6), Txn(1, 7))],
)
def test_the_way_to_start_over_takes_topic_and_marker_together_and_says_what_it_costs(
    snapshot: StreamSnapshot, at: LedgerEntry | None, listed: Txn | None
) -> None:
    (finding,) = check_start(writing(snapshot, at, listed))
    together = "delete topic orders and its marker topic __recourse.s.orders together, create orders again, and start"
    for text in ("a new stream with a new output topic", together, "now are written again"):
        assert text in finding.next_step


def test_a_generation_that_was_just_opened_may_start() -> None:
    """A driver that opened generation 2 in the topic and was killed before its first batch."""
    snapshot = writing(settled(7), marker(-1, 2), Txn(1, 7))
    assert snapshot.record is not None
    newer = replace(snapshot.record, generations=(*snapshot.record.generations, _generation(2)))
    findings = [f for f in check_start(replace(snapshot, record=newer)) if "topic orders" in f.found]
    assert findings == []


def _generation(number: int) -> Any:
    known = settled(7).record
    assert known is not None
    return replace(known.generations[0], number=number)


@pytest.mark.parametrize(
    ("changes", "severity", "text"),
    [
        ({"info": None}, "unknown", "topic orders, which stream parity writes, does not exist"),
        (
            {"info": replace(INFO, replicas=2, min_insync_replicas=3)},
            "refuse",
            "has 2 replicas and min.insync.replicas=3",
        ),
        ({"info": replace(INFO, replicas=3)}, "warn", "3 replicas and min.insync.replicas=1"),
        ({"info": replace(INFO, id="another")}, "warn", "was deleted and made anew"),
        ({"marker_info": replace(MARKERS, replicas=3)}, "warn", "topic __recourse.s.orders has 3 replicas and min"),
        (
            {"marker_info": replace(MARKERS, min_insync_replicas=2)},
            "refuse",
            "topic __recourse.s.orders has 1 replicas",
        ),
        (
            {"info": replace(INFO, replicas=3, min_insync_replicas=2), "marker_info": MARKERS},
            "warn",
            "topic __recourse.s.orders has 1 replicas, topic orders has 3",
        ),
        ({"acks": "1", "exactly_once": False}, "warn", "acks=1"),
    ],
)
def test_the_topic_itself_is_looked_at(changes: dict[str, Any], severity: str, text: str) -> None:
    # At-least-once sinks are listed nowhere.
    listed = None if changes.get("exactly_once") is False else Txn(1, 7)
    (finding,) = check_start(writing(settled(7), marker(7), listed, **changes))
    assert finding.severity == severity and text in finding.found


def test_a_topic_that_is_no_longer_written_is_missed() -> None:
    gone = replace(writing(settled(7), marker(7), Txn(1, 7)), topic_sinks=())
    (finding,) = check_start(gone)
    assert "no longer writes topic orders exactly once" in finding.found
    assert check_start(replace(gone, external_known=False)) == [], "a replay writes none, and looks at none"


def shards(*batches: int | None, declared: int = 2, marked: bool = True) -> dict[str, Any]:
    markers = {shard: None if batch is None else marker(batch) for shard, batch in enumerate(batches)}
    return {"shards": (ShardsSnapshot(SHARDS, markers, marked=marked),), "declared_shards": declared}


@pytest.mark.parametrize(
    ("snapshot", "changes"),
    [
        (settled(7), shards(-1, -1)),
        (settled(7), shards(5, 7, declared=0)),
        (settled(7), shards(5, None, marked=False)),
        (in_flight(), shards(8, 7)),
        (in_flight(), shards(8, 8)),
    ],
)
def test_shards_that_are_not_ahead_or_have_the_planned_batch_let_the_stream_start(
    snapshot: StreamSnapshot, changes: dict[str, Any]
) -> None:
    assert check_start(writing(snapshot, marker(7), Txn(1, 7), **changes)) == []


@pytest.mark.parametrize(
    ("snapshot", "changes", "text"),
    [
        (settled(7), shards(7, None), "lacks the markers of shards 1: nobody knows"),
        (settled(7), shards(7, 8), "shards of topic orders have g0001 batch 8, which is not the planned batch"),
        (in_flight(), shards(9, 7), "shards of topic orders have g0001 batch 9"),
        (in_flight(), shards(8, 7, declared=4), "some of the 2 shards of topic orders have g0001 batch 8"),
        (in_flight(), shards(8, 7, declared=0), "is declared with none"),
    ],
)
def test_a_shard_that_is_lost_or_elsewhere_refuses_the_start(
    snapshot: StreamSnapshot, changes: dict[str, Any], text: str
) -> None:
    (finding,) = check_start(writing(snapshot, marker(7), Txn(1, 7), **changes))
    assert finding.severity == "refuse" and text in finding.found


@pytest.mark.parametrize(("snapshot", "at"), [(fresh(), None), (opened(), marker(-1))])
def test_shards_of_a_topic_that_was_deleted_refuse_the_start(snapshot: StreamSnapshot, at: LedgerEntry | None) -> None:
    (finding,) = check_start(writing(snapshot, at, None, **shards(3, 3, marked=False)))
    assert finding.severity == "refuse" and f"delete topic {SHARDS}" in finding.next_step
    (finding,) = check_start(writing(settled(7), marker(7), Txn(1, 7), **shards(9, 7)))
    assert "delete" not in finding.next_step, "the marker speaks of them: without theirs no start would be possible"
    (finding,) = check_start(writing(settled(7), marker(7), Txn(1, 7), **shards(7, None)))
    assert f"{SHARDS} together" in finding.next_step


def test_whoever_writes_all_records_again_is_told_to_delete_the_markers_of_shards_too() -> None:
    no_record = replace(writing(fresh(), marker(3), None, **shards(3, 3)))
    (finding,) = check_start(no_record)
    assert f"its marker topics __recourse.s.orders, {SHARDS} together" in finding.next_step
