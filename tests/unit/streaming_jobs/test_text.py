"""Text that people read: durations, never guessed, and pictures as SVG."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings_sections import Duration
from streaming_jobs.text.durations import format_duration, milliseconds, parse_duration
from streaming_jobs.text.svg import element, line, picture, rect, text, ticks


class Lateness(BaseModel):
    delay: Duration


@given(st.integers(0, 10**13))
def test_a_duration_comes_back_from_its_text_to_the_millisecond(ms: int) -> None:
    assert parse_duration(format_duration(timedelta(milliseconds=ms))) == timedelta(milliseconds=ms)


@given(st.integers(0, 10**6), st.sampled_from(["ms", "s", "m", "min", "h", "d", "weeks", "Hours", "SECOND"]))
def test_blanks_and_capitals_do_not_matter(count: int, unit: str) -> None:
    assert parse_duration(f"{count}{unit}") == parse_duration(f"  {count}   {unit.lower()} ")


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500 ms", timedelta(milliseconds=500)),
        ("6 hours", timedelta(hours=6)),
        ("10s", timedelta(seconds=10)),
        ("1.5 h", timedelta(minutes=90)),
        ("2 days 4 hours", timedelta(days=2, hours=4)),
        ("1d2h3m4s5ms", timedelta(days=1, hours=2, minutes=3, seconds=4, milliseconds=5)),
        ("2 weeks", timedelta(days=14)),
        ("0 ms", timedelta(0)),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    "text",
    ["", " ", "10", "hours", "-5 s", "10 parsecs", "5 s later", "5 s,", "1e3 s", "1 h - 5 m", "ten s", "5 s 3", "1 µs"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a duration") as refused:
        parse_duration(text)
    assert "'6 hours'" in refused.value.next_step


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(0), "0 ms"),
        (timedelta(days=1, seconds=1), "1 day 1 second"),
        (timedelta(days=7), "7 days"),
        (timedelta(hours=26), "1 day 2 hours"),
        (timedelta(milliseconds=1), "1 ms"),
        (timedelta(seconds=90), "1 minute 30 seconds"),
    ],
)
def test_durations_are_written_shortly(duration: timedelta, text: str) -> None:
    assert format_duration(duration) == text


def test_milliseconds_are_whole_and_rounded_down() -> None:
    assert milliseconds(timedelta(seconds=1, microseconds=1999)) == 1001


def test_a_field_takes_text_or_a_duration_is_shown_as_text_and_says_what_is_wrong() -> None:
    assert Lateness(delay="6 hours").delay == Lateness(delay=timedelta(hours=6)).delay
    assert Lateness(delay=timedelta(hours=6)).model_dump() == {"delay": "6 hours"}
    with pytest.raises(ValidationError, match="'six' is not a duration"):
        Lateness(delay="six")


def test_words_and_numbers_are_written_and_escaped_as_svg_has_them() -> None:
    assert line(0, 1.26, 2.0, 3, class_="axis") == '<line x1="0" y1="1.3" x2="2" y2="3" class="axis"/>'
    assert text(1, 2, "a", text_anchor="end") == '<text x="1" y="2" text-anchor="end">a</text>'
    assert element("g", line(0, 0, 1, 1)).startswith("<g><line ")
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
