"""The replay of a recovery: its progress, the border where it is compared, and its end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructField, StructType, TimestampType

from reprocessing.plan.targets import Target
from reprocessing.replay import staging
from reprocessing.replay.session import Border, RowByRow
from reprocessing.stages import replay
from reprocessing.stages.recovery import RecoveryContext, RecoveryEvents
from reprocessing.stages.replay import ReplayProgress
from reprocessing.stages.stages import TakeSavepoint
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.formats import Json
from streaming_jobs.runtime import output_plans
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta import store
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import CodeSince
from streaming_jobs.storage.files import sync_tree
from streaming_jobs.stream import KafkaTopic, Stream
from tests.support.life import ROWS, STREAM, TOPIC, Life, Topics, plan_one, recovery, run_stage
from tests.support.power import Power

pytestmark = pytest.mark.slow


def test_progress_is_told_when_there_is_some_and_else_what_is_waited_for() -> None:
    now, said = [0.0], list[str]()
    events = RecoveryEvents(tell=said.append, progress=lambda done, total: said.append(f"{done} of {total}"))
    progress = ReplayProgress(events, planned=60, total=100, clock=lambda: now[0])
    for second, (done, batch) in enumerate([(0, 2)] * 40 + [(50, 3)] * 3 + [(100, 4)] * 40):
        now[0] = float(second)
        progress.reached(done, batch)
    assert said == [
        "  replay: 40 records have come since the plan was made, and are read too",
        "0 of 100",
        "  replay: it waits for the commit of batch 3",
        "50 of 100",
        "100 of 100",
        "  replay: it waits for the end of its session",
    ]


Offsets = dict[int, int]
LETTERS = all_tables(STREAM)[-1][0]


class Spark:
    """Plans batches over a topic as Spark does, and runs the entry that is there when it begins again."""

    def __init__(self, folder: Path, start: Offsets, end: Offsets, largest: int, *, state: bool) -> None:
        self.log, self.end, self.largest, self.state = folder / "offsets", end, largest, state
        (folder / "sources" / "0").mkdir(parents=True)
        (folder / "sources" / "0" / "0").write_text("\0v1\n" + json.dumps({TOPIC: start}))
        self.log.mkdir()
        self.at, self.batches = start, list[tuple[Offsets, Offsets]]()
        self.checkpoint = Checkpoint(folder)

    def run(self, border: Border) -> int:
        """Run to the topic's end; how often the query had to begin again."""
        begun, waiting = 0, self.state
        while True:
            number = len(self.batches)
            if not (self.log / str(number)).exists():
                if self.at == self.end and not waiting:
                    return begun
                waiting = self.at != self.end and self.state  # a batch without records lets state go
                (self.log / str(number)).write_text("v1\n{}\n" + json.dumps({TOPIC: self._next()}))
                (self.log / f".{number}.crc").write_text("of that text")
            if border(self.checkpoint, number):
                begun += 1
                assert not (self.log / f".{number}.crc").exists() and begun < 1_000
                continue
            ends = dict(self.checkpoint.end(number)[TOPIC])
            self.batches.append((self.at, ends))
            self.at = ends

    def _next(self) -> Offsets:
        left = {p: self.end[p] - self.at[p] for p in self.end}
        total = sum(left.values())
        if total <= self.largest:
            return dict(self.end)
        return {
            p: min(self.at[p] + max(n * self.largest // total, 1 if n else 0), self.end[p]) for p, n in left.items()
        }


def of(offsets: Offsets) -> dict[str, Offsets]:
    return {TOPIC: offsets}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), state=st.booleans(), largest=st.integers(1, 40))
def test_one_batch_ends_where_the_published_tables_do(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, state: bool, largest: int
) -> None:
    """And for state the batch before is the published tables' last one, be it without records."""
    grow = st.tuples(*[st.integers(0, 30)] * 3)
    start, before, published, end = [dict.fromkeys(range(3), 0)] * 4
    start = dict(enumerate(data.draw(grow)))
    before = {p: start[p] + n for p, n in enumerate(data.draw(grow))}
    published = {p: before[p] + n for p, n in enumerate(data.draw(st.one_of(grow, st.just((0, 0, 0)))))}
    end = {p: published[p] + n for p, n in enumerate(data.draw(grow))}
    if published == start:
        return
    spark = Spark(tmp_path_factory.mktemp("checkpoint"), start, end, largest, state=state)
    copied_at: list[int] = []
    steps = (of(before), of(published)) if state and before != published else (of(published),)
    empty = state and before == published
    begun = spark.run(Border(steps, empty, largest, lambda: copied_at.append(len(spark.batches))))
    assert spark.at == end and [b for _, b in spark.batches[:-1]] == [a for a, _ in spark.batches[1:]]
    assert all(sum(b.values()) - sum(a.values()) <= largest + 2 for a, b in spark.batches)
    if end == published:
        at = len(spark.batches) - (1 if copied_at else 0)
    else:
        assert copied_at, "records came since"
        at = copied_at[0]
    assert spark.batches[at - 1][1] == published
    if state and before != published and sum(published.values()) - sum(before.values()) <= largest:
        assert spark.batches[at - 1][0] == before
    if empty and end != published:
        assert spark.batches[at - 1][0] == published, "a batch without records, as the published tables' last one"
    assert begun <= 3 + sum(published.values()) // max(largest // 3, 1)


