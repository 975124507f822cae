"""The page of a report: bounded in size and time, self-contained, and without markup from the data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reprocessing.explainer import explain
from reprocessing.plan.journal import Journal
from reprocessing.replay.difference import for_journal
from reprocessing.report.facts import PARTITIONS
from reprocessing.report.page import page, sample_table
from streaming_jobs.storage.object_files import LocalFiles, ObjectHandle
from tests.support.reports import AT, batches_of, difference, journal_of, plan_of

pytestmark = pytest.mark.slow

LIMIT = 2_000_000
EVIL = "<script>alert(1)</script>\"' onload=x"


class Tags(HTMLParser):
    """The tags of a page with their attributes; elements that are not closed in order are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of(self, tag: str, kind: str | None = None) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.tags if name == tag and kind in (None, attributes.get("class")))


def usual(folder: Path) -> str:
    plan = plan_of(2)
    replayed = batches_of(6, since=AT + 60, records=5_000)
    journal = journal_of(folder, plan, replaced=batches_of(70), replayed=replayed, differences=[difference()])
    return page(plan, journal, [], explain(plan))


def test_a_page_has_the_plots_of_offsets_batches_times_and_keys(tmp_path: Path) -> None:
    read = Tags(usual(tmp_path))
    assert not read.open
    labels = [each["aria-label"] or "" for each in read.of("svg")]
    assert [label.split(":")[0] for label in labels] == [
        "Offsets of stream inventory",
        "Rows per batch of stream inventory",
        "Differing rows of table inventory by hour, from 2026-11-16 19",
        "Differing rows of table inventory by item",
    ]
    assert labels[0].endswith("2 partitions, 30,374 records replayed")
    assert labels[1].endswith("70 batches with 22,778 rows replaced, 6 batches with 20,563 rows in the replay")
    assert all(each["role"] == "img" for each in read.of("svg"))
    # Two bars of "before" are partitions, the others are batches; the four marks are of the legends.
    assert len(list(read.of("rect", "before"))) == 2 + 70 and len(list(read.of("rect", "replay"))) == 2 + 6
    assert len(list(read.of("rect", "now"))) == 2 and len(list(read.of("polygon"))) == 4
    assert len(list(read.of("rect", "corrected"))) == 36 + 20


def test_a_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    text = usual(tmp_path)
    read = Tags(text)
    names = {name for name, _ in read.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "use", "image", "foreignObject"}
    attributes = {key for _, each in read.tags for key in each}
    assert not {key for key in attributes if key.startswith("on")} | (attributes & {"href", "src", "xlink:href"})
    assert "url(" not in text and "@import" not in text and "http" not in text


def test_a_page_can_be_read_on_a_dark_background(tmp_path: Path) -> None:
    style = usual(tmp_path).split("<style>")[1].split("</style>")[0]
    light, dark = (set(re.findall(r"--([a-z]+):", part)) for part in style.split("prefers-color-scheme: dark")[:2])
    assert light == dark and "fill=" not in usual(tmp_path / "again")
    assert set(re.findall(r"var\(--([a-z]+)\)", style)) <= light


def test_text_of_the_data_is_no_markup(tmp_path: Path) -> None:
    plan = plan_of(1)
    differences = [difference(first_key=EVIL, table=EVIL)]
    journal = journal_of(tmp_path, plan, replaced=batches_of(3), differences=differences)
    text = page(plan, journal, [], explain(plan))
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not [attributes for _, attributes in Tags(text).tags if "onload" in attributes]


