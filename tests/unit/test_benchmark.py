"""What the benchmark computes without running anybody: input, truth, comparison, latencies, goals."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.speed.contestants import variant
from benchmarks.speed.environment import python_of
from benchmarks.speed.goals import verdicts
from benchmarks.speed.latency import latencies
from benchmarks.speed.measure import _steady
from benchmarks.speed.peers import flink_sql
from benchmarks.speed.process import ContestantFailed
from benchmarks.speed.progress import MarkedBatches, OffsetsBeforeRows, OffsetsWithRows
from benchmarks.speed.records import COLUMNS, LATENESS_MS, WINDOW_MS, WORKS, Work, difference, generate, truth
from benchmarks.speed.report import markdown
from benchmarks.speed.topic import check_keys
from benchmarks.speed.watch import SEEN, Point
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange

RECORDS = generate(3_000, seed=7)


def test_the_same_seed_makes_the_same_bytes_and_another_one_does_not() -> None:
    assert generate(100, 1).encoded() == generate(100, 1).encoded()
    assert generate(100, 1).encoded() != generate(100, 2).encoded()


def test_a_record_is_json_of_the_promised_size_and_at_most_two_seconds_out_of_order() -> None:
    values = RECORDS.encoded()[:-2]
    assert 115 <= np.mean([len(value) for value in values]) <= 130
    reached = np.maximum.accumulate(RECORDS.at_ms)
    assert 1_500 < (reached - RECORDS.at_ms).max() <= 2_000
    first = json.loads(values[0])
    assert (first["id"], first["amount"]) == (0, int(RECORDS.amount[0]))


def test_the_truth_is_what_a_plain_loop_over_the_records_makes() -> None:
    values = [json.loads(value) for value in RECORDS.encoded()]
    kept = [v for v in values if v["kind"] != "test"]
    assert truth(RECORDS, "stateless")["net"].to_pylist() == [v["amount"] - v["amount"] // 100 for v in kept]
    assert 0.05 < 1 - len(kept) / len(values) < 0.15
    totals: dict[str, int] = defaultdict(int)
    windows: dict[tuple[str, str], int] = defaultdict(int)
    for value in values:
        totals[value["account"]] += value["amount"]
        windows[value["at"][:18], value["account"]] += value["amount"]
    running = truth(RECORDS, "running")
    assert dict(zip(running["account"].to_pylist(), running["total"].to_pylist(), strict=True)) == totals
    windowed = truth(RECORDS, "windowed")
    starts = [start.isoformat()[:18] for start in windowed["start"].to_pylist()]
    found = dict(
        zip(zip(starts, windowed["account"].to_pylist(), strict=True), windowed["total"].to_pylist(), strict=True)
    )
    open_ones = {key: total for key, total in windows.items() if key not in found}
    assert {account for _, account in open_ones} == {"a001000", "a001001"}
    assert found == {key: total for key, total in windows.items() if key not in open_ones}


@pytest.mark.parametrize("work", WORKS)
def test_a_row_too_few_twice_or_wrong_is_seen(work: Work) -> None:
    right = truth(RECORDS, work)
    mixed = right.take(np.random.default_rng(1).permutation(right.num_rows))
    assert difference(mixed, right, work) is None
    assert "instead of" in (difference(right.slice(1), right, work) or "")
    assert "1 with a key that is there already" in (difference(pa.concat_tables([right, right[:1]]), right, work) or "")
    place = right.column_names.index("net" if work == "stateless" else "total")
    one_more = pa.chunked_array([pa.array([right.column(place)[0].as_py() + 1]), *right.column(place)[1:].chunks])
    assert difference(right.set_column(place, right.column_names[place], one_more), right, work) is not None


def test_a_stateless_record_is_readable_with_its_row() -> None:
    kept = np.flatnonzero(~RECORDS.dropped)
    seen = (RECORDS.sent_ms[kept] + 40) / 1000
    arrivals = pa.table({"id": kept, SEEN: seen})
    assert _ms(latencies(RECORDS, arrivals, "stateless", since_ms=0, until_ms=np.inf)) == {40}
    again = pa.concat_tables([arrivals, pa.table({"id": kept, SEEN: seen + 9})])
    assert _ms(latencies(RECORDS, again, "stateless", since_ms=0, until_ms=np.inf)) == {40}
    with pytest.raises(LookupError, match="1 records of stateless"):
        latencies(RECORDS, arrivals.slice(1), "stateless", since_ms=0, until_ms=np.inf)


def test_a_record_is_readable_with_the_first_total_that_counts_it() -> None:
    own = np.flatnonzero(RECORDS.account == 5)
    times = RECORDS.sent_ms[own]
    assert len(own) >= 2
    others = np.flatnonzero(RECORDS.account != 5)
    rest = truth(RECORDS, "running").filter(pa.compute.not_equal(truth(RECORDS, "running")["account"], "a000005"))
    late = RECORDS.sent_ms[-1] + 1_000
    accounts = ["a000005", "a000005", *rest["account"].to_pylist()]
    counts = [1, len(own), *rest["count"].to_pylist()]
    seen = [times[0] + 30, late, *([late] * rest.num_rows)]
    arrivals = pa.table({"account": accounts, "count": counts, SEEN: np.array(seen) / 1000})
    found = latencies(RECORDS, arrivals, "running", since_ms=0, until_ms=np.inf)
    expected = {int(own[0]): 30.0, **{int(n): late - RECORDS.sent_ms[n] for n in (*own[1:], *others)}}
    np.testing.assert_allclose(found, [expected[n] for n in range(len(RECORDS))], atol=0.01)


def test_a_window_counts_from_the_first_record_that_lets_it_close() -> None:
    records = generate(40_000, seed=2)
    start = int(records.at_ms[0]) // 10_000 * 10_000
    closing = int(np.flatnonzero(records.at_ms >= start + 15_000)[0])
    seen = [(records.sent_ms[closing] + 25) / 1000]
    arrivals = pa.table({"start": pa.array([start], pa.timestamp("ms", "UTC")), "account": ["a000001"], SEEN: seen})
    assert _ms(latencies(records, arrivals, "windowed", since_ms=0, until_ms=np.inf)) == {25}


def test_the_steady_rate_leaves_out_the_first_fifth_and_is_none_where_little_is_left() -> None:
    points = [Point(10, 100, 0), Point(20, 200, 0), Point(21, 600, 0), Point(24, 1_000, 0)]
    assert _steady(points, points[-1], 1_000) == 200
    assert _steady(points[2:], points[-1], 1_000) is None


def test_goals_are_told_where_there_are_runs_for_them() -> None:
    runs = [
        {"peer": "recourse", "work": "stateless", "kind": "backlog", "steady_rate": 150.0, "rate": 90.0},
        {"peer": "kafka-streams", "work": "stateless", "kind": "backlog", "steady_rate": 100.0, "rate": 100.0},
    ]
    runs[0]["first_batch_s"] = 3.0
    found = {v.goal.figure: (v.reached, v.met) for v in verdicts(runs)}
    assert found == {"steady_rate": (1.5, True), "first_batch_s": (3.0, False)}
    assert "| recourse | stateless | backlog | steady_rate / kafka-streams | 1.50 | >= 1.20 | yes |" in markdown(runs)


def test_a_variant_is_the_product_with_settings() -> None:
    found = variant("fast:stream.path=driver,stream.min_commit_interval=100 ms")
    assert (found.name, dict(found.settings)) == (
        "fast",
        {"stream.path": "driver", "stream.min_commit_interval": "100 ms"},
    )
    with pytest.raises(ValueError, match="name:key=value"):
        variant("fast")


class WrittenTopic:
    """Stands in for an output topic; `end` None: a transaction is open."""

    def __init__(self) -> None:
        self.end: int | None = None
        self.whole = False
        self.examined = 0

    def settled(self) -> int | None:
        return self.end

    def complete(self) -> bool:
        self.examined += 1
        return self.whole


def test_offsets_that_are_committed_with_the_rows_are_points_at_once() -> None:
    progress = OffsetsWithRows()
    assert [[point.records for point in progress.points(records)] for records in (0, 5, 5, 9)] == [[], [5], [], [9]]


def test_a_marker_is_a_point_with_the_offsets_read_and_the_rows_written_so_far() -> None:
    def marker(batch: int, end: int, rows: int) -> bytes:
        offsets = (OffsetRange("in", "i", {0: 0, 1: 0}, {0: end, 1: 1}),) if batch >= 0 else ()
        written = (WrittenRange("out", "o", 0, 0, rows + 1, rows), WrittenRange("other", "p", 0, 0, 9, 9))
        return LedgerEntry("batch", "s", "topic:out", 1, batch, offsets, written=written).encode().encode()

    batches = MarkedBatches("out")
    assert batches.points(marker(-1, 0, 0), 1.0) == []  # opens the generation
    assert batches.points(marker(0, 5, 3), 2.0) == [Point(2.0, 6, 3)]
    assert batches.points(marker(0, 5, 3), 3.0) == []  # a driver that opens the topic writes the newest one again
    assert batches.points(marker(1, 9, 2), 4.0) == [Point(4.0, 10, 5)]


def test_a_record_with_another_key_than_its_account_is_found() -> None:
    rows = pa.table({"account": ["a000001", "a000002"]})
    check_keys(rows, [b"a000001", b"a000002"])
    with pytest.raises(LookupError, match="1 records"):
        check_keys(rows, [b"a000001", b""])


def test_offsets_before_their_rows_are_points_when_the_next_checkpoint_has_its_own() -> None:
    progress, at = _progress(WrittenTopic(), 1_000, [1.0, 1.1, 2.0])
    assert progress.points(100) == []
    assert progress.points(200) == []  # of the same checkpoint: another partition
    assert progress.points(300) == [Point(1.1, 200, None)]
    assert list(at) == []


def test_offsets_before_their_rows_are_a_point_as_soon_as_no_transaction_is_open() -> None:
    output = WrittenTopic()
    progress, _ = _progress(output, 1_000, [1.0, 1.3])
    assert progress.points(1_000) == []
    output.end = 50
    assert progress.points(1_000) == [Point(1.3, 1_000, None)]


def test_a_complete_output_is_the_end_though_the_last_offsets_are_missing() -> None:
    output = WrittenTopic()
    progress, _ = _progress(output, 1_000, [1.0, 1.2, 1.4, 1.6])
    output.end = 40
    assert progress.points(900) == [Point(1.2, 900, None)]
    assert progress.points(900) == []
    assert output.examined == 1  # reading it costs time: only where something came
    output.end, output.whole = 50, True
    assert progress.points(900) == [Point(1.6, 1_000, None)]


def test_an_environment_is_built_once_for_its_requirements_and_again_after_a_build_that_failed(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("something==1\n")
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> None:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()

    def fail(command: Sequence[str]) -> None:
        run(command)
        if "pip" in command:
            raise ContestantFailed("no network")

    with pytest.raises(ContestantFailed, match="no network"):
        python_of("peer", requirements, tmp_path / "cache", fail)
    python = python_of("peer", requirements, tmp_path / "cache", run)
    assert len(commands) == 4
    assert str(requirements) in commands[-1]
    assert commands[-1][0] == str(python)
    assert python_of("peer", requirements, tmp_path / "cache", run) == python
    assert len(commands) == 4
    requirements.write_text("something==2\n")
    assert python_of("peer", requirements, tmp_path / "cache", run) != python


@pytest.mark.parametrize("work", WORKS)
def test_flink_reads_strictly_and_writes_exactly_once_what_is_compared(work: Work) -> None:
    source, sink, insert = flink_sql.statements(work, "broker:1", "input", "output")
    for text in ("'topic' = 'input'", "'properties.group.id' = 'output'", "'json.fail-on-missing-field' = 'true'"):
        assert text in source
    for text in ("'topic' = 'output'", "'sink.delivery-guarantee' = 'exactly-once'", "'key.format' = 'raw'"):
        assert text in sink
    assert all(column in sink for column in COLUMNS[work])
    assert "FROM" in insert


def test_flink_has_the_windows_and_the_lateness_of_the_truth() -> None:
    source, _, insert = flink_sql.statements("windowed", "broker:1", "input", "output")
    assert f"WATERMARK FOR `at` AS `at` - INTERVAL '{LATENESS_MS // 1000}' SECOND" in source
    assert f"INTERVAL '{WINDOW_MS // 1000}' SECOND" in insert


def test_flink_commits_within_what_a_broker_accepts_and_ends_at_a_failure(tmp_path: Path) -> None:
    _, sink, _ = flink_sql.statements("running", "broker:1", "input", "output")
    assert "'properties.transaction.timeout.ms' = '900000'" in sink
    settings = flink_sql.settings("running", tmp_path, tmp_path / "connector.jar", 1)
    assert settings["execution.checkpointing.interval"] == "1 s"
    assert settings["restart-strategy.type"] == "none"
    assert settings["pipeline.jars"].startswith("file:///")


def test_flink_is_ready_when_every_task_of_every_step_runs() -> None:
    running = {"parallelism": 2, "tasks": {"RUNNING": 2, "INITIALIZING": 0}}
    starting = {"parallelism": 2, "tasks": {"RUNNING": 1, "INITIALIZING": 1}}
    assert flink_sql.all_running({"vertices": [running, running]})
    assert not flink_sql.all_running({"vertices": [running, starting]})
    assert not flink_sql.all_running({"vertices": []})
    assert not flink_sql.all_running({"errors": ["not found"]})


def _progress(output: WrittenTopic, records: int, times: list[float]) -> tuple[OffsetsBeforeRows, Iterator[float]]:
    clock = iter(times)
    return OffsetsBeforeRows(output, records, lambda: next(clock)), clock


def _ms(found: np.ndarray[tuple[int], np.dtype[np.float64]]) -> set[int]:
    return {round(value) for value in found.tolist()}
