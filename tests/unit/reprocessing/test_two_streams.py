"""A recovery of two streams: one plan, one journal, one question; killed after every stage, resumed, given up.

Both streams read the topic `things`. Batches 3 to 5 of both are wrong, and the code of today is right.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from reprocessing import executor
from reprocessing.executor import give_up, recovery_of, resume
from reprocessing.explainer import explain
from reprocessing.plan import registry
from reprocessing.plan.journal import Journal, journal_of
from reprocessing.plan.plan import RecoveryPlan
from reprocessing.plan.plan_file import load, names_of
from reprocessing.plan.planner import RecoveryRequest, make_plan, plan_undo
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from reprocessing.report.facts import facts_of
from reprocessing.report.page import page
from reprocessing.stages import beside
from reprocessing.stages.recovery import Recovery, RecoveryEvents
from reprocessing.stages.stages import stages_of
from streaming_jobs.catalog.snapshots import read_snapshot
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import ForeignWrite, PreflightRefused, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import take
from streaming_jobs.storage.locations import delta_table
from tests.support.life import Killed, Life, Topics, replayed
from tests.support.life_flows import OTHERS, STREAM

pytestmark = pytest.mark.slow

BOTH = (STREAM, OTHERS)
TO_BATCH_2, TO_80 = Target("batch", "2"), Target("offsets", "0:80")
RIGHT = list(range(60))
WRONG = sorted([*range(30), *(-n for n in range(30, 60))])


@dataclasses.dataclass(frozen=True)
class Cut(Journal):
    """A journal whose process is killed right after it has noted that a stage of a stream is done."""

    after: tuple[str, str | None] = ("", None)

    def write(self, stage: str, state: Any, *findings: Any, stream: str | None = None) -> None:
        super().write(stage, state, *findings, stream=stream)
        if (stage, stream) == self.after and state == "done":
            raise Killed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("made")
    for stream in BOTH:
        Life.begin(home, stream).run(*range(6), wrong=range(3, 6), bug=range(3, 6))
    return home


def copied(made: Path, home: Path) -> list[Life]:
    shutil.copytree(made, home)
    settings = Settings.load({"home": home})
    return [Life(settings, stream) for stream in BOTH]


@pytest.fixture
def both(made: Path, tmp_path: Path) -> list[Life]:
    return copied(made, tmp_path / "home")


def requests(settings: Settings, *targets: Target, ends: tuple[int, int] = (60, 60)) -> list[RecoveryRequest]:
    """One request for each stream; `ends` are the ends of the topic when the streams are planned."""
    return [
        RecoveryRequest(planning_snapshot(settings, stream, Topics(end=end)), target)
        for stream, target, end in zip(BOTH, targets, ends, strict=True)
    ]


def back(settings: Settings) -> RecoveryPlan:
    """Both streams go back before batch 3."""
    return make_plan(settings, requests(settings, TO_BATCH_2, TO_BATCH_2))


def back_and_forward(settings: Settings) -> RecoveryPlan:
    """The first stream goes back, the second one skips records 60 to 79."""
    return make_plan(settings, requests(settings, TO_BATCH_2, TO_80, ends=(60, 90)))


def recovery(
    settings: Settings,
    plan: str,
    events: RecoveryEvents | None = None,
    cut: tuple[str, str | None] | None = None,
    end: int = 60,
) -> Recovery:
    topics = Topics(end=end)
    whole = recovery_of(settings, BOTH, topics, load(settings, plan), events or RecoveryEvents(), replay=replayed)
    return whole if cut is None else dataclasses.replace(whole, journal=Cut(whole.journal.handle, after=cut))


def killed_after(both: list[Life], stage: str, stream: str | None) -> str:
    """The plan of both streams that go back, whose process is killed after a stage."""
    plan = back(both[0].settings).id
    with pytest.raises(Killed):
        resume(recovery(both[0].settings, plan, cut=(stage, stream)))
    return plan


def can_start(life: Life) -> bool:
    return not life.refused(Topics(end=60))


TOPOLOGY = Topology({stream.name: stream for stream in BOTH})


def snapshot_rows(settings: Settings) -> list[list[int]]:
    """The ids that a reader of a snapshot sees in both tables."""
    found = read_snapshot(settings, TOPOLOGY)
    return [sorted(found[stream.primary.name].rows(["id"])["id"].to_pylist()) for stream in BOTH]


def snapshot_versions(settings: Settings) -> list[int]:
    found = read_snapshot(settings, TOPOLOGY)
    return [found[stream.primary.name].version for stream in BOTH]


def newest_version(life: Life) -> int:
    return delta_table(life.settings.tables / life.stream.primary.name).version()


def test_stages_go_side_by_side_and_nothing_is_published_before_everything_was_compared(both: list[Life]) -> None:
    plan = back(both[0].settings)
    assert (plan.id, plan.names, plan.streams[0].staging, plan.streams[1].staging) == (
        "things-0001",
        ("things", "others"),
        "things-0001",
        "things-0001.others",
    )
    assert [(stage.name, stage.stream) for stage in stages_of(plan)] == [
        *(("take_savepoint", name) for name in plan.names),
        *(("fence", name) for name in plan.names),
        *(("prepare", name) for name in plan.names),
        *(("replay", name) for name in plan.names),
        ("audit", None),
        *(("publish", name) for name in plan.names),
        *(("switch_generation", name) for name in plan.names),
        ("clean_up", None),
    ]
    text = explain(plan)
    for words in (
        "rewind to batch 2, stream things; rewind to batch 2, stream others",
        "stops        things,",
        "stops        others,",
        "start the streams again: recourse streams run things others",
    ):
        assert words in text


def test_one_stream_goes_back_and_the_other_goes_forward(both: list[Life]) -> None:
    settings = both[0].settings
    plan = back_and_forward(settings)
    names = [(stage.name, stage.stream) for stage in stages_of(plan)]
    assert names[4:] == [
        ("prepare", "things"),
        ("replay", "things"),
        ("audit", None),
        ("publish", "things"),
        ("skip", "others"),
        ("switch_generation", "things"),
        ("clean_up", None),
    ]
    resume(recovery(settings, plan.id, end=90))
    assert both[0].rows() == RIGHT and both[1].rows() == WRONG
    assert snapshot_versions(settings) == [newest_version(life) for life in both]
    assert [life.record.generation for life in both] == [2, 2]
    assert [(v["from"], v["to"]) for v in both[1].record.void_ranges] == [(60, 80)]


def test_a_skip_that_is_refused_is_refused_before_the_other_stream_has_published(both: list[Life]) -> None:
    settings = both[0].settings
    plan = back_and_forward(settings)
    text = explain(plan)
    assert "ask whether these 20 records may be left out" in text and "as long as the topic keeps the records" in text
    assert "prepare             things: " in text
    whole = recovery(settings, plan.id, end=90)
    with pytest.raises(Killed):
        resume(recovery(settings, plan.id, cut=("replay", "things"), end=90))
    both[1].meddle()
    with pytest.raises(ForeignWrite, match="of table others"):
        resume(whole)
    assert both[0].rows() == WRONG, "nothing is published"


def test_a_stream_that_has_skipped_and_run_on_is_not_given_up(both: list[Life]) -> None:
    settings = both[0].settings
    plan = make_plan(settings, requests(settings, TO_80, TO_80, ends=(90, 90)))
    whole = recovery(settings, plan.id, end=90)
    with pytest.raises(Killed):
        resume(recovery(settings, plan.id, cut=("skip", "things"), end=90))
    both[0].batch(6, generation=2)
    with pytest.raises(UsageError, match="can no longer be given up"):
        give_up(whole)
    assert journal_of(settings, plan.id).outcome == "applying"
    resume(whole)
    assert [life.record.generation for life in both] == [2, 2]


def test_a_plan_names_each_stream_once(both: list[Life]) -> None:
    request, _ = requests(both[0].settings, TO_BATCH_2, TO_BATCH_2)
    with pytest.raises(UsageError, match="each stream once"):
        make_plan(both[0].settings, [request, request])


def test_a_stream_that_reads_the_table_of_another_one_is_not_named_since_it_goes_along(
    both: list[Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = StructType([StructField("id", LongType())])
    reader = dataclasses.replace(OTHERS, sources={"value": DeltaSource("things", rows)})
    monkeypatch.setattr("reprocessing.plan.affected_streams.Topology.load", lambda _: Topology({}))
    settings = both[0].settings
    of_writer, of_reader = requests(settings, TO_BATCH_2, TO_BATCH_2)
    of_reader = dataclasses.replace(of_reader, snapshot=dataclasses.replace(of_reader.snapshot, stream=reader))
    for order in ([of_writer, of_reader], [of_reader, of_writer]):
        with pytest.raises(UsageError, match="stream others reads what another stream of the plan writes") as refused:
            make_plan(settings, order)
        assert "leave others out" in refused.value.next_step
    assert not names_of(settings, "things")


def test_a_staging_table_that_is_gone_is_not_to_be_put_back(both: list[Life]) -> None:
    settings, plan = both[0].settings, killed_after(both, "replay", "others")
    shutil.rmtree(settings.tables / "_staging" / plan / "things_dead_letters")
    with pytest.raises(PreflightRefused, match="staging table things_dead_letters") as refused:
        resume(recovery(settings, plan))
    assert f"recover abort {plan}" in refused.value.next_step


SHORT = [("fence", "things"), ("replay", "things"), ("publish", "things"), ("switch_generation", "things")]
"""Between the two streams: one is fenced, rebuilt, published, in its new generation, and the other is not."""
STAGES = [
    *((stage, stream.name) for stage in ("take_savepoint", "fence", "prepare", "replay") for stream in BOTH),
    ("audit", None),
]
STAGES += [*((stage, stream.name) for stage in ("publish", "switch_generation") for stream in BOTH), ("clean_up", None)]


@pytest.mark.parametrize("cut", [pytest.param(cut, marks=() if cut in SHORT else pytest.mark.long) for cut in STAGES])
def test_killed_after_any_stage_it_is_finished_by_resume(both: list[Life], cut: tuple[str, str | None]) -> None:
    settings, plan = both[0].settings, back(both[0].settings)
    assert [(stage.name, stage.stream) for stage in stages_of(plan)] == STAGES
    with pytest.raises(Killed):
        resume(recovery(settings, plan.id, cut=cut))
    done = STAGES[: STAGES.index(cut) + 1]
    for life in both:
        name = life.stream.name
        assert life.rows() == (RIGHT if ("publish", name) in done else WRONG)
        assert can_start(life) == (("fence", name) not in done or ("switch_generation", name) in done)
    assert snapshot_rows(settings) == ([RIGHT] * 2 if ("publish", "others") in done else [WRONG] * 2), "of one plan"
    resume(recovery(settings, plan.id))
    assert snapshot_rows(settings) == [RIGHT, RIGHT]
    for life in both:
        assert life.rows() == RIGHT and life.record.generation == 2 and can_start(life)
    assert not (settings.tables / "_staging").exists() and journal_of(settings, plan.id).outcome == "published"


GIVEN_UP = [("take_savepoint", "things"), ("fence", "things"), ("audit", None)]
GIVEN_UP += [pytest.param(cut, marks=pytest.mark.long) for cut in (("fence", "others"), ("replay", "things"))]


@pytest.mark.parametrize("cut", GIVEN_UP)
def test_given_up_before_the_first_publish_both_go_on_as_they_were(
    both: list[Life], cut: tuple[str, str | None]
) -> None:
    settings, plan = both[0].settings, killed_after(both, *cut)
    fenced = {"take_savepoint": 0, "fence": BOTH.index(STREAM if cut[1] == "things" else OTHERS) + 1}.get(cut[0], 2)
    give_up(recovery(settings, plan))
    for number, life in enumerate(both):
        assert life.rows() == WRONG and can_start(life)
        assert snapshot_versions(settings)[number] == newest_version(life)
        assert life.record.generation == (3 if number < fenced else 1)
    assert not (settings.tables / "_staging").exists() and journal_of(settings, plan).outcome == "aborted"


def test_it_is_not_given_up_when_one_of_them_has_published(both: list[Life]) -> None:
    settings, plan = both[0].settings, killed_after(both, "publish", "things")
    assert (both[0].rows(), both[1].rows()) == (RIGHT, WRONG)
    with pytest.raises(UsageError, match="has published table things,"):
        give_up(recovery(settings, plan))


def test_nobody_agrees_then_nothing_is_published_and_yes_publishes_both(both: list[Life]) -> None:
    settings = both[0].settings
    plan = back(settings).id
    shown: list[Sequence[str]] = []

    def no(whole: Recovery) -> bool:
        shown.append([difference.table for difference in whole.differences])
        return False

    with pytest.raises(Exception, match="not confirmed"):
        resume(recovery(settings, plan, RecoveryEvents(confirm=no)))
    assert shown == [["things", "things_dead_letters", "others", "others_dead_letters"]]
    assert journal_of(settings, plan).outcome == "waits for confirmation"
    noted = facts_of(load(settings, plan), journal_of(settings, plan)).differences
    assert [each.table for each in noted] == shown[0] and noted[0].counts.corrected == 30
    assert [life.rows() for life in both] == [WRONG, WRONG]
    executor.apply(recovery(settings, plan))
    assert [life.rows() for life in both] == [RIGHT, RIGHT]
    text = page(load(settings, plan), journal_of(settings, plan), [], "")
    assert "publish things" in text and "publish others" in text
    for each in facts_of(load(settings, plan), journal_of(settings, plan)).streams:
        for series in (each.replaced, each.replayed):
            assert [(c.first, c.rows, c.records) for c in series.columns] == [(n, 10, 10) for n in (3, 4, 5)]
        assert [(p.before, p.replayed, p.now) for p in each.partitions] == [((0, 60), (30, 60), (0, 60))]


def test_both_are_undone_by_one_plan(both: list[Life]) -> None:
    settings = both[0].settings
    plan = back(settings)
    resume(recovery(settings, plan.id))
    assert names_of(settings, "others") == [plan.id] == names_of(settings, "things")
    undo = plan_undo(settings, {stream.name: stream for stream in BOTH}, Topics(end=60), plan)
    assert undo.undoes == plan.id and undo.names == plan.names
    resume(dataclasses.replace(recovery(settings, undo.id), replay=lambda _: {"since": 0}))
    assert [life.rows() for life in both] == [WRONG, WRONG] == snapshot_rows(settings)
    assert registry.undone_by(settings, plan) == undo.id


def test_a_plan_of_both_is_in_the_way_of_another_of_either(both: list[Life]) -> None:
    settings, plan = both[0].settings, killed_after(both, "take_savepoint", "others")
    for stream in BOTH:
        under_way = registry.under_way(settings, stream.name)
        assert under_way is not None and under_way.id == plan
        assert plan in registry.needed_savepoints(settings, stream.name).values()
    with pytest.raises(UsageError, match="is of things and others"):
        recovery_of(settings, [STREAM], Topics(), load(settings, plan), RecoveryEvents())


def test_neither_stream_runs_while_a_plan_of_both_is_at_work(both: list[Life], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_READY_WITHIN", 0.0)
    settings = both[0].settings
    plan = back(settings).id
    with take(settings, "others", purpose="session", wait=0), pytest.raises(Exception, match="others"):
        resume(dataclasses.replace(recovery(settings, plan), patience=-60.0), stop_first=True)
    assert journal_of(settings, plan).outcome == "planned" and all(map(can_start, both))
    with take(settings, "things", purpose="session", wait=0):  # it was given back
        pass
