"""The ledger: a commit's entry survives, only grows, and distinguishes our commits from those of others."""

from __future__ import annotations

import json
import os
import random
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from streaming_jobs.errors import PermanentError, PreflightRefused
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, TableVersion, Txn, app_id
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.sinks.stored import entries
from streaming_jobs.state.ledger_file import LedgerFile, RawLine
from streaming_jobs.verification import delta_log
from tests.conftest import SettingsFactory
from tests.support.worlds import CODE, DEAD_LETTERS, PRIMARY, SECONDARY, STREAM, Disk, entry, offsets

txns = st.builds(Txn, st.integers(1, 2**31 - 1), st.integers(-1, 2**32 - 2))
partitions = st.dictionaries(st.integers(0, 500), st.integers(0, 2**63 - 1), max_size=5)
ranges = st.builds(OffsetRange, st.text(min_size=1), st.text(), partitions, partitions)
counts = st.dictionaries(st.text(), st.integers(0, 2**63 - 1), max_size=3)
ledger_entries = st.builds(
    LedgerEntry,
    kind=st.sampled_from(["batch", "fence", "publish", "upkeep", "schema"]),
    stream=st.text(),
    table=st.text(),
    generation=st.integers(1, 2**31 - 1),
    batch=st.integers(-1, 2**32 - 2),
    offsets=st.lists(ranges, max_size=3, unique_by=lambda r: r.topic).map(tuple),
    rows=counts,
    txns=counts,
    code=st.builds(CodeVersion, st.text(), st.text()),
    plan=st.none() | st.text(),
    note=st.none() | st.text(),
    written=st.lists(st.builds(WrittenRange, st.text(), st.text(), *[st.integers(0, 2**63 - 1)] * 4), max_size=3).map(
        tuple
    ),
    lookups=st.dictionaries(st.text(), st.builds(TableVersion, st.integers(0, 2**63 - 1), st.text()), max_size=3),
)


@given(txns)
def test_a_transaction_version_says_generation_and_batch(txn: Txn) -> None:
    assert Txn.of(txn.version) == txn
    assert 0 < txn.version < 2**63  # Delta's version is a signed 64-bit number


@given(txns, txns)
def test_versions_are_ordered_like_generation_then_batch(one: Txn, other: Txn) -> None:
    assert (one < other) == (one.version < other.version)


def test_the_app_id_and_the_version_of_an_open_generation_stay_the_same_for_ever() -> None:
    assert app_id("orders", "totals") == "recourse:orders:totals"
    assert Txn(3, -1).version == 3 << 32
    assert Txn(2, 2**32 - 2) < Txn(3, -1) < Txn(3, 0)


@hypothesis.settings(max_examples=40)
@given(ledger_entries)
def test_an_entry_comes_back_from_the_commit_as_it_went_in(made: LedgerEntry) -> None:
    assert LedgerEntry.decode(made.encode()) == made


offset = st.integers(0, 2**63 - 1) | st.integers(10**6, 10**6 + 2000)
many = st.lists(st.tuples(st.none() | offset, offset), min_size=30, max_size=80)


@hypothesis.settings(max_examples=100)
@given(st.lists(many, min_size=1, max_size=2), st.booleans(), st.booleans())
def test_the_partitions_of_a_wide_topic_come_back_for_the_pipeline_and_for_the_verifier(
    topics: list[list[tuple[int | None, int]]], forwards: bool, hole: bool
) -> None:
    """A topic that was read backwards, or without one of its partitions, does not occur, and comes back too."""
    ranges = []
    for number, parts in enumerate(topics):
        starts = {p: start for p, (start, _) in enumerate(parts) if start is not None}
        ends = {p + hole: max(end, starts.get(p + hole, 0)) if forwards else end for p, (_, end) in enumerate(parts)}
        ranges.append(OffsetRange(f"t{number}", "id", starts, ends))
    made = replace(entry(3), offsets=tuple(ranges))
    text = made.encode()
    assert LedgerEntry.decode(text) == made
    if forwards and not hole:
        assert (json.loads(text)["recourse"] == 2) is any(len(parts) >= 32 for parts in topics)
    verified = delta_log._entry(text)
    assert verified is not None
    assert [(r.topic, r.start, r.end) for r in verified.ranges] == [(r.topic, r.start, r.end) for r in made.offsets]


