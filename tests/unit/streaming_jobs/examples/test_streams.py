"""Declaring the shipped streams is cheap: the command line lists them without pandas, Kafka or a JVM."""

from __future__ import annotations

import json
import subprocess
import sys

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.examples.flights.streams import FLIGHT, FLIGHTS_BY_SCHEDULE


def test_flows_import_nothing_heavy() -> None:
    program = """
        import json, sys
        from streaming_jobs.catalog.topology import Topology
        Topology.load(["streaming_jobs.examples.flights.streams"])
        print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
    """
    lines = "\n".join(line.strip() for line in program.strip().splitlines())
    done = subprocess.run([sys.executable, "-c", lines], check=True, capture_output=True, text=True)
    assert not {"pandas", "numpy", "pyarrow", "confluent_kafka", "deltalake"} & set(json.loads(done.stdout))


def test_the_shipped_streams_hang_together_and_only_that_with_windows_has_a_watermark() -> None:
    topology = Topology.load(["streaming_jobs.examples.flights.streams"])
    assert topology.readers("flights") == ["airport_hours", "carrier_totals", "flights_clean"]
    assert {stream.primary.mode for stream in topology.streams.values()} == {"append", "upsert"}
    assert topology["flights_clean"].primary.partition_by == ("month",)
    assert topology["carrier_totals"].primary.keys == ("carrier",)
    streams = Topology.load(["streaming_jobs.examples.flights.streams"]).streams
    with_watermark = [name for name, stream in streams.items() for topic in stream.sources.values() if topic.event_time]
    assert with_watermark == ["airport_hours"]


def test_what_a_flight_must_have_is_required() -> None:
    assert FLIGHTS_BY_SCHEDULE.event_time is not None
    assert not FLIGHT[FLIGHTS_BY_SCHEDULE.event_time].nullable
    assert {f.name for f in FLIGHT if f.nullable} == {"actual_dep", "dep_delay", "arr_delay", "tailnum", "air_time"}
