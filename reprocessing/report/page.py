"""The outcome of a plan, as a page that can be archived and sent: `<state>/recoveries/<plan>/report.html`.

The page is self-contained: no script, nothing loaded, every text escaped. Its size is bounded: what is beyond a bound
is left out, and the page says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from reprocessing.planning.instants import instant_words
from reprocessing.plans.journal import Journal, Line
from reprocessing.plans.plan import RecoveryPlan
from reprocessing.rebuild.audit import Difference, paired
from reprocessing.report import difference_plots, plots
from reprocessing.report.batches import READ, BatchSeries
from reprocessing.report.facts import ReportFacts, Span, StreamFacts, facts_of
from reprocessing.report.sample_rows import sample_table
from reprocessing.report.style import STYLE
from streaming_jobs.platform.files import write_atomic
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration
from streaming_jobs.text.spelling import counted

_PLAN_LINES = 400
_STEPS = 200
_COLUMNS = 200
_CHARACTERS = 1_400_000
"""Characters at most before the last sections; a section that would begin after them is left out."""


def write_report(
    path: Path, plan: RecoveryPlan, journal: Journal, differences: Sequence[Difference], explained: str
) -> None:
    """Write the page anew; only its owner can read it."""
    write_atomic(path, page(plan, journal, differences, explained))


def page(plan: RecoveryPlan, journal: Journal, differences: Sequence[Difference], explained: str) -> str:
    """The page as HTML. `differences` are those of the audit; if empty, those in the journal are shown.

    `explained` is the plan's text.
    """
    facts = facts_of(plan, journal, differences)
    title = escape(f"Recovery {plan.id}: {facts.outcome}")
    body = "\n".join(
        [
            f"<h1>{title}</h1>",
            *within(_sections(facts)),
            "<h2>What was done</h2>",
            _steps(plan, journal),
            "<h2>The plan</h2>",
            f"<pre>{escape(_plan_text(plan.id, explained))}</pre>",
        ]
    )
    return document(title, body)


def document(title: str, body: str) -> str:
    """A self-contained page; both parts are HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def within(sections: Iterable[str]) -> Iterator[str]:
    """Yields sections as long as the page has room for them."""
    size = left_out = 0
    for section in sections:
        size += len(section.encode())
        if size <= _CHARACTERS:
            yield section
        else:
            left_out += 1
    if left_out:
        yield f'<p class="soft">The page would be too large: {counted(left_out, "part")} left out.</p>'


def _sections(facts: ReportFacts) -> Iterator[str]:
    if facts.differences:
        head = ["table", "published", "rebuilt", "corrected", "new", "gone"]
        yield html_table(head, [[d.table, *_counts(d)] for d in facts.differences], numbers=True)
    shown = [each for each in facts.streams if each.partitions]
    if shown:
        yield "<h2>Offsets</h2>"
        yield from map(_offsets, shown)
    replayed = [each for each in facts.streams if each.replaced.columns or each.replayed.columns]
    if replayed:
        yield "<h2>Rows per batch</h2>"
        yield from map(_batches, replayed)
    if facts.differences:
        yield "<h2>Rebuilt rows against the published ones</h2>"
        yield from map(difference_section, facts.differences)


def _offsets(stream: StreamFacts) -> str:
    doing, done = ("skip", "skipped") if stream.skips else ("replay", "replayed")
    legend = [
        ("before", "in the tables before"),
        (doing, done if stream.done else f"to be {done}"),
        ("now", "in the tables now"),
    ]
    rows = [
        [
            row.topic,
            str(row.partition),
            *map(_span, (row.before, row.skipped if stream.skips else row.replayed, row.now)),
        ]
        for row in stream.partitions
    ]
    parts = [
        f"<h3>{escape(stream.stream)}</h3>",
        f"<p>{_SCALE.format(done=done)}</p>",
        _legend(legend),
        _plot(plots.offsets(stream)),
    ]
    if stream.left_out.partitions:
        parts.append(
            f'<p class="soft">{counted(stream.left_out.partitions, "more partition")} with '
            f"{counted(stream.left_out.records, 'record')} not shown: these have the fewest.</p>"
        )
    parts.append(_numbers(["topic", "partition", "before", done, "now"], rows))
    return "\n".join(parts)


_SCALE = (
    "The records whose rows are in the tables, by partition. All bars have one scale, in offsets since the first one "
    "that is {done}; an arrow means that the bar begins earlier."
)


def _span(span: Span) -> str:
    return f"{span[0]:,} to {span[1] - 1:,}" if span[0] < span[1] else "none"


def _batches(stream: StreamFacts) -> str:
    series = (("replaced", stream.replaced), ("replay", stream.replayed))
    joined = max(len(each.columns) and each.columns[0].batches for _, each in series) > 1
    legend = [("before", "batches that were replaced"), ("replay", "batches of the replay")]
    words = "Rows written to the primary table per batch, in the order of the batches. "
    if joined:
        legend.append(("most", "rows of the largest batch in a column"))
        words += "A column joins several batches and has their mean. "
    words += "" if plots.shares_scale(stream) else "The two plots have different scales."
    rows = [
        [
            name,
            f"{each.batches:,}",
            f"{each.records:,}",
            f"{each.rows:,}",
            _per_thousand(each),
            _duration(each.seconds),
        ]
        for name, each in series
    ]
    parts = [f"<h3>{escape(stream.stream)}</h3>", f"<p>{words}</p>", _legend(legend), _plot(plots.batches(stream))]
    if any(each.cut for _, each in series):
        parts.append(f'<p class="soft">Only the newest {READ:,} batches are counted.</p>')
    head = ["", "batches", "records read", "rows written", "rows per 1,000 records", "first to last batch"]
    return "\n".join([*parts, html_table(head, rows, numbers=True)])