@pytest.mark.parametrize(
    ("held", "moving", "most"),
    [
        pytest.param(10_000, 1.0, 2_048, id="10 million records"),
        pytest.param(100_000, 0.05, 2_200, id="100 million records, few partitions move"),
        pytest.param(1_000_000, 10.0, 3_000, id="1 billion records, all partitions move"),
        pytest.param(None, 10.0, 5_900, id="partitions of any size up to a billion records"),
    ],
)
def test_the_entry_of_a_thousand_partitions_is_short(held: int | None, moving: float, most: int) -> None:
    chance = random.Random(1)
    ends = [chance.randrange(10**9) if held is None else round(chance.gauss(held, held**0.5)) for _ in range(1000)]
    start = {p: end - int(chance.expovariate(1 / moving)) for p, end in enumerate(ends)}
    read = OffsetRange("things", "4Kx8vYQ5S2m0Q3kq1dXyZw", start, dict(enumerate(ends)))
    made = replace(entry(70_000), offsets=(read,))
    assert len(made.encode()) <= most
    assert LedgerEntry.decode(made.encode()) == made


def test_the_entries_of_before_have_offsets_in_plain_text_and_those_of_few_partitions_still_do() -> None:
    read = OffsetRange("things", "id", {p: p for p in range(200)}, {p: 2 * p for p in range(200)})
    plain = {
        "things": {"id": "id", "start": {str(p): p for p in range(200)}, "end": {str(p): 2 * p for p in range(200)}}
    }
    value = {**json.loads(entry(0).encode()), "recourse": 1, "offsets": plain}
    before = LedgerEntry.decode(json.dumps(value))
    assert before is not None and before.offsets == (read,)
    assert '"start":{"0":' in entry(0).encode()


@pytest.mark.parametrize("text", [None, "", "no json", "[1]", "7", '{"by": "hand"}', '{"recourse_like": 1}'])
def test_a_commit_of_somebody_else_has_no_entry(text: str | None) -> None:
    assert LedgerEntry.decode(text) is None


def test_an_entry_of_a_newer_format_is_refused_and_not_guessed_at() -> None:
    newer = json.dumps({**json.loads(entry(0).encode()), "recourse": 3})
    with pytest.raises(PermanentError, match="format 3, this version reads 1 and 2"):
        LedgerEntry.decode(newer)


@hypothesis.settings(max_examples=40)
@given(st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 10**12), st.integers(0, 10**6)), max_size=6))
def test_a_range_counts_the_offsets_between_start_and_end(parts: dict[int, tuple[int, int]]) -> None:
    read = OffsetRange("t", "id", {p: s for p, (s, _) in parts.items()}, {p: s + n for p, (s, n) in parts.items()})
    assert read.records == sum(n for _, n in parts.values())


def test_a_partition_that_is_new_in_a_batch_counts_from_its_beginning() -> None:
    assert OffsetRange("t", "id", {0: 10}, {0: 12, 1: 5}).records == 7


@hypothesis.settings(max_examples=40)
@given(ranges)
def test_equal_offsets_of_a_recreated_topic_are_told_by_name_and_offsets_only(read: OffsetRange) -> None:
    assert read.same_offsets(OffsetRange(read.topic, "other id", read.start, read.end))
    assert not read.same_offsets(OffsetRange(read.topic + "x", read.topic_id, read.start, read.end))
    assert not read.same_offsets(OffsetRange(read.topic, read.topic_id, read.start, {**read.end, 501: 1}))
    assert not read.same_offsets(OffsetRange(read.topic, read.topic_id, {**read.start, 501: 1}, read.end))


@pytest.fixture
def disk(settings: SettingsFactory) -> Disk:
    return Disk(settings()).open()


def test_the_log_is_walked_from_the_newest_commit_back_and_the_ledger_shows_its_batches_and_no_upkeep(
    disk: Disk,
) -> None:
    disk.run(0, 1)
    walked = list(walk(disk.table(PRIMARY)))
    assert [(c.version, c.entry and c.entry.kind, c.changes_data) for c in walked] == [
        (2, "batch", True),
        (1, "batch", True),
        (0, "schema", False),
    ]
    assert walked[0].operation == "WRITE"
    assert abs(walked[0].at / 1000 - datetime.now(UTC).timestamp()) < 60
    disk.run(0, 1, 2)
    shown = entries(walk(disk.table(PRIMARY)), 2)
    assert [(c.version, e.batch) for c, e in shown] == [(3, 2), (2, 1)]
    assert [e.kind for _, e in entries(walk(disk.table(PRIMARY)), 100)] == ["batch"] * 3
    assert shown[0][1].offsets == (offsets(2),)
    assert shown[0][1].txns == {SECONDARY: Txn(1, 2).version, DEAD_LETTERS: Txn(1, 0).version}