def test_where_nothing_came_since_a_stream_without_state_runs_as_it_is(tmp_path: Path) -> None:
    spark = Spark(tmp_path, {0: 0}, {0: 95}, 10, state=False)
    copied_at: list[int] = []
    assert spark.run(Border((of({0: 95}),), False, 10, lambda: copied_at.append(1))) == 0
    assert len(spark.batches) == 10 and not copied_at


def test_the_content_of_a_table_is_not_divided(tmp_path: Path) -> None:
    """Two ranges from 0 on, to version 25 and to 50, are not the content at 50: the first one is none of its parts."""
    spark = Spark(tmp_path, {0: 0}, {0: 95}, 1_000, state=False)
    (spark.log / "0").write_text("v1\n{}\n" + json.dumps({"rows": {"0": 60}, TOPIC: {"0": 95}}))
    border = Border(({"rows": {0: 50}, TOPIC: {0: 80}},), False, 20, lambda: None, frozenset({"rows"}))
    assert border(spark.checkpoint, 0)
    assert spark.checkpoint.end(0) == {"rows": {0: 50}, TOPIC: {0: 20}}
    assert border._share({("rows", 0): 10}, {("rows", 0): 50}) == {("rows", 0): 30}


@pytest.mark.parametrize(("start", "end"), [(10, 22), (22, 60), (2, 22)])
def test_versions_that_the_plan_rebuilds_are_not_divided(start: int, end: int) -> None:
    border = Border(({"rows": {0: 60}},), False, 20, lambda: None, frozenset({"rows"}), {"rows": (22, 60)})
    assert border._share({("rows", 0): start}, {("rows", 0): 60}) == {("rows", 0): end}


def test_a_partition_that_the_published_tables_do_not_know_has_no_border(tmp_path: Path) -> None:
    spark = Spark(tmp_path, {0: 0, 1: 0}, {0: 95, 1: 20}, 10, state=False)
    assert spark.run(Border((of({0: 40}),), False, 10, lambda: pytest.fail("there is none"))) == 0


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.of_batches(tmp_path, 9)


def replaying(life: Life) -> RecoveryContext:
    """A plan whose replay begins after batch 3; the topic has thirty records more than the published table."""
    plan = plan_one(life.snapshot(Topics(end=120)), Target("batch", "3"))
    context = recovery(life, plan.id, Topics(end=120)).of(STREAM.name)
    context.journal.write("take_savepoint", "done", run_stage(context, TakeSavepoint))
    staging.prepare(life.settings, STREAM, plan, life.record, context.base())
    return context


def test_the_border_is_where_the_published_tables_end(life: Life) -> None:
    found = replay.border_of(replaying(life))
    assert found.steps == (of({0: 90}),) and not found.empty_last


@pytest.mark.parametrize("event_time", [None, "seen"])
def test_for_windows_the_last_batch_is_the_published_tables_own(life: Life, event_time: str | None) -> None:
    """The rows of a window depend on the watermark of the batches before; a running total depends on no border."""
    context = replaying(life)
    times = StructType([StructField("seen", TimestampType())])
    late = "1 minute" if event_time else None
    topic = replace(STREAM.sources["value"], value=Json(times), event_time=event_time, lateness=late)
    stream = replace(STREAM, sources={"value": topic})
    context = replace(context, stream=stream, plan=replace(context.plan, stateful=True))
    steps = (of({0: 80}), of({0: 90})) if event_time else (of({0: 90}),)
    assert replay.border_of(context).steps == steps


