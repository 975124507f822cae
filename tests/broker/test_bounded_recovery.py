"""Bounded recoveries as a person does them: a bug in the middle of a stream's life, and right rows before and after."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from orchestration.cli.demo import RIGHT, WRONG, Story
from streaming_jobs.examples.stock import movements
from streaming_jobs.examples.stock.movements import TOPIC
from streaming_jobs.platform.broker import Broker
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import stream_record
from tests.support.driver import command
from tests.support.stories import copy_of, stock_story

COUNT = 3_000
STREAM = "low_stock"
SMALL = "300"
"""Offsets per batch: several batches of each version of the code."""
Rows = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def bugged(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A third of the movements read by the right code, a third by a wrong one, a third by the right one again."""
    with stock_story(broker, tmp_path_factory.mktemp("stock"), COUNT) as story:
        third = COUNT // 3
        for number, code in enumerate((RIGHT, WRONG, RIGHT)):
            story.deploy(code)
            story.feed(story.all[number * third : (number + 1) * third])
            assert run(story, "streams", "run", STREAM, "--trigger", "available-now").returncode == 0
        yield story


@pytest.fixture
def story(bugged: Story, tmp_path: Path) -> Story:
    """A copy of that home."""
    return copy_of(bugged, tmp_path / "home")


def run(story: Story, *arguments: str, crash: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**story.environment(), "RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER": SMALL}
    if crash is not None:
        environment["RECOURSE_CRASH"] = f"{STREAM}:{crash}:0"
    return command(story.folder, environment, *arguments)


def done(story: Story, *arguments: str) -> str:
    finished = run(story, *arguments)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def wrong_code(story: Story) -> str:
    record = stream_record.load(story.settings, STREAM)
    assert record is not None and len(record.code) == 3
    return record.code[1].hash


def planned(story: Story) -> str:
    code = wrong_code(story)
    arguments = ["recover", "plan", STREAM, "--before-code", code, "--until", f"code {code}", "--require", "taken >= 5"]
    return str(json.loads(done(story, *arguments, "--output", "json"))["id"])


def rows(story: Story) -> Rows:
    return sorted((row["product"], row["taken"], row["at"].astimezone(UTC)) for row in story.rows(STREAM))


