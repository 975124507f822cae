"""A recovery beside its running stream: readers see fresh rows all the while, and the result is that of right code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import pytest

from orchestration.cli.demo import RIGHT, WRONG, Story
from orchestration.cli.live import Freshness
from reprocessing.plan.journal import journal_of
from streaming_jobs.errors import PermanentError
from streaming_jobs.platform.broker import Broker
from streaming_jobs.platform.table_rows import rows
from streaming_jobs.state.status import Status, read_status
from tests.broker.small_disk import small_disk
from tests.support.waiting import wait_for

STREAMS = ("inventory", "low_stock")
FIRST = 20_000
PER_SECOND = 100
FRESH_WITHIN = 45.0
"""Seconds. On a quiet machine it is 5; where streams stop first, the replay and a start of Spark come on top."""


@pytest.fixture
def sent(stock: Story) -> Story:
    """The first movements are sent, and wrong code will read them."""
    stock.deploy(WRONG)
    stock.feed(stock.all[:FIRST])
    return stock


@pytest.fixture
def live(sent: Story) -> Iterator[Story]:
    """The wrong code has read the first movements, and goes on reading those that keep coming."""
    with sent.session() as check:
        sent.wait(lambda: sent.has_read(FIRST), "all movements", check)
        yield sent


def status(story: Story, stream: str = "inventory") -> Status:
    return read_status(story.settings, stream) or Status(stream)


def settled(story: Story, generation: int) -> None:
    """Wait until both streams go on in a generation."""
    wait_for(lambda: story.runs_in(generation, streams=STREAMS), f"both streams in generation {generation}")


def stages(story: Story, plan: str) -> list[str]:
    return [line.stage for line in journal_of(story.settings, plan).lines() if line.state == "done"]


def crashed(story: Story, point: str, *arguments: str) -> None:
    """A command that is killed at a point of its recovery."""
    environment = {**story.environment(), "RECOURSE_CRASH": f"inventory:{point}:0"}
    done = story.command(story.folder, environment, *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr


def whole(story: Story, sent: int) -> None:
    """Wait until both tables have all movements, and compare them with the truth."""
    wait_for(lambda: story.has_read(sent), "the rest")
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
    told_to_readers_outside(live, plan)
    log = (live.folder / "session.log").read_text()
    assert "the start of the stream was " in log, "rehearsed, if ten seconds were enough for it here"


def told_to_readers_outside(story: Story, plan: str) -> None:
    """The corrections of a plan, compared with the two versions of each table that they name."""
    document = json.loads(story.recourse("recover", "corrections", plan, "-o", "json", quiet=True))
    assert (document["schema"], document["outcome"]) == ("recourse.corrections/1", "published")
    assert [each["generation"] for each in document["streams"]] == [{"before": 1, "after": 2}] * 2
    tables = {table["table"]: table for stream in document["streams"] for table in stream["tables"]}

    def at(name: str, which: str) -> list[dict[str, Any]]:
        return list(rows(story.settings.tables / name, tables[name]["version"][which]).to_pylist())

    before, after = ({row["product"]: row for row in at("inventory", which)} for which in ("before", "after"))
    touched = {product for (product,) in tables["inventory"]["keys"]}
    assert tables["inventory"]["key_columns"] == ["product"]
    assert {product for product, row in before.items() if row["quantity"] < 0} <= touched
    assert all(before[product] != after[product] for product in touched)
    gone = Counter(map(values, at("low_stock", "before"))) - Counter(map(values, at("low_stock", "after")))
    least, most = map(datetime.fromisoformat, tables["low_stock"]["ranges"]["at"])
    counts = tables["low_stock"]["rows"]
    assert tables["low_stock"]["keys"] is None and gone.total() == counts["gone"] + counts["corrected"] > 0
    assert all(least <= when.astimezone(UTC) <= most for *_, when in gone)


def values(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["product"], row["taken"], row["at"]


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


@pytest.mark.long
@pytest.mark.parametrize("killed", ["session", "broker"])
def test_what_dies_while_the_replay_follows_does_not_change_where_it_ends(
    broker: Broker, sent: Story, killed: str
) -> None:
    """The recovery goes on without its stream's session; without the broker it ends, and is resumed."""
    arriving = sent.live(FIRST, PER_SECOND)
    with ExitStack() as first:
        check = first.enter_context(sent.session())
        sent.wait(lambda: sent.has_read(FIRST), "all movements", check)
        sent.deploy(RIGHT)
        plan = sent.plan_of(*STREAMS, "--to-earliest", show=False)
        journal = journal_of(sent.settings, plan)
        with ThreadPoolExecutor(1) as pool:
            applied = pool.submit(sent.command, sent.folder, sent.environment(), "recover", "apply", plan, "--yes")
            wait_for(lambda: journal.reached("follow"), "the replay")
            if killed == "session":
                os.kill(status(sent).pid or 0, signal.SIGKILL)
                with pytest.raises(PermanentError, match="the session has ended"):
                    first.close()
            else:
                broker.kill()
                time.sleep(2)
                broker.restart()
            if applied.result(300).returncode != 0:
                sent.recourse("recover", "resume", plan, "--yes")
        assert journal.outcome == "published"
        if killed == "session":
            first.enter_context(sent.session())
        with arriving.running():
            settled(sent, 2)
        whole(sent, arriving.sent)


@pytest.mark.long
def test_a_full_disk_of_the_replay_ends_it_alone_and_with_space_there_is_another(live: Story) -> None:
    """The first plan, and the state of its replay, lie on a small disk of their own."""
    before = status(live)
    arriving = live.live(FIRST, PER_SECOND)
    with arriving.running():
        live.deploy(RIGHT)
        with small_disk(live.settings.state / "recoveries", 8) as disk:

            def on_disk(*arguments: str) -> subprocess.CompletedProcess[str]:
                command = [*disk.prefix, sys.executable, "-m", "orchestration.cli", *arguments]
                return subprocess.run(
                    command, env=live.environment(), cwd=live.folder, capture_output=True, text=True, check=False
                )

            planned = on_disk("recover", "plan", *STREAMS, "--to-earliest", "--output", "json")
            plan = json.loads(planned.stdout)["id"]
            disk.fill()
            full = on_disk("recover", "apply", plan, "--yes")
            assert full.returncode != 0 and "No space left on device" in full.stderr, full.stderr[-2000:]
            assert status(live).begun_at == before.begun_at and status(live).state in ("running", "idle")
            disk.free()
            assert on_disk("recover", "abort", plan).returncode == 0
        plan = live.plan_of(*STREAMS, "--to-earliest", show=False)
        live.recourse("recover", "apply", plan, "--yes")
        settled(live, 2)
    whole(live, arriving.sent)
