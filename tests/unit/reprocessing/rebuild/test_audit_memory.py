"""The audit's memory is bounded: what does not fit is spilled, and a lack of room is no fault of anybody's SQL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from reprocessing.planning.conditions import broken
from reprocessing.rebuild.audit import compare
from streaming_jobs.platform import table_rows
from streaming_jobs.platform.table_rows import QueryFailed

_ROWS = 1_000_000
_COMPARED = """
import json, sys
from pathlib import Path
from deltalake import DeltaTable
from reprocessing.rebuild.audit import compare
from streaming_jobs.platform import table_rows
table_rows.MEMORY_MB = int(sys.argv[2])
home = Path(sys.argv[1])
def peak():  # of this program alone; ru_maxrss begins with that of the process that has started it
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) >> 10
before = peak()
made = compare("t", DeltaTable(home / "old"), DeltaTable(home / "new"), sys.argv[3:], home / "compared")
print(json.dumps({"mb": peak() - before, "found": [made.only_old, made.only_new, made.changed]}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables that share no file; a hundredth of the rows differ."""
    home = tmp_path_factory.mktemp("tables")
    for name, add in (("old", 0), ("new", 1)):
        for begin in range(0, _ROWS, 100_000):
            ids = range(begin, begin + 100_000)
            text = [f"some text of row {n} that is not short, as rows are" for n in ids]
            rows = pa.table({"id": ids, "text": text, "n": [n + (add if n % 100 == 0 else 0) for n in ids]})
            write_deltalake(home / name, rows, mode="append")
    return home


@pytest.mark.parametrize("keys", [["id"], pytest.param([], marks=pytest.mark.long)])
def test_a_comparison_of_large_tables_stays_within_its_memory(home: Path, keys: list[str]) -> None:
    def compared(memory_mb: int) -> dict[str, object]:
        command = [sys.executable, "-c", _COMPARED, str(home), str(memory_mb), *keys]
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

    little, enough = compared(64), compared(2_000)
    assert little["found"] == enough["found"] == ([0, 0, _ROWS // 100] if keys else [_ROWS // 100, _ROWS // 100, 0])
    assert int(str(little["mb"])) < int(str(enough["mb"])) - 20, "the rest was on disk"
    assert not (home / "compared").exists()


def test_what_memory_or_disk_cannot_do_is_no_fault_of_a_condition(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_rows, "MEMORY_MB", 1)
    with pytest.raises(QueryFailed, match="a query on table t failed: .*Resources exhausted") as failure:
        compare("t", DeltaTable(home / "old"), DeltaTable(home / "new"), [], tmp_path / "compared")
    assert "SQL" not in str(failure.value) and not (tmp_path / "compared").exists()


def test_a_file_that_is_gone_is_no_fault_of_a_condition(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1, 2]}))
    table = DeltaTable(tmp_path / "t")
    for file in table.file_uris():
        Path(file).unlink()
    with pytest.raises(QueryFailed) as failure:
        broken(table, ["id > 0"])
    assert "write a SQL condition" not in str(failure.value)
