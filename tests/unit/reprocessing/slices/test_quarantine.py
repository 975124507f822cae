"""What a rebuilt slice changes in its table's quarantine: by rows alone, and staged beside a real table."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from reprocessing.slices import quarantine as module
from reprocessing.slices.quarantine import StagedQuarantine, settled, staged_quarantine
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.sinks.delta.slice_staging import STAGED
from tests.support.days import BEGIN, Days, guarded, range_of
from tests.support.redrives import QUARANTINE, quarantine_rows, with_quarantined


def at(hours: float) -> datetime:
    return BEGIN + timedelta(hours=hours)


def quarantined(*rows: tuple[float, float, str], batch: int = 1) -> pa.Table:
    """Rows by hour, value and rule, in the columns of a quarantine."""
    return pa.table(
        {
            "at": [at(hour) for hour, _, _ in rows],
            "total": [float(total) for _, total, _ in rows],
            "_rules": [[rule] for _, _, rule in rows],
            "_reason": ["in words"] * len(rows),
            **{name: pa.nulls(len(rows), pa.int64()) for name in ("_topic", "_partition", "_offset")},
            "_generation": [1] * len(rows),
            "_batch": [batch] * len(rows),
        }
    )


def test_the_quarantine_gets_what_is_set_aside_of_the_slices_today() -> None:
    nan = float("nan")
    there = quarantined((1, 10, "small"), (2, 60, "small"), (3, 70, "small"), (3, 70, "small"), (4, nan, "small"))
    today = quarantined((2, 61, "small"), (3, 70, "small"), (4, nan, "small"), batch=9)
    found = settled(there, today)
    outcomes = found.outcomes("at")
    assert [each.outcome for each in outcomes] == ["rebuilt", "rebuilt", "quarantined", "rebuilt", "quarantined"]
    assert {each.at for each in outcomes} == {at(hour).isoformat() for hour in (1, 2, 3, 4)}
    assert found.after["_batch"].to_pylist() == [1, 1, 9] and found.after["total"].to_pylist()[2] == 61
    assert found.figures == {"before": 5, "after": 3, "gone": 3, "came": 1} and found.changes
    again = settled(found.after, today)
    assert not again.changes and again.after.num_rows == 3
    other_rule = settled(there.slice(0, 1), quarantined((1, 10, "large")))
    assert other_rule.changes and other_rule.after["_rules"].to_pylist() == [["large"]]


def test_rows_of_two_records_are_two_rows() -> None:
    """Two records may make rows with the same values: each row stays with its own record."""
    one, two = (quarantined((1, 10, "small")).set_column(6, "_offset", [[offset]]) for offset in (7, 8))
    found = settled(one, two)
    assert (found.gone, found.came) == (1, 1) and found.after["_offset"].to_pylist() == [8]


def staged(life: Days, *today: int, newest: Txn = Txn(1, 4)) -> StagedQuarantine:  # noqa: B008
    name = f"s-{newest.generation}"
    return staged_quarantine(life.stored(QUARANTINE), name, range_of(0), quarantine_rows(*today), newest)


@pytest.mark.slow
def test_rows_of_later_batches_and_of_other_slices_stay(tmp_path: Path) -> None:
    life = with_quarantined(Days.of(tmp_path, 5, guarded()), 1, 2, 30)
    with_quarantined(life, 3, batch=5)
    made = staged(life, 2, 4)
    assert made.rows.figures == {"before": 2, "after": 2, "gone": 1, "came": 1}
    after = made.staged.after().to_pyarrow_table().to_pydict()
    assert dict(zip(after["n"], after["_batch"], strict=True)) == {2: 0, 4: 4, 3: 5}
    of_an_earlier_generation = staged(life, 3, newest=Txn(2, 0))
    assert of_an_earlier_generation.rows.figures == {"before": 3, "after": 1, "gone": 2, "came": 0}


@pytest.mark.slow
def test_what_cannot_be_settled_is_refused_and_leaves_nothing_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = with_quarantined(Days.of(tmp_path, 5, guarded()), 1, 2)
    with (
        monkeypatch.context() as patch,
        pytest.raises(PreflightRefused, match="2 rows of the slice.* 1 can be"),
    ):
        patch.setattr(module, "MOST", 1)
        staged(life, 2)
    unknown = quarantine_rows(1).append_column("new", pa.array([1]))
    with pytest.raises(PreflightRefused, match="no column new yet"):
        staged_quarantine(life.stored(QUARANTINE), "s", range_of(0), unknown, Txn(1, 4))
    assert not list((life.settings.tables / QUARANTINE / STAGED).iterdir())
    nothing = staged_quarantine(life.stored(QUARANTINE), "s", range_of(0), unknown.slice(0, 0), Txn(1, 4))
    assert nothing.rows.gone == 2, "without rows, columns that are not there yet need not be"
