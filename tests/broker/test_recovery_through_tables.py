"""A recovery of a stream takes along the streams that read its tables: one plan, one audit, one undo."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from reprocessing.plan.journal import journal_of
from reprocessing.plan.plan_file import undos_of
from streaming_jobs.catalog.topology import Topology
from tests.broker.conftest import BenchFactory
from tests.broker.test_table_source import made
from tests.support import diamond, two_steps
from tests.support.driver import Bench, command, produce, rows, session_of, variables
from tests.support.things import expected_totals, thing
from tests.support.waiting import wait_for

FLOWS = "tests.support.diamond"
STREAMS = ("first", "sums", "seen", "last")
COLUMNS = {
    "diamond_events": ("k", "n"),
    "diamond_seen": ("k", "n"),
    "diamond_sums": ("k", "c", "s"),
    "diamond_both": ("side", "n"),
}
WRONG = dict.fromkeys(range(300, 500), 3000)
"""What the wrong code adds to the numbers of the second batch."""


@pytest.fixture
def here(bench: BenchFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The first stream was right for a batch and wrong for the next, and all streams have read both."""
    here = bench({"flows": [FLOWS]})
    for topic in ("things", diamond.MARKS.name, f"__recourse.first.{diamond.MARKS.name}"):
        if here.topics.describe(topic):
            here.topics.delete(topic)
    here.topics.create("things", 2)
    here.topics.create(diamond.MARKS.name, 1)
    more(here, 0, 300)
    run(here)
    monkeypatch.setattr(diamond, "MARK", 3000)
    more(here, 300, 500)
    run(here)
    monkeypatch.undo()
    assert_rows(here, 500, WRONG)
    yield here


def more(here: Bench, first: int, end: int) -> None:
    produce(here.bootstrap, "things", map(thing, range(first, end)))


def run(here: Bench, *names: str) -> None:
    for name in names or STREAMS:
        here.run(Topology.load([FLOWS])[name])


def assert_rows(here: Bench, end: int, mark: dict[int, int] | None = None) -> None:
    """Each table has the rows of a computation over the first `end` things."""
    for table, right in diamond.truth(range(end), mark).items():
        found = Counter(tuple(row[name] for name in COLUMNS[table]) for row in rows(here.settings, table))
        assert found == right, f"{table}: {list((found - right).items())[:5]} {list((right - found).items())[:5]}"


def planned(here: Bench, *arguments: str) -> dict[str, Any]:
    made = here.recourse(FLOWS, "recover", "plan", "first", "--to-batch", "0", *arguments, "--output", "json")
    return dict(json.loads(made))


def killed(here: Bench, point: str, *arguments: str) -> None:
    environment = {**variables(here.settings.home, here.bootstrap, FLOWS), "RECOURSE_CRASH": point}
    done = command(here.settings.home, environment, *arguments)
    assert done.returncode == -signal.SIGKILL, f"{point}: {done.stderr[-2000:]}"


def test_a_diamond_of_tables_and_topics_is_put_right_and_taken_back(here: Bench) -> None:
    more(here, 500, 600)
    run(here, "first")  # right again, and the others have not read these rows when the plan stops them
    plan = planned(here)
    assert {each["stream"] for each in plan["streams"]} == set(STREAMS)
    assert all(each["base"]["savepoint"] for each in plan["streams"]), "each goes back to its first batch"
    with session_of(here, FLOWS, "first"):  # the replay follows it; what it writes to the topic is appended at the end
        for end in (620, 640):
            more(here, end - 20, end)
            wait_for(lambda end=end: len(rows(here.settings, "diamond_events")) == end, "the things")  # type: ignore[misc]
        more(here, 640, 700)
        killed(here, "first:recover_append_written:0", "recover", "apply", plan["id"], "--yes")
        here.recourse(FLOWS, "recover", "resume", plan["id"], "--yes")
    done = [(line.stage, line.stream) for line in journal_of(here.settings, plan["id"]).lines() if line.state == "done"]
    assert done.index(("follow", "first")) < done.index(("append_records", "first")) < done.index(("replay", "seen"))
    run(here)
    assert_rows(here, 700)
    more(here, 700, 800)
    run(here)
    assert_rows(here, 800)
    here.recourse(FLOWS, "recover", "undo", plan["id"], "--yes")
    run(here)
    assert_rows(here, 800, WRONG)


