"""Pictures as SVG text."""

from __future__ import annotations

import pytest

from streaming_jobs.text.svg import element, line, picture, rect, text, ticks


def test_names_and_numbers_are_written_as_svg_has_them() -> None:
    assert line(0, 1.26, 2.0, 3, class_="axis") == '<line x1="0" y1="1.3" x2="2" y2="3" class="axis"/>'
    assert text(1, 2, "a", text_anchor="end") == '<text x="1" y="2" text-anchor="end">a</text>'
    assert element("g", line(0, 0, 1, 1)).startswith("<g><line ")


def test_all_words_are_escaped() -> None:
    evil = "<script>\"&'"
    escaped = "&lt;script&gt;&quot;&amp;&#x27;"
    assert text(0, 0, evil) == f'<text x="0" y="0">{escaped}</text>'
    assert f"<title>{escaped}</title></rect>" in rect(0, 0, 1, 1, hover=evil)
    assert picture(10, 20.5, [], label=evil) == f'<svg viewBox="0 0 10 20.5" role="img" aria-label="{escaped}"></svg>'


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (0, [0, 1]),
        (1, [0, 1]),
        (3, [0, 1, 2, 3]),
        (15_100, [0, 5_000, 10_000, 15_000, 20_000]),
        (100, [0, 50, 100]),
        (80, [0, 20, 40, 60, 80]),
    ],
)
def test_ticks_are_round_and_reach_the_largest_value(largest: int, expected: list[int]) -> None:
    assert ticks(largest) == expected


@pytest.mark.parametrize("largest", [1, 7, 99, 12_345, 10**12 + 1, 10**18])
@pytest.mark.parametrize("count", [3, 4, 6])
def test_there_are_never_many_ticks(largest: int, count: int) -> None:
    marks = ticks(largest, count)
    assert marks[0] == 0 and marks[-1] >= largest and len(marks) <= count + 2
