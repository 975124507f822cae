"""Conditions on rows: every row that breaks one is found, and one that cannot be evaluated is refused."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from reprocessing.plan.conditions import bad_rows, broken
from streaming_jobs.errors import UsageError
from tests.support.life import Life


def test_statistics_that_were_written_wrong_hide_no_row_from_a_condition(tmp_path: Path) -> None:
    """As deltalake rounds decimals in them, in tables of before; a scan passes over the file by them."""
    amounts = pa.array([Decimal("1.00"), Decimal("12345678901234567.89")], pa.decimal128(20, 2))
    write_deltalake(tmp_path / "table", pa.table({"amount": amounts}))
    (commit,) = (tmp_path / "table" / "_delta_log").glob("*.json")
    actions = [json.loads(line) for line in commit.read_text("utf-8").splitlines()]
    for added in (action["add"] for action in actions if "add" in action):
        added["stats"] = json.dumps(
            {"numRecords": 2, "minValues": {"amount": 1.0}, "maxValues": {"amount": 2.0}, "nullCount": {"amount": 0}}
        )
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions), "utf-8")
    table = DeltaTable(tmp_path / "table")
    assert table.to_pyarrow_table(filters=[("amount", ">", Decimal(5))]).num_rows == 0, "it does hide it from others"
    assert bad_rows(table, "amount > 5") == 1
    assert broken(DeltaTable(tmp_path / "table"), "amount < 5").rows == 1


@pytest.mark.parametrize("rule", ["nothing > 1", "id >>> 1 (", "'", "1 / (id - id) = 1", "CAST(place AS INT) > 0"])
def test_a_rule_that_cannot_be_asked_is_refused(life: Life, rule: str) -> None:
    with pytest.raises(UsageError, match="cannot be evaluated"):
        broken(DeltaTable(life.table), rule)
    with pytest.raises(UsageError, match="cannot be evaluated"):
        bad_rows(DeltaTable(life.table), rule)


@pytest.mark.parametrize("unknown", ["nope", "nope(id)", "id > 'x'", "id >"])
def test_a_condition_that_cannot_be_asked_says_what_is_unknown(life: Life, unknown: str) -> None:
    with pytest.raises(UsageError) as refused:
        bad_rows(DeltaTable(life.table), unknown)
    assert {
        "nope": "there is no column nope; the columns are id, place",
        "nope(id)": "there is no function nope",
        "id > 'x'": "Cannot cast string 'x'",
        "id >": "Expected: an expression",
    }[unknown] in refused.value.found
    assert "Did you mean" not in refused.value.found, "'now' is no help where 'nope' is unknown"


def test_a_misspelt_name_is_told_the_one_that_is_near_it(life: Life) -> None:
    with pytest.raises(UsageError, match="there is no column plase; did you mean place"):
        bad_rows(DeltaTable(life.table), "plase = 'x'")
    with pytest.raises(UsageError, match="there is no function sqrrt; did you mean sqrt"):
        bad_rows(DeltaTable(life.table), "sqrrt(id) > 1")


def test_rows_that_break_a_rule_are_shown_and_nulls_are_named(tmp_path: Path) -> None:
    amounts = pa.array([None, None, -1, 5], pa.int64())
    write_deltalake(tmp_path / "t", pa.table({"id": [1, 2, 3, 4], "amount": amounts}))
    breach = broken(DeltaTable(tmp_path / "t"), "amount >= 0")
    assert (breach.rows, breach.null) == (3, 2)
    words = breach.words("amount >= 0")
    assert words.startswith("3 rows break the rule amount >= 0: for 2 it is null") and "id 3, amount -1" in words
    assert broken(DeltaTable(tmp_path / "t"), "id > 0").rows == 0
