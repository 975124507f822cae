"""`recourse streams sample`: the newest rows, conditions that can change nothing, and text that steers no terminal."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from reprocessing.sample import sample
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.settings import Settings
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, stream
from tests.support.worlds import DEAD_LETTERS, PRIMARY, Disk, NoBytes
from tests.unit.orchestration.cli.conftest import Run

ORDERS = StructType(
    [StructField("id", LongType()), StructField("at", TimestampType()), StructField('odd"name', StringType())]
)


@stream(
    source=KafkaTopic("orders", value=NoBytes(ORDERS), event_time="at", lateness="1 hour"),
    sink=Declared("orders_plain"),
)
def orders(rows: object) -> object:
    """A table with an event time, and a column whose name has a quote in it."""
    return rows


class OrdersOnDisk(Disk):
    columns = ORDERS


@pytest.fixture
def home(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Table `orders_plain` with ids 0 to 99; id 1 and 2 are the newest by event time."""
    monkeypatch.setenv("RECOURSE_FLOWS", json.dumps(["tests.support.worlds", __name__]))
    settings = Settings.load()
    Disk(settings).open().run(0, 1, 2)
    OrdersOnDisk(settings, orders).open()
    days = [datetime(2026, 1, 1 + (n if n in (1, 2) else 0), tzinfo=UTC) for n in range(100)]
    rows = pa.table(
        {"id": range(100), "at": pa.array(days, pa.timestamp("us", "UTC")), 'odd"name': ["\x1b[31mred\n"] * 100}
    )
    write_deltalake(str(settings.tables / "orders_plain"), rows, mode="append")
    return settings


def of(run: Run, *arguments: str, code: int = 0) -> str:
    printed = run("streams", "sample", *arguments)
    assert printed.code == code
    return printed.err if code else printed.out


def test_the_newest_rows_come_first(home: Settings, run: Run) -> None:
    rows = json.loads(of(run, "orders_plain", "--rows", "2", "-o", "json"))
    assert [row["id"] for row in rows] == [2, 1]
    assert rows[0]["at"] == "2026-01-03T00:00:00+00:00"
    rows = json.loads(of(run, "orders_plain", "--rows", "3", "--order-by", "id", "-o", "json"))
    assert [row["id"] for row in rows] == [99, 98, 97]
    assert len(of(run, "orders_plain").splitlines()) == 12


def test_a_condition_selects_rows(home: Settings, run: Run) -> None:
    rows = json.loads(of(run, "orders_plain", "--where", "id > 97 -- and a comment", "-o", "json"))
    assert sorted(row["id"] for row in rows) == [98, 99]
    assert json.loads(of(run, "orders_plain", "--where", '"odd""name" IS NULL', "-o", "json")) == []
    assert "cannot be evaluated" in of(run, "orders_plain", "--where", "idd > 3", code=2)
    assert "has no column 'idd'" in of(run, "orders_plain", "--order-by", "idd", code=2)


@pytest.mark.parametrize(
    "condition",
    [
        "true); DROP TABLE t; --",
        "true) LIMIT 1; COPY (SELECT 1) TO '{file}' --",
        "true); COPY t TO '{file}' STORED AS CSV; SELECT (true",
        "true); INSERT INTO t VALUES (1, NULL, NULL); SELECT (true",
        "true); CREATE EXTERNAL TABLE x STORED AS CSV LOCATION '/etc/passwd'; SELECT (true",
        "EXISTS (SELECT * FROM '/etc/passwd')",
    ],
)
def test_nothing_can_be_changed_or_read_beside_the_table(
    home: Settings, tmp_path: Path, run: Run, condition: str
) -> None:
    file = tmp_path / "written"
    version = DeltaTable(home.tables / "orders_plain").version()
    assert "cannot be evaluated" in of(run, "orders_plain", "--where", condition.format(file=file), code=2)
    assert not file.exists()
    assert DeltaTable(home.tables / "orders_plain").version() == version


def test_text_of_records_does_not_steer_a_terminal(home: Settings, run: Run) -> None:
    text = of(run, "orders_plain", "--rows", "1")
    assert "\x1b" not in text and "\\x1b[31mred\\x0a" in text


def test_dead_letters_and_tables_without_a_time(home: Settings, run: Run) -> None:
    assert [row["reason"] for row in json.loads(of(run, DEAD_LETTERS, "-o", "json"))] == ["not_json"]
    topology = Topology.of_settings(home)
    assert sample(home, topology, DEAD_LETTERS, rows=1).order == ("timestamp", "offset")
    assert sample(home, topology, PRIMARY, rows=5).order == ()
    assert len(sample(home, topology, PRIMARY, rows=2).rows) == 2


def test_an_unknown_table_and_one_that_is_not_made_yet(home: Settings, run: Run) -> None:
    assert "did you mean 'orders_plain'" in of(run, "order_plain", code=2)
    assert "does not exist yet" in of(run, "plain", code=2)