def _duration(seconds: float) -> str:
    """A duration in text: to a tenth of a second below a minute, otherwise in whole seconds."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(timedelta(seconds=round(seconds)))


def _per_thousand(series: BatchSeries) -> str:
    return f"{1_000 * series.rows / series.records:,.1f}" if series.records else ""


def difference_section(d: Difference) -> str:
    """One table's difference: numbers, plots by time and by key, sums, and some rows."""
    if d.unknown:
        return f"<h3>{escape(d.table)}</h3>\n<p>The rows were not compared: {escape(d.unknown)}</p>"
    parts = [f"<h3>{escape(d.table)}</h3>", html_table(["published", "rebuilt", *_KINDS], [_counts(d)], numbers=True)]
    sums = [(column, sides) for column, sides in d.totals.items() if any(side is not None for side in sides)]
    totals = [[column, str(old), str(new)] for column, (old, new) in sums[:_COLUMNS]]
    legend = _legend([(kind, f"{kind} rows") for kind in _KINDS])
    if d.timeline.periods:
        parts.append(f"<h4>By time: {escape(d.time_column)}</h4>")
        without = d.only_old + d.only_new + d.changed - sum(sum(each[1:]) for each in d.timeline.periods)
        if without:
            parts.append(f'<p class="soft">{counted(without, "differing row")} without a time not shown.</p>')
        parts += [legend, _plot(difference_plots.by_time(d))]
    if d.by_time:
        periods = [[since, *(f"{n:,}" for n in paired(*counts, keyed=d.keyed))] for since, *counts in d.by_time]
        parts.append(_numbers([f"{d.time_column} from", *_KINDS], periods))
    if d.by_key.largest:
        parts += _keys(d, legend)
    if totals:
        parts += [
            f"<h4>Sums over {d.read_words()}</h4>",
            html_table(["sum of", "published", "rebuilt"], totals, numbers=True),
        ]
    if d.sample:
        head, rows = sample_table(d.sample)
        parts += ["<h4>Some rows that differ</h4>", html_table(head, rows, numbers=True)]
    return "\n".join(parts)


_KINDS = difference_plots.KINDS


def _keys(d: Difference, legend: str) -> Iterator[str]:
    keys = d.by_key
    rows = difference_plots.counts_rows(keys)
    yield f"<h4>By key: {escape(', '.join(keys.columns))}</h4>"
    shown = f"the {len(keys.largest)} with most differences" if keys.groups > len(keys.largest) else "all of them"
    unit = "rows that differ" if rows else "values that differ, as each key has one row"
    yield f"<p>{counted(keys.groups, 'key')} with differences; {shown}, by the number of {unit}.</p>"
    yield legend
    yield _plot(difference_plots.by_key(d))
    named = [
        [key, *(f"{n:,}" for n in (changed, came, gone, values))] for key, gone, came, changed, values in keys.largest
    ]
    yield _numbers([", ".join(keys.columns), *_KINDS, "values that differ"], named)


def _counts(d: Difference) -> list[str]:
    counts = (d.old_rows, d.new_rows, d.corrected, d.new, d.gone)
    return ["?" if d.unknown else f"{n:,}" for n in counts]


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = (f'<span><i class="{escape(kind)}"></i>{escape(words)}</span>' for kind, words in entries)
    return f'<div class="legend">{"".join(items)}</div>'


def _plot(picture: str) -> str:
    return f'<div class="wide">{picture}</div>'


def _numbers(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The numbers of a plot as a table that is closed at first."""
    return f"<details><summary>as numbers</summary>{html_table(head, rows)}</details>"


def _plan_text(plan: str, explained: str) -> str:
    """The plan's text; of a very long one the beginning and the end."""
    lines = [line if len(line) <= 1_000 else line[:1_000] + " ..." for line in explained.splitlines()]
    if len(lines) > _PLAN_LINES:
        half = _PLAN_LINES // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half:,} lines: {commands.show_plan(plan)}"]
    return "\n".join(lines) + "\n"


def _steps(plan: RecoveryPlan, journal: Journal) -> str:
    """One row per attempt at a stage: its start, its duration, and its outcome; the newest, if they are too many."""
    rows: list[list[str]] = []
    begun = 0.0
    for line in journal.lines():
        if line.state == "begun":
            begun = line.at
            rows.append([instant_words(line.at), _stage(plan, line), "", "cut off", ""])
            continue
        findings = "; ".join(_finding(key, value) for key, value in line.found.items() if key not in _PLOTTED)
        rows[-1:] = [[instant_words(begun), _stage(plan, line), f"{line.at - begun:.1f} s", line.state, findings]]
    return html_table(["begun", "stage", "took", "", "found"], rows[-_STEPS:])


_PLOTTED = ("differences", "batches", "ends", "starts")
"""Findings that are shown in sections of their own."""


def _finding(key: str, value: Any) -> str:
    if key != "tables":
        return f"{key}: {_short(value)}"
    each = (
        f"{t['table']}: version {t['version']}, {t['came']:,} files came, {t['went']:,} went, {t['stayed']:,} stayed"
        for t in value[:_STEPS]
    )
    return "; ".join(each)


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table; with `numbers`, all columns but those of text are aligned to the right."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(_cell(text, numbers=numbers) for text in row) + "</tr>" for row in rows]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def _cell(text: str, *, numbers: bool) -> str:
    kind = ' class="n"' if numbers and text.lstrip("-")[:1].isdigit() else ""
    return f"<td{kind}>{escape(text)}</td>"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else text[:400] + " ..."


def _stage(plan: RecoveryPlan, line: Line) -> str:
    return line.stage if line.stream is None or len(plan.streams) == 1 else f"{line.stage} {line.stream}"
