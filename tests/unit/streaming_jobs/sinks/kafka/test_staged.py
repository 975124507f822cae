"""Records of a topic that wait in files: as they were made, whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streaming_jobs.errors import PermanentError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.sinks.kafka import staged
from streaming_jobs.sinks.kafka.producer import Record
from streaming_jobs.sinks.kafka.staged import StagedWriter, staged_batches, written_below

RECORDS: Sequence[Record] = (
    ("orders", b"k", b"\x00value", [("recourse.batch", b"7"), ("empty", None)], 0, -1),
    ("orders", None, None, [], 1_700_000_000_000, -1),
    ("orders-eu", b"", b"", [("twice", b"1"), ("twice", b"2")], 5, 3),
)


@dataclass
class Records:
    """The records of one batch."""

    records: Sequence[Record] = RECORDS
    missing: int = 0
    topic_ids: dict[str, str] = field(default_factory=dict)
    most_bytes: int = 0

    @property
    def count(self) -> int:
        return len(self.records) + self.missing

    def __iter__(self) -> object:
        return iter(self.records)


def entry(batch: int) -> LedgerEntry:
    return LedgerEntry("batch", "s", "topic:orders", 2, batch, rows={"written": 3})


def opened(folder: Path, *, exactly_once: bool = True) -> StagedWriter:
    writer = StagedWriter(folder, exactly_once)
    writer.open(2)
    return writer


def test_records_wait_as_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "_BLOCK", 2)
    writer = opened(tmp_path / "orders")
    assert writer.position is None and writer.write(entry(7), Records()) and writer.position == Txn(2, 7)
    assert writer.write(entry(12), Records(RECORDS[:1]))
    batches = staged_batches(tmp_path / "orders")
    assert [*batches] == [Txn(2, 7), Txn(2, 12)]
    batch = batches[Txn(2, 7)]
    assert [*batch] == list(RECORDS) == [*batch], "more than once"
    assert (batch.count, batch.entry, batch.topics) == (3, entry(7), {"orders", "orders-eu"})


def test_staged_records_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    opened(tmp_path / "orders").write(entry(7), Records())
    assert (tmp_path / "orders").stat().st_mode & 0o077 == 0


def test_where_they_were_written_is_noted_for_all_topics_together(tmp_path: Path) -> None:
    ranges = {name: WrittenRange(name, f"id-{name}", 1, 5, 9, 3) for name in ("orders", "returns")}
    for name, each in ranges.items():
        opened(tmp_path / name).write(entry(7), Records())
        batch = staged_batches(tmp_path / name)[Txn(2, 7)]
        assert batch.written is None
        batch.note_written([each])
        assert batch.written == (each,) and opened(tmp_path / name).position == Txn(2, 7)
    opened(tmp_path / "orders").write(entry(8), Records())
    assert written_below(tmp_path) == {Txn(2, 7): (*ranges.values(),)}


def test_a_batch_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    with pytest.raises(PermanentError, match="3 records of a batch of 4 were staged"):
        writer.write(entry(7), Records(missing=1))
    assert not staged_batches(tmp_path) and writer.position is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    assert opened(tmp_path).position is None and not [*tmp_path.iterdir()], "the next session removes it"


def test_a_session_goes_on_after_the_newest_batch_and_a_repeated_batch_is_written_once(tmp_path: Path) -> None:
    opened(tmp_path).write(entry(7), Records())
    again = opened(tmp_path)
    assert again.position == Txn(2, 7) and again.newest == entry(7)
    assert not again.write(entry(7), Records(RECORDS[:1])) and staged_batches(tmp_path)[Txn(2, 7)].count == 3
    plain = opened(tmp_path, exactly_once=False)
    assert plain.position is None, "the topic will not say which batches it has"
    assert plain.write(entry(7), Records(RECORDS[:1])) and staged_batches(tmp_path)[Txn(2, 7)].count == 1


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "_ENTRY", "other")
    opened(tmp_path).write(entry(7), Records())
    monkeypatch.undo()
    with pytest.raises(PermanentError, match="has no ledger entry"):
        staged_batches(tmp_path)
