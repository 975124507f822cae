"""Live input and the reader of a table: how far it is behind, and how that is drawn."""

from __future__ import annotations

import time
from xml.etree import ElementTree as ET

from orchestration.cli.live import Freshness, LiveInput, Look, Mark

FRESHNESS = Freshness(
    [
        *(Look(100 + second / 10, 10 * second, 0.2) for second in range(100)),
        *(Look(110 + second / 10, 990, second / 10) for second in range(41)),  # no further records for four seconds
        *(Look(114.1 + second / 10, 2_000 + second, 0.2) for second in range(60)),
    ]
)
MARKS = [Mark(110, "s", "the stream stops"), Mark(110, "P", "published"), Mark(500, "x", "later than the last look")]


def test_the_largest_gap_is_the_longest_time_without_further_records() -> None:
    assert round(FRESHNESS.largest_gap(), 1) == 4.2
    assert round(FRESHNESS.largest_gap(since=114.5), 1) == 0.1, "a gap that had ended by then"
    assert Freshness([Look(1, 5, 0.0), Look(9, 5, 8.0)]).largest_gap() == 0.0, "none has ended"


def test_a_part_of_the_time_shows_its_worst_look_and_one_without_a_look_that_of_the_part_before() -> None:
    assert Freshness([Look(0, 1, 0.5), Look(1, 2, 0.1), Look(10, 3, 2.0)]).columns(5) == [0.5, 0.5, 0.5, 0.5, 2.0]


def test_the_plot_of_a_terminal_has_its_width_the_marks_in_their_order_and_the_scale() -> None:
    lines = FRESHNESS.lines(MARKS, 80)
    assert max(map(len, lines)) <= 80
    *plot, axis, signs, ends = lines
    assert len(plot) == 8 and plot[0].startswith("  4.0 |") and plot[0].count("#") > 0
    assert plot[-1].count(".") > 40 and axis.startswith("  0.0 +--")
    assert "sP" in signs, "the second of two marks at one place goes beside it"
    assert signs.endswith("x") and ends.split() == ["0", "s", "20", "s"]


def test_the_picture_is_well_formed_and_names_its_marks() -> None:
    picture = FRESHNESS.svg(MARKS, "seconds & more")
    texts = [each.text for each in ET.fromstring(picture).iter() if each.tag.endswith("text")]
    assert "seconds & more" in texts and {"s", "P", "x"} <= set(texts)
    assert "s: the stream stops; P: published; x: later than the last look" in texts


def test_records_arrive_at_their_rate_and_the_reader_sees_how_long_the_oldest_one_waits() -> None:
    sent: list[tuple[int, int]] = []
    live = LiveInput(lambda *part: sent.append(part), lambda: 120, sent=100, most=150, rate=100)
    with live.running():
        deadline = time.monotonic() + 20
        while live.sent < 150 or len(live.looks) < 5 or live.looks[-1].behind < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert sent == [(100, 125), (125, 150)], "no more than there are"
    assert all(look.records == 120 for look in live.looks)
    assert live.looks[-1].behind > 0.3, "the records after the first 120 wait"
