"""Real jobs of PySpark alone, killed, reset, restored and then inspected; one of them is taken over by a stream."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable as Table

from streaming_jobs.errors import UsageError
from streaming_jobs.inspection.adoption import AdoptionPlan, adopt, plan_adoption, plan_undo, undo
from streaming_jobs.inspection.carried_state import StateTrial
from streaming_jobs.inspection.counted_offsets import OffsetColumns
from streaming_jobs.inspection.inspection import Inspection, beside_topics, inspect
from streaming_jobs.platform.jars import ensure, locked
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.support import ROOT
from tests.support.driver import Bench, assert_chained, ledger, rows
from tests.support.spark_cluster import java_for_spark
from tests.support.taken_flows import TOPIC, WITH_STATE, fewer, firsts, others, taken, totals
from tests.unit.streaming_jobs.inspection.test_inspection import state_of

COLUMNS = OffsetColumns("partition", "offset")
ROCKS_DB = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
    "RocksDBStateStoreProvider"
}


class PlainJobs:
    """Runs `tests/support/plain_job.py` as its own process, with checkpoints and tables below a folder."""

    def __init__(self, made: Bench, folder: Path) -> None:
        self.made, self.folder = made, folder
        jars = ensure(made.settings, [*locked("spark"), *locked("peers")])
        self.jars = [str(path) for path in jars]
        self.environment = {**os.environ, "JAVA_HOME": str(java_for_spark(made.settings, folder / "java"))}
        self.environment["PYSPARK_PYTHON"] = sys.executable

    def run(self, *jobs: dict[str, Any]) -> int:
        """Run jobs in one session; returns the exit code."""
        names = {"bootstrap": self.made.bootstrap, "jars": self.jars}
        whole = [{**names, **job, **{k: str(job[k]) for k in ("checkpoint", "table") if k in job}} for job in jobs]
        script = [sys.executable, str(ROOT / "tests/support/plain_job.py"), json.dumps(whole)]
        done = subprocess.run(
            script, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode in (0, -9), done.stderr[-4000:]
        return done.returncode

    def send(self, topic: str, ids: range) -> None:
        producer = Producer({"bootstrap.servers": self.made.bootstrap})
        for number in ids:
            producer.produce(topic, value=b"%d" % number, partition=number % 2)
        assert producer.flush(30) == 0


def offsets(found: Inspection, kind: str) -> set[tuple[int, int]]:
    """The places of the findings of a kind."""
    spans = [span for each in found.findings if each.kind == kind for span in each.spans]
    return {(span.partition, offset) for span in spans for offset in range(span.start, span.end)}


def places(table: Path) -> Counter[tuple[int, int]]:
    data = Table(str(table)).to_pyarrow_table().to_pylist()
    return Counter((row["partition"], row["offset"]) for row in data)


@pytest.mark.long  # generated histories are its short form: tests/unit/streaming_jobs/inspection
def test_what_real_jobs_have_lost_and_doubled_is_found_offset_by_offset(bench: BenchFactory, tmp_path: Path) -> None:
    made = bench()
    jobs = PlainJobs(made, tmp_path)
    kinds = {"append": "sums", "append-once": "once", "merge": "merged", "sink": "sunk"}
    for topic in kinds.values():
        made.topics.create(topic, 2)
        jobs.send(topic, range(12))
    job = {
        kind: {"kind": kind, "topic": topic, "checkpoint": tmp_path / f"c_{topic}", "table": tmp_path / topic}
        for kind, topic in kinds.items()
    }

    def look(kind: str, *further: Path) -> Inspection:
        checkpoints = [job[kind]["checkpoint"], *further]
        found = inspect(checkpoints, [job[kind]["table"]])
        assert {m for m in ("missing", "doubled") if offsets(found, m)} <= {
            f.kind for f in inspect(checkpoints, [job[kind]["table"]], COLUMNS).findings
        }, "the rows agree"
        return found

    assert jobs.run(*({**job[kind], "kill_after": 1} for kind in ("append", "append-once", "merge"))) == -9
    assert [f.reason for f in look("append").findings if f.alarming] == ["will_repeat"]
    assert not look("append-once").alarming and not look("merge").alarming
    assert jobs.run(*job.values()) == 0
    doubled = {place for place, times in places(tmp_path / "sums").items() if times > 1}
    assert offsets(look("append"), "doubled") == doubled and len(doubled) == 4
    for kind in ("append-once", "sink", "merge"):
        assert set(places(job[kind]["table"]).values()) == {1} and not look(kind).alarming, look(kind).findings
    assert "repeated" in {f.kind for f in look("merge").findings}
    assert {w.how for w in look("sink").tables[0].attribution.writes} == {"epoch"}
    assert {w.how for w in look("append-once").tables[0].attribution.writes} == {"transaction"}

    for topic in ("sunk", "sums"):
        jobs.send(topic, range(12, 18))
    table, second = job["sink"]["table"], tmp_path / "c_sums_second"
    statements = [
        f"OPTIMIZE delta.`{table}`",
        f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 1",
    ]
    again = {**job["append"], "checkpoint": second, "starting": "latest"}
    later = {"kind": "send", "topic": "sums", "ids": [18, 22]}
    assert jobs.run({"kind": "sql", "sql": statements}, job["sink"], again, later, again) == 0
    every = {(number % 2, number // 2) for number in range(18)}
    lost = every - set(places(table))
    assert offsets(look("sink"), "missing") == lost and lost
    reset = look("append", second)
    assert offsets(reset, "missing") == {(number % 2, number // 2) for number in range(12, 18)}
    assert offsets(reset, "doubled") == doubled

    made.topics.delete("sums")
    gone = beside_topics(reset, {"sums": None})
    assert {f.reason for f in gone.findings if f.kind == "unknown"} == {"topic_gone"}


def test_a_stream_goes_on_where_a_real_job_has_stopped_without_losing_or_doubling_a_record(
    bench: BenchFactory, tmp_path: Path
) -> None:
    made = bench()
    jobs = PlainJobs(made, tmp_path)
    made.topics.create(TOPIC, 2)
    jobs.send(TOPIC, range(21))
    assert isinstance(made.settings.tables, Path)
    table, checkpoint = made.settings.tables / "taken", tmp_path / "checkpoint"
    assert jobs.run({"kind": "sink", "topic": TOPIC, "checkpoint": checkpoint, "table": table}) == 0
    jobs.send(TOPIC, range(21, 40))
    shown = made.recourse("tests.support.taken_flows", "adopt", "taken", "--checkpoint", str(checkpoint), "--yes")
    assert f"begins at {TOPIC} 0:11 1:10" in shown
    made.run(taken)
    jobs.send(TOPIC, range(40, 50))
    made.run(taken)
    assert sorted(int(row["id"]) for row in rows(made.settings, "taken")) == list(range(50))
    batches = ledger(made.settings, "taken")
    assert_chained(batches)
    assert batches[0].batch == 0 and dict(batches[0].offsets[0].start) == {0: 11, 1: 10}
    assert not inspect([checkpoint, made.settings.state / "taken" / "g0001"], [table], COLUMNS).alarming
    made.recourse("tests.support.taken_flows", "verify", "taken")


@pytest.mark.long
def test_a_stream_goes_on_with_the_state_of_a_real_job_if_it_computes_the_same(
    bench: BenchFactory, tmp_path: Path
) -> None:
    made = bench()
    jobs, flows, tables = PlainJobs(made, tmp_path), "tests.support.taken_flows", made.settings.tables
    made.topics.create(WITH_STATE, 2)
    jobs.send(WITH_STATE, range(17))
    assert isinstance(tables, Path)
    common = {"topic": WITH_STATE, "per_batch": 6}
    grouped = {**common, "kind": "merge", "shape": "totals", "key": "bucket", "table": tables / "totals"}
    distinct = {**common, "kind": "sink", "shape": "distinct", "table": tables / "firsts", "conf": ROCKS_DB}
    for job in (grouped, distinct):
        job["checkpoint"] = tmp_path / f"c_{job['shape']}"
    assert jobs.run(grouped, distinct) == 0
    before = state_of(tmp_path / "c_totals")

    def plan(declared: Stream, job: dict[str, Any] = grouped) -> AdoptionPlan:
        trial = StateTrial(made.settings, declared, made.topics, made.connection, lambda: made.spark)
        return plan_adoption(made.settings, declared, job["checkpoint"], made.topics, trial)

    for declared, why in (
        (others, "3 keys had another value or another place after batch 2"),
        (fewer, r"\[STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE\]"),
    ):
        shutil.copytree(tables / "totals", tables / declared.name)
        with pytest.raises(UsageError, match=f"does not fit stream {declared.name}: {why}"):
            plan(declared)
    fits = plan(totals)
    assert fits.state is not None
    assert (fits.state.batch, fits.state.keys) == (2, 3) and "Aggregate" in str(fits.state.fingerprint)
    adopt(made.settings, totals, fits)
    undo(made.settings, totals, plan_undo(made.settings, totals))

    jobs.send(WITH_STATE, range(17, 30))
    shown = made.recourse(flows, "adopt", "totals", "--checkpoint", str(grouped["checkpoint"]), "--yes")
    assert "its state fits: batch 2, computed again by the stream, left the same 3 keys" in shown
    assert "g0001: the job's checkpoint after batch 2, with a copy of its state" in shown
    adopt(made.settings, firsts, plan(firsts, distinct))
    assert state_of(tmp_path / "c_totals") == before, "it is only read"
    for number in (30, 44):
        made.run(totals)
        made.run(firsts)
        truth = [(b, len(range(b, number, 3)), sum(range(b, number, 3))) for b in range(3)]
        now = [tuple(row[name] for name in ("bucket", "records", "total")) for row in rows(made.settings, "totals")]
        assert sorted(now) == truth
        assert sorted(row["id"] for row in rows(made.settings, "firsts")) == list(range(7))
        if number == 30:
            jobs.send(WITH_STATE, range(30, 44))
    batches = ledger(made.settings, "totals")
    assert_chained(batches)
    assert batches[0].batch == 3 and dict(batches[0].offsets[0].start) == {0: 9, 1: 8}
    both = [tmp_path / "c_totals", made.settings.state / "totals" / "g0001"]
    assert not inspect(both, [tables / "totals"]).alarming
    made.recourse(flows, "verify", "totals", "firsts")
    with pytest.raises(UsageError, match="has committed since its adoption"):
        plan_undo(made.settings, totals)
