"""Recovery as a person does it, with real commands: the story, kills between stages, abort, undo, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake

from orchestration.cli.demo import BAD, RIGHT, WRONG, Story
from reprocessing.plan.plan_file import load
from reprocessing.plan.planner import RecoveryRequest, make_plan
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.examples.stock import movements
from streaming_jobs.examples.stock.movements import TOPIC
from streaming_jobs.platform.broker import Broker
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import stream_record
from streaming_jobs.state.status import Status, read_status
from tests.broker.small_disk import small_disk
from tests.support import ROOT
from tests.support.driver import command
from tests.support.stories import copy_of, stock_story, with_a_bug
from tests.support.waiting import wait_for

COUNT = 4_000


@pytest.fixture(scope="module")
def bugged(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Half of the movements read by the right code, half by the wrong one; the right one is deployed again."""
    with stock_story(broker, tmp_path_factory.mktemp("stock"), COUNT) as story:
        story.deploy(RIGHT)
        with_a_bug(story)
        yield story


@pytest.fixture
def story(bugged: Story, tmp_path: Path) -> Story:
    """A copy of that home."""
    return copy_of(bugged, tmp_path / "home")


def run(story: Story, *arguments: str, crash: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = story.environment()
    if crash is not None:
        environment["RECOURSE_CRASH"] = f"inventory:{crash}" if ":" in crash else f"inventory:{crash}:0"
        environment["RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER"] = "700"  # a replay of several batches
    return command(story.folder, environment, *arguments)


def outcome(story: Story, plan: str) -> str:
    return str(json.loads(run(story, "recover", "show", plan, "--output", "json").stdout)["outcome"])


def generation(story: Story) -> int:
    record = stream_record.load(story.settings, "inventory")
    assert record is not None
    return record.generation


def stock(story: Story, version: int | None = None) -> dict[str, int]:
    """The quantity in stock of each product, in a version of the table."""
    rows = DeltaTable(story.settings.tables / "inventory", version=version).to_pyarrow_table().to_pylist()
    quantities = {row["product"]: row["quantity"] for row in rows}
    assert len(quantities) == len(rows)
    return quantities


def test_the_story(story: Story) -> None:
    bad = story.compare(COUNT, right=False)
    assert bad > 0 and verified(story) == (1, "wrong")
    plan = story.plan()
    old, begun = stock(story), DeltaTable(story.settings.tables / "inventory").version()
    with polled(story) as polls:
        story.recourse("recover", "apply", plan, "--yes")
    story.compare(COUNT, right=True)
    assert generation(story) == 2 and outcome(story, plan) == "published" and verified(story) == (0, "ok")
    new, ended = stock(story), DeltaTable(story.settings.tables / "inventory").version()
    seen = [stock(story, version) for version in range(begun, ended + 1)]
    assert seen == [old] * (len(seen) - 1) + [new], "whoever reads each version sees old rows, then new ones"
    assert len(polls) > 20 and polls[0] == old and all(poll in (old, new) for poll in polls), "and whoever polls"
    report = (story.settings.state / "recoveries" / plan / "report.html").read_text()
    assert "last_at from" in report and "corrected" in report
    story.recourse("recover", "undo", plan, "--yes")
    story.compare(COUNT, right=False, bad=bad)
    assert generation(story) == 3 and verified(story) == (1, "wrong")


def verified(story: Story) -> tuple[int, str]:
    """Exit code of `recourse verify` and what it says of the values, when every offset is there once."""
    done = run(story, "verify", "inventory", "--output", "json")
    (verdict,) = json.loads(done.stdout)["streams"]
    ends = Topics.of(story.settings.kafka, story.bootstrap).offsets(TOPIC)
    assert (verdict["verified"], verdict["unproved"], verdict["lost"], verdict["doubled"]) == (ends.total, 0, [], []), (
        verdict
    )
    assert not verdict["faults"], verdict
    outcomes = {one["what"]: one["verdict"] for one in verdict["comparisons"]}
    assert outcomes["keys"] == outcomes["dead letters"] == "ok"
    return done.returncode, outcomes["truth"]


@contextmanager
def polled(story: Story) -> Iterator[list[dict[str, int]]]:
    """The stock that a reader sees who reads the newest version repeatedly."""
    seen: list[dict[str, int]] = []
    over = threading.Event()

    def poll() -> None:
        while not over.wait(0.1):
            seen.append(stock(story))

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        try:
            yield seen
        finally:
            over.set()
        polling.result(30)


@pytest.mark.long
@pytest.mark.parametrize(("story", "words"), [("recovery", "; P: published; U: undone"), ("quality", "it is red")])
def test_the_story_as_it_is_told(broker: Broker, tmp_path: Path, story: str, words: str) -> None:
    """The demonstrations themselves: the plot of a reader through recovery and undo, the suite that leads there."""
    broker.start()
    done = subprocess.run(
        [sys.executable, "-m", "orchestration.cli", "demo", story, "--home", str(tmp_path / "demo")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stderr and "done in" in done.stderr and not (tmp_path / "demo").exists()


STAGES = ("take_savepoint", "fence", "prepare", "replay", "audit", "publish", "switch_generation", "clean_up")
POINTS = [f"recover_{stage}_{moment}" for stage in STAGES for moment in ("begun", "ran")]
POINTS += [
    "recover_publish_between",
    "recover_switch_generation_between",
    "staged:1",
    "primary_committed:1",
    "batch_committed:1",
]
FENCED = POINTS[3:13] + POINTS[16:]
"""From the fence to the switch nobody but the plan starts the stream."""
SHORT = ("recover_publish_between",)


@pytest.mark.parametrize(
    "point", [point if point in SHORT else pytest.param(point, marks=pytest.mark.long) for point in POINTS]
)
def test_killed_anywhere_it_is_resumed_and_ends_the_same(story: Story, point: str) -> None:
    plan = story.plan()
    died = run(story, "recover", "apply", plan, "--yes", crash=point)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert outcome(story, plan) == "applying"
    if point in FENCED:
        started = run(story, "streams", "run", "inventory", "--trigger", "available-now")
        assert started.returncode == 78 and ("fenced by" in started.stderr or "is not finished" in started.stderr)
    story.recourse("recover", "resume", plan, "--yes")
    story.compare(COUNT, right=True)
    again = run(story, "recover", "resume", plan, "--yes")
    assert again.returncode == 0 and generation(story) == 2
    assert not (story.settings.tables / "_staging").exists()


def test_an_audit_that_refuses_publishes_nothing_and_can_be_aborted(story: Story) -> None:
    story.deploy(WRONG.replace("F.abs", "2 * F.abs"))  # a fix that is none
    arguments = ["recover", "plan", "inventory", "--before-first-bad", BAD, "--require", f"not ({BAD})"]
    plan = str(json.loads(run(story, *arguments, "--output", "json").stdout)["id"])
    bad = story.compare(COUNT, right=False)
    refused = run(story, "recover", "apply", plan, "--yes")
    assert refused.returncode == 1 and "REC-030" in refused.stderr and "break the rule" in refused.stderr
    assert "(product " in refused.stderr and ", quantity -" in refused.stderr, "some of the rows are shown"
    assert story.compare(COUNT, right=False, bad=bad) == bad
    story.recourse("recover", "abort", plan)
    assert generation(story) == 3 and outcome(story, plan) == "aborted"
    story.compare(COUNT, right=False, bad=bad)
    story.run_streams()
    assert run(story, "recover", "resume", plan).returncode == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "point", ["recover_abort_begun", "recover_abort_between", "recover_abort_published", "recover_abort_ran"]
)
def test_killed_while_it_aborts_it_aborts_once_more(story: Story, point: str) -> None:
    bad = story.compare(COUNT, right=False)
    plan = story.plan()
    assert run(story, "recover", "apply", plan, "--yes", crash="recover_prepare_ran").returncode == -signal.SIGKILL
    assert run(story, "recover", "abort", plan, crash=point).returncode == -signal.SIGKILL
    assert run(story, "recover", "resume", plan, "--yes").returncode == 2
    story.recourse("recover", "abort", plan)
    assert generation(story) == 3 and story.compare(COUNT, right=False, bad=bad) == bad
    story.run_streams()
    story.recourse("recover", "apply", story.plan(), "--yes")
    story.compare(COUNT, right=True)


BEFORE_PUBLISH = [f"recover_{stage}_{moment}" for stage in STAGES[:5] for moment in ("begun", "ran")]


@pytest.mark.long
@pytest.mark.parametrize("point", [*BEFORE_PUBLISH, "staged:1", "batch_committed:1"])
def test_cut_off_anywhere_before_it_publishes_it_can_be_given_up(story: Story, point: str) -> None:
    bad = story.compare(COUNT, right=False)
    plan = story.plan()
    assert run(story, "recover", "apply", plan, "--yes", crash=point).returncode == -signal.SIGKILL
    story.recourse("recover", "abort", plan)
    assert outcome(story, plan) == "aborted" and generation(story) == (1 if point in POINTS[:3] else 3)
    assert story.compare(COUNT, right=False, bad=bad) == bad
    story.run_streams()
    assert not (story.settings.tables / "_staging").exists()


@pytest.mark.long
def test_a_writer_who_comes_between_two_publishes_is_not_written_over(story: Story) -> None:
    plan = story.plan()
    died = run(story, "recover", "apply", plan, "--yes", crash="recover_publish_between")
    assert died.returncode == -signal.SIGKILL
    table = DeltaTable(story.settings.tables / "inventory")
    row = table.to_pyarrow_table().slice(0, 1)
    write_deltalake(table, row, mode="append")
    version = DeltaTable(story.settings.tables / "inventory").version()
    refused = run(story, "recover", "resume", plan, "--yes")
    assert refused.returncode == 1 and "was not written by stream inventory" in refused.stderr, refused.stderr
    assert DeltaTable(story.settings.tables / "inventory").version() == version
    arguments = ["--table", "inventory", "--version", str(version), "--why", "a test"]
    story.recourse("streams", "accept", "inventory", *arguments)
    story.recourse("recover", "resume", plan, "--yes")
    story.compare(COUNT, right=True)


def test_every_target_becomes_offsets_and_a_border(story: Story, tmp_path: Path) -> None:
    """Two batches: the right code's, and the wrong code's."""
    offsets = Topics.of(story.settings.kafka, story.bootstrap).offsets(TOPIC).latest
    record = stream_record.load(story.settings, "inventory")
    assert record is not None
    stream = Topology.load(["streaming_jobs.examples.stock.streams"]).select(["inventory"])[0]
    savepoint = json.loads(run(story, "savepoints", "list", "inventory", "--output", "json").stdout)[0]["savepoint"]
    exported = tmp_path / "offsets.csv"
    plan = story.plan()
    exported.write_text(run(story, "recover", "show", plan, "--offsets").stdout)
    border = load(story.settings, plan).of("inventory").base.ends[TOPIC]
    middle = story.all[COUNT // 2].at
    for kind, value, batch in (
        ("earliest", "", None),
        ("offsets", ",".join(f"{p}:{o}" for p, o in border.items()), 0),
        ("file", str(exported), 0),
        ("shift-by", "-1", 0),
        ("duration", "36500 days", None),
        ("datetime", middle.isoformat(), 0),
        ("batch", "0", 0),
        ("batch", "-1", None),
        ("table-version", "1", 0),
        ("savepoint", savepoint, 0),
        ("code", record.code[1].hash, 0),
    ):
        snapshot = planning_snapshot(story.settings, stream, Topics.of(story.settings.kafka, story.bootstrap))
        made = make_plan(story.settings, [RecoveryRequest(snapshot, Target(kind, value))]).of("inventory")  # type: ignore[arg-type]
        assert not made.skips and made.record_bytes and made.record_bytes > 20
        assert (made.base.savepoint, made.base.batch) == ((None, -1) if batch is None else (savepoint, batch)), kind
        assert made.records == sum(offsets.values()) - (0 if batch is None else sum(border.values())), kind


def test_a_state_folder_that_cannot_be_written_is_told_in_a_line(story: Story, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        home = disk.outside / "home"
        subprocess.run(["cp", "-a", str(story.folder), str(home)], check=True)
        disk.read_only()
        environment = story.environment() | {"RECOURSE_HOME": str(disk.inside / "home")}
        for arguments in (["plan", "inventory", "--to-batch", "0"], ["plan", "inventory", "--to-batch", "-1"]):
            refused = command(story.folder, environment, "recover", *arguments, prefix=disk.prefix)
            assert refused.returncode == 1 and "Read-only" in refused.stderr, refused.stderr
            assert len(refused.stderr.strip().splitlines()) <= 3


@pytest.mark.long
def test_from_the_very_start_it_begins_where_the_stream_began(story: Story) -> None:
    """Whatever the setting `start` says by now."""
    plan = str(
        json.loads(run(story, "recover", "plan", "inventory", "--to-batch", "-1", "--output", "json").stdout)["id"]
    )
    applied = run(story, "--set", "stream.start=latest", "recover", "apply", plan, "--yes")
    assert applied.returncode == 0, applied.stderr
    story.compare(COUNT, right=True)
    undone = run(story, "recover", "undo", plan, "--yes")
    assert undone.returncode == 0, undone.stderr
    story.compare(COUNT, right=False)


@pytest.mark.long
def test_nobody_to_ask_means_no(story: Story) -> None:
    plan = story.plan()
    answer = run(story, "recover", "apply", plan)
    assert answer.returncode == 2 and "nobody to ask" in answer.stderr and outcome(story, plan) == "planned"
    story.recourse("recover", "apply", plan, "--yes")
    story.compare(COUNT, right=True)


def test_a_plan_whose_world_has_moved_is_refused(story: Story) -> None:
    plan = story.plan()
    story.deploy(WRONG.replace("F.abs", "3 * F.abs"))
    moved = run(story, "recover", "apply", plan, "--yes")
    assert moved.returncode == 2 and "no longer holds: the code is" in moved.stderr
    assert generation(story) == 1 and outcome(story, plan) == "planned"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "--to-earliest"], "nothing"),
        (["inventory"], "0 targets were given"),
        (["inventory", "--to-earliest", "--to-batch", "0"], "2 targets were given"),
        (["inventory", "--to-offsets", "0:1"], "leave out partition 1"),
        (["inventory", "--to-datetime", "2026-03-02T06:00:00"], "names no zone"),
        (["inventory", "--before-first-bad", "nope < 0"], "cannot be evaluated"),
        (["inventory", "--to-batch", "0", "--require", "nope(quantity) < 0"], "there is no function nope"),
        (["inventory", "--before-first-bad", "quantity > 100000"], "no row of table inventory is bad"),
        (["inventory", "--to-batch", "99"], "not in the ledger"),
        (["inventory", "--savepoint", "g0001-b000000099"], "no savepoint"),
        (["inventory", "--to-earliest", "--max-changed", "often"], "not a share"),
    ],
)
def test_what_cannot_be_is_told_in_a_line_and_changes_nothing(bugged: Story, arguments: list[str], words: str) -> None:
    refused = run(bugged, "recover", "plan", *arguments)
    assert refused.returncode == 2 and words in refused.stderr, refused.stderr
    assert len(refused.stderr.strip().splitlines()) <= 3
    assert not list((bugged.settings.state / "recoveries").glob("*/plan.json"))


