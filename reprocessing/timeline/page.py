"""A timeline in a file: the picture alone (.svg), or a page with the picture and its marks in words (.html)."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from reprocessing.planning.instants import instant_words
from reprocessing.report.style import STYLE
from reprocessing.timeline.marks import Mark
from reprocessing.timeline.plot import draw
from reprocessing.timeline.timeline import Timeline
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.files import write_atomic
from streaming_jobs.text.spelling import counted

MOST = 500
"""Marks at most that a page lists, the newest ones."""


def write(path: Path, timeline: Timeline) -> None:
    """Write the file anew, readable by its owner alone; raises UsageError if its folder is missing."""
    content = draw(timeline) if path.suffix == ".svg" else page(timeline)
    try:
        write_atomic(path, content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name a file in a folder of yours") from error


def page(timeline: Timeline) -> str:
    """The page as HTML."""
    heading = escape(f"Timeline of stream {timeline.stream}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{heading}</title>'
        f"<style>{STYLE} body {{ max-width: 74rem }}</style></head>\n<body>\n<h1>{heading}</h1>\n"
        f'<div class="wide">{draw(timeline)}</div>\n<h2>Marks</h2>\n{"".join(_marks(timeline))}\n</body></html>\n'
    )


def _marks(timeline: Timeline) -> Iterator[str]:
    shown = [mark for mark in timeline.marks if mark.kind != "savepoint" or mark.what != "time"]
    marks = shown[-MOST:]
    if len(shown) > MOST:
        yield f'<p class="soft">{len(shown) - MOST:,} older marks are left out.</p>'
    if left := len(timeline.marks) - len(shown):
        yield f'<p class="soft">{counted(left, "savepoint")} taken by the clock not listed.</p>'
    yield "<table><tr><th>time</th><th>kind</th><th>what</th></tr>"
    yield from map(_row, marks)
    yield "</table>"


def _row(mark: Mark) -> str:
    return f"<tr><td>{instant_words(mark.at)}</td><td>{mark.kind}</td><td>{escape(mark.text)}</td></tr>"
