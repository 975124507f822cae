"""The verifier's own reader of the ledger beside the state, against the one that writes it."""

from __future__ import annotations

from pathlib import Path

from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.verification.state_evidence import _ledger_lines


def ends_after(batch: int) -> dict[int, int]:
    """Of eight partitions one moves with each batch; a ninth comes later."""
    moved = {p: sum(each % 8 == p for each in range(batch + 1)) for p in range(8)}
    return moved | ({8: batch} if batch > 20 else {})


def test_lines_with_the_partitions_that_moved_have_all_of_them_for_the_verifier(tmp_path: Path) -> None:
    written = LedgerFile(tmp_path)
    expected = {}
    for batch in range(60):
        read = OffsetRange("t", "id", ends_after(batch - 1), ends_after(batch))
        written.append(
            LedgerEntry("batch", "s", "s", 1, batch, (read,), {"written": 1}, code=CodeVersion("a", "1")), {}
        )
        expected[1, batch] = (dict(read.start), dict(read.end))
    text = next(tmp_path.glob("*.jsonl")).read_text()
    assert text.count('"on":') > 40, "most lines are short"
    seen = {at: (dict(entry.ranges[0].start), dict(entry.ranges[0].end)) for at, entry in _ledger_lines(tmp_path, "s")}
    assert seen == expected
