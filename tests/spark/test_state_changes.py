"""A matrix of changes of functions that keep state: the class of each, and that the class is the truth.

Each case runs the old code over half of the records, and the new code on the state that it left. A change that is said
to fit ends equal to a batch computation over all records: of earlier ones prepared by the old code, of later ones by
the new. A change that is said not to fit is refused, by Recourse or by Spark itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession

from streaming_jobs.errors import RecourseError
from streaming_jobs.runtime.trial import trial
from streaming_jobs.testing import StreamTest
from streaming_jobs.text import commands
from tests.support import ROOT
from tests.support.state_changes import CASES, FITS, HARMLESS, REBUILT, Case

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FIRST = [(k, g, n, n) for n, (k, g) in enumerate([("x", "p"), ("y", "p"), ("z", "q"), ("x", "q"), ("y", "p")], 1)]
SECOND = [(k, g, n, n) for n, (k, g) in enumerate([("z", "p"), ("y", "q"), ("x", "p"), ("z", "q"), ("w", "p")], 6)]
LAST = ("last", "q", 99, 7_200)

KINDS = {
    "a filter or a column behind an operator with state": (
        "having",
        "comment",
        "column_behind",
        "window_filter_behind",
        "filter_behind_hops",
        "filter_behind_deduplication",
        "join_filter_behind",
        "join_column_behind",
        "second_table_filter",
    ),
    "a look-up behind it": ("lookup_behind",),
    "anything else, in a function without state": ("no_state",),
    "a filter or a computed value ahead of it": (
        "value_ahead",
        "filter_ahead",
        "filter_ahead_of_hops",
        "filter_ahead_of_sessions",
        "filter_ahead_of_deduplication",
        "filter_of_a_merged_topic",
        "merged_topic_left_out",
        "join_filter_ahead",
    ),
    "a key that a further part of a union computes differently": ("key_of_a_further_topic",),
    "a look-up ahead of it": ("lookup_ahead",),
    "an argument of a wider type, if the aggregate's type stays (`sum` of an `int`)": ("argument_widened",),
    "lateness, or another event time": (
        "grace",
        "less_grace",
        "watermark_of_another_time",
        "deduplicated_for_longer",
    ),
    "the body of a processor, the bound of its timers": ("processor_body", "reordered_for_longer"),
    "an aggregate added or removed": ("aggregate_added", "aggregate_removed", "second_table_aggregate", "cast_behind"),
    "an aggregate renamed, exchanged, or in another order": (
        "aggregate_exchanged",
        "aggregate_renamed",
        "aggregates_swapped",
    ),
    "an aggregate of another argument, or of another type": (
        "argument_of_an_aggregate",
        "type_of_an_argument",
        "greatest_widened",
    ),
    "a key added, removed, computed differently, or in another order": (
        "key_expression",
        "key_changed",
        "key_added",
        "key_removed",
        "key_exploded",
        "keys_exchanged",
        "window_key_added",
    ),
    "length, slide or offset of a window": (
        "hop_slide",
        "hop_length",
        "hop_offset",
        "window_length",
        "window_slide",
        "window_offset",
    ),
    "the gap of a session": ("session_gap", "session_gap_shorter"),
    "a session in place of a window, or the reverse": ("window_to_session", "session_to_window"),
    "`emit`": ("emit", "emit_at_each_change"),
    "the columns of a deduplication": ("deduplicated_by_less", "deduplicated_by_more"),
    "a deduplication that forgets, or no longer does": ("deduplicated_in_time",),
    "a deduplication ahead of an aggregation": ("deduplication_ahead",),
    "state where there was none, or the reverse": ("state_added", "state_removed"),
    "topics read in another order, with or without state": ("topics_exchanged",),
    "the time bound of a join": ("join_bound", "join_bound_narrower", "interval_bound", "interval_side"),
    "an `interval_join` in place of a `join` with the bound, or the reverse": ("interval_by_bound",),
    "the kind of a join": ("join_kind", "semi_to_inner", "left_to_full"),
    "a further column of a side of a join, or one in another's place": ("join_column_exchanged", "join_column_added"),
    "a state variable of a processor added, removed, renamed, or of another type": (
        "processor_state_added",
        "processor_state_removed",
        "processor_state_renamed",
        "processor_state_of_another_type",
    ),
    "timers of a processor, where there were none, or the reverse": ("timers_removed",),
    "an aggregation in place of a processor": ("processor_to_aggregate",),
    "the parts of a `salt`, a salt added or removed": ("salt", "salt_added", "salt_removed"),
}
"""The rows of the table in docs/deploy.md, and the cases of each."""
EXAMPLES = {HARMLESS: "having", FITS: "value_ahead", REBUILT: "aggregate_exchanged"}
"""By class the case whose reason is in docs/deploy.md."""


def documented(*columns: str) -> list[tuple[str, ...]]:
    """The rows of the table with these columns in docs/deploy.md."""
    _, _, rest = (ROOT / "docs/deploy.md").read_text().partition(f"| {' | '.join(columns)} |\n|---|---|\n")
    return [tuple(line[2:-2].split(" | ")) for line in rest.partition("\n\n")[0].splitlines()]


def test_every_change_is_of_a_kind_and_the_kinds_are_in_the_documentation() -> None:
    by_name = {each.name: each for each in CASES}
    assert sorted(name for names in KINDS.values() for name in names) == sorted(
        each.name for each in CASES if not each.refused
    )
    changes = {kind: {by_name[name].change for name in names} for kind, names in KINDS.items()}
    assert documented("change", "class") == [(kind, change) for kind, [change] in changes.items()]
    assert [change for change, _ in documented("class", "reason")] == [by_name[n].change for n in EXAMPLES.values()]


def record(of_: tuple[str, str, int, int]) -> dict[str, Any]:
    k, g, n, minute = of_
    return {"k": k, "g": g, "n": n, "at": NOON + timedelta(seconds=minute)}


def other(of_: tuple[str, str, int, int]) -> dict[str, Any]:
    k, _, n, minute = of_
    return {"k2": k, "m": 10 * n, "z": 100 * n, "bt": NOON + timedelta(seconds=minute)}


def send(test: StreamTest, records: list[tuple[str, str, int, int]]) -> None:
    for each in records:
        test.send(record(each), topic="a")
        if "b" in {topic.name for topic in test.stream.topics}:
            test.send(other(each), topic="b")


def truth(spark: SparkSession, case: Case) -> list[dict[str, Any]]:
    """The rows that a batch computation over all records makes."""
    assert case.computed is not None
    kind, kind_b = "k string, g string, n int, at timestamp", "k2 string, m int, z int, bt timestamp"
    parts = [
        prepare(spark.createDataFrame([record(r) for r in records], kind))
        for prepare, records in zip(case.prepared, (FIRST, SECOND), strict=True)
    ]
    frames = [parts[0].unionByName(parts[1])]
    if len(case.old.sources) == 2:
        frames.append(spark.createDataFrame([other(r) for r in [*FIRST, *SECOND]], kind_b))
    return [row.asDict() for row in case.computed(*frames).collect()]


@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.name, marks=[pytest.mark.long] if each.long else []) for each in CASES]
)
def test_the_class_of_a_change_is_true(stream_test: Callable[..., StreamTest], case: Case) -> None:
    test = stream_test(case.old)
    send(test, FIRST)
    test.run()
    test.deploy(case.new)
    if case.new.lookups:
        test.lookup("names", [{"code": "p", "label": "pine"}])
    spark = test._spark
    before = {path: path.stat().st_mtime_ns for path in test.settings.state.rglob("*") if path.is_file()}
    verdict = trial(test.settings, test.stream, spark)
    after = {path: path.stat().st_mtime_ns for path in test.settings.state.rglob("*") if path.is_file()}
    assert after == before, "a trial writes nothing to the state"
    step = commands.plan("s", to_batch=-1) if case.change == REBUILT else case.refused
    assert (verdict.change, bool(verdict.found)) == (case.change, bool(step)), verdict
    if case.name in EXAMPLES.values():
        [reason] = [reason for change, reason in documented("class", "reason") if change == case.change]
        assert verdict.why.startswith(reason.strip("`"))
    send(test, SECOND)
    if step:
        assert step in verdict.next_step, "the trial names what helps"
        with pytest.raises(RecourseError) as start:
            test.run()
        assert step in start.value.next_step, "so does the start"
        return
    if case.closes:
        send(test, [LAST])
    test.run()
    expected = truth(spark, case)
    names = expected[0].keys()
    assert rows_of((row for row in test.rows() if row["k"] != LAST[0]), names) == rows_of(expected, names)


def rows_of(rows: Iterable[Mapping[str, Any]], names: Collection[str]) -> list[str]:
    """The rows in one order, with times as Spark returns them."""
    plain = ([v.replace(tzinfo=None) if isinstance(v, datetime) else v for v in map(row.get, names)] for row in rows)
    return sorted(map(repr, plain))
