"""A recovery beside a running stream that writes a table and a topic, and beside streams that read the topic."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from reprocessing.plan.journal import journal_of
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.state.topic_records import void_of
from tests.broker.conftest import BenchFactory
from tests.support import diamond
from tests.support.driver import Bench, command, produce, rows, session_of, variables
from tests.support.things import thing
from tests.support.topic_reader import committed
from tests.support.waiting import meanwhile, wait_for

FLOWS = "tests.support.diamond"
WRITER, READER = "first", "seen"
TOPIC = diamond.MARKS.name
MARKERS = f"__recourse.first.{TOPIC}"
WRONG = dict.fromkeys(range(300, 500), 3000)
"""What the wrong code adds to the numbers of the second batch."""


class Live:
    """Streams that run, in a session of their own; things are sent, by tens while `arriving`."""

    def __init__(self, here: Bench, streams: Sequence[str]) -> None:
        self.here, self.streams, self.sent = here, streams, 0

    def send(self, end: int) -> None:
        produce(self.here.bootstrap, "things", map(thing, range(self.sent, end)))
        self.sent = end

    @contextmanager
    def arriving(self) -> Iterator[None]:
        def feed(over: threading.Event) -> None:
            while not over.wait(0.1):
                self.send(self.sent + 10)

        with meanwhile(feed):
            yield

    def whole(self, mark: dict[int, int] | None = None) -> None:
        """Wait until the streams have read all things, and compare tables and topic with the truth."""
        truth = diamond.truth(range(self.sent), mark)
        for table in ("diamond_events", "diamond_seen")[: len(self.streams)]:
            right = truth[table]
            wait_for(lambda: len(self.rows(table)) >= right.total(), f"the rows of {table}")  # noqa: B023
            found = Counter((row["k"], row["n"]) for row in self.rows(table))
            assert found == right, f"{table}: {found - right} {right - found}"
        assert self.counting() == truth["diamond_seen"]

    def rows(self, table: str) -> list[dict[str, Any]]:
        return list(rows(self.here.settings, table))

    def counting(self) -> Counter[tuple[Any, ...]]:
        """The records of the topic, without void ones, as another program would read them."""
        info = self.here.topics.describe(TOPIC)
        assert info is not None
        void = void_of(self.here.settings, TOPIC, info.id)
        records = committed(self.here.bootstrap, TOPIC, 1)
        values = [json.loads(m.value() or b"") for m in records if not void.count({0: (m.offset(), m.offset() + 1)})]
        return Counter((each["k"], each["n"]) for each in values)

    @property
    def ends(self) -> list[dict[int, int]]:
        """The ends of the topic, and of that with its markers."""
        return [self.here.topics.high_watermarks(name) for name in (TOPIC, MARKERS)]

    def recourse(self, *arguments: str) -> str:
        return self.here.recourse(FLOWS, *arguments)

    def plan(self) -> str:
        made = self.recourse("recover", "plan", WRITER, "--to-batch", "0", "--output", "json")
        return str(json.loads(made)["id"])

    def killed(self, point: str, *arguments: str) -> None:
        environment = {**variables(self.here.settings.home, self.here.bootstrap, FLOWS), "RECOURSE_CRASH": point}
        done = command(self.here.settings.home, environment, *arguments)
        assert done.returncode == -signal.SIGKILL, f"{point}: {done.stderr[-2000:]}"

    def done(self, plan: str) -> list[tuple[str, str | None]]:
        lines = journal_of(self.here.settings, plan).lines()
        return [(line.stage, line.stream) for line in lines if line.state == "done"]


@contextmanager
def running(here: Bench, patch: pytest.MonkeyPatch, *names: str) -> Iterator[Live]:
    """The first stream was right for a batch and wrong for the next; the streams run now, with the right code."""
    for topic in ("things", TOPIC, MARKERS):
        if here.topics.describe(topic):
            here.topics.delete(topic)
    here.topics.create("things", 2)
    here.topics.create(TOPIC, 1)
    live, streams = Live(here, names), Topology.load([FLOWS])
    for end, mark in ((300, 0), (500, 3000)):
        patch.setattr(diamond, "MARK", mark)
        live.send(end)
        for name in names:
            here.run(streams[name])
    patch.undo()
    with session_of(here, FLOWS, *names):
        for end in (550, 600):  # batches of their own
            live.send(end)
            wait_for(lambda: len(live.rows("diamond_events")) == live.sent, "the rows")
        yield live


@pytest.fixture
def writer(bench: BenchFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    with running(bench({"flows": [FLOWS]}), monkeypatch, WRITER) as live:
        yield live


@pytest.fixture
def both(bench: BenchFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    with running(bench({"flows": [FLOWS]}), monkeypatch, WRITER, READER) as live:
        yield live


@pytest.mark.long
def test_staged_records_are_appended_once_when_the_stream_stops_though_a_kill_comes_between(writer: Live) -> None:
    plan = writer.plan()
    with writer.arriving():
        writer.killed("first:recover_append_written:0", "recover", "apply", plan, "--yes")
        writer.recourse("recover", "resume", plan, "--yes")
    stages = ["follow", "compare", "take_savepoint", "void_records", "append_records", "replay"]
    assert [each for each, _ in dict.fromkeys(writer.done(plan)) if each in stages] == stages
    writer.whole()
    document = json.loads(writer.recourse("recover", "corrections", plan, "-o", "json"))
    (topic,) = document["streams"][0]["topics"]
    (void,), (instead,) = topic["void"], topic["replaced_by"]
    assert 0 < void["begin"] < void["end"] <= instead["begin"] < instead["end"] <= writer.ends[0][0]
    lines = journal_of(writer.here.settings, plan).lines()
    compared = next(line.found["differences"] for line in lines if line.is_of("compare") and line.state == "done")
    (topic,) = [each for each in compared if each["table"] == f"topic {TOPIC}"]
    assert topic["old_rows"] == topic["new_rows"] > 0
    assert topic["only_old"] == topic["only_new"] == len(range(300, 500, 3)), "each wrong record is corrected"


@pytest.mark.long
def test_an_abort_leaves_the_topic_as_it_was_and_an_undo_lets_the_old_records_count(both: Live) -> None:
    wait_for(lambda: len(both.rows("diamond_seen")) == 200, "the records of the topic")
    before, plan = both.ends, both.plan()
    both.killed("first:recover_compare_ran:0", "recover", "apply", plan, "--yes")
    assert both.ends == before
    both.recourse("recover", "abort", plan)
    assert both.ends == before and not [*both.here.settings.tables_folder.glob("_staging/*")]
    both.whole(WRONG)
    plan = both.plan()
    shown = both.recourse("recover", "show", plan)
    still = f"stands still for seconds at the end, plus about 1 s to append to {TOPIC}, for "
    assert (
        still in shown
        and " offsets at an assumed 20,000 a second, plus " in shown
        and "of seen, its tables stay readable" in shown
    ), shown
    with both.arriving():
        both.recourse("recover", "apply", plan, "--yes")
        done = both.done(plan)
        assert ("follow", READER) not in done and done.index(("replay", WRITER)) < done.index(("replay", READER))
    both.whole()
    with both.arriving():
        both.recourse("recover", "undo", plan, "--yes")
    both.whole(WRONG)
    with both.arriving():
        both.recourse("recover", "apply", both.plan(), "--yes", "--stop-first")
    both.whole()


KILLS = (
    "first:recover_follow_ran:0",
    "first:recover_void_records_ran:0",
    "first:recover_append_records_begun:0",
    "first:recover_append_written:0",
    "first:recover_append_next:0",
    "first:recover_append_records_ran:0",
    "first:recover_replay_begun:0",
    "first:recover_replay_ran:0",
    "seen:recover_replay_begun:0",
    "first:recover_audit_ran:0",
    "first:recover_publish_ran:0",
)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_at_every_border_of_the_append_it_is_resumed_and_ends_the_same(both: Live) -> None:
    plan = both.plan()
    with both.arriving():
        for number, point in enumerate(KILLS):
            both.killed(point, "recover", "resume" if number else "apply", plan, "--yes")
        both.recourse("recover", "resume", plan, "--yes")
    both.whole()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("point", ["append_records_begun", "append_written", "append_next", "replay_ran"])
def test_given_up_between_its_appends_every_record_of_before_counts_again(both: Live, point: str) -> None:
    plan = both.plan()
    both.killed(f"first:recover_{point}:0", "recover", "apply", plan, "--yes")
    both.recourse("recover", "abort", plan)
    both.send(both.sent + 50)
    both.whole(WRONG)


@pytest.mark.long
@pytest.mark.parametrize("point", ["secondary_committed", "primary_committed"])
def test_killed_within_a_batch_that_it_stages_it_may_go_on_with_its_stream_stopped(writer: Live, point: str) -> None:
    """The batch has its records in files, and its rows in the staging table or not yet."""
    plan = writer.plan()
    writer.killed(f"first:{point}:1", "recover", "apply", plan, "--yes")
    writer.recourse("recover", "resume", plan, "--yes", "--stop-first")
    assert ("append_records", WRITER) in writer.done(plan) and ("follow", WRITER) not in writer.done(plan)
    writer.send(writer.sent + 50)
    writer.whole()
