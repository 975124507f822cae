"""The stream's record: whole on disk or not changed, one checkpoint a generation, exceptions with a reason.

And the records of topics: which void ranges hold on which path of generations, and who may read meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from streaming_jobs.errors import Fenced, LeaseBusy, PreflightRefused, UsageError
from streaming_jobs.ledger.entry import CodeVersion, Txn
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.lease import take
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Accepted, CodeSince, Generation
from streaming_jobs.state.topic_records import VoidRange, declare_void, load, under_way_of, void_of
from tests.support.objects import path_of
from tests.support.worlds import PRIMARY, SECONDARY, STREAM, TOPIC, entry, parity, record

FULL = record(
    generations=(Generation(1, 1.0, "first start"), Generation(2, 2.0, "recovery r1")),
    accepted=(Accepted(PRIMARY, 12, "asked for", 3.0), Accepted(SECONDARY, 4, "asked for", 4.0)),
    code=(CodeSince("fd2f87f71956", "0.1.0", 1, 0, 5.0),),
    state_fingerprint={"0": "Aggregate [k], [k, sum(n) AS s]"},
    void_ranges=({"topic": TOPIC, "from": 1, "to": 9},),
)


def test_a_record_comes_back_as_it_was_saved_and_its_folder_is_private(home: Settings) -> None:
    """What an earlier version does not know is in its file only where it says something."""
    aborted = replace(FULL, generations=(*FULL.generations, Generation(3, 3.0, "abort of r1", aborts=True)))
    stream_record.save(home, aborted)
    assert stream_record.load(home, STREAM) == aborted
    written = json.loads(path_of(StreamFolder.of(home, STREAM).record).read_text())["generations"]
    assert ["aborts" in each for each in written] == [False, False, True]
    stream_record.save(home, FULL)
    folder = StreamFolder.of(home, STREAM).path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "stream.json").stat().st_mode & 0o777 == 0o600
    assert [f.name for f in folder.iterdir()] == ["stream.json"]


def test_a_stream_that_never_ran_has_no_record_and_its_first_is_generation_1_and_binds_nothing(home: Settings) -> None:
    assert stream_record.load(home, STREAM) is None
    first = stream_record.first(STREAM)
    assert first.generation == 1
    assert (first.tables, first.topics, first.accepted, first.code) == ((), (), (), ())


def test_a_driver_replaces_no_record_that_another_one_has_written(home: Settings) -> None:
    mine = stream_record.save(home, stream_record.first(STREAM))
    with pytest.raises(Fenced, match=r"stream\.json was written by another driver"):
        stream_record.save(home, stream_record.first(STREAM))
    theirs = stream_record.load(home, STREAM)
    assert theirs == mine
    newer = stream_record.save(home, replace(mine, void_ranges=({"topic": TOPIC},)))
    with pytest.raises(Fenced, match=r"stream\.json was written by another driver"):
        stream_record.save(home, replace(theirs, void_ranges=()))
    assert stream_record.load(home, STREAM) == newer
    stream_record.save(home, replace(newer, void_ranges=()))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "stream": "parity"}'])
def test_a_damaged_record_is_refused_and_never_taken_for_a_first_start(home: Settings, text: str) -> None:
    stream_record.save(home, FULL)
    (StreamFolder.of(home, STREAM).path / "stream.json").write_text(text)
    with pytest.raises(PreflightRefused, match=r"stream\.json cannot be read") as refused:
        stream_record.load(home, STREAM)
    assert "put the checkpoint folder back" in refused.value.next_step


def test_a_record_of_a_newer_version_is_refused(home: Settings) -> None:
    stream_record.save(home, FULL)
    path = StreamFolder.of(home, STREAM).path / "stream.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(PreflightRefused, match="written by a newer version"):
        stream_record.load(home, STREAM)


def test_the_newest_generation_is_the_current_one_and_each_has_a_checkpoint_of_its_own(home: Settings) -> None:
    assert FULL.generation == 2
    folders = [StreamFolder.of(home, STREAM).checkpoint(number).folder for number in (1, 2, 10_000)]
    assert [folder.name for folder in folders] == ["g0001", "g0002", "g10000"]
    assert {folder.parent for folder in folders} == {StreamFolder.of(home, STREAM).path}


@pytest.mark.parametrize("name", ["", "..", "../other", "a/b", "Orders", "1st", "a" * 64])
def test_a_name_that_is_no_name_never_becomes_a_folder(home: Settings, name: str) -> None:
    with pytest.raises(UsageError, match="is not a stream name"):
        StreamFolder.of(home, name)


def test_tables_topics_and_exceptions_are_found_by_name() -> None:
    table, topic = FULL.table(SECONDARY), FULL.topic(TOPIC)
    assert table is not None and table.role == "secondary"
    assert topic is not None and topic.start == {0: 0, 1: 0}
    assert (FULL.table("nothing"), FULL.topic("nothing")) == (None, None)
    assert (FULL.accepts(PRIMARY), FULL.accepts("nothing")) == ({12}, frozenset())


def test_new_code_is_noted_with_its_first_batch_also_when_it_comes_back_and_old_code_is_not_noted_again() -> None:
    same = CodeVersion("fd2f87f71956", "0.1.0")
    assert FULL.with_code(same, 8) is FULL
    others = (("000000000000", "0.1.0", ""), ("fd2f87f71956", "0.2.0", ""), ("2-000000000000", "0.1.0", "fd2f87f71956"))
    for other in map(CodeVersion._make, others):
        noted = FULL.with_code(other, 8).code
        assert noted[:-1] == FULL.code
        assert noted[-1].version == other and noted[-1].since == Txn(2, 8)
        assert len(FULL.with_code(other, 8).with_code(same, 9).code) == 3


def commit(home: Settings, version: int, *, rows: bool = True, by: str | None = None, table: str = PRIMARY) -> None:
    """One commit in a table's log: by a stream, or by somebody else."""
    log = home.tables / table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    info: dict[str, object] = {"timestamp": 1, "operation": "DELETE"}
    if by:
        info["userMetadata"] = entry(version, stream=by).encode()
    actions: list[dict[str, object]] = [{"commitInfo": info}]
    actions += [{"remove": {"path": "a.parquet", "dataChange": True}}] if rows else []
    (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"version": 6}, "is not in the table's log"),
        ({"version": 7, "by": STREAM}, "was written by stream parity itself"),
        ({"version": 7, "rows": False}, "changed no rows"),
        ({"version": 7, "table": SECONDARY}, "is not in the table's log"),
    ],
)
def test_only_a_commit_of_others_that_is_there_and_changed_rows_can_be_accepted(
    home: Settings, made: dict[str, Any], words: str
) -> None:
    stream_record.save(home, FULL)
    commit(home, **made)
    with pytest.raises(UsageError, match=f"version 7 of table {PRIMARY} {words}"):
        stream_record.accept(home, parity, PRIMARY, 7, "why")
    assert stream_record.load(home, STREAM) == FULL


