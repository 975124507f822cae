"""The difference of two tables: rows, sums, times, keys and a sample, and the memory that it takes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from reprocessing.plan.conditions import bad_rows, broken
from reprocessing.replay.difference import Difference, Touched, compare
from streaming_jobs.platform import table_rows
from streaming_jobs.platform.table_rows import QueryFailed
from tests.support.life import Life

pytestmark = pytest.mark.slow


def compared(old: pa.Table | DeltaTable, new: pa.Table | DeltaTable, *keys: str) -> Difference:
    """The difference of two tables `t`; nothing of the comparison stays on disk."""
    with TemporaryDirectory() as folder:
        tables = []
        for name, rows in (("old", old), ("new", new)):
            if isinstance(rows, pa.Table):
                write_deltalake(Path(folder) / "of" / name, rows)
                rows = DeltaTable(Path(folder) / "of" / name)
            tables.append(rows)
        difference = compare("t", *tables, keys, Path(folder) / "compared")
        assert not (Path(folder) / "compared").exists()
        return difference


def test_rules_and_differences_are_told(life: Life) -> None:
    published, staged = DeltaTable(life.table), pa.table({"id": list(range(60)), "place": ["plain"] * 60})
    for rule, rows in (("id >= 0", 30), ("place IS NOT NULL", 0)):
        breach = broken(published, rule)
        assert (breach.rows, breach.null) == (rows, 0)
    never_null = "(id < 0) IS NOT TRUE"  # as a plan before the first bad row asks of what it has rebuilt
    assert broken(published, never_null).rows == 30 == bad_rows(published, never_null)
    by_row = compared(published, published)
    assert (by_row.only_old, by_row.only_new, by_row.changed, by_row.share) == (0, 0, 0, 0.0)
    by_key = compared(published, staged, "id")
    assert (by_key.old_rows, by_key.new_rows, by_key.only_old, by_key.only_new) == (60, 60, 30, 30)
    assert by_key.changed == 30 - 6, "one place in five is the same"
    by_row = compared(published, staged)
    assert (by_row.only_old, by_row.only_new) == (54, 54)
    assert by_row.totals["id"] == (sum(range(30)) - sum(range(30, 60)), sum(range(60)))
    assert len(by_row.sample) == len(by_key.sample) == 5


def test_what_differs_is_counted_by_time() -> None:
    at = pa.array([datetime(2026, 3, 2 + n, 6, tzinfo=UTC) for n in range(4)], pa.timestamp("us", "UTC"))
    old, new = (pa.table({"id": [0, 1, 2, 3], "n": [1, n, n, 1], "at": at}) for n in (1, 2))
    old = old.slice(0, 3)
    by_key = compared(old, new, "id")
    assert by_key.time_column == "at" and (by_key.changed, by_key.only_new) == (2, 1)
    assert by_key.by_time == [
        ("2026-03-03 06:00", 0, 0, 1),
        ("2026-03-04 06:00", 0, 0, 1),
        ("2026-03-05 06:00", 0, 1, 0),
    ]
    by_row = compared(old, new)
    assert by_row.by_time == [
        ("2026-03-03 06:00", 1, 1, 0),
        ("2026-03-04 06:00", 1, 1, 0),
        ("2026-03-05 06:00", 0, 1, 0),
    ]
    assert compared(old, old, "id").by_time == []


def test_times_before_1970_and_columns_of_any_type_are_compared() -> None:
    at = pa.array([datetime(1960, 1, 1, 6, 5, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    difference = compared(*(pa.table({"inside": [{"a": n}], "list": [[n]], "at": at}) for n in (1, 2)))
    assert difference.by_time == [("1960-01-01 06:05", 1, 1, 0)]


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us")], ids=str)
@pytest.mark.parametrize("year", [1, 1677, 2263, 9999])
def test_dates_beyond_what_nanoseconds_can_hold_are_compared(kind: pa.DataType, year: int) -> None:
    zone = UTC if getattr(kind, "tz", None) else None
    far = datetime(year, 12, 31, 23, 59, 59, 999_999, tzinfo=zone)
    near = datetime(2026, 1, 1, tzinfo=zone)
    days = [far.date(), near.date()] if pa.types.is_date(kind) else [far, near]
    both = [pa.table({"id": [1, 2], "n": [n, n], "at": pa.array(days, kind)}) for n in (1, 2)]
    for keys in (("id",), ()):
        difference = compared(*both, *keys)
        assert len(difference.by_time) == 2
        assert sum(gone + came + changed for _, gone, came, changed in difference.by_time) == (2 if keys else 4)
        assert all(period[4] == "-" for period, *_ in difference.by_time)


def test_the_largest_differences_are_shown_first() -> None:
    """Sixteen totals went on a little; one is wrong by a thousand, and it is the last by name."""
    keys = [f"k{n:02d}" for n in range(16)]
    old = pa.table({"k": keys, "total": pa.array([100 + n for n in range(15)] + [1_115], pa.int64())})
    new = pa.table({"k": keys, "total": pa.array([101 + n for n in range(16)], pa.int64())})
    difference = compared(old, new, "k")
    assert difference.changed == 16 and difference.sample[0]["k"] == "k15"
    assert (difference.sample[0]["total published"], difference.sample[0]["total rebuilt"]) == (1_115, 116)


def test_a_difference_of_unknown_size_and_rows_that_come_or_go_hide_no_large_one() -> None:
    old = pa.table({"k": ["a", "b", "c", "d"], "x": pa.array([None, 5.0, float("nan"), 1.0]), "s": ["p"] * 4})
    new = pa.table({"k": ["a", "b", "c", "e"], "x": pa.array([1.0, 900.0, 2.0, 1.0]), "s": ["q"] * 4})
    difference = compared(old, new, "k")
    assert (difference.changed, difference.only_old, difference.only_new) == (3, 1, 1)
    assert difference.sample[0]["k"] == "b" and len(difference.sample) == 5


def test_of_rows_without_a_key_the_largest_are_shown_first() -> None:
    old = pa.table({"name": [f"r{n}" for n in range(9)], "amount": pa.array([1] * 8 + [70_000], pa.int64())})
    new = pa.table({"name": [f"s{n}" for n in range(9)], "amount": pa.array([1] * 9, pa.int64())})
    difference = compared(old, new)
    assert difference.sample[0] == {"published": {"name": "r8", "amount": 70_000}}


def test_sums_of_money_are_told() -> None:
    kind = pa.decimal128(38, 4)
    old = pa.table({"k": ["a", "b"], "amount": pa.array([Decimal("99999999999999999999.9999"), Decimal("1.5")], kind)})
    new = pa.table({"k": ["a", "b"], "amount": pa.array([Decimal("99999999999999999999.9999"), Decimal("2.5")], kind)})
    difference = compared(old, new, "k")
    assert difference.totals["amount"] == ("100000000000000000001.4999", "100000000000000000002.4999")


def test_a_sum_that_does_not_fit_its_type_ends_no_audit() -> None:
    kind = pa.decimal128(38, 0)
    large = Decimal(9 * 10**37)
    old = pa.table({"k": ["a", "b"], "amount": pa.array([large, large], kind), "n": pa.array([2**63 - 1] * 2)})
    new = pa.table({"k": ["a", "b"], "amount": pa.array([large, Decimal(1)], kind), "n": pa.array([2**63 - 1, 1])})
    difference = compared(old, new, "k")
    assert difference.changed == 1
    assert [str(x) for x in difference.totals["n"]] == [str(2**64 - 2), str(2**63)]
    assert float(difference.totals["amount"][0]) == pytest.approx(1.8e38)


def test_a_position_that_only_new_code_writes_is_no_difference() -> None:
    schema = pa.schema(
        [("id", pa.int64()), pa.field("_position", pa.int64(), metadata={"recourse.column": "position"})]
    )
    both = [pa.table({"id": [1, 2], "_position": each}, schema=schema) for each in ([None, None], [7, 8])]
    difference = compared(*both, "id")
    assert (difference.changed, difference.only_old, difference.only_new, dict(difference.totals)) == (0, 0, 0, {})
    by_row = compared(*both)
    assert by_row.only_old == by_row.only_new == 0


def test_differences_are_grouped_by_the_part_of_the_key_that_is_no_time() -> None:
    days = [datetime(2026, 3, 1 + n, tzinfo=UTC) for n in range(6)]

    def rows(places: list[str], totals: list[int]) -> pa.Table:
        at = pa.array(days[: len(places)], pa.timestamp("us", "UTC"))
        return pa.table({"place": places, "day": at, "total": totals, "label": ["x"] * len(places)})

    old = rows(["a", "a", "a", "b", "b"], [1, 1, 1, 1, 1])
    new = rows(["a", "a", "a", "b", "b", "c"], [1, 2, 2, 1, 2, 9])
    by_key = compared(old, new, "place", "day").by_key
    assert list(by_key.columns) == ["place"] and by_key.groups == 3
    assert list(by_key.largest) == [("a", 0, 0, 2, 2), ("c", 0, 1, 0, 2), ("b", 0, 0, 1, 1)]


def test_of_a_hundred_thousand_differing_rows_bounded_groups_stay() -> None:
    """Each in a minute and a key of its own; a journal holds what the report shows, and reads it back."""
    count = 100_000
    at = pa.array([1_770_000_000_000_000 + n * 60_000_000 for n in range(count)], pa.timestamp("us", "UTC"))
    both = [
        pa.table({"k": [f"{n:06d}" + "x" * 300 for n in range(count)], "at": at, "n": [side] * count})
        for side in (1, 2)
    ]
    difference = compared(*both, "k")
    assert difference.changed == difference.by_key.groups == count
    assert len(difference.by_key.largest) == 20 and all(len(key) == 60 for key, *_ in difference.by_key.largest)
    assert 10 < len(difference.timeline.periods) <= 60 and len(difference.by_time) <= 10
    sums = [sum(period[3] for period in periods) for periods in (difference.timeline.periods, difference.by_time)]
    assert sums == [count, count]
    text = json.dumps(dataclasses.asdict(replace(difference, sample=())))
    assert len(text) < 8_000
    decoded = Difference.decode(json.loads(text))
    assert [tuple(each) for each in decoded.timeline.periods] == list(difference.timeline.periods)
    assert decoded.by_key.groups == count


@pytest.mark.parametrize(
    "seconds", [0, 59, 3_000, 40_000, 100_000, 5_000_000, 90_000_000, 3 * 10**9, 10**11, 2 * 10**11]
)
def test_the_periods_of_text_and_plot_cover_any_time(seconds: int) -> None:
    starts = [n * seconds // 999 - 62_135_596_800 for n in range(1_000)]
    at = pa.array([start * 1_000_000 for start in starts], pa.timestamp("us", "UTC"))
    both = [pa.table({"k": list(range(1_000)), "at": at, "n": [side] * 1_000}) for side in (1, 2)]
    difference = compared(*both, "k")
    timeline = difference.timeline
    assert len(timeline.periods) <= 60 and len(difference.by_time) <= 10
    assert all(start % timeline.seconds == 0 for start, *_ in timeline.periods)
    assert sum(period[3] for period in difference.by_time) == 1_000


def test_the_journal_of_an_earlier_version_is_read() -> None:
    value = {"table": "t", "old_rows": 1, "new_rows": 1, "only_old": 0, "only_new": 0, "changed": 1, "totals": {}}
    assert Difference.decode({**value, "sample": []}).by_key.groups == 0


def test_the_bytes_of_a_key_are_shown_as_digits() -> None:
    both = [pa.table({"k": [b"\xff\x00"], "n": [side]}) for side in (1, 2)]
    difference = compared(*both, "k")
    assert [key for key, *_ in difference.by_key.largest] == ["ff00"]
    assert difference.touched == Touched(("k",), [["ff00"]]), "bytes have no range"


def test_the_keys_and_ranges_of_what_differs_are_noted() -> None:
    hours = [datetime(2026, 3, 1, hour, tzinfo=UTC) for hour in range(5)]

    def rows(totals: list[int]) -> pa.Table:
        count = len(totals)
        return pa.table(
            {"place": list("abcde")[:count], "at": pa.array(hours[:count], pa.timestamp("us", "UTC")), "total": totals}
        )

    old, new = rows([1, 1, 1, 1]), rows([1, 2, 1, 3, 1])  # b and d have other totals, e comes
    times = ("2026-03-01T01:00:00+00:00", "2026-03-01T04:00:00+00:00")
    by_key = compared(old, new, "place").touched
    assert by_key == Touched(("place",), [["b"], ["d"], ["e"]], {"place": ("b", "e"), "at": times})
    by_row = compared(old, new).touched
    assert by_row == Touched((), None, {"at": times}), "rows without a key are found by their times"
    assert compared(old, old).touched is None


@pytest.mark.parametrize(("count", "noted"), [(1_000, True), (1_001, False)])
def test_more_keys_than_a_journal_should_hold_are_a_range(count: int, noted: bool) -> None:
    both = [pa.table({"k": list(range(count)), "n": [side] * count}) for side in (1, 2)]
    touched = compared(*both, "k").touched
    assert touched is not None and touched.ranges == {"k": (0, count - 1)}
    assert touched.keys == ([[k] for k in range(count)] if noted else None)


_ROWS = 1_000_000
_COMPARED = """
import json, sys
from pathlib import Path
from deltalake import DeltaTable
from reprocessing.replay.difference import compare
from streaming_jobs.platform import table_rows
table_rows.MEMORY_MB = int(sys.argv[2])
home = Path(sys.argv[1])
def written():
    return int(next(l for l in open("/proc/self/io") if l.startswith("wchar")).split()[1])
before = written()
made = compare("t", DeltaTable(home / "old"), DeltaTable(home / "new"), sys.argv[3:], home / "compared")
print(json.dumps({"mb": (written() - before) >> 20, "found": [made.only_old, made.only_new, made.changed]}))
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
    assert enough["mb"] == 0 and int(str(little["mb"])) > 20, "what the memory did not hold was on disk"
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
        broken(table, "id > 0")
    assert "write a SQL condition" not in str(failure.value)
