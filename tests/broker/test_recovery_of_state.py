"""Streams with windows, deduplication and partitions: rewound, rebuilt, skipped ahead, begun with empty state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import open_sink
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import DeltaTable as Declared
from tests.support import ROOT
from tests.support.driver import command

TOPIC = "readings"
FLOWS = """
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

READING = StructType([StructField("place", StringType(), False), StructField("id", LongType(), False),
                      StructField("at", TimestampType(), False)])
READINGS = KafkaTopic("readings", value=Json(READING), event_time="at", lateness="1 minute")

@stream(source=READINGS, sink=DeltaTable("minutes", partition_by=["place"]))
def minutes(readings):
    window = F.window("at", "1 minute")
    return readings.groupBy(window, "place").agg(F.count("*").alias("n"), F.sum("id").alias("total")).select(
        F.col("window.start").alias("minute"), "place", "n", "total")

@stream(source=READINGS, sink=DeltaTable("places", partition_by=["place"]))
def places(readings):
    return readings.select("place", "id", "at")

@stream(source=READINGS, sink=DeltaTable("distinct_readings"))
def distinct_readings(readings):
    return readings.dropDuplicatesWithinWatermark(["id"]).select("place", "id", "at")

@stream(source=READINGS, sink={"means": DeltaTable("minute_means"), "counts": DeltaTable("minute_counts")})
def split_minutes(readings):
    window = F.window("at", "1 minute")
    both = readings.groupBy(window, "place").agg(F.count("*").alias("n"), F.sum("id").alias("total"))
    flat = both.select(F.col("window.start").alias("minute"), "place", "n", "total")
    mean = (F.col("total") / F.col("n")).alias("mean")
    return {"counts": flat.select("minute", "place", "n"),
            "means": flat.where("place <> 'plain'").select("minute", "place", mean)}
"""
PLACES = ("plain", "two words", "a/b:50%")


class Home:
    """A project with two streams that keep state, read in small batches."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self.folder, self.bootstrap = folder, bootstrap
        (folder / "code").mkdir()
        self.deploy("", "")
        self.settings = Settings.load({"home": folder})

    def deploy(self, part: str, instead: str) -> None:
        """Put code there in which a part is another one."""
        assert part in FLOWS
        (self.folder / "code" / "reading_flows.py").write_text(FLOWS.replace(part, instead) if part else FLOWS)

    def send(self, first: int, last: int) -> None:
        """Readings in the order of their times, one a second; each third one comes twice."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True})
        for number in range(first, last):
            at = f"2026-03-02T{number // 3600:02d}:{number // 60 % 60:02d}:{number % 60:02d}Z"
            value = json.dumps({"place": PLACES[number % 3], "id": number, "at": at})
            for _ in range(2 if number % 3 == 0 else 1):
                producer.produce(TOPIC, value=value, partition=0)
        assert producer.flush(30) == 0

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run a command; what it printed, or said where it has to fail."""
        environment = {
            **os.environ,
            "RECOURSE_HOME": str(self.folder),
            "RECOURSE_FLOWS": '["reading_flows"]',
            "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap,
            "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "150",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder / "code"), str(ROOT)]),
        }
        done = command(self.folder, environment, *arguments)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def read(self, stream: str) -> None:
        """Let a stream read what there is."""
        self("streams", "run", stream, "--trigger", "available-now")

    def plan(self, stream: str, *target: str) -> dict[str, Any]:
        """Plan a recovery."""
        return dict(json.loads(self("recover", "plan", stream, *target, "--output", "json")))

    def readings(self) -> list[tuple[int, str | None]]:
        """Rows of table `places`: the reading's number, and what made the row; the partition is the reading's."""
        rows = DeltaTable(self.settings.tables / "places").to_pyarrow_table().to_pylist()
        assert all(PLACES[row["id"] % 3] == row["place"] for row in rows)
        return sorted(((row["id"], row.get("made_by")) for row in rows), key=lambda reading: reading[0])

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """A table's rows, sorted."""
        content = DeltaTable(self.settings.tables / table).to_pyarrow_table()
        return sorted(tuple(row[name] for name in sorted(row)) for row in content.to_pylist())


@pytest.fixture
def home(broker: Broker, tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path, broker.start())
    topics = Topics.of(home.settings.kafka, home.bootstrap)
    topics.create(TOPIC, 1)
    yield home
    topics.delete(TOPIC)


