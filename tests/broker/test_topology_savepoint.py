"""One savepoint of three streams that run on while it is taken: whoever is ahead of its writer's goes back further.

The short forms: `test_named_savepoints.py` and `test_affected_streams.py` of the unit tests, and
`test_topology_recovery.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestration.cli.demo import CHANGES, RIGHT_CHANGE, SHOP_STREAMS, WRONG_CHANGE, ShopStory
from streaming_jobs.examples.shop import streams
from streaming_jobs.platform.broker import Broker
from streaming_jobs.state import savepoints
from streaming_jobs.state.savepoint_retention import take_named
from streaming_jobs.state.savepoints import Savepoint
from tests.support.stories import shop_story

NAME = "before-release"
FIRST, CUT, COUNT = 300, 500, 800
pytestmark = pytest.mark.long


@pytest.fixture
def story(broker: Broker, tmp_path: Path) -> Iterator[ShopStory]:
    with shop_story(broker, tmp_path / "shop", COUNT) as told:
        told.begin()
        yield told


def test_each_stream_goes_back_to_its_own_or_further_and_all_equal_the_truth(story: ShopStory) -> None:
    story.feed(0, FIRST)
    story.run_in_order()

    def running(taken: Savepoint) -> None:
        """After the first stream's savepoint, it and the second one read on; the third one stands still."""
        if taken.stream == "stock_changes":
            story.feed(FIRST, CUT)
            story.run_streams(["stock_changes"])
            story.run_streams(["stock"])

    cut = take_named(story.settings, [getattr(streams, name) for name in SHOP_STREAMS], NAME, each=running)
    ahead = savepoints.find(story.settings, "stock", cut.streams["stock"])
    assert ahead is not None and sum(ahead.ends[CHANGES].values()) >= CUT
    story.deploy(WRONG_CHANGE)
    story.feed(CUT, COUNT)
    story.run_in_order()
    story.compare(COUNT, right=False)
    story.deploy(RIGHT_CHANGE)
    plan = json.loads(story.recourse("recover", "plan", "--savepoint", NAME, "--output", "json", quiet=True))
    planned = {each["stream"]: each for each in plan["streams"]}
    assert tuple(planned) == SHOP_STREAMS
    for name in ("stock_changes", "availability"):
        assert planned[name]["base"]["savepoint"] == cut.streams[name], name
    assert planned["stock"]["base"]["batch"] < ahead.batch
    assert any("void after this plan" in note for note in planned["stock"]["notes"])
    story.recourse("recover", "apply", plan["id"], "--yes", quiet=True)
    story.compare(COUNT, right=True)