def test_an_accepted_commit_of_anybody_is_recorded_with_its_reason_and_the_lease_is_free(home: Settings) -> None:
    stream_record.save(home, replace(FULL, accepted=()))
    commit(home, 7)
    commit(home, 8, by="orders")
    stream_record.accept(home, parity, PRIMARY, 7, "  a customer asked for it ")
    stream_record.accept(home, parity, PRIMARY, 8, "why")
    record = stream_record.load(home, STREAM)
    assert record is not None
    accepted = [(a.table, a.version, a.why) for a in record.accepted]
    assert accepted == [(PRIMARY, 7, "a customer asked for it"), (PRIMARY, 8, "why")]
    assert replace(record, accepted=()) == replace(FULL, accepted=())


@pytest.mark.parametrize("why", ["", "  \n"])
def test_a_commit_is_not_accepted_without_a_reason(home: Settings, why: str) -> None:
    stream_record.save(home, FULL)
    with pytest.raises(UsageError, match="needs a reason"):
        stream_record.accept(home, parity, PRIMARY, 7, why)
    assert stream_record.load(home, STREAM) == FULL


def test_only_a_table_of_the_stream_can_be_accepted_and_nothing_while_a_driver_holds_it(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="has no table"):
        stream_record.accept(home, parity, PRIMARY, 7, "why")
    stream_record.save(home, FULL)
    with pytest.raises(UsageError, match="has no table nothing"):
        stream_record.accept(home, parity, "nothing", 7, "why")
    stream_record.save(home, FULL)
    monkeypatch.setattr(stream_record, "take", lambda *names, purpose, wait: take(*names, purpose=purpose, wait=0))
    with take(home, STREAM, purpose="session"), pytest.raises(LeaseBusy):
        stream_record.accept(home, parity, PRIMARY, 7, "why")
    assert stream_record.load(home, STREAM) == FULL