def test_savepoints_and_generations_are_listed_and_dropped(story: Story) -> None:
    made = json.loads(run(story, "savepoints", "create", "inventory", "--note", "mine", "--output", "json").stdout)
    listed = json.loads(run(story, "savepoints", "list", "inventory", "--output", "json").stdout)
    assert [s["reason"] for s in listed] == ["code", "purpose"] and listed[1]["savepoint"] == made["savepoint"]
    story.recourse("savepoints", "drop", "inventory", str(made["savepoint"]))
    assert len(json.loads(run(story, "savepoints", "list", "inventory", "--output", "json").stdout)) == 1
    generations = json.loads(run(story, "generations", "list", "inventory", "--output", "json").stdout)
    assert [life["number"] for life in generations] == [1] and generations[0]["kept"]


STREAMS_RUN = ["orchestration.cli", "streams", "run", "inventory", "low_stock"]
SESSION = ["streaming_jobs.session", "--streams", "inventory,low_stock"]


@pytest.mark.long
@pytest.mark.parametrize("command", [STREAMS_RUN, SESSION], ids=["streams run", "unsupervised"])
def test_a_stream_is_recovered_while_the_others_of_its_session_run(story: Story, command: list[str]) -> None:
    """Afterwards `streams run` goes on with all of them: the driver had the corrected code from its start on."""
    session = subprocess.Popen(
        [sys.executable, "-m", *command, "--trigger", "continuous"],
        cwd=story.folder,
        env=story.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    groups = {session.pid}

    def status(stream: str) -> Status:
        return read_status(story.settings, stream) or Status(stream)

    def at_work(*streams: str) -> bool:
        return {status(stream).state for stream in streams} <= {"running", "idle"}

    try:
        wait_for(lambda: at_work("inventory", "low_stock"), "both streams")
        before = {stream: status(stream) for stream in ("inventory", "low_stock")}
        groups |= {status.pid for status in before.values()}
        plan = story.plan()
        story.recourse("recover", "apply", plan, "--yes")
        story.compare(COUNT, right=True)
        if command is STREAMS_RUN:
            then = before["inventory"]
            wait_for(lambda: status("inventory").started_at > then.started_at, "a new start")
            wait_for(lambda: at_work("inventory"), "inventory with the corrected code")
            assert status("inventory").pid == then.pid, "it is the same process that goes on"
            assert status("low_stock").started_at == before["low_stock"].started_at, "nobody had to stop it"
            assert status("inventory").generation > before["inventory"].generation
            assert session.poll() is None
            session.send_signal(signal.SIGTERM)
            assert session.wait(60) == 0
        else:
            assert status("inventory").state == "stopped"
            assert session.poll() is None and at_work("low_stock")
            story.run_streams(["inventory"])
        story.compare(COUNT, right=True)
    finally:
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        session.wait()


@pytest.mark.long
def test_records_that_came_meanwhile_are_no_difference(story: Story) -> None:
    """Every product moves again after the stream has stopped: the differences are those of the bug all the same."""
    published = {row["product"]: row for row in story.rows("inventory")}
    right = movements.inventory(story.all)
    wrong = {
        product
        for product, row in published.items()
        if (row["quantity"], row["movements"], row["last_at"].astimezone(UTC)) != right[product]
    }
    plan = story.plan()
    story.feed(story.all[: COUNT // 4])
    died = run(story, "recover", "apply", plan, "--yes", crash="staged:2")
    assert died.returncode == -signal.SIGKILL, died.stderr
    story.recourse("recover", "resume", plan, "--yes")
    done = {
        line["stage"]: line["found"]
        for line in json.loads(run(story, "recover", "show", plan, "--output", "json").stdout)["journal"]
        if line["state"] == "done"
    }
    difference = next(d for d in done["audit"]["differences"] if d["table"] == "inventory")
    assert done["replay"]["since"] >= COUNT // 4
    assert (difference["changed"], difference["only_old"], difference["only_new"]) == (len(wrong), 0, 0)
    assert int(difference["totals"]["quantity"][1]) == sum(quantity for quantity, _, _ in right.values())
    assert sum(row["movements"] for row in story.rows("inventory")) == COUNT + done["replay"]["since"]


@pytest.mark.long
def test_a_driver_that_wakes_up_after_the_recovery_writes_nothing(story: Story) -> None:
    """It is stopped in the middle of a batch of the old generation; its lease file is taken away, as a crash might."""
    story.deploy(RIGHT)
    sleeper = subprocess.Popen(
        [sys.executable, "-m", "orchestration.cli", "streams", "run", "inventory", "--trigger", "continuous"],
        cwd=story.folder,
        env=story.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        status = story.settings.state / "inventory" / "status.json"
        wait_for(
            lambda: status.exists() and json.loads(status.read_text())["state"] in ("running", "idle"), "the driver"
        )
        os.killpg(sleeper.pid, signal.SIGSTOP)
        (story.settings.state / "inventory" / "lease").unlink()
        plan = story.plan()
        story.recourse("recover", "apply", plan, "--yes")
        story.compare(COUNT, right=True)
        os.killpg(sleeper.pid, signal.SIGCONT)
        story.feed(story.all[:10])
        sleeper.wait(60)
        story.compare(COUNT, right=True)
    finally:
        if sleeper.poll() is None:
            os.killpg(sleeper.pid, signal.SIGKILL)
        sleeper.wait()
