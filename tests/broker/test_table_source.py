"""A stream that reads the table of another one: every row once, through kills, upkeep, recoveries and retention."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from deltalake import DeltaTable

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import OffsetsLost
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import open_sink
from streaming_jobs.state.status import read_status
from streaming_jobs.table_sources.versions import TableVersions
from tests.broker.conftest import BenchFactory
from tests.support import ROOT, two_steps
from tests.support.driver import Bench, assert_chained, command, driver, finished, ledger, produce, rows
from tests.support.things import KEYS, expected_totals, thing
from tests.support.waiting import wait_for

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


KILLS = (
    "copied:primary_committed:3",
    "clean_windows:staged:3",
)
MORE_KILLS = (
    "copied:batch_started:1",
    "copied:staged:2",
    "copied:batch_committed:4",
    "clean_windows:primary_committed:5",
    "sums:primary_committed:2",
)


@pytest.mark.long
@pytest.mark.parametrize("kills", [KILLS, MORE_KILLS])
def test_a_reader_killed_at_any_point_of_a_batch_loses_nothing_and_doubles_nothing(
    bench: BenchFactory, kills: tuple[str, ...]
) -> None:
    here = made(bench, **{"stream.max_offsets_per_trigger": 300, "streams.copied.path": "executor"})
    streams = Topology.load(FLOWS)
    readers = ("copied", "clean_windows", "sums")
    produce(here.bootstrap, "things", map(thing, range(300)))
    for name in ("clean", *readers):
        here.run(streams[name])
    produce(here.bootstrap, "things", map(thing, range(300, 3600)))
    here.run(streams["clean"])
    arguments = ("--trigger", "available-now", "--set", "stream.max_offsets_per_trigger=300")
    arguments += ("--set", "streams.copied.path=executor", "--streams")

    def run(names: str, environment: Mapping[str, str]) -> tuple[int, str]:
        return finished(
            driver(here.settings, here.bootstrap, *arguments, names, flows=FLOWS[0], environment=environment)
        )

    for kill in kills:
        code, output = run(kill.partition(":")[0], {"RECOURSE_CRASH": kill})
        assert code == -signal.SIGKILL, f"{kill}: {output[-3000:]}"
    code, output = run(",".join(readers), {})
    assert code == 0, output[-3000:]
    assert numbers(here, "copied") == Counter(range(3600))
    assert {(row["k"]): (row["c"], row["s"]) for row in rows(here.settings, "sums")} == expected_totals(range(3600))
    windows = rows(here.settings, "clean_windows")
    assert len({(row["start"], row["k"]) for row in windows}) == len(windows) == 2 * len(KEYS)
    assert sum(row["c"] for row in windows) == 2000, "two windows of ten seconds are over"
    for table in ("copied", "sums"):
        assert_chained(entries := ledger(here.settings, table))
        assert sum(entry.records for entry in entries) == 3600 and len(entries) > 5


LEFT = ("--leave", "copied")


@pytest.mark.long
def test_a_recovery_of_the_table_changes_nothing_for_a_reader_that_is_left_but_new_records(
    bench: BenchFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = made(bench)
    streams = Topology.load(FLOWS)

    def run(stream: str) -> None:
        here.run(streams[stream])

    def recourse(*arguments: str) -> dict[str, Any]:
        environment = {
            **os.environ,
            "RECOURSE_HOME": str(here.settings.home),
            "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": here.bootstrap,
            "RECOURSE_FLOWS": json.dumps(FLOWS),
            "PYTHONPATH": str(ROOT),
        }
        done = command(here.settings.home, environment, *arguments)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return dict(json.loads(done.stdout)) if "json" in arguments else {}

    def more(first: int, end: int) -> None:
        produce(here.bootstrap, "things", map(thing, range(first, end)))

    monkeypatch.setattr(two_steps, "MARK", 1000)
    more(0, 300)
    run("clean")
    run("copied")
    more(300, 400)
    run("clean")
    monkeypatch.undo()
    more(400, 450)
    plan = recourse("recover", "plan", "clean", "--to-batch", "-1", *LEFT, "--output", "json")["id"]
    recourse("recover", "apply", plan, "--yes")
    assert numbers(here, "clean") == Counter(range(450))
    more(450, 500)
    run("clean")
    compact(here.settings, "clean")
    run("copied")
    right = Counter([*range(1000, 1400), *range(400, 500)])
    assert numbers(here, "copied") == right, "what it had read stays, and nothing is missing or doubled"
    more(500, 520)
    recourse("recover", "undo", plan, "--yes")
    assert numbers(here, "clean") == Counter([*range(1000, 1400), *range(400, 520)])
    run("copied")
    right.update(range(500, 520))
    assert numbers(here, "copied") == right
    again = recourse("recover", "plan", "clean", "--to-batch", "-1", *LEFT, "--output", "json")["id"]
    recourse("recover", "apply", again, "--yes")
    more(520, 540)
    run("clean")
    run("copied")
    right.update(range(520, 540))
    assert numbers(here, "copied") == right and numbers(here, "clean") == Counter(range(540))
    itself = recourse("recover", "plan", "copied", "--to-batch", "-1", "--output", "json")["id"]
    recourse("recover", "apply", itself, "--yes")
    assert numbers(here, "copied") == Counter(range(540)), "a reader that is rebuilt has the corrected rows"
    more(540, 550)
    run("clean")
    run("copied")
    assert numbers(here, "copied") == Counter(range(550))


def compact(settings: Settings, table: str) -> None:
    """Compaction, as the driver of the stream does it."""
    declared = Topology.load(FLOWS)[table].primary
    sink = open_sink(settings, declared, table)
    assert sink is not None
    assert TableMaintenance(sink, settings.table, 2).compact() > 1


def test_a_reader_that_starts_first_waits_for_its_table_and_then_follows_it_live(bench: BenchFactory) -> None:
    here = made(bench)
    live = driver(here.settings, here.bootstrap, "--streams", "copied,clean", flows=FLOWS[0])
    try:
        waiting = wait_for(
            lambda: (s := read_status(here.settings, "copied")) and s.error and s.error["code"] == "REC-015" and s,
            "the wait for the table",
        )
        assert waiting.state == "failing" and "table clean" in waiting.error["found"]
        produce(here.bootstrap, "things", map(thing, range(200)))
        wait_for(lambda: _count(here, "copied") == 200, "the first rows")
        for first in range(200, 400, 50):
            produce(here.bootstrap, "things", map(thing, range(first, first + 50)))
            wait_for(lambda first=first: _count(here, "copied") == first + 50, "the next rows")
        wait_for(
            lambda: (s := read_status(here.settings, "copied")) and s.lag_records == 0 and s.error is None, "no lag"
        )
        assert numbers(here, "copied") == Counter(range(400))
    finally:
        live.terminate()
        code, output = finished(live)
    assert code == 0, output[-3000:]


def test_a_reader_behind_what_is_left_is_refused_with_the_range_and_can_be_rebuilt(bench: BenchFactory) -> None:
    here = made(bench)
    streams = Topology.load(FLOWS)
    for first in range(0, 60, 10):
        produce(here.bootstrap, "things", map(thing, range(first, first + 10)))
        here.run(streams["clean"])
        if not first:
            here.run(streams["copied"])
    position = TableVersions(here.settings.tables / "clean").newest()
    assert position is not None
    DeltaTable(here.settings.tables / "clean").create_checkpoint()
    for version in range(position):
        (here.settings.tables / "clean" / "_delta_log" / f"{version:020d}.json").unlink(missing_ok=True)
    with pytest.raises(
        OffsetsLost, match=rf"versions \d+ to {position - 1} of table clean can no longer be read"
    ) as lost:
        here.run(streams["copied"])
    assert "recourse recover plan copied --to-batch -1" in lost.value.next_step
    environment = {
        **os.environ,
        "RECOURSE_HOME": str(here.settings.home),
        "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": here.bootstrap,
        "RECOURSE_FLOWS": json.dumps(FLOWS),
        "PYTHONPATH": str(ROOT),
    }
    for arguments in (("plan", "copied", "--to-batch", "-1"), ("apply", "copied-0001", "--yes")):
        done = command(here.settings.home, environment, "recover", *arguments)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert numbers(here, "copied") == Counter(range(60))


def _count(here: Bench, table: str) -> int:
    """The rows of a table; 0 if it does not exist yet."""
    return sum(numbers(here, table).values()) if (here.settings.tables / table / "_delta_log").is_dir() else 0
