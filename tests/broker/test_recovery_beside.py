"""A recovery beside its running stream: readers see fresh rows all the while, and the result is that of right code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestration.cli.demo import RIGHT, WRONG, Story
from orchestration.cli.live import Freshness
from reprocessing.plan.journal import journal_of
from streaming_jobs.examples.stock.movements import PARTITIONS, TOPIC
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.status import Status, read_status
from tests.support.driver import until

STREAMS = ("inventory", "low_stock")
FIRST, COUNT = 20_000, 40_000
PER_SECOND = 100
FRESH_WITHIN = 45.0
"""Seconds. On a quiet machine it is 5; where streams stop first, the replay and a start of Spark come on top."""
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def live(broker: Broker, tmp_path: Path) -> Iterator[Story]:
    """The wrong code has read the first movements, and goes on reading those that keep coming."""
    story = Story(tmp_path, Settings.load({"home": tmp_path}), broker.start(), COUNT)
    topics = Topics.of(story.settings.kafka, story.bootstrap)
    topics.create(TOPIC, PARTITIONS)
    story.deploy(WRONG)
    story.feed(story.all[:FIRST])
    with story.session() as check:
        story.wait(lambda: story.has_read(FIRST), "all movements", check)
        yield story
    topics.delete(TOPIC)


def status(story: Story, stream: str = "inventory") -> Status:
    return read_status(story.settings, stream) or Status(stream)


def settled(story: Story, generation: int) -> None:
    """Wait until both streams go on in a generation."""
    until(lambda: story.runs_in(generation, streams=STREAMS), 120, f"both streams in generation {generation}")


def stages(story: Story, plan: str) -> list[str]:
    return [line.stage for line in journal_of(story.settings, plan).lines() if line.state == "done"]


def crashed(story: Story, point: str, *arguments: str) -> None:
    """A command that is killed at a point of its recovery."""
    environment = {**story.environment(), "RECOURSE_CRASH": f"inventory:{point}:0"}
    done = story.command(story.folder, environment, *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr


def whole(story: Story, sent: int) -> None:
    """Wait until both tables have all movements, and compare them with the truth."""
    until(lambda: story.has_read(sent), 60, "the rest")
    story.compare(sent, right=True, low_stock=True)


def test_readers_see_fresh_rows_through_a_recovery_of_two_streams(live: Story) -> None:
    arriving = live.live(FIRST, PER_SECOND)
    with arriving.running():
        live.deploy(RIGHT)
        plan = live.plan_of(*STREAMS, "--to-earliest", show=False)
        live.recourse("recover", "apply", plan, "--yes")
        settled(live, 2)
    done = stages(live, plan)
    assert done.index("compare") < done.index("take_savepoint") < done.index("replay"), done
    whole(live, arriving.sent)
    freshness, marks = Freshness(arriving.looks), live.marks([plan])
    assert 0 < freshness.largest_gap() < FRESH_WITHIN
    assert [mark.sign for mark in marks] == ["f", "s", "P"], "the replay follows, the stream stops, published"
    assert freshness.looks[0].at < marks[0].at < marks[1].at < marks[2].at < freshness.looks[-1].at


@pytest.mark.long
def test_an_abort_is_not_noticed_and_an_undo_and_a_recovery_that_stops_first_go_on_in_the_session(live: Story) -> None:
    before = {stream: status(live, stream) for stream in STREAMS}
    arriving = live.live(FIRST, PER_SECOND)
    with arriving.running():
        live.deploy(RIGHT)
        plan = live.plan_of(*STREAMS, "--to-earliest", show=False)
        crashed(live, "recover_follow_ran", "recover", "apply", plan, "--yes")
        live.recourse("recover", "abort", plan)
        assert stages(live, plan) == ["prepare", "prepare", "abort"]
        for stream, then in before.items():
            now = status(live, stream)
            assert (now.generation, now.begun_at, now.state in ("running", "idle")) == (1, then.begun_at, True)
        plan = live.plan_of(*STREAMS, "--to-earliest", show=False)
        live.recourse("recover", "apply", plan, "--yes")
        settled(live, 2)
        live.recourse("recover", "undo", plan, "--yes")
        settled(live, 3)
        last = live.plan_of(*STREAMS, "--to-earliest", show=False)
        live.recourse("recover", "apply", last, "--yes", "--stop-first")
        assert "follow" not in stages(live, last)
        settled(live, 4)
    whole(live, arriving.sent)


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "recover_prepare_ran",
        "recover_follow_begun",
        "recover_compare_ran",
        "recover_take_savepoint_begun",
        "recover_take_savepoint_ran",
        "recover_fence_ran",
        "recover_replay_begun",
        "recover_replay_ran",
        "recover_audit_ran",
        "recover_publish_between",
        "recover_publish_ran",
        "recover_switch_generation_between",
        "recover_switch_generation_ran",
        "recover_clean_up_ran",
    ],
)
def test_killed_anywhere_beside_the_stream_it_is_resumed_and_ends_the_same(live: Story, point: str) -> None:
    arriving = live.live(FIRST, PER_SECOND)
    with arriving.running():
        live.deploy(RIGHT)
        plan = live.plan_of(*STREAMS, "--to-earliest", show=False)
        crashed(live, point, "recover", "apply", plan, "--yes")
        live.recourse("recover", "resume", plan, "--yes")
        settled(live, 2)
    whole(live, arriving.sent)