def test_of_the_generations_that_are_over_the_newest_keep_their_checkpoints(home: Settings) -> None:
    lived = replace(FULL, generations=tuple(Generation(n, float(n), "recovery") for n in range(1, 6)))
    for each in lived.generations:
        (StreamFolder.of(home, STREAM).checkpoint(each.number).folder / "offsets").mkdir(parents=True)
    coming = StreamFolder.of(home, STREAM).checkpoint(6).folder  # a recovery is making it
    coming.mkdir()
    assert stream_record.prune(home, lived, 2) == ["g0001", "g0002"]
    assert stream_record.prune(home, lived, 2) == []
    left = sorted(place.name for place in StreamFolder.of(home, STREAM).path.iterdir())
    assert left == ["g0003", "g0004", "g0005", "g0006"]
    assert stream_record.prune(home, lived, 0) == ["g0003", "g0004"]


def declare(
    home: Settings, path: Sequence[int], *spans: tuple[int, int], generation: int = 2, plan: str = "a-0001", **rest: str
) -> None:
    ranges = [VoidRange(0, begin, end, plan, generation, 1.0) for begin, end in spans]
    topic_id = rest.pop("topic_id", "id")
    declare_void(home, "t", topic_id, writer="a", path=path, ranges=ranges, under_way=rest.get("under_way"))


def spans(home: Settings) -> tuple[tuple[int, int], ...]:
    return void_of(home, "t", "id").spans.get(0, ())


def test_a_topic_of_which_nothing_is_void_has_no_record_and_nobody_reads_while_a_plan_appends(home: Settings) -> None:
    declare(home, [1, 2])
    assert load(home, "t") is None and spans(home) == ()
    declare(home, [1, 2], (10, 20), under_way="a-0001")
    with pytest.raises(PreflightRefused, match="a-0001 is appending"):
        spans(home)
    declare(home, [1, 2])
    assert spans(home) == ((10, 20),)


def test_a_range_holds_while_its_generation_is_on_the_path_and_is_replaced_by_the_same_plan(home: Settings) -> None:
    declare(home, [1, 2], (10, 25))
    declare(home, [1, 2], (10, 20))
    assert spans(home) == ((10, 20),)
    declare(home, [1, 3], (20, 40), generation=3, plan="a-0002")  # an undo
    assert spans(home) == ((20, 40),)
    declare(home, [1, 2, 4], (40, 50), generation=4, plan="a-0003")  # and that one undone
    assert spans(home) == ((10, 20), (40, 50))


def test_a_topic_that_was_made_anew_has_no_void_ranges(home: Settings) -> None:
    declare(home, [1, 2], (10, 20))
    assert void_of(home, "t", "another").spans == {}
    declare(home, [1, 2, 3], (5, 6), generation=3, topic_id="another")
    assert void_of(home, "t", "another").spans == {0: ((5, 6),)}


def test_a_damaged_record_is_refused_and_a_name_is_no_path(home: Settings) -> None:
    declare(home, [1, 2], (10, 20))
    (home.state / "_topics" / "t.json").write_text("{")
    with pytest.raises(PreflightRefused, match="cannot be read"):
        spans(home)
    with pytest.raises(UsageError):
        load(home, "../t")


def test_ranges_of_another_writer_hold_for_good(home: Settings) -> None:
    declare(home, [1, 2], (10, 20))
    declare_void(home, "t", "id", writer="b", path=[1], under_way="b-0001")
    assert [each.topic for each in under_way_of(home, "b-0001")] == ["t"]
    declare_void(home, "t", "id", writer="b", path=[1, 3])
    assert spans(home) == ((10, 20),) and under_way_of(home, "b-0001") == []