def test_sources_end_batches_at_the_border(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    context, given = replaying(life), list[Any]()

    def queries(*_: Any, **options: Any) -> None:
        given.append(options["steps"])
        raise KeyboardInterrupt

    monkeypatch.setattr("reprocessing.replay.session.SparkQueries", queries)
    with pytest.raises(KeyboardInterrupt):
        replay.replay(context)
    assert given == [(of({0: 90}),)]


def test_the_tables_are_kept_once_as_they_are_at_the_border(life: Life) -> None:
    """Rows that a killed attempt has written past the border since are not in them."""
    context = replaying(life)
    replayed = Life(context.replay_settings).run(*range(4, 9), generation=2)
    assert replay.kept_table(context, STREAM.primary) is None and replay.past_the_border(context, of({0: 90})) == 0
    assert replay.past_the_border(context, of({0: 120})) is None, "no batch ended there"
    replay.keep_tables(context)
    replayed.batch(9, generation=2)
    replay.keep_tables(context)
    copy = replay.kept_table(context, STREAM.primary)
    assert copy is not None and life.rows(copy.path) == life.rows() == list(range(90))
    assert replayed.rows() == list(range(100)) and replay.past_the_border(context, of({0: 120})) == 30


def test_what_a_table_with_a_batch_from_past_the_border_has_that_is_new_is_not_known(life: Life) -> None:
    """A kill came after that table's commit and before the primary one's; its readers may have read the batch."""
    torn = replace(life.entry(9), table=LETTERS.name)
    context = replaying(life)
    assert set(replay.rows_past_the_border(context, of({0: 90}))) == {"things", LETTERS.name}
    life.stored(LETTERS.name).mark(torn)
    assert set(replay.rows_past_the_border(context, of({0: 90}))) == {"things"}
    replay.keep_tables(context)
    assert set(replay.rows_past_the_border(context, of({0: 120}))) == {"things"}


def test_a_kill_while_they_are_kept_leaves_nothing_half(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    context = replaying(life)
    making = store.make_table

    def killed(path: Path, *arguments: object, **options: object) -> None:
        if path.name == "things_dead_letters":
            raise KeyboardInterrupt
        making(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "make_table", killed)
    write_deltalake(context.replay_settings.tables / "things_dead_letters", life_letters(life), mode="append")
    with pytest.raises(KeyboardInterrupt):
        replay.keep_tables(context)
    assert replay.kept_table(context, STREAM.primary) is None
    monkeypatch.setattr(store, "make_table", making)
    replay.keep_tables(context)
    assert replay.kept_table(context, LETTERS) is not None


def test_what_was_kept_survives_a_power_cut(life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every resume believes what lies there; an empty file among it would stop each of them."""
    context = replaying(life)
    sync_tree(life.settings.home)
    power = Power(life.settings.home, monkeypatch)
    replay.keep_tables(context)
    cut = Settings.load({"home": power.cut(tmp_path / "cut")})
    power.close()
    copy = replay.kept_table(replace(context, settings=cut), STREAM.primary)
    assert copy is not None and life.rows(copy.path) == list(range(40))


def life_letters(life: Life) -> object:
    """No dead letters, in their columns."""
    return DeltaTable(life.settings.tables / "things_dead_letters").to_pyarrow_table()


def test_an_entry_that_is_written_anew_keeps_what_else_is_in_it(tmp_path: Path) -> None:
    spark = Spark(tmp_path, {0: 0}, {0: 95}, 1_000, state=False)
    (spark.log / "0").write_text('v1\n{"batchWatermarkMs":17}\n' + json.dumps({TOPIC: {"0": 95}}))
    assert Border((of({0: 40}),), False, 1_000, lambda: None)(spark.checkpoint, 0)
    assert spark.checkpoint.metadata(0) == {"batchWatermarkMs": 17} and spark.checkpoint.end(0) == of({0: 40})


@pytest.mark.parametrize("node", ["Aggregate", "TransformWithState", "Mystery"])
def test_the_code_of_a_bounded_replay_keeps_no_state(life: Life, node: str) -> None:
    """Whatever the plan knew of it: the session has noted the nodes of the code that it runs."""
    life.change(code=(CodeSince("fixed", "1", 1, 0, 1.0),))
    checkpoint, guard = life.checkpoint(), RowByRow(life.settings, STREAM)
    plans = StreamFolder.of(life.settings, STREAM.name).output_plans
    output_plans.write(plans, {"fixed": {"things": {"nodes": ["Filter", "Project"], "position": None}}})
    assert guard(checkpoint, 0) is False
    output_plans.write(plans, {"fixed": {"things": {"nodes": ["Project", node], "position": None}}})
    with pytest.raises(PreflightRefused, match=f"keep state, or may keep it: {node}"):
        guard(checkpoint, 0)


def test_in_a_bounded_replay_of_several_sources_a_join_may_keep_state(life: Life) -> None:
    """With one source it is one with a table that does not change."""
    life.change(code=(CodeSince("fixed", "1", 1, 0, 1.0),))
    plans = StreamFolder.of(life.settings, STREAM.name).output_plans
    output_plans.write(plans, {"fixed": {"things": {"nodes": ["Join", "Project"], "position": None}}})
    assert RowByRow(life.settings, STREAM)(life.checkpoint(), 0) is False
    both = Stream(
        STREAM.name,
        lambda value, other: value,
        {**STREAM.sources, "other": KafkaTopic("others", Json(ROWS))},
        STREAM.sinks,
    )
    with pytest.raises(PreflightRefused, match="keep state, or may keep it: Join"):
        RowByRow(life.settings, both)(life.checkpoint(), 0)
