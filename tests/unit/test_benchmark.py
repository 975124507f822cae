"""What benchmarks compute without running anybody: options, verdicts, input, truth, comparison, latencies, goals."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.run import Report, command_line, in_turn, verdict
from benchmarks.speed.contestants import Recourse, variant
from benchmarks.speed.measure import latencies, steady_rate
from benchmarks.speed.peers import flink_sql
from benchmarks.speed.records import (
    COLUMNS,
    LATENESS_MS,
    OPERATORS,
    WINDOW_MS,
    WORKS,
    Work,
    difference,
    generate,
    truth,
)
from benchmarks.speed.report import tables
from benchmarks.speed.topic_watch import MarkedBatches, OffsetsBeforeRows, OffsetsWithRows, check_keys
from benchmarks.speed.watch import SEEN, Point
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange

RECORDS = generate(3_000, seed=7)


def test_the_options_of_a_scenario_are_its_keyword_arguments() -> None:
    def run(
        report: Report, *, rows: Annotated[int, "of the table"] = 5, works: tuple[Literal["a", "b"], ...] = ("a",),
        out_of: Path | None = None, deep: bool = False,
    ) -> None: ...  # fmt: skip

    parser = command_line("x", "", run)
    given = vars(parser.parse_args(["--rows", "7", "--works", "b,a", "--out-of", "f", "--deep"]))
    assert given == {"rows": 7, "works": ("b", "a"), "out_of": Path("f"), "deep": True, "report_out": None}
    assert parser.parse_args([]).works == ("a",)
    with pytest.raises(SystemExit):
        parser.parse_args(["--works", "c"])


def test_a_row_that_is_not_good_fails_the_run_and_figures_are_kept(tmp_path: Path) -> None:
    report = Report(tmp_path / "figures.json", {"rounds": 3})
    report.table("rows", [{"what": "x", "verdict": verdict(True)}])
    assert report.good
    report.table("worse", [{"what": "x", "verdict": verdict(True)}, {"what": "y", "verdict": verdict(False)}])
    assert not report.good
    kept = json.loads((tmp_path / "figures.json").read_text())
    assert kept["options"] == {"rounds": 3} and [row["what"] for row in kept["worse"]] == ["x", "y"]
    assert [in_turn("abc", number) for number in (0, 1, 3)] == [["a", "b", "c"], ["b", "c", "a"], ["a", "b", "c"]]


def test_a_record_is_the_same_for_a_seed_of_the_promised_size_and_at_most_two_seconds_out_of_order() -> None:
    assert generate(100, 1).encoded() == generate(100, 1).encoded() != generate(100, 2).encoded()
    values = RECORDS.encoded()[:-2]
    assert 115 <= np.mean([len(value) for value in values]) <= 130
    assert 1_500 < (np.maximum.accumulate(RECORDS.at_ms) - RECORDS.at_ms).max() <= 2_000
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
    assert {row["account"]: row["total"] for row in truth(RECORDS, "running").to_pylist()} == totals
    rows = truth(RECORDS, "windowed").to_pylist()
    closed = {(row["start"].isoformat()[:18], row["account"]): row["total"] for row in rows}
    still_open = {key: total for key, total in windows.items() if key not in closed}
    assert {account for _, account in still_open} == {"a001000", "a001001"}
    assert closed | still_open == windows


def test_the_truth_of_a_join_of_sessions_and_of_a_processor_is_what_a_plain_loop_makes() -> None:
    records = generate(2_000, seed=7)
    values = [json.loads(value) for value in records.encoded()]
    by_account: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for value, at in zip(values, records.at_ms.tolist(), strict=True):
        by_account[value["account"]].append({**value, "ms": at})
    pairs, sessions, previous = [], [], {}
    for account, payments in by_account.items():
        before = 0
        for payment in payments:
            previous[payment["id"]] = before
            before = payment["amount"]
            pairs += [
                (payment["id"], other["id"])
                for other in payments
                if payment["id"] % 2 == 0 and other["id"] % 2 and 0 <= other["ms"] - payment["ms"] <= 1_000
            ]
        ordered = sorted(payments, key=lambda payment: payment["ms"])
        for number, payment in enumerate(ordered):
            if number and payment["ms"] - ordered[number - 1]["ms"] <= 1_000:
                sessions[-1] = (*sessions[-1][:2], sessions[-1][2] + 1, sessions[-1][3] + payment["amount"])
            else:
                sessions.append((account, payment["ms"], 1, payment["amount"]))
    joined = truth(records, "joined").to_pylist()
    assert sorted((row["id"], row["confirmation"]) for row in joined) == sorted(pairs) and len(pairs) > 300
    assert {row["account"] for row in joined if row["id"] == pairs[0][0]} == {values[pairs[0][0]]["account"]}
    rows = [
        (row["account"], round(row["start"].timestamp() * 1000), row["count"], row["total"])
        for row in truth(records, "sessions").to_pylist()
    ]
    assert sorted(rows) == sorted(session for session in sessions if session[0] < "a001000")
    assert {row["id"]: row["previous"] for row in truth(records, "previous").to_pylist()} == previous


@pytest.mark.parametrize("work", [*WORKS, *OPERATORS])
def test_a_row_too_few_twice_or_wrong_is_seen(work: Work) -> None:
    right = truth(RECORDS, work)
    mixed = right.take(np.random.default_rng(1).permutation(right.num_rows))
    assert difference(mixed, right, work) is None
    assert "instead of" in (difference(right.slice(1), right, work) or "")
    assert "1 with a key that is there already" in (difference(pa.concat_tables([right, right[:1]]), right, work) or "")
    rows = right.to_pylist()
    rows[0][{"stateless": "net", "joined": "id", "previous": "previous"}.get(work, "total")] += 1
    assert difference(pa.Table.from_pylist(rows, right.schema), right, work) is not None


def test_a_stateless_record_is_readable_with_its_row() -> None:
    kept = np.flatnonzero(~RECORDS.dropped)
    seen = (RECORDS.sent_ms[kept] + 40) / 1000
    arrivals = pa.table({"id": kept, SEEN: seen})
    again = pa.concat_tables([arrivals, pa.table({"id": kept, SEEN: seen + 9})])
    for rows in (arrivals, again):
        found = latencies(RECORDS, rows, "stateless", since_ms=0, until_ms=np.inf)
        np.testing.assert_allclose(found, 40, atol=0.01)
    with pytest.raises(LookupError, match="1 records of stateless"):
        latencies(RECORDS, arrivals.slice(1), "stateless", since_ms=0, until_ms=np.inf)


def test_a_record_is_readable_with_the_first_total_that_counts_it() -> None:
    fifth = np.flatnonzero(RECORDS.account == 5)
    late = RECORDS.sent_ms[-1] + 1_000
    rest = truth(RECORDS, "running").filter(pa.compute.not_equal(truth(RECORDS, "running")["account"], "a000005"))
    accounts = ["a000005", "a000005", *rest["account"].to_pylist()]
    counts = [1, len(fifth), *rest["count"].to_pylist()]
    seen = [RECORDS.sent_ms[fifth[0]] + 30, *[late] * (len(counts) - 1)]
    arrivals = pa.table({"account": accounts, "count": counts, SEEN: np.array(seen) / 1000})
    expected = late - RECORDS.sent_ms
    expected[fifth[0]] = 30
    found = latencies(RECORDS, arrivals, "running", since_ms=0, until_ms=np.inf)
    np.testing.assert_allclose(found, expected, atol=0.01)


def test_a_window_counts_from_the_first_record_that_lets_it_close() -> None:
    records = generate(40_000, seed=2)
    start = int(records.at_ms[0]) // 10_000 * 10_000
    closing = int(np.flatnonzero(records.at_ms >= start + 15_000)[0])
    seen = [(records.sent_ms[closing] + 25) / 1000]
    arrivals = pa.table({"start": pa.array([start], pa.timestamp("ms", "UTC")), "account": ["a000001"], SEEN: seen})
    found = latencies(records, arrivals, "windowed", since_ms=0, until_ms=np.inf)
    np.testing.assert_allclose(found, 25, atol=0.01)


def test_the_steady_rate_leaves_out_the_first_fifth_and_is_none_where_little_is_left() -> None:
    points = [Point(10, 100, 0), Point(20, 200, 0), Point(21, 600, 0), Point(24, 1_000, 0)]
    assert steady_rate(points, points[-1], 1_000) == 200
    assert steady_rate(points[2:], points[-1], 1_000) is None


def test_goals_are_judged_where_there_are_runs_for_them() -> None:
    run = {"work": "stateless", "kind": "backlog"}
    ours = {"peer": "recourse", **run, "steady_rate": 150.0, "first_batch_s": 3.0}
    lines = tables([ours, {"peer": "kafka-streams", **run, "steady_rate": 100.0}]).splitlines()
    assert [line.split(" | ", 3)[3] for line in lines if line.endswith(("| yes |", "| no |"))] == [
        "steady_rate / kafka-streams | 1.50 | >= 1.20 | yes |",
        "first_batch_s | 3.00 | <= 2.50 | no |",
    ]


def test_a_variant_is_the_product_with_settings() -> None:
    fast = variant(Recourse, "fast:stream.path=driver,stream.min_commit_interval=100 ms")
    assert (fast.name, fast.settings) == ("fast", {"stream.path": "driver", "stream.min_commit_interval": "100 ms"})
    with pytest.raises(ValueError, match="name:key=value"):
        variant(Recourse, "fast")


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


@pytest.mark.parametrize(
    ("ends", "times", "offsets", "points"),
    [
        # The second ones are of the same checkpoint, of another partition; the third ones of the next checkpoint.
        ([None] * 3, [1.0, 1.1, 2.0], [100, 200, 300], [[], [], [Point(1.1, 200, None)]]),
        # No transaction is open any more.
        ([None, 50], [1.0, 1.3], [1_000, 1_000], [[], [Point(1.3, 1_000, None)]]),
        # The output is complete by its third look, though the last offsets are missing.
        ([40, 40, 50], [1.0, 1.2, 1.4, 1.6], [900] * 3, [[Point(1.2, 900, None)], [], [Point(1.6, 1_000, None)]]),
    ],
)
def test_offsets_before_their_rows_are_points_once_their_rows_are_readable(
    ends: list[int | None], times: list[float], offsets: list[int], points: list[list[Point]]
) -> None:
    complete = Mock(side_effect=[False, True])  # not asked again before something came: reading costs time
    output: Any = SimpleNamespace(settled=iter(ends).__next__, complete=complete)
    progress = OffsetsBeforeRows(output, 1_000, iter(times).__next__)
    assert [progress.points(records) for records in offsets] == points


@pytest.mark.parametrize("work", WORKS)
def test_flink_reads_strictly_within_the_truths_lateness_and_writes_exactly_once(work: Work, tmp_path: Path) -> None:
    source, sink, insert = flink_sql.statements(work, "broker:1", "input", "output")
    for text in ("'topic' = 'input'", "'properties.group.id' = 'output'", "'json.fail-on-missing-field' = 'true'"):
        assert text in source
    # The longest timeout of transactions that a broker accepts.
    timeout = "'properties.transaction.timeout.ms' = '900000'"
    for text in ("'topic' = 'output'", "'sink.delivery-guarantee' = 'exactly-once'", "'key.format' = 'raw'", timeout):
        assert text in sink
    assert all(column in sink for column in COLUMNS[work].names) and "FROM" in insert
    if work == "windowed":
        assert f"WATERMARK FOR `at` AS `at` - INTERVAL '{LATENESS_MS // 1000}' SECOND" in source
        assert f"INTERVAL '{WINDOW_MS // 1000}' SECOND" in insert
    settings = flink_sql.settings(work, tmp_path, tmp_path / "connector.jar", 1)
    assert settings["execution.checkpointing.interval"] == "1 s"
    assert settings["restart-strategy.type"] == "none"  # it ends at a failure
    assert settings["pipeline.jars"].startswith("file:///")


@pytest.mark.parametrize(
    ("job", "ready"),
    [
        ({"vertices": [{"parallelism": 2, "tasks": {"RUNNING": 2, "INITIALIZING": 0}}]}, True),
        ({"vertices": [{"parallelism": 2, "tasks": {"RUNNING": running}} for running in (2, 1)]}, False),
        ({"vertices": []}, False),
        ({"errors": ["not found"]}, False),
    ],
)
def test_flink_is_ready_when_every_task_of_every_step_runs(job: dict[str, Any], ready: bool) -> None:
    assert flink_sql.all_running(job) is ready
