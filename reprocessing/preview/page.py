"""The report of a preview: a page that a reviewer of the change reads, self-contained and bounded as every report."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from reprocessing.planning.instants import instant_words
from reprocessing.preview.result import Preview, reasons
from reprocessing.preview.words import code_words, headline, range_words, text
from reprocessing.report.page import difference_section, document, html_table, within
from streaming_jobs.platform.files import write_atomic

_RANGES = 200


def write_page(path: Path, preview: Preview) -> None:
    """Write the page; only its owner can read it."""
    write_atomic(path, page(preview))


def page(preview: Preview) -> str:
    """The page as HTML."""
    title = escape(f"Preview of stream {preview.stream}: {preview.verdict.value}")
    sections = [f"<h1>{title}</h1>", f"<p>{escape(headline(preview))}</p>", *within(_sections(preview))]
    sections += ["<h2>As text</h2>", f"<pre>{escape(text(preview))}</pre>"]
    return document(title, "\n".join(sections))


def _sections(preview: Preview) -> Iterator[str]:
    facts = [
        ["made", instant_words(preview.made_at)],
        ["code", code_words(preview)],
        ["range", range_words(preview)],
        ["records", f"{preview.records:,}"],
        ["published", "nothing: the stream and its tables are as they were"],
    ]
    yield html_table(["", ""], facts)
    if why := reasons(preview):
        yield "<h2>Why it must not be deployed</h2>"
        yield "<ul>" + "".join(f"<li>{escape(each)}</li>" for each in why) + "</ul>"
    if preview.tables:
        head = ["table", "published rows", "rebuilt rows", "changed", "new", "gone", "new columns"]
        yield html_table(head, [_row(preview, place) for place in range(len(preview.tables))], numbers=True)
    figures = [[name, f"{before:,}", f"{after:,}"] for name, before, after in preview.counted()]
    if figures:
        yield "<h2>Figures of the batches</h2>"
        yield html_table(["", "published", "rebuilt"], figures, numbers=True)
    if preview.suites:
        yield "<h2>Suites</h2>"
        yield html_table(
            ["suite", ""], [[name, "; ".join(failing) if failing else "passes"] for name, failing in preview.suites]
        )
    yield "<h2>Offsets</h2>"
    yield html_table(
        ["topic", "partition", "from", "to"],
        [[topic, str(p), f"{begin:,}", f"{end:,}"] for topic, p, begin, end in preview.ranges()[:_RANGES]],
    )
    changed = [table for table in preview.tables if table.rows]
    if changed:
        yield "<h2>Rows of the code on disk against the published ones</h2>"
        yield from (difference_section(table.difference) for table in changed)


def _row(preview: Preview, place: int) -> list[str]:
    table = preview.tables[place]
    d = table.difference
    numbers = [f"{n:,}" for n in (d.old_rows, d.new_rows, d.corrected, d.new, d.gone)]
    return [d.table, *numbers, ", ".join(table.new_columns) or "none"]
