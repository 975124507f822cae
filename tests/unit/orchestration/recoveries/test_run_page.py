"""A recovery in Dagster: the lines, tags and marks that its events become. No Dagster process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from orchestration.recoveries import run as made
from orchestration.recoveries.events import (
    ChangedTable,
    Ended,
    Event,
    Failed,
    OffsetSpan,
    PlanShown,
    Progress,
    Said,
    decode,
    encode,
)
from orchestration.recoveries.launchpad import LAUNCHPAD
from orchestration.recoveries.run import Metadata, RunView
from orchestration.sessions.ownership import PLAN_TAG, STAGE_TAG
from reprocessing.stages.recovery import StageBegun

SHOWN = PlanShown("orders-0001", "Plan orders-0001: rewind\n", "batch 3", ["orders"], "/nowhere", 900)
REPLAY = StageBegun(4, 8, "replay", "orders", "replay 900 records")
CHANGE = ChangedTable("orders", 60, 60, 30, 0, 0, ["orders: 60 rows published, 60 rebuilt; 30 corrected"])
PUBLISHED = Ended("orders-0001", "published", {"orders": 2}, [OffsetSpan("orders", "t", 0, 100, 1000)])
EVENTS: list[Event] = [
    SHOWN,
    REPLAY,
    Progress("orders", 1, 9),
    Said("a"),
    CHANGE,
    PUBLISHED,
    Failed("REC-001", "b", "c"),
]


@dataclass
class Page:
    """Everything that was written, in order."""

    run_id: str = "abc"
    lines: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    marks: list[tuple[str, str, Metadata]] = field(default_factory=list)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def tag(self, name: str, value: str) -> None:
        self.tags[name] = value

    def observe(self, stream: str, metadata: Metadata) -> None:
        self.marks.append(("observed", stream, metadata))

    def rebuilt(self, stream: str, metadata: Metadata) -> None:
        self.marks.append(("materialised", stream, metadata))


@dataclass
class Desk:
    """A view with a clock that is set by hand."""

    page: Page = field(default_factory=Page)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.view = RunView(self.page, clock=lambda: self.now)

    def take(self, *events: Event) -> None:
        for event in events:
            self.view.take(event)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def value(metadata: Metadata, name: str) -> Any:
    return metadata[name].value


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_its_line(event: Event) -> None:
    assert decode(encode(event)) == event


@pytest.mark.parametrize("line", [b"WARN something of the JVM", b"[1]", b'{"event": "unheard of"}', b"\xff"])
def test_a_line_that_is_no_event_is_shown_as_text(line: bytes) -> None:
    assert isinstance(decode(line), Said)


def test_a_plan_alone_marks_no_table_and_says_what_to_do_next(desk: Desk) -> None:
    desk.take(SHOWN, Ended("orders-0001", "planned"))
    assert not desk.page.marks
    assert desk.page.tags == {PLAN_TAG: "orders-0001", STAGE_TAG: "planned"}
    assert desk.page.lines[0] == SHOWN.text
    assert desk.page.lines[-1] == "plan orders-0001 is planned; carry it out: do: apply, plan: orders-0001"


def test_the_tables_are_marked_once_while_the_recovery_is_at_work(desk: Desk) -> None:
    desk.take(SHOWN, StageBegun(1, 8, "keep", "orders", "stop orders"), REPLAY)
    ((how, stream, mark),) = desk.page.marks
    assert (how, stream) == ("observed", "orders")
    assert value(mark, "recovery").startswith("under recovery by plan orders-0001")
    assert value(mark, "run") == "abc" and "rewind" in value(mark, "plan_text")
    assert desk.page.tags[STAGE_TAG] == "4 of 8: replay"
    assert "stage 4 of 8, replay: replay 900 records" in desk.page.lines


def test_progress_has_rate_and_time_left_and_its_lines_become_rarer(desk: Desk) -> None:
    desk.take(SHOWN, REPLAY)
    desk.page.lines.clear()
    for second in range(3601):
        desk.now = float(second)
        desk.take(Progress("orders", second * 10, 72_000))
    assert desk.page.lines[1] == "replay: 50 of 72,000 records, 10 a second, about 120 min left (0%)"
    assert 60 < len(desk.page.lines) < 120
    desk.take(Progress("orders", 72_000, 72_000))
    assert desk.page.lines[-1].startswith("replay: 72,000 of 72,000 records"), "the last one is always shown"


def test_the_time_before_the_first_record_spoils_neither_the_rate_nor_the_log(desk: Desk) -> None:
    desk.take(SHOWN, REPLAY)
    desk.page.lines.clear()
    for second in range(100):
        desk.now = float(second)
        desk.take(Progress("orders", max(second - 80, 0) * 10, 1000))
    assert desk.page.lines[0] == "replay: 0 of 1,000 records (0%)"
    assert desk.page.lines[1:] and all("10 a second" in line for line in desk.page.lines[1:])


def test_a_published_recovery_is_a_materialisation_with_generation_and_offsets(desk: Desk) -> None:
    desk.take(SHOWN, REPLAY, CHANGE, PUBLISHED)
    how, _, mark = desk.page.marks[-1]
    assert how == "materialised" and value(mark, "recovery") == "recovered by plan orders-0001"
    assert value(mark, "generation") == "2"
    table = mark["recovered_offsets"]
    assert isinstance(table, dg.TableMetadataValue)
    (row,) = table.records
    assert row.data == {"stream": "orders", "topic": "t", "partition": 0, "first": 100, "last": 999, "records": 900}
    assert desk.page.tags[STAGE_TAG] == "published"


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Ended("orders-0001", "aborted", {"orders": 3}), "plan orders-0001: given up"),
        (Ended("orders-0001", "waits for confirmation", {"orders": 1}), "plan orders-0001: waits for confirmation"),
        (
            Ended("orders-0001", "published", {"orders": 2}, [OffsetSpan("orders", "t", 0, 5, 9)], skips=True),
            "skipped records by plan orders-0001",
        ),
    ],
)
def test_what_changes_no_row_is_an_observation(desk: Desk, ended: Ended, words: str) -> None:
    desk.take(SHOWN, REPLAY, ended)
    how, _, mark = desk.page.marks[-1]
    assert (how, value(mark, "recovery")) == ("observed", words)
    assert ("skipped_offsets" in mark) == ended.skips


def test_a_recovery_that_was_cut_off_says_where_and_why_on_its_tables(desk: Desk) -> None:
    desk.take(SHOWN, REPLAY)
    desk.view.stopped("applying", "stopped on request")
    _, _, mark = desk.page.marks[-1]
    assert value(mark, "recovery") == "plan orders-0001 is not over, it ended in stage replay: stopped on request"
    assert "do: resume, plan: orders-0001" in value(mark, "next") and "do: abort" in value(mark, "next")
    assert desk.page.tags[STAGE_TAG] == "stopped in replay"


def test_a_plan_that_was_refused_before_its_first_stage_marks_no_table(desk: Desk) -> None:
    desk.take(SHOWN, Failed("REC-001", "plan orders-0001 no longer holds"))
    desk.view.stopped("planned", "REC-001")
    assert not desk.page.marks


@pytest.mark.parametrize(
    "outcome", ["planned", "applying", "waits for confirmation", "refused", "published", "aborting"]
)
def test_each_outcome_names_what_can_be_done_as_text_and_as_links(outcome: str) -> None:
    words, links = made.next_words("orders-0001", outcome), made.next_steps(LAUNCHPAD, "orders-0001", outcome)
    assert "plan: orders-0001" in words
    assert str(links["next_steps"].value).count("/jobs/recover/playground/setup?config=") == words.count("do: ")


def test_a_plan_that_was_given_up_leads_nowhere() -> None:
    assert not made.next_words("orders-0001", "aborted") and not made.next_steps(LAUNCHPAD, "orders-0001", "aborted")


def test_only_files_that_are_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    shown = PlanShown("orders-0001", "``` of a condition", "batch 3", ["orders"], str(tmp_path), 900)
    metadata = made.of_plan(shown)
    assert metadata["plan_file"] == dg.MetadataValue.path(str(tmp_path / "plan.json")) and "report" not in metadata
    assert str(metadata["plan_text"].value).count("```") == 2, "a text of ours cannot end its block"
