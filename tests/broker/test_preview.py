"""Previews as a person makes them, with real commands: while the stream runs, of right, wrong and impossible code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestration.cli.demo import RIGHT, WRONG, Story
from streaming_jobs.examples.stock import movements
from streaming_jobs.platform.broker import Broker
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.stored import entries
from streaming_jobs.state.status import read_status
from tests.broker.test_recovery_of_state import Home, home
from tests.support.driver import command
from tests.support.stories import copy_of, stock_story
from tests.support.waiting import wait_for

__all__ = ["home"]

COUNT = 3_000
SAME = 'F.when(F.col("kind") != "sold", F.col("quantity")).otherwise(-F.col("quantity"))'
"""The right function, written in another way."""


@pytest.fixture(scope="module")
def told(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Two thirds of the movements read by the right code, with savepoints after the first one."""
    with stock_story(broker, tmp_path_factory.mktemp("stock"), COUNT) as story:
        story.deploy(RIGHT)
        story.feed(story.all[: COUNT // 3])
        story.run_streams()
        for name in ("inventory", "low_stock"):
            story.recourse("savepoints", "create", name)
        story.feed(story.all[COUNT // 3 : 2 * COUNT // 3])
        story.run_streams()
        yield story


@pytest.fixture
def story(told: Story, tmp_path: Path) -> Story:
    """A copy of that home."""
    return copy_of(told, tmp_path / "home")


def preview(story: Story, *arguments: str, crash: str = "") -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and talk of a preview, in small batches."""
    environment = story.environment() | {"RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": "300"}
    if crash:
        environment["RECOURSE_CRASH"] = crash
    done = command(story.folder, environment, "preview", *arguments, "-o", "json")
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def files(story: Story) -> dict[str, tuple[int, int]]:
    """Every file of state and tables but those of previews: bytes, and the time of the last change."""
    found = {}
    for root in (story.settings.state, story.settings.tables):
        for folder, _, names in os.walk(root):
            for path in (Path(folder) / name for name in names):
                if "_previews" not in path.parts:
                    found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


def leftovers(story: Story, stream: str) -> list[Path]:
    """What a preview should have removed."""
    places = (story.settings.tables / "_previews" / stream, story.settings.state / "_previews" / stream / "replay")
    return [place for place in places if place.exists()]


def shown(value: dict[str, Any], table: str) -> dict[str, Any]:
    return next(dict(each) for each in value["tables"] if each["table"] == table)


def test_the_same_rows_are_equal_other_rows_are_counted_and_nothing_is_changed(story: Story) -> None:
    before = files(story)
    story.deploy(SAME)
    code, value, said = preview(story, "inventory")
    assert (code, value.get("verdict")) == (0, "equal"), said
    assert value["records"] == COUNT // 3 and value["batches"]["rebuilt"] >= 3
    assert value["code"]["hash"] != value["published_code"][0]["hash"]
    assert Path(value["report"]).is_file() and Path(value["report"]).stat().st_mode & 0o077 == 0
    story.deploy(WRONG)
    code, value, said = preview(story, "inventory")
    assert (code, value.get("verdict")) == (10, "different"), said
    assert (shown(value, "inventory")["corrected"], shown(value, "inventory")["new"]) == (wrong_products(story), 0)
    code, value, said = preview(story, "low_stock")
    part = story.all[COUNT // 3 : 2 * COUNT // 3]
    more = sum(1 for each in part if wrong_change(each) <= -5) - sum(1 for each in part if each.change <= -5)
    assert code == 10 and (shown(value, "low_stock")["new"], shown(value, "low_stock")["gone"]) == (more, 0) and more
    assert files(story) == before and not leftovers(story, "inventory") and not leftovers(story, "low_stock")


def wrong_change(movement: movements.Movement) -> int:
    """The change of the stock by the wrong function."""
    return movement.quantity if movement.kind == "received" else -abs(movement.quantity)


def wrong_products(story: Story) -> int:
    """Products whose quantity the wrong function makes another one, with the movements after the savepoint."""
    right: dict[str, int] = {}
    wrong: dict[str, int] = {}
    for movement in story.all[COUNT // 3 : 2 * COUNT // 3]:
        right[movement.product] = right.get(movement.product, 0) + movement.change
        wrong[movement.product] = wrong.get(movement.product, 0) + wrong_change(movement)
    return sum(1 for product in right if right[product] != wrong[product])


def test_the_stream_runs_on_meanwhile(story: Story) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "orchestration.cli", "streams", "run", "inventory", "--trigger", "continuous"],
        cwd=story.folder,
        env=story.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: _state(story) in ("running", "idle"), "the driver")
        story.feed(story.all[2 * COUNT // 3 :])
        wait_for(lambda: moved(story) == COUNT, "the rest of the movements")
        before = newest(story)
        story.deploy(WRONG)
        previewing = subprocess.Popen(
            [sys.executable, "-m", "orchestration.cli", "preview", "inventory", "-o", "json"],
            cwd=story.folder,
            env=story.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        place = story.settings.tables / "_previews" / "inventory" / "published" / "inventory"
        wait_for(place.is_dir, "the preview")
        story.feed(story.all[:10])
        wait_for(lambda: moved(story) == COUNT + 10, "what comes during the preview")
        assert previewing.poll() is None, "it came while the preview ran"
        value = json.loads(previewing.communicate(timeout=240)[0])
        assert previewing.returncode == 10 and value["verdict"] == "different"
        assert value["to"]["batch"] == before, "the border is the newest batch when the preview began"
        assert value["records"] == 2 * COUNT // 3 and shown(value, "inventory")["new"] == 0
        assert running.poll() is None and _state(story) in ("running", "idle")
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGTERM)
        running.wait(120)


def moved(story: Story) -> int:
    """Movements that the published table has counted."""
    return sum(row["movements"] for row in story.rows("inventory"))


def newest(story: Story) -> int:
    """The newest batch in the published table."""
    return entries(walk(story.settings.tables / "inventory"), 1)[0][1].batch


def _state(story: Story) -> str:
    status = read_status(story.settings, "inventory")
    return "" if status is None else status.state


@pytest.mark.long
def test_a_killed_preview_is_cleaned_up_by_the_next_one(story: Story) -> None:
    code, _, said = preview(story, "inventory", crash="inventory:staged:2")
    assert code == -signal.SIGKILL, said
    assert len(leftovers(story, "inventory")) == 2
    code, value, said = preview(story, "inventory")
    assert (code, value.get("verdict")) == (0, "equal"), said
    assert not leftovers(story, "inventory")
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(story.folder) in str(each.info["cmdline"])]


def test_code_that_cannot_start_on_the_state_is_told_with_the_fix(story: Story) -> None:
    text = story.code.read_text()
    story.code.write_text(text.replace('F.max("at").alias("last_at")', 'F.min("at").alias("last_at")'))
    code, value, said = preview(story, "inventory")
    assert (code, value.get("verdict")) == (1, "cannot start"), said
    assert "built by another aggregation" in value["reasons"][0] and "--to-batch -1" in value["reasons"][0]
    story.code.write_text(text.replace('(-change()).cast("int").alias("taken"), "at"', '"at"'))
    code, value, said = preview(story, "low_stock")
    assert code == 1 and value["verdict"] == "cannot start" and "taken" in value["reasons"][0], said
    assert preview(story, "inventory", "--from-savepoint", "g0001-b000000099")[0] == 2
    assert preview(story, "inventory", "--last", "soon")[0] == 2


@pytest.mark.long
@pytest.mark.parametrize("stream", ["minutes", "distinct_readings"])
def test_windows_end_where_those_of_the_running_stream_do(home: Home, stream: str) -> None:
    """Windows that only the next batch closes are no difference, also if that batch has no records."""
    for first, last in ((0, 200), (200, 600)):
        home.send(first, last)
        home.read(stream)
        if first == 0:
            home("savepoints", "create", stream)
    value = json.loads(home("preview", stream, "-o", "json"))
    assert value["verdict"] == "equal" and shown(value, stream)["published_rows"] > 5
