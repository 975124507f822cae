"""How long planning reads a ledger: one day of a batch a second, as a question about its middle needs it.

python -m benchmarks.ledger [--batches 86400]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from reprocessing.planning.history import lineage
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_record import first

TOPIC, PER_BATCH = "readings", 10


def main() -> int:
    """Write the day, then time the reading; prints a line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=86_400)
    count = parser.parse_args().batches
    with tempfile.TemporaryDirectory(prefix="recourse-ledger-") as folder:
        ledger = LedgerFile(Path(folder))
        for batch in range(count):
            ledger.append(_entry(batch), {"readings": batch + 1, "readings_dead_letters": 0}, 0.2)
        began = time.monotonic()
        history = lineage(first("readings").generations, ledger.days("readings"))
        found = history.last_within({TOPIC: {0: count // 2 * PER_BATCH}})
        pace = history.pace()
        seconds = time.monotonic() - began
    assert found is not None and found.txn.batch == count // 2 - 1 and pace is not None
    sys.stdout.write(f"{count:,} batches: {seconds:.2f} s\n")
    return 0


def _entry(batch: int) -> LedgerEntry:
    read = OffsetRange(TOPIC, "id", {0: batch * PER_BATCH}, {0: (batch + 1) * PER_BATCH})
    return LedgerEntry("batch", "readings", "readings", 1, batch, (read,), {"written": 10}, code=CodeVersion("a", "1"))


if __name__ == "__main__":
    sys.exit(main())