@pytest.mark.long
@pytest.mark.parametrize("stream", ["minutes", "distinct_readings"])
def test_windows_and_deduplication_go_on_from_the_savepoints_state(home: Home, stream: str) -> None:
    home.send(0, 450)  # four batches, then four more; windows and duplicates lie across the border
    home.read(stream)
    savepoint = json.loads(home("savepoints", "create", stream, "--output", "json"))["savepoint"]
    home.send(450, 900)
    home.read(stream)
    never_rewound = home.rows(stream)
    assert len(never_rewound) == 900 if stream == "distinct_readings" else len(never_rewound) > 30
    plan = home.plan(stream, "--savepoint", savepoint)
    assert plan["stateful"] and plan["records"] == 600
    home("recover", "apply", plan["id"], "--yes")
    assert home.rows(stream) == never_rewound


@pytest.mark.long
def test_two_tables_behind_one_state_are_killed_between_their_commits_recovered_and_put_back(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = 'F.col("total") / F.col("n")', '-F.col("total") / F.col("n")'
    home.send(0, 450)
    monkeypatch.setenv("RECOURSE_CRASH", "split_minutes:secondary_committed:2")
    assert "SIGKILL" in home("streams", "run", "split_minutes", "--trigger", "available-now", code=1)
    monkeypatch.delenv("RECOURSE_CRASH")
    home.read("split_minutes")
    assert both_tables(home) == expected(450, wrong_from=450)
    home.deploy(right, wrong)
    home.send(450, 900)
    home.read("split_minutes")
    minutes_of_450 = 450 // 60 - 1  # those that were open when the code changed are wrong too
    assert both_tables(home) == expected(900, wrong_from=minutes_of_450 * 60)
    home.deploy("", "")
    plan = home.plan("split_minutes", "--before-first-broken", "mean >= 0")
    assert plan["stateful"]
    home("recover", "apply", plan["id"], "--yes")
    assert both_tables(home) == expected(900, wrong_from=900)
    home("recover", "undo", plan["id"], "--yes")
    assert both_tables(home) == expected(900, wrong_from=minutes_of_450 * 60)


def both_tables(home: Home) -> tuple[list[tuple[int, str, float]], list[tuple[int, str, float]]]:
    counts, means = (
        [(row["minute"].hour * 60 + row["minute"].minute, row["place"], row[value]) for row in rows.to_pylist()]
        for value, rows in (
            ("n", DeltaTable(home.settings.tables / "minute_counts").to_pyarrow_table()),
            ("mean", DeltaTable(home.settings.tables / "minute_means").to_pyarrow_table()),
        )
    )
    return sorted(counts), sorted(means)


def expected(last: int, *, wrong_from: int) -> tuple[list[tuple[int, str, float]], list[tuple[int, str, float]]]:
    """The windows that the watermark has closed after so many readings; the sign of means is wrong from a second on."""
    windows: dict[tuple[int, str], list[int]] = {}
    for number in twice(0, last):
        windows.setdefault((number // 60, PLACES[number % 3]), []).append(number)
    closed = {key: numbers for key, numbers in windows.items() if (key[0] + 1) * 60 <= last - 1 - 60}
    counts = sorted((minute, place, float(len(numbers))) for (minute, place), numbers in closed.items())
    means = sorted(
        (minute, place, sum(numbers) / len(numbers) * (-1 if minute * 60 >= wrong_from else 1))
        for (minute, place), numbers in closed.items()
        if place != "plain"
    )
    return counts, means


@pytest.mark.long
@pytest.mark.parametrize("stream", ["minutes", "distinct_readings"])
def test_records_that_came_meanwhile_are_no_difference_under_a_watermark(home: Home, stream: str) -> None:
    """The same code replays what it wrote, in other batches; the watermark goes on with what came since."""
    home.send(0, 450)
    home.read(stream)
    savepoint = json.loads(home("savepoints", "create", stream, "--output", "json"))["savepoint"]
    home.send(450, 900)
    home.read(stream)
    published = home.rows(stream)
    plan = home.plan(stream, "--savepoint", savepoint)
    home.send(900, 1300)
    home("recover", "apply", plan["id"], "--yes")
    lines = json.loads(home("recover", "show", plan["id"], "--output", "json"))["journal"]
    done = {line["stage"]: line["found"] for line in lines if line["state"] == "done"}
    difference = next(d for d in done["audit"]["differences"] if d["table"] == stream)
    assert done["replay"]["since"] >= 400 and difference["new_rows"] == difference["old_rows"] == len(published)
    assert (difference["changed"], difference["only_old"], difference["only_new"]) == (0, 0, 0)
    assert len(home.rows(stream)) > len(published), "and it is rebuilt to the topic's end"


def test_a_partitioned_table_is_rebuilt_over_a_compaction_with_a_new_column(home: Home) -> None:
    line = 'select("place", "id", "at")\n'
    home.send(0, 450)
    home.read("places")
    home.deploy(line, 'select("place", (-F.col("id")).alias("id"), "at")\n')
    home.send(450, 900)
    home.read("places")
    sink = open_sink(home.settings, Declared("places", partition_by=["place"]), "places")
    assert sink is not None
    files = len(sink.handle.file_uris())
    TableMaintenance(sink, home.settings.table, 1).compact()
    assert len(sink.handle.file_uris()) < files, "compacted between the savepoint and now"
    home.deploy(line, 'select("place", "id", "at", F.lit("fixed").alias("made_by"))\n')
    plan = home.plan("places", "--before-first-broken", "id >= 0")
    assert plan["checks"]["rules"] == ["id >= 0"] and plan["base"]["savepoint"] and plan["records"] == 600
    home("recover", "apply", plan["id"], "--yes")
    assert home.readings() == [*((n, None) for n in twice(0, 450)), *((n, "fixed") for n in twice(450, 900))]


@pytest.mark.long
def test_records_that_nobody_wants_are_skipped_and_an_undo_reads_them(home: Home) -> None:
    home.send(0, 900)
    home.read("places")
    home.send(900, 1000)
    assert "is at" in home("recover", "plan", "places", "--to-offsets", "0:1200", code=2)
    home("recover", "plan", "places", "--to-latest", "--detailed-exitcode", code=10)
    skip = home.plan("places", "--to-latest")
    home("recover", "apply", skip["id"], "--yes")
    home.send(1000, 1100)
    home.read("places")
    expected = [*twice(0, 900), *twice(1000, 1100)]
    assert [number for number, _ in home.readings()] == expected
    home("recover", "undo", skip["id"], "--yes")
    assert [number for number, _ in home.readings()] == twice(0, 1100)


def twice(first: int, last: int) -> list[int]:
    """Numbers of readings as they are in the topic: each third one comes twice."""
    return [n for n in range(first, last) for _ in range(2 if n % 3 == 0 else 1)]


@pytest.mark.long
def test_a_changed_aggregation_begins_with_empty_state_on_the_savepoints_rows(home: Home) -> None:
    home.send(0, 450)
    home.read("minutes")
    savepoint = json.loads(home("savepoints", "create", "minutes", "--output", "json"))["savepoint"]
    before = home.rows("minutes")
    home.send(450, 900)
    home.read("minutes")
    never_rewound = home.rows("minutes")
    home.deploy('F.sum("id").alias("total"))', 'F.sum(2 * F.col("id")).alias("total"))')
    with_state = home.plan("minutes", "--savepoint", savepoint)
    assert "another aggregation" in home("recover", "apply", with_state["id"], "--yes", code=1)
    home("recover", "abort", with_state["id"])
    assert home.rows("minutes") == never_rewound
    plan = home.plan("minutes", "--savepoint", savepoint, "--discard-state")
    assert plan["discards_state"]
    home("recover", "apply", plan["id"], "--yes")
    rows = home.rows("minutes")
    assert [row for row in rows if row in before] == before, "what the savepoint had is as it was"
    whole = {(minute, place): total for minute, _, place, total in never_rewound}
    doubled = [row for row in rows if row not in before]
    short = [row for row in doubled if row[3] != 2 * whole[row[0], row[2]]]
    assert len(doubled) > 15 and len({row[0] for row in short}) <= 2, "but for windows that were open, all is right"
    home.send(900, 1000)
    home.read("minutes")
    again = home.plan("minutes", "--to-batch", "-1")
    assert again["base"]["ends"] == {TOPIC: {"0": 0}}
    home("recover", "apply", again["id"], "--yes")
    assert {row[3] for row in home.rows("minutes")} >= {2 * total for total in whole.values()}


@pytest.mark.long
def test_an_undo_keeps_what_came_after_the_publish(home: Home) -> None:
    line = 'select("place", "id", "at")\n'
    home.send(0, 300)
    home.read("places")
    home.deploy(line, 'select("place", (-F.col("id")).alias("id"), "at")\n')
    home.send(300, 600)
    home.read("places")
    home.deploy("", "")
    plan = home.plan("places", "--before-first-broken", "id >= 0")
    home("recover", "apply", plan["id"], "--yes")
    assert [number for number, _ in home.readings()] == twice(0, 600)
    home.send(600, 700)
    home.read("places")
    home("recover", "undo", plan["id"], "--yes")
    wrong = sorted([*twice(0, 300), *(-n for n in twice(300, 600)), *twice(600, 700)])
    assert [row[1] for row in sorted(home.rows("places"), key=lambda row: row[1])] == wrong
    assert "was undone by" in home("recover", "undo", plan["id"], "--yes", code=2)
    again = home.plan("places", "--before-first-broken", "id >= 0")
    home("recover", "apply", again["id"], "--yes")
    assert [number for number, _ in home.readings()] == twice(0, 700)