def later_files(story: Story) -> set[str]:
    """The files that hold rows of the last third alone."""
    since = story.all[2 * COUNT // 3].at
    uris = DeltaTable(story.settings.tables / STREAM).file_uris()
    return {uri for uri in uris if min(pq.read_table(uri.removeprefix("file://"))["at"].to_pylist()) >= since}


def right(story: Story) -> Rows:
    """The rows of a stream that never erred."""
    return list(movements.low_stock(story.all))


def verified(story: Story) -> dict[str, str]:
    """What `recourse verify` says, by what it compares; every offset is there once."""
    (verdict,) = json.loads(run(story, "verify", STREAM, "--output", "json").stdout)["streams"]
    ends = Topics.of(story.settings.kafka, story.bootstrap).offsets(TOPIC)
    assert (verdict["verified"], verdict["unproved"], verdict["lost"], verdict["doubled"]) == (ends.total, 0, [], [])
    assert not verdict["faults"], verdict
    return {each["what"]: each["verdict"] for each in verdict["comparisons"]}


def outcome(story: Story, plan: str) -> str:
    return str(json.loads(done(story, "recover", "show", plan, "--output", "json"))["outcome"])


def test_it_equals_a_run_that_never_erred_and_later_rows_keep_their_files(story: Story) -> None:
    wrong, kept = rows(story), later_files(story)
    assert wrong != right(story) and len(kept) > 2 and verified(story)["truth"] == "wrong"
    plan = planned(story)
    shown = done(story, "recover", "show", plan)
    assert f"until batch {_last_wrong(story)}" in shown and f"{COUNT // 3:,} records" in shown, shown
    done(story, "recover", "apply", plan, "--yes")
    assert rows(story) == right(story) and kept <= set(DeltaTable(story.settings.tables / STREAM).file_uris())
    says = verified(story)
    assert "wrong" not in says.values() and says["truth"] == says["row counts"] == "ok", says
    report = (story.settings.state / "recoveries" / plan / "report.html").read_text()
    assert "until batch" in report and "add_later_rows" in report
    journal = json.loads(done(story, "recover", "show", plan, "--output", "json"))["journal"]
    found = {line["stage"]: line["found"] for line in journal if line["state"] == "done"}
    assert found["replay"]["records"] == COUNT // 3, "to the end of the wrong code's last batch, and not further"
    done(story, "streams", "run", STREAM, "--trigger", "available-now")
    assert rows(story) == right(story), "no later record is read again"
    done(story, "recover", "undo", plan, "--yes")
    assert rows(story) == wrong and verified(story)["truth"] == "wrong"
    done(story, "recover", "apply", planned(story), "--yes")
    assert rows(story) == right(story)


def _last_wrong(story: Story) -> int:
    record = stream_record.load(story.settings, STREAM)
    assert record is not None
    return record.code[2].batch - 1


STAGES = (
    "take_savepoint",
    "fence",
    "prepare",
    "replay",
    "add_later_rows",
    "audit",
    "publish",
    "continue_generation",
    "clean_up",
)
POINTS = [f"recover_{stage}_{moment}" for stage in STAGES for moment in ("begun", "ran")]
POINTS += [f"recover_{stage}_between" for stage in ("add_later_rows", "publish", "continue_generation")]
SHORT = ("recover_add_later_rows_between",)


@pytest.mark.parametrize(
    "point", [point if point in SHORT else pytest.param(point, marks=pytest.mark.long) for point in POINTS]
)
def test_killed_anywhere_it_is_resumed_and_ends_the_same(story: Story, point: str) -> None:
    kept, before = later_files(story), rows(story)
    plan = planned(story)
    died = run(story, "recover", "apply", plan, "--yes", crash=point)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert outcome(story, plan) == "applying"
    assert rows(story) == (right(story) if point in PUBLISHED else before)
    done(story, "recover", "resume", plan, "--yes")
    assert rows(story) == right(story) and kept <= later_files(story)
    assert not (story.settings.tables / "_staging").exists()
    done(story, "streams", "run", STREAM, "--trigger", "available-now")
    assert rows(story) == right(story)


PUBLISHED = [
    f"recover_{stage}_{moment}" for stage in ("continue_generation", "clean_up") for moment in ("begun", "ran")
]
PUBLISHED += ["recover_publish_ran", "recover_continue_generation_between"]


@pytest.mark.long
@pytest.mark.parametrize("point", [f"recover_{stage}_{moment}" for stage in STAGES[:6] for moment in ("begun", "ran")])
def test_cut_off_anywhere_before_it_publishes_it_can_be_given_up(story: Story, point: str) -> None:
    before, plan = rows(story), planned(story)
    assert run(story, "recover", "apply", plan, "--yes", crash=point).returncode == -signal.SIGKILL
    done(story, "recover", "abort", plan)
    assert outcome(story, plan) == "aborted" and rows(story) == before
    done(story, "streams", "run", STREAM, "--trigger", "available-now")
    assert rows(story) == before and not (story.settings.tables / "_staging").exists()
    done(story, "recover", "apply", planned(story), "--yes")
    assert rows(story) == right(story)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--until", "batch"], "is not the end of a bounded recovery"),
        (["--until", "tomorrow 5"], "the kinds are batch, table-version"),
        (["--until", "batch 99"], "not in the ledger"),
        (["--until", "batch 0"], "nothing between"),
        (["--until", "duration 0 seconds"], "that is an ordinary recovery"),
    ],
)
def test_an_end_that_cannot_be_is_told_in_a_line_and_changes_nothing(
    bugged: Story, arguments: list[str], words: str
) -> None:
    refused = run(bugged, "recover", "plan", STREAM, "--to-batch", "2", *arguments)
    assert refused.returncode == 2 and words in refused.stderr, refused.stderr
    assert len(refused.stderr.strip().splitlines()) <= 3
    assert not list((bugged.settings.state / "recoveries").glob("*/plan.json"))


@pytest.mark.long
def test_records_that_come_afterwards_are_read_after_the_last_batch(story: Story) -> None:
    """The last test: the topic is that of all of them."""
    plan = planned(story)
    more = story.all[:200]
    story.feed(more)
    done(story, "streams", "run", STREAM, "--trigger", "available-now")
    done(story, "recover", "apply", plan, "--yes")
    story.feed(more)
    done(story, "streams", "run", STREAM, "--trigger", "available-now")
    assert rows(story) == sorted([*right(story), *movements.low_stock(more), *movements.low_stock(more)])