KILLS = (
    "first:recover_fence_ran:0",
    "sums:recover_prepare_ran:0",
    "seen:recover_replay_begun:0",
    "sums:recover_replay_ran:0",
    "last:recover_replay_ran:0",
    "first:recover_publish_ran:0",
    "last:recover_publish_between:0",
    "last:recover_switch_generation_between:0",
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_between_its_streams_it_is_resumed_and_ends_the_same(here: Bench) -> None:
    plan = planned(here)["id"]
    more(here, 500, 600)
    for number, point in enumerate(KILLS):
        killed(here, point, "recover", "resume" if number else "apply", plan, "--yes")
    here.recourse(FLOWS, "recover", "resume", plan, "--yes")
    run(here)
    assert_rows(here, 600)
    for number, point in enumerate(KILLS):
        undo = undos_of(here.settings, plan)
        killed(here, point, *(("recover", "resume", undo[-1]) if number else ("recover", "undo", plan)), "--yes")
    here.recourse(FLOWS, "recover", "resume", undos_of(here.settings, plan)[-1], "--yes")
    run(here)
    assert_rows(here, 600, WRONG)
    here.recourse(FLOWS, "recover", "apply", planned(here)["id"], "--yes")
    run(here)
    assert_rows(here, 600)


@pytest.mark.long
def test_given_up_after_the_replays_every_stream_goes_on_as_it_was(here: Bench) -> None:
    for point in ("first:recover_fence_ran:0", "last:recover_replay_ran:0", "first:recover_audit_ran:0"):
        plan = planned(here)["id"]
        killed(here, point, "recover", "apply", plan, "--yes")
        here.recourse(FLOWS, "recover", "abort", plan)
    more(here, 500, 600)
    run(here)
    assert_rows(here, 600, WRONG)


@pytest.mark.long
def test_a_reader_is_left_or_rebuilt_if_somebody_chooses_so(here: Bench) -> None:
    plan = planned(here, "--leave", "last", "--rebuild", "sums")
    assert {each["stream"] for each in plan["streams"]} == {"first", "sums", "seen"}
    more(here, 500, 600)
    here.recourse(FLOWS, "recover", "apply", plan["id"], "--yes")
    run(here)
    both = Counter(row["n"] for row in rows(here.settings, "diamond_both") if row["side"] == "events")
    assert both == Counter([*range(300), *(i + WRONG[i] for i in WRONG), *range(500, 600)])
    with pytest.raises(AssertionError, match="diamond_both"):
        assert_rows(here, 600)


TWO_STEPS = "tests.support.two_steps"


@pytest.mark.long
def test_beside_their_session_the_writer_is_followed_and_its_reader_replayed_after_it(
    bench: BenchFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = made(bench)
    streams = Topology.load([TWO_STEPS])
    for first, mark in ((0, 0), (300, 1000)):
        monkeypatch.setattr(two_steps, "MARK", mark)
        more(here, first, first + 300)
        for name in ("clean", "sums"):
            here.run(streams[name])

    def totals() -> dict[str, tuple[int, int]]:
        return {row["k"]: (row["c"], row["s"]) for row in rows(here.settings, "sums")}

    def read(end: int) -> None:
        wait_for(lambda: sum(count for count, _ in totals().values()) == end, f"{end} rows in sums")

    with session_of(here, TWO_STEPS, "clean", "sums"):
        for end in (700, 800, 900):
            more(here, end - 100, end)
            read(end)
        made_plan = here.recourse(TWO_STEPS, "recover", "plan", "clean", "--to-batch", "0", "--output", "json")
        plan = json.loads(made_plan)["id"]
        here.recourse(TWO_STEPS, "recover", "apply", plan, "--yes")
        more(here, 900, 1000)
        read(1000)
        assert totals() == expected_totals(range(1000))
        assert Counter(row["n"] for row in rows(here.settings, "clean")) == Counter(range(1000))
        done = [(line.stage, line.stream) for line in journal_of(here.settings, plan).lines() if line.state == "done"]
        followed, stopped = done.index(("follow", "clean")), done.index(("take_savepoint", "clean"))
        assert followed < stopped < done.index(("replay", "sums")) and ("follow", "sums") not in done