def test_a_walk_ends_at_a_gap_and_files_beside_the_commits_are_none(disk: Disk) -> None:
    log = disk.table(PRIMARY) / "_delta_log"
    for name in ("_last_checkpoint.json", f"{0:020d}.compacted.json", "7.json", f"{9:020d}.crc"):
        (log / name).write_text("{}")
    assert [c.version for c in walk(disk.table(PRIMARY))] == [0]
    disk.run(0, 1, 2)
    (disk.table(PRIMARY) / "_delta_log" / f"{1:020d}.json").unlink()
    assert [c.version for c in walk(disk.table(PRIMARY))] == [3, 2]


def test_a_folder_that_is_no_table_has_no_commits_and_a_damaged_one_is_named_with_its_version(tmp_path: Path) -> None:
    assert list(walk(tmp_path)) == []
    assert newest(tmp_path, STREAM) == (None, [])
    log = tmp_path / "_delta_log"
    log.mkdir()
    (log / f"{7:020d}.json").write_text('{"commitInfo": ')
    with pytest.raises(PreflightRefused, match="version 7 in"):
        list(walk(tmp_path))


def test_rewriting_files_with_the_same_rows_is_no_change(disk: Disk) -> None:
    disk.run(0, 1)
    DeltaTable(disk.table(PRIMARY)).optimize.compact()
    assert next(c.operation for c in walk(disk.table(PRIMARY))) == "OPTIMIZE"
    assert newest(disk.table(PRIMARY), STREAM)[1] == []


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    return LedgerFile(tmp_path / "ledger")


def test_the_newest_line_gives_the_entry_and_the_tables_versions_back(ledger: LedgerFile) -> None:
    assert ledger.newest(STREAM) is None
    ledger.append(entry(0), {PRIMARY: 1, SECONDARY: 1})
    ledger.append(entry(1, rows={"written": 7}), {PRIMARY: 2, SECONDARY: 1})
    assert ledger.newest(STREAM) == (entry(1, rows={"written": 7}), {PRIMARY: 2, SECONDARY: 1})
    assert ledger.newest(STREAM)[0].code == CODE  # type: ignore[index]
    written = (WrittenRange("orders", "id", 2, 5, 9, 3),)
    ledger.append(entry(7, written=written), {})
    newest = ledger.newest(STREAM)
    assert newest is not None and newest[0].written == written


def test_a_line_that_a_crash_cut_off_is_passed_over_and_does_not_take_the_next_one_along(ledger: LedgerFile) -> None:
    ledger.append(entry(0), {PRIMARY: 1})
    file = next(ledger.folder.glob("*.jsonl"))
    file.write_text(file.read_text() + '{"g":1,"b":1,"t":17')
    assert ledger.newest(STREAM) == (entry(0), {PRIMARY: 1})
    ledger.append(entry(2), {PRIMARY: 3})
    assert ledger.newest(STREAM) == (entry(2), {PRIMARY: 3})


def test_a_new_day_compresses_the_days_before_and_drops_those_past_the_retention(ledger: LedgerFile) -> None:
    ledger.append(entry(0), {PRIMARY: 1})
    today = next(ledger.folder.glob("*.jsonl"))
    line, name = today.read_text(), today.name
    today.unlink()
    for age in (400, 20, 5):
        (ledger.folder / f"{datetime.now(UTC) - timedelta(days=age):%Y-%m-%d}.jsonl").write_text(line)
    assert ledger.newest(STREAM) == (entry(0), {PRIMARY: 1})
    ledger.append(entry(1), {PRIMARY: 2})
    assert ledger.rolled(20)
    five_days_ago = f"{datetime.now(UTC) - timedelta(days=5):%Y-%m-%d}.jsonl.gz"
    assert sorted(f.name for f in ledger.folder.iterdir()) == [five_days_ago, name]
    (ledger.folder / name).unlink()
    assert ledger.newest(STREAM) == (entry(0), {PRIMARY: 1})


