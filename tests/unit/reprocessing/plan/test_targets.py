"""Targets of a recovery: every kind becomes exact offsets and the end of a batch at or before them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprocessing.plan.history import BatchPace, CommittedBatch, History, generation_spans, in_lineage, lineage
from reprocessing.plan.targets import Target, View, named_code, parse_offsets, read_offsets, resolve, write_offsets
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import CodeVersion, Txn
from streaming_jobs.preflight.snapshot import TopicSnapshot
from streaming_jobs.state.ledger_file import LedgerFile, RawLine, lines_of
from streaming_jobs.state.stream_record import BoundTable, BoundTopic, CodeSince, Generation, StreamRecord

NOW = 1_800_000_000.0
T = "orders"


def batch(
    number: int, ends: Mapping[int, int], starts: Mapping[int, int], generation: int = 1, code: str = "a"
) -> CommittedBatch:
    records = sum(end - starts[p] for p, end in ends.items())
    made = NOW - 1000 + number
    return CommittedBatch(
        Txn(generation, number), made, {T: starts}, {T: ends}, CodeVersion(code, "1"), {T: number + 1}, records
    )


BATCHES = tuple(
    batch(n, {0: 10 * (n + 1), 1: 5 * (n + 1)}, {0: 10 * n, 1: 5 * n}, code="a" if n < 6 else "b") for n in range(10)
)
RECORD = StreamRecord(
    "orders_clean",
    (Generation(1, NOW - 2000, "first start"),),
    (BoundTable(T, "id", "primary"),),
    (BoundTopic(T, "topic-id", {0: 0, 1: 0}),),
    code=(CodeSince("a", "1", 1, 0, NOW), CodeSince("b", "1", 1, 6, NOW)),
)


def view(**changed: Any) -> View:
    values = {
        "record": RECORD,
        "history": History(BATCHES),
        "topics": [TopicSnapshot(T, "topic-id", {0: 0, 1: 0}, {0: 130, 1: 70})],
        "savepoints": [],
        "for_time": lambda _, ms: {0: min(ms // 1000, 130), 1: min(ms // 2000, 70)},
        "now": NOW,
        **changed,
    }
    return View(**values)


@pytest.mark.parametrize(
    ("target", "batch_number"),
    [
        (Target("batch", "3"), 3),
        (Target("table-version", "4"), 3),
        (Target("offsets", "0:40,1:20"), 3),
        (Target("offsets", "0:49,1:24"), 3),
        (Target("offsets", "0:100,1:24"), 3),
        (Target("shift-by", "-1"), 8),
        (Target("shift-by", "-10"), 7),
        (Target("code", "b"), 5),
        (Target("datetime", "1970-01-01T00:00:40+00:00"), 3),
    ],
)
def test_a_target_goes_to_the_last_batch_that_read_nothing_of_it(target: Target, batch_number: int) -> None:
    assert resolve(target, view()).batch == Txn(1, batch_number)


@pytest.mark.parametrize("target", [Target("earliest"), Target("offsets", "0:0,1:0"), Target("batch", "-1")])
def test_before_the_first_batch_is_the_very_start(target: Target) -> None:
    assert resolve(target, view()).batch is None


@pytest.mark.parametrize(
    ("target", "offsets"),
    [
        (Target("latest"), {0: 130, 1: 70}),
        (Target("shift-by", "5"), {0: 105, 1: 55}),
        (Target("shift-by", "25"), {0: 125, 1: 70}),
        (Target("offsets", "0:100,1:51"), {0: 100, 1: 51}),
        (Target("datetime", "1970-01-01T00:02:05+00:00"), {0: 125, 1: 62}),
    ],
)
def test_a_target_ahead_of_the_stream_goes_forward(target: Target, offsets: dict[int, int]) -> None:
    resolved = resolve(target, view())
    assert resolved.ahead and resolved.batch is None and resolved.wanted == {T: offsets}


def test_what_the_topic_has_lost_before_it_was_read_can_only_be_skipped() -> None:
    gone = [TopicSnapshot(T, "topic-id", {0: 110, 1: 60}, {0: 130, 1: 70})]
    resolved = resolve(Target("earliest"), view(topics=gone))
    assert resolved.ahead and resolved.wanted == {T: {0: 110, 1: 60}}


@pytest.mark.parametrize(
    ("target", "changed", "wanted", "batch_number", "note"),
    [
        (Target("offsets", "0:50,1:60"), {}, {0: 50, 1: 50}, 4, "60 is ahead of the stream, which is at 50"),
        (
            Target("offsets", "0:3,1:20"),
            {"topics": [TopicSnapshot(T, "topic-id", {0: 25, 1: 12}, {0: 130, 1: 70})]},
            {0: 25, 1: 20},
            1,
            "3 moved to the topic's first record left, 25",
        ),
        (
            Target("datetime", "2026-01-01T00:00:00+00:00"),
            {"for_time": lambda _, __: {0: 130, 1: 20}},
            {0: 100, 1: 20},
            3,
            "no record of orders at or after",
        ),
        (
            Target("datetime", "2027-01-01T00:00:00+00:00"),
            {"for_time": lambda _, __: {0: 130, 1: 60}},
            {0: 100, 1: 60},
            None,
            "partitions 0: they stay where the stream is",
        ),
    ],
)
def test_offsets_that_are_ahead_outside_the_topic_or_of_no_record_are_moved_and_told(
    target: Target, changed: dict[str, Any], wanted: dict[int, int], batch_number: int | None, note: str
) -> None:
    """A plan that goes back skips nothing; a partition without a record at or after a time stays where it is."""
    resolved = resolve(target, view(**changed))
    assert resolved.wanted == {T: wanted} and any(note in each for each in resolved.notes)
    assert resolved.batch == (None if batch_number is None else Txn(1, batch_number))
    assert resolved.ahead == (batch_number is None)


def test_a_duration_counts_back_from_now() -> None:
    resolved = resolve(
        Target("duration", "100 seconds"), view(for_time=lambda _, ms: {0: int(NOW * 1000 - ms) // 2000, 1: 70})
    )
    assert resolved.wanted == {T: {0: 50, 1: 50}} and resolved.batch == Txn(1, 4)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target("offsets", "0:100,1:50"), "is at orders 0:100, 1:50 already"),
        (Target("shift-by", "0"), "already"),
        (Target("batch", "9"), "where the stream is now"),
        (Target("batch", "17"), "not in the ledger"),
        (Target("batch", "x"), "not the number of a batch"),
        (Target("code", "zz"), "never run code"),
        (Target("savepoint", "g0001-b000000001"), "no savepoint"),
        (Target("datetime", "2026-11-21T08:00:00"), "names no zone"),
        (Target("datetime", "soon"), "not a time"),
        (Target("offsets", "0:1"), "leave out partition 1"),
        (Target("offsets", "0:1,1:1,2:1"), "no partition 2"),
        (Target("offsets", "0=1"), "not an offset"),
        (Target("offsets", "other/0:1,orders/0:1,orders/1:1"), "does not read topic other"),
        (Target("table-version", "0"), "as old as version 0"),
    ],
)
def test_a_target_that_cannot_be_is_refused_in_one_line(target: Target, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(target, view())


def test_nothing_can_be_put_right_before_the_first_batch() -> None:
    with pytest.raises(UsageError, match="not run a batch"):
        resolve(Target("shift-by", "-1"), view(history=History(())))


def test_a_partition_that_is_new_is_told() -> None:
    topics = [TopicSnapshot(T, "topic-id", {0: 0, 1: 0, 2: 0}, {0: 130, 1: 70, 2: 9})]
    resolved = resolve(Target("earliest"), view(topics=topics))
    assert any("partition 2 of orders is new" in note for note in resolved.notes)


def test_a_file_is_read_as_kafkas_own_tool_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "offsets.csv"
    file.write_text('"orders",0,40\norders,1,20\n')
    assert read_offsets(file) == {T: {0: 40, 1: 20}}
    assert resolve(Target("file", str(file)), view()).batch == Txn(1, 3)
    file.write_text(write_offsets({T: {1: 2, 0: 1}}))
    assert file.read_text() == "orders,0,1\norders,1,2\n"


@pytest.mark.parametrize("text", ["orders,0\n", "orders,zero,1\n", "orders,0,1\norders,0,2\n"])
def test_a_file_that_is_no_such_thing_names_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UsageError, match=r"x\.csv"):
        read_offsets(tmp_path / "x.csv")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_offsets(tmp_path / "nothing.csv")


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="no target 'yesterday'"):
        Target("yesterday")  # type: ignore[arg-type]


def test_offsets_of_several_topics_name_them() -> None:
    assert parse_offsets("a/0:1,b/0:2", ["a", "b"]) == {"a": {0: 1}, "b": {0: 2}}
    with pytest.raises(UsageError):
        parse_offsets("0:1", ["a", "b"])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=30), st.data())
def test_the_border_is_the_last_one_at_or_before_the_offsets(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    at = {0: 0, 1: 0}
    batches = []
    for number, (a, b) in enumerate(steps):
        ends = {0: at[0] + a, 1: at[1] + b}
        batches.append(batch(number, ends, dict(at)))
        at = ends
    wanted = {T: {0: data.draw(st.integers(0, at[0])), 1: data.draw(st.integers(0, at[1]))}}
    border = History(tuple(batches)).last_within(wanted)
    within = [b for b in batches if all(b.ends[T][p] <= wanted[T][p] for p in (0, 1))]
    assert border == (within[-1] if within else None)


def line(txn: Txn, end: int) -> RawLine:
    offsets = {T: {"id": "id", "start": {"0": end - 10}, "end": {"0": end}}}
    place = {"g": txn.generation, "b": txn.batch}
    value = {
        **place,
        "t": NOW,
        "table": "t",
        "versions": {},
        "offsets": offsets,
        "rows": {},
        "txns": {},
        "code": ["a", "1"],
    }
    return lines_of("s", io.BytesIO(json.dumps(value, separators=(",", ":")).encode()))[0]


def batches(generations: Sequence[Generation], *days: list[RawLine]) -> list[CommittedBatch]:
    return list(lineage(generations, reversed(days)).newest_first())[::-1]


def test_the_path_leaves_out_what_a_recovery_left_behind() -> None:
    generations = (
        Generation(1, 0, "first start"),
        Generation(2, 1, "recovery", 1, 3),
        Generation(3, 2, "undo", 1, 5),
    )
    lines = [line(Txn(1, n), 10 * (n + 1)) for n in range(6)]
    lines += [line(Txn(2, n), 10 * (n + 1)) for n in range(4, 8)]
    lines += [line(Txn(3, n), 10 * (n + 1)) for n in range(6, 8)]
    assert [b.txn for b in batches(generations, lines)] == [*(Txn(1, n) for n in range(6)), Txn(3, 6), Txn(3, 7)]
    assert [b.txn for b in batches(generations[:2], lines)] == [
        *(Txn(1, n) for n in range(4)),
        *(Txn(2, n) for n in range(4, 8)),
    ]
    assert list(generation_spans(generations)) == [(1, 0, 5), (3, 6, 1 << 32)]
    assert (
        in_lineage(generations, Txn(1, 5))
        and not in_lineage(generations, Txn(2, 5))
        and not in_lineage(generations, Txn(1, 6))
    )


def test_a_generation_from_the_very_start_leaves_all_before_it_behind() -> None:
    generations = (Generation(1, 0, "first start"), Generation(2, 1, "recovery", None, -1))
    lines = [line(Txn(1, 0), 10), line(Txn(2, 0), 20)]
    assert [b.txn for b in batches(generations, lines)] == [Txn(2, 0)]


def test_a_generation_that_began_with_empty_state_counts_from_0_again() -> None:
    generations = (Generation(1, 0, "first start"), Generation(2, 1, "recovery", 1, 3, restarts=True))
    lines = [line(Txn(1, n), 10 * (n + 1)) for n in range(6)] + [line(Txn(2, n), 10 * (n + 5)) for n in range(2)]
    assert [b.txn for b in batches(generations, lines)] == [*(Txn(1, n) for n in range(4)), Txn(2, 0), Txn(2, 1)]
    assert (
        in_lineage(generations, Txn(2, 0))
        and in_lineage(generations, Txn(1, 3))
        and not in_lineage(generations, Txn(1, 4))
    )


def test_of_a_batch_written_twice_the_newest_line_counts() -> None:
    lines = [line(Txn(1, 0), 10), line(Txn(1, 0), 20)]
    assert [b.ends for b in batches((Generation(1, 0, ""),), lines)] == [{T: {0: 20}}]


@given(st.integers(1, 60), st.lists(st.integers(1, 59), max_size=5), st.data())
def test_days_are_read_only_as_far_back_as_a_question_needs(count: int, cuts: list[int], data: st.DataObject) -> None:
    """Wherever the days begin, and whatever is asked first, the answers are those of a ledger of one day."""
    generations = (Generation(1, 0, "first start"), Generation(2, 1, "recovery", 1, count // 2))
    lines = [line(Txn(1, n), 10 * (n + 1)) for n in range(count)]
    lines += [line(Txn(2, n), 10 * (n + 1)) for n in range(count // 2 + 1, count + 5)]
    borders = sorted({0, len(lines), *(cut for cut in cuts if cut < len(lines))})
    days = [lines[a:b] for a, b in pairwise(borders)]
    history, whole = lineage(generations, reversed(days)), batches(generations, lines)
    for _ in range(4):
        offset = data.draw(st.integers(0, 10 * (count + 6)))
        within = [b for b in whole if b.ends[T][0] <= offset]
        assert history.last_within({T: {0: offset}}) == (within[-1] if within else None)
        chosen = whole[data.draw(st.integers(0, len(whole) - 1))]
        earlier = [b for b in whole if b.txn < chosen.txn]
        assert history.find(chosen.txn) == chosen
        assert history.before(chosen.txn) == (earlier[-1] if earlier else None)
        assert history.between(None, chosen.txn) == [*earlier, chosen]
        assert history.between(whole[0].txn, chosen.txn) == [*earlier, chosen][1:]
    assert history.last == whole[-1] and history.find(Txn(1, count + 9)) is None


def test_of_many_days_only_the_newest_are_read_for_a_question_about_today() -> None:
    read = []

    def days() -> Iterator[list[RawLine]]:
        for day in reversed(range(14)):
            read.append(day)
            yield [line(Txn(1, n), 10 * (n + 1)) for n in range(100 * day, 100 * day + 100)]

    history = lineage((Generation(1, 0, ""),), days())
    assert history.last is not None and history.last.txn == Txn(1, 1399)
    border = history.last_within({T: {0: 13_955}})
    assert border is not None and border.txn.batch == 1394 and read == [13]
    assert history.before(Txn(1, 1300)) is not None and read == [13, 12]


def test_a_line_that_was_cut_off_is_on_no_day(tmp_path: Path) -> None:
    text = line(Txn(1, 1), 20).text.decode()
    for whole in (text, text[:-1] + ',"ms":17}'):
        cut_off = "\n".join(whole[:length] for length in range(len(whole)))
        (tmp_path / "2026-11-20.jsonl").write_text(f"{cut_off}\n{whole}\n")
        assert [[raw.text.decode().strip() for raw in day] for day in LedgerFile(tmp_path).days("s")] == [[whole]]


def timed(number: int, records: int, seconds: float | None, at: float) -> CommittedBatch:
    return replace(batch(number, {0: records}, {0: 0}), seconds=seconds, at=at)


def test_the_pace_is_that_of_batches_and_not_of_records_coming_in() -> None:
    waiting = [timed(n, records, 0.2 + records / 1000, 100.0 * n) for n, records in enumerate((100, 500, 900, 100))]
    pace = History(waiting).pace()
    assert pace is not None
    assert (pace.per_batch, pace.per_record) == (pytest.approx(0.2), pytest.approx(0.001))
    assert pace.rate(10_000, 1_000) == pytest.approx(10_000 / 12)
    one_after_another = [timed(n, 100, 0.3, 0.5 * n) for n in range(10)]
    assert History(one_after_another).pace() == BatchPace(pytest.approx(0.5), 0.0)  # type: ignore[arg-type]
    assert History([timed(0, 100, None, 0.0)]).pace() is None


LATE = Target("datetime", "2027-01-01T00:00:00+00:00")


def test_a_time_after_every_record_is_no_skip_ahead() -> None:
    """The stream is at 100 and 50, the topic ends at 130 and 70: those records were not read."""
    with pytest.raises(UsageError, match="no record of orders at or after") as refused:
        resolve(LATE, view(for_time=lambda _, __: {0: 130, 1: 70}))
    assert "--to-latest" in refused.value.next_step


@given(offsets=st.tuples(st.integers(0, 130), st.integers(0, 70)))
def test_no_time_skips_a_record_of_a_partition_that_has_none_after_it(offsets: tuple[int, int]) -> None:
    try:
        resolved = resolve(LATE, view(for_time=lambda _, __: dict(enumerate(offsets))))
    except UsageError:
        return
    for partition, (offset, end, at) in enumerate(zip(offsets, (130, 70), (100, 50), strict=True)):
        if offset == end:
            assert resolved.wanted[T][partition] <= at


def test_code_begins_where_its_function_did_and_not_where_the_package_was_upgraded() -> None:
    ran = [("a", "1", 0), ("x", "1", 10), ("a", "1", 20), ("x", "1", 30), ("x", "2", 40), ("b", "2", 50)]
    record = replace(RECORD, code=tuple(CodeSince(name, package, 1, batch, NOW) for name, package, batch in ran))
    assert [named_code(name, record).batch for name in ("x", "a", "b")] == [30, 20, 50]


def test_one_slow_batch_is_not_the_pace() -> None:
    """The first batch of a session waits for Spark, and a loaded machine has its moments."""
    batches = [timed(n, 100 + n % 3, 0.2 + (100 + n % 3) / 1000, 100.0 * n) for n in range(9)]
    slow = [timed(9, 500, 90.0, 10_000.0), timed(10, 20, 60.0, 20_000.0)]
    pace = History([*batches, *slow]).pace()
    assert pace is not None
    assert pace.rate(1_000, 100) > 200
