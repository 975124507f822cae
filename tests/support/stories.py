"""The demonstrations' stories on a test's broker: their topics are new, and gone afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestration.cli.demo import CHANGES, LEVELS, RIGHT, WRONG, ShopStory, Story
from streaming_jobs.examples.shop.streams import TOPICS
from streaming_jobs.examples.stock.movements import PARTITIONS, TOPIC
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics


@contextmanager
def stock_story(broker: Broker, home: Path, count: int) -> Iterator[Story]:
    story = Story(home, Settings.load({"home": home}), broker.start(), count)
    topics = Topics.of(story.settings.kafka, story.bootstrap)
    topics.create(TOPIC, PARTITIONS)
    yield story
    topics.delete(TOPIC)


def with_a_bug(story: Story) -> None:
    """Half of the movements are read by the code there is, half by the wrong one; the right one is deployed again."""
    half = len(story.all) // 2
    story.feed(story.all[:half])
    story.run_streams()
    story.deploy(WRONG)
    story.feed(story.all[half:])
    story.run_streams()
    story.deploy(RIGHT)


def copy_of(story: Story, home: Path) -> Story:
    """The same in a copy of its home."""
    subprocess.run(["cp", "-a", str(story.folder), str(home)], check=True)  # hard links stay hard links
    return Story(home, Settings.load({"home": home}), story.bootstrap, len(story.all))


@contextmanager
def shop_story(broker: Broker, home: Path, count: int) -> Iterator[ShopStory]:
    """With no stream that has begun."""
    story = ShopStory(home, Settings.load({"home": home}), broker.start(), count)
    topics = Topics.of(story.settings.kafka, story.bootstrap)

    def remove() -> None:
        for name in (*TOPICS, f"__recourse.stock_changes.{CHANGES}", f"__recourse.stock.{LEVELS}"):
            if topics.describe(name) is not None:
                topics.delete(name)

    remove()
    yield story
    remove()
