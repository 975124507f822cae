"""A bench for one test: a home and a topic of its own on the shared broker and the shared session."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from orchestration.cli.demo import RIGHT, Demonstration, Story
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from tests.conftest import QUICK_START, SettingsFactory
from tests.support import driver
from tests.support.driver import Bench
from tests.support.stories import stock_story
from tests.support.warm import Warm

BenchFactory = Callable[..., Bench]


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands of this run start from one Python and one JVM."""
    home = tmp_path_factory.mktemp("warm")
    made = Warm(home, Settings.load({"home": home, "spark.driver_memory_mb": 1024, "spark.extra": QUICK_START}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Demonstration, "command", staticmethod(driver.command))
        driver.WARM.append(made)
        yield
        driver.WARM.clear()
    made.close()


@pytest.fixture(scope="session", autouse=True)
def quick_children() -> Iterator[None]:
    """Sessions in processes of their own start as quickly as the shared one."""
    os.environ["RECOURSE_SPARK__EXTRA"] = json.dumps(QUICK_START)
    yield
    del os.environ["RECOURSE_SPARK__EXTRA"]


@pytest.fixture
def stock(broker: Broker, tmp_path: Path) -> Iterator[Story]:
    """The story of a stock in a home of its own, with right code, and no movements yet."""
    with stock_story(broker, tmp_path, 40_000) as story:
        story.deploy(RIGHT)
        yield story


@pytest.fixture
def bench(settings: SettingsFactory, broker: Broker, spark: SparkSession) -> BenchFactory:
    """Makes a bench: `bench({"stream.path": "executor"})`."""
    bootstrap = broker.start()

    def make(flags: dict[str, object] | None = None) -> Bench:
        return Bench(settings({"kafka.bootstrap_servers": bootstrap, **(flags or {})}), bootstrap, spark)

    return make


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name of this test's own; the test creates it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:200]
