"""The picture of a timeline: self-contained, escaped, bounded, and with a sign for every kind of mark."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

from reprocessing.timeline.marks import KINDS, Mark
from reprocessing.timeline.plot import COLUMNS, bins_of, draw, page
from reprocessing.timeline.timeline import Timeline, of_days
from streaming_jobs.state.ledger_file import lines_of
from tests.support.timelines import MONDAY, ledger_line

DAY = 86_400.0
EVIL = "<script>alert(1)</script>\"' onload=x"


def timeline(*marks: Mark, batches: int = 300, replayed: int = 0) -> Timeline:
    lines = [ledger_line(n, MONDAY + n * DAY / batches) for n in range(batches)]
    lines += [ledger_line(9_000 + n, MONDAY + 50_000 + n, generation=2, rows=900, versions={}) for n in range(replayed)]
    return Timeline(
        "parity",
        MONDAY,
        MONDAY + DAY,
        of_days([lines_of("parity", io.BytesIO("\n".join(lines).encode()))], MONDAY).batches,
        marks,
    )


def signs(svg: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(svg).iter() if each.get("class") == "sign"]


def test_every_kind_of_mark_has_a_lane_and_a_sign_with_its_text() -> None:
    marks = [
        Mark(MONDAY + 9_000 * (n + 1), kind, "published", f"text of {kind}", "p-1") for n, kind in enumerate(KINDS)
    ]
    svg = draw(timeline(*marks))
    assert len(signs(svg)) == len(KINDS)
    for kind, lane in zip(KINDS, ("deploys", "code", "sessions", "recoveries", "savepoints", "slices"), strict=True):
        assert f">{lane}<" in svg and f"text of {kind}" in svg
    assert ">deploys<" not in draw(timeline())


def test_the_picture_is_escaped_and_loads_and_runs_nothing() -> None:
    evil = timeline(Mark(MONDAY + 100, "deploy", EVIL, EVIL), Mark(MONDAY + 200, "recovery", "begun", EVIL, EVIL))
    for text in (draw(evil), page(evil)):
        assert "<script" not in text and "url(" not in text and "@import" not in text
        assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    names = {each.tag.rpartition("}")[2] for each in ET.fromstring(draw(evil)).iter()}
    assert not names & {"script", "image", "use", "foreignObject", "a", "link"}


def test_a_long_ledger_gives_a_bounded_picture() -> None:
    many = [Mark(MONDAY + n, "session", "started", "session started") for n in range(5_000)]
    svg = draw(timeline(*many, batches=20_000))
    assert len(signs(svg)) < 600
    assert len(svg) < 400_000


def test_columns_hold_every_batch_once() -> None:
    made = timeline(batches=340, replayed=40)
    bins = bins_of(made.batches, made.since, made.until)
    assert len(bins) <= COLUMNS + 1
    assert sum(each.batches for each in bins) == len(made.batches) == 380
    assert (sum(each.rows for each in bins), sum(each.replayed for each in bins)) == (340 * 15, 40 * 900)


def test_a_replay_does_not_make_the_other_columns_flat() -> None:
    svg = draw(timeline(replayed=40))
    assert "cut off: the largest is" in svg and "of a replay" in svg
    assert "cut off" not in draw(timeline())
    own = [float(each.get("height", 0)) for each in ET.fromstring(svg).iter() if each.get("class") == "rows"]
    assert max(own) > 50


def test_nothing_at_all_is_a_picture_too() -> None:
    assert draw(timeline(batches=0)).count("no batches") == 2


def test_the_page_lists_the_marks_without_savepoints_by_the_clock() -> None:
    text = page(timeline(Mark(MONDAY, "savepoint", "time", "one"), Mark(MONDAY, "deploy", NAME, "the deploy")))
    assert "<td>the deploy</td>" in text and "<td>one</td>" not in text
    assert "1 savepoint taken by the clock" in text


NAME = "0a1b2c3d4e5f"