def test_the_newest_lines_are_found_without_reading_whole_days(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.append(entry(0), {PRIMARY: 1})
    file = next(ledger.folder.glob("*.jsonl"))
    line = file.read_text()
    file.write_text("".join(line.replace('"b":0,', f'"b":{batch},') for batch in range(2_000)))
    read, days = list[str](), LedgerFile.days

    def noted(self: LedgerFile, stream: str) -> Iterator[list[RawLine]]:
        read.append(stream)
        yield from days(self, stream)

    monkeypatch.setattr(LedgerFile, "days", noted)
    assert [line.entry.batch for line in ledger.after(STREAM, Txn(1, 1_997), at_most=200_000)] == [1_999, 1_998]
    assert read == []
    assert len(ledger.after(STREAM, Txn(1, 99), at_most=200_000)) == 1_900, (
        "what lies before the last lines is found too"
    )
    assert read == [STREAM]


def many(batch: int, *moved: int, partitions: int = 100) -> LedgerEntry:
    """A batch that has read 7 records of some partitions, and none of the others."""
    ends = {p: 1_000 + 10 * batch + (7 if p in moved else 0) for p in range(partitions)}
    starts = dict.fromkeys(range(partitions), 1000 + 10 * batch)
    still = {p: 1_000 for p in range(partitions) if p not in moved}
    return replace(entry(batch), offsets=(OffsetRange("t", "id", {**starts, **still}, {**ends, **still}),))


def test_a_line_has_the_partitions_that_moved_and_a_reader_gets_all_of_them(ledger: LedgerFile) -> None:
    made = [many(batch, batch % 7) for batch in range(120)]
    for each in made:
        ledger.append(each, {PRIMARY: each.batch})
    file = next(ledger.folder.glob("*.jsonl"))
    sizes = [len(text) for text in file.read_bytes().splitlines()]
    assert sum(size > 1_000 for size in sizes) == 3, "one in 50 is full"
    (day,) = ledger.days(STREAM)
    assert [raw.read().entry for raw in day] == made
    assert ledger.newest(STREAM) == (made[-1], {PRIMARY: 119})
    assert [line.entry for line in ledger.after(STREAM, Txn(1, 110), at_most=500)] == made[:110:-1]


@hypothesis.settings(max_examples=60)
@given(st.lists(st.lists(ranges, max_size=2, unique_by=lambda r: r.topic).map(tuple), min_size=1, max_size=6))
def test_whatever_partitions_come_and_go_each_line_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, read: list[tuple[OffsetRange, ...]]
) -> None:
    ledger = LedgerFile(tmp_path_factory.mktemp("ledger"))
    made = [replace(entry(batch), offsets=each) for batch, each in enumerate(read)]
    for each in made:
        ledger.append(each, {})
    assert [raw.read().entry for day in ledger.days(STREAM) for raw in day] == made


def test_a_partition_that_is_new_and_one_that_stood_still_are_told_apart(ledger: LedgerFile) -> None:
    first = replace(entry(0), offsets=(OffsetRange("t", "id", dict.fromkeys(range(9), 1), dict.fromkeys(range(9), 5)),))
    stood = dict.fromkeys(range(9), 5)
    second = replace(entry(1), offsets=(OffsetRange("t", "id", stood, {**stood, 9: 3}),))
    third = replace(entry(2), offsets=(OffsetRange("t", "id", {**stood, 9: 3}, {**stood, 9: 3}),))
    for each in (first, second, third):
        ledger.append(each, {})
    text = next(ledger.folder.glob("*.jsonl")).read_text()
    assert text.count('"on":[1,0]') == 2
    (day,) = ledger.days(STREAM)
    assert [raw.read().entry for raw in day] == [first, second, third] and second.records == 3


def test_a_line_whose_full_line_was_lost_is_left_out_and_the_next_driver_begins_anew(ledger: LedgerFile) -> None:
    for batch in range(3):
        ledger.append(many(batch, 1), {})
    file = next(ledger.folder.glob("*.jsonl"))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0][:40] + b"\n" + lines[1] + lines[2])
    LedgerFile(ledger.folder).append(many(3, 2), {})
    assert [raw.read().entry for day in ledger.days(STREAM) for raw in day] == [many(3, 2)]


