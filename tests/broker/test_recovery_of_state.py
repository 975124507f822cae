"""Streams with state are rewound from a savepoint, and end with the very rows of a run that was never rewound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.driver import REPOSITORY

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

@stream(source=READINGS, sink=DeltaTable("distinct_readings"))
def distinct_readings(readings):
    return readings.dropDuplicatesWithinWatermark(["id"]).select("place", "id", "at")
"""
PLACES = ("plain", "two words", "a/b:50%")


class Home:
    """A project with two streams that keep state, read in small batches."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self.folder, self.bootstrap = folder, bootstrap
        (folder / "code").mkdir()
        (folder / "code" / "reading_flows.py").write_text(FLOWS)
        self.settings = Settings.load({"home": folder})

    def send(self, first: int, last: int) -> None:
        """Readings in the order of their times, one a second; each third one comes twice."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True})
        for number in range(first, last):
            at = f"2026-03-02T{number // 3600:02d}:{number // 60 % 60:02d}:{number % 60:02d}Z"
            value = json.dumps({"place": PLACES[number % 3], "id": number, "at": at})
            for _ in range(2 if number % 3 == 0 else 1):
                producer.produce(TOPIC, value=value, partition=0)
        assert producer.flush(30) == 0

    def __call__(self, *arguments: str) -> str:
        """Run a command; what it printed."""
        environment = {
            **os.environ,
            "RECOURSE_HOME": str(self.folder),
            "RECOURSE_FLOWS": '["reading_flows"]',
            "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap,
            "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "150",
            "PYTHONPATH": os.pathsep.join([str(self.folder / "code"), str(REPOSITORY)]),
        }
        done = subprocess.run(
            [sys.executable, "-m", "orchestration.cli", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """A table's rows, sorted."""
        found = DeltaTable(self.settings.tables / table).to_pyarrow_table()
        return sorted(tuple(row[name] for name in sorted(row)) for row in found.to_pylist())


@pytest.fixture
def home(broker: Broker, tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path, broker.start())
    topics = Topics.of(home.settings.kafka, home.bootstrap)
    topics.create(TOPIC, 1)
    yield home
    topics.delete(TOPIC)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", ["minutes", pytest.param("distinct_readings", marks=pytest.mark.long)])
def test_windows_and_deduplication_go_on_from_the_savepoints_state(home: Home, stream: str) -> None:
    home.send(0, 450)  # four batches, then four more; windows and duplicates lie across the border
    home("streams", "run", stream, "--trigger", "available-now")
    savepoint = json.loads(home("savepoints", "create", stream, "--output", "json"))["savepoint"]
    home.send(450, 900)
    home("streams", "run", stream, "--trigger", "available-now")
    never_rewound = home.rows(stream)
    assert len(never_rewound) == 900 if stream == "distinct_readings" else len(never_rewound) > 30
    plan = json.loads(home("recover", "plan", stream, "--savepoint", savepoint, "--output", "json"))
    assert plan["stateful"] and plan["records"] == 600
    home("recover", "apply", plan["id"], "--yes")
    assert home.rows(stream) == never_rewound