def test_what_was_done_is_listed_with_attempts_that_a_kill_cut_off_and_with_errors(tmp_path: Path) -> None:
    plan, journal = plan_of(1), Journal(ObjectHandle(LocalFiles(tmp_path), "journal.jsonl"))
    for stage, state, found in (
        ("take_savepoint", "begun", {}),
        ("take_savepoint", "begun", {}),
        ("take_savepoint", "done", {"savepoint": "g0001-b000000003"}),
        ("audit", "begun", {}),
        ("audit", "failed", {"error": f"<b>{EVIL}</b>"}),
    ):
        journal.write(stage, state, found)
    text = page(plan, journal, [], explain(plan))
    assert "refused" in text and "Rebuilt rows" not in text and "savepoint: g0001-b000000003" in text
    assert text.count("<td>take_savepoint</td>") == 2 and text.count("cut off") == 1
    assert "<script" not in text and "&lt;b&gt;" in text
    journal.write("audit", "done", {"differences": for_journal([difference()])})
    published = {"table": "things", "version": 7, "came": 1, "went": 2, "stayed": 3, "seconds": 0.1}
    journal.write("publish", "done", {"tables": [published]})
    text = page(plan, journal, [], explain(plan))
    assert "Rebuilt rows" in text and "hour from" in text and "things: version 7, 1 files came" in text


@pytest.mark.parametrize("until", ["take_savepoint", "fence", "prepare", "replay", "audit", "publish", "clean_up"])
@pytest.mark.parametrize("skips", [False, True])
def test_a_page_can_be_made_after_every_stage(tmp_path: Path, until: str, *, skips: bool) -> None:
    plan = plan_of(2, skips=skips)
    assert not Tags(page(plan, journal_of(tmp_path, plan, until=until), [], explain(plan))).open


def test_a_stream_without_batches_and_records_has_a_page(tmp_path: Path) -> None:
    plan = plan_of(1)
    journal = journal_of(tmp_path, plan, replaced=batches_of(1, records=0), differences=[difference(keys=1)])
    assert "no batches of the replay are in the ledger" in page(plan, journal, [], explain(plan))


def test_a_large_recovery_has_a_small_page(tmp_path: Path) -> None:
    """Twelve streams of two thousand partitions and ten thousand batches each; sixty tables."""
    plan = plan_of(2_000, streams=12)
    tables = [difference(keys=100_000, table=f"table {n}" * 20, first_key="k" * 60) for n in range(60)]
    batches = batches_of(10_000)
    journal = journal_of(tmp_path, plan, replaced=batches, replayed=batches, differences=tables)
    text = page(plan, journal, [], explain(plan))
    assert 500_000 < len(text.encode()) < LIMIT
    assert "left out" in text and not Tags(text).open


def test_partitions_beyond_the_bound_are_counted(tmp_path: Path) -> None:
    plan = plan_of(PARTITIONS + 1)
    read = page(plan, journal_of(tmp_path, plan), [], explain(plan))
    assert "1 more partition with 15,100 records not shown" in read
    assert len(list(Tags(read).of("rect", "replay"))) == PARTITIONS


def test_of_both_sides_only_the_columns_that_differ_are_shown_after_the_keys() -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    rows = [
        {"id": 1, "n published": 1, "n rebuilt": 2, "at published": at, "at rebuilt": at},
        {"id": 2, "n published": None, "n rebuilt": 2, "at published": at, "at rebuilt": at},
    ]
    assert sample_table(rows) == (["id", "n published", "n rebuilt"], [["1", "1", "2"], ["2", "null", "2"]])


def test_rows_of_one_side_keep_all_columns_and_values_are_text() -> None:
    at = datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC)
    rows = [{"side": "gone", "at": at, "day": date(2026, 3, 1), "text": "x" * 200}, {"side": "new"}]
    head, (gone, new) = sample_table(rows)
    assert head == ["side", "at", "day", "text"]
    assert gone == ["gone", "2026-03-01 12:00:00.000005", "2026-03-01", "x" * 120 + " ..."]
    assert new == ["new", "", "", ""]
    assert sample_table([]) == ([], [])


def test_a_column_that_only_ends_like_a_side_is_kept() -> None:
    assert sample_table([{"was published": 1}]) == (["was published"], [["1"]])