def test_a_full_line_that_could_not_be_written_is_written_again(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = many(1, *range(100))
    ends = everything.offsets[0].end
    ledger.append(many(0, 1), {})
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space"):
            ledger.append(everything, {})
    later = replace(entry(2), offsets=(OffsetRange("t", "id", ends, {**ends, 0: 2_000}),))
    ledger.append(later, {})
    assert ledger.newest(STREAM) == (later, {})


def test_a_day_in_memory_is_places_in_its_file_and_not_its_text(ledger: LedgerFile) -> None:
    made = [many(batch, batch % 7, partitions=1_000) for batch in range(200)]
    for each in made:
        ledger.append(each, {})
    ledger.roll(datetime.now(UTC), [*ledger.folder.glob("*.jsonl")])
    tracemalloc.start()
    (day,) = ledger.days(STREAM)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 200 * 500 and day[150].read().entry == made[150]


def test_the_lines_of_another_folder_are_taken_over_with_all_their_partitions(
    ledger: LedgerFile, tmp_path: Path
) -> None:
    replayed = LedgerFile(tmp_path / "replayed")
    for batch in range(5):
        replayed.append(many(batch, 1), {PRIMARY: batch})
    ledger.append(many(9, 3), {PRIMARY: 9})
    for _ in range(2):  # killed, and done again
        LedgerFile(ledger.folder).adopt(replayed)
    read = [raw.read().entry for day in ledger.days(STREAM) for raw in day]
    assert read == [many(9, 3), *(many(batch, 1) for batch in range(5))]


def test_lines_are_taken_over_with_the_ranges_that_are_known_since(ledger: LedgerFile, tmp_path: Path) -> None:
    replayed, ranges = LedgerFile(tmp_path / "replayed"), (WrittenRange("t", "id", 0, 5, 9, 4),)
    entries = [replace(entry(0), written=ranges), entry(1), replace(entry(2), note="mixed")]
    for number, each in enumerate(entries):
        replayed.append(each, {PRIMARY: number}, 1.5)
    other = (WrittenRange("t", "id", 1, 0, 3, 3),)
    ledger.adopt(replayed, {each.txn: other for each in entries})
    lines = [raw.read() for day in LedgerFile(ledger.folder).days(STREAM) for raw in day]
    assert [line.entry.written for line in lines] == [ranges, other, other], "those of a line count before others"
    assert [line.seconds for line in lines] == [1.5] * 3 and lines[2].entry.note == "mixed"


def test_a_roll_that_a_kill_cut_off_is_done_again_by_the_next_driver(ledger: LedgerFile) -> None:
    ledger.append(entry(0), {PRIMARY: 1})
    today = next(ledger.folder.glob("*.jsonl"))
    past = ledger.folder / f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}.jsonl"
    past.write_bytes(today.read_bytes())
    past.with_suffix(".jsonl.partial").write_bytes(b"half")
    driver = LedgerFile(ledger.folder)
    driver.append(entry(1), {PRIMARY: 2})
    assert driver.rolled(20)
    assert sorted(f.name for f in ledger.folder.iterdir()) == [f"{past.name}.gz", today.name]
    assert len(list(ledger.days(STREAM))) == 2


def test_past_days_are_compressed_beside_the_batch_however_old_the_only_one_is(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.folder.mkdir()
    (ledger.folder / "2001-01-01.jsonl").write_text("")
    ledger.roll(datetime.now(UTC), [*ledger.folder.glob("*.jsonl")])
    assert [f.name for f in ledger.folder.iterdir()] == ["2001-01-01.jsonl.gz"]
    ledger.append(entry(0), {PRIMARY: 1})
    today = next(ledger.folder.glob("*.jsonl"))
    past = ledger.folder / f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}.jsonl"
    past.write_bytes(today.read_bytes())
    today.unlink()
    go, roll = threading.Event(), LedgerFile.roll

    def waits(self: LedgerFile, *arguments: Any) -> None:
        assert go.wait(20)
        roll(self, *arguments)

    monkeypatch.setattr(LedgerFile, "roll", waits)
    driver = LedgerFile(ledger.folder)
    driver.append(entry(1), {PRIMARY: 2})  # returns although the day before is not compressed yet
    assert past.exists() and not driver.rolled(0)
    tomorrow = ledger.folder / f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%d}.jsonl"
    tomorrow.write_text("")  # lines are added to it while the day before is compressed late
    go.set()
    assert driver.rolled(20)
    assert sorted(f.name for f in ledger.folder.iterdir()) == [f"{past.name}.gz", today.name, tomorrow.name]
