"""Many batches leave few files: logs, removed files and checkpoints stay within their bounds, and a restart still finds
its place. Large batches leave no Python processes, threads and descriptors behind. The benchmarks `steadiness`, `soak`
and `growth` are the long forms."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from benchmarks.place import place
from benchmarks.run import bad
from benchmarks.scenarios import growth
from streaming_jobs.sinks.delta import maintenance
from streaming_jobs.sinks.delta.log import newest, walk
from streaming_jobs.state.stream_folder import StreamFolder
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, on_topic, produce, rows
from tests.support.things import expected_totals, plain, thing, totals

BATCHES, RECORDS = 110, 6
LOOK = 50
MINUTES = 1.0
TIGHT = {
    "stream.max_offsets_per_trigger": RECORDS,
    "stream.min_commit_interval": "1 ms",
    "table.log_versions": 10,
    "table.checkpoint_interval": 5,
    "table.compact_after_files": 10,
    "table.deleted_file_retention": "0 s",
}


@pytest.fixture
def tight(bench: BenchFactory, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Bounds that are reached within a hundred batches."""
    monkeypatch.setattr(maintenance, "_SWEEP_EVERY", 0.0)
    monkeypatch.setattr(maintenance, "_SWEEP_SHARE", 1.0)
    return bench(TIGHT)


def versions(bench: Bench, table: str) -> int:
    return len(list((bench.settings.tables / table / "_delta_log").glob("*.json")))


def data_files(bench: Bench, table: str) -> tuple[set[Path], set[Path]]:
    """The data files in the table's folder, and those that the table lists."""
    folder = bench.settings.tables / table
    there = set(folder.rglob("*.parquet")) - set((folder / "_delta_log").iterdir())
    return there, {Path(uri) for uri in DeltaTable(folder).file_uris()}


@pytest.mark.long
def test_an_append_stream_stays_small_and_goes_on_from_a_short_log(tight: Bench, topic: str) -> None:
    tight.topics.create(topic, 1)
    produce(tight.bootstrap, topic, [(b"k", b"no JSON"), *map(thing, range(BATCHES * RECORDS - 1))])
    tight.run(on_topic(plain, topic))
    assert versions(tight, "plain") <= 10 + 5 + LOOK
    there, listed = data_files(tight, "plain")
    assert listed <= there and len(there) <= (LOOK + 10) * 6 < BATCHES * 5
    checkpoint = StreamFolder.of(tight.settings, "plain").checkpoint(1)
    assert len(list((checkpoint.folder / "offsets").glob("[0-9]*"))) <= 102

    letters = tight.settings.tables / "plain_dead_letters"
    assert newest(letters, "plain")[0] is not None, "its only batch is a hundred batches old"
    produce(tight.bootstrap, topic, map(thing, range(BATCHES * RECORDS - 1, BATCHES * RECORDS + 50)))
    tight.run(on_topic(plain, topic))
    assert sorted(row["n"] for row in rows(tight.settings, "plain")) == list(range(BATCHES * RECORDS + 50))


@pytest.mark.long
def test_an_upsert_stream_leaves_no_trail_of_files(tight: Bench, topic: str) -> None:
    tight.topics.create(topic, 1)
    produce(tight.bootstrap, topic, map(thing, range(BATCHES * RECORDS)))
    tight.run(on_topic(totals, topic))
    assert versions(tight, "totals") <= 10 + 5 + LOOK
    there, listed = data_files(tight, "totals")
    assert listed <= there and len(there) <= LOOK + 10
    assert next(c.entry.kind for c in walk(tight.settings.tables / "totals") if c.entry) == "batch"
    by_key = {row["k"]: (row["c"], row["s"]) for row in rows(tight.settings, "totals")}
    assert by_key == expected_totals(range(BATCHES * RECORDS))


@pytest.mark.long
def test_a_session_grows_no_python_processes_threads_or_descriptors() -> None:
    with place() as here:
        verdicts = growth.verdicts(growth.watch(here, MINUTES, 500, ["flights_clean"]))
    judged = {row["what"] for row in verdicts}
    assert {"processes, workers", "threads, workers", "descriptors, planners", "workers at the same time"} <= judged
    # How far behind the stream is says how busy the machine is; the benchmark looks at that, on a quiet one.
    streams = [row for row in verdicts if row["what"].startswith("stream ")]
    assert all(row["last part"].startswith("running") and row["last part"].endswith(" 0 restarts") for row in streams)
    assert [row for row in bad(verdicts) if row not in streams] == [], verdicts
