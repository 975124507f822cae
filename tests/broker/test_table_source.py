"""A stream that reads the table of another one: every row once, through kills, upkeep, recoveries and retention."""

from __future__ import annotations

from collections import Counter

from streaming_jobs.topology import Topology
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, assert_chained, ledger, produce, rows
from tests.support.things import thing

FLOWS = ["tests.support.two_steps"]


def made(bench: BenchFactory, **flags: object) -> Bench:
    """A bench with a topic `things` of its own."""
    here = bench({"flows": FLOWS, **flags})
    if here.topics.describe("things"):
        here.topics.delete("things")
    here.topics.create("things", 2)
    return here


def numbers(here: Bench, table: str) -> Counter[int]:
    return Counter(row["n"] for row in rows(here.settings, table))


def test_rows_pass_through_a_table_into_a_second_stream_each_once(bench: BenchFactory) -> None:
    here = made(bench)
    streams = Topology.load(FLOWS)
    produce(here.bootstrap, "things", map(thing, range(300)))
    here.run(streams["clean"])
    running = here.run(streams["copied"])
    assert numbers(here, "copied") == Counter(range(300))
    assert running.status.batch_records == 300
    produce(here.bootstrap, "things", map(thing, range(300, 500)))
    here.run(streams["clean"])
    produce(here.bootstrap, "things", map(thing, range(500, 600)))
    here.run(streams["clean"])
    for name in ("copied", "clean_windows", "sums"):
        assert here.run(streams[name]).status.state == "stopped"
    assert numbers(here, "copied") == Counter(range(600))
    assert_chained(ledger(here.settings, "copied"))
    assert [entry.records for entry in ledger(here.settings, "copied")] == [300, 300]
    assert sum(row["c"] for row in rows(here.settings, "sums")) == 600
    assert {row["k"]: row["s"] for row in rows(here.settings, "sums")} == {
        key: sum(row["n"] for row in rows(here.settings, "clean") if row["k"] == key)
        for key in {row["k"] for row in rows(here.settings, "clean")}
    }
