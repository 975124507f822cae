"""The outcome of a plan, as a page that can be archived and sent: `<state>/recoveries/<plan>/report.html`.

Its size is bounded: what is beyond a bound is left out, and the page says so. `difference_section` is shared with the
page of a preview.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from reprocessing.plan.journal import Journal, Line
from reprocessing.plan.plan import RecoveryPlan
from reprocessing.plan.plan_file import folder
from reprocessing.replay.difference import Difference
from reprocessing.replay.words import RowCounts
from reprocessing.report import plots
from reprocessing.report.facts import READ, BatchSeries, ReportFacts, Span, StreamFacts, facts_of
from streaming_jobs.page import macros, render_page
from streaming_jobs.settings import Settings
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration
from streaming_jobs.text.spelling import counted, instant_words

SECTIONS = Path(__file__).with_name("sections.html.j2")
_PLAN_LINES, _STEPS, _COLUMNS, _CHARACTERS = 400, 200, 200, 120
_PLOTTED = ("differences", "batches", "ends", "starts")
"""Findings that are shown in sections of their own."""
FIGURES = ["published", "rebuilt", *RowCounts._fields]


def report_of(settings: Settings, plan: str) -> Path:
    """The path of a plan's report, which is written when a stage fails or the plan is over."""
    return folder(settings, plan) / "report.html"


def page(plan: RecoveryPlan, journal: Journal, differences: Sequence[Difference], explained: str) -> str:
    """The page as HTML. `differences` are those of the audit; if empty, those in the journal are shown.

    `explained` is the plan's text.
    """
    facts, parts = facts_of(plan, journal, differences), macros()
    last = [
        parts.heading("What was done"),
        parts.table(["begun", "stage", "took", "", "found"], _steps(plan, journal)[-_STEPS:]),
        parts.text("The plan", _plan_text(plan.id, explained)),
    ]
    return render_page(f"Recovery {plan.id}: {facts.outcome}", _sections(facts), last)


def _sections(facts: ReportFacts) -> Iterator[str]:
    parts = macros()
    if facts.differences:
        yield parts.table(["table", *FIGURES], [[d.table, *figures(d)] for d in facts.differences], numbers=True)
    if shown := [each for each in facts.streams if each.partitions]:
        yield parts.heading("Offsets")
        yield from map(_offsets, shown)
    if replayed := [each for each in facts.streams if each.replaced.columns or each.replayed.columns]:
        yield parts.heading("Rows per batch")
        yield from map(_batches, replayed)
    if facts.differences:
        yield parts.heading("Rebuilt rows against the published ones")
        yield from map(difference_section, facts.differences)


def _offsets(stream: StreamFacts) -> str:
    doing, done = ("skip", "skipped") if stream.skips else ("replay", "replayed")
    legend = [
        ("before", "in the tables before"),
        (doing, done if stream.done else f"to be {done}"),
        ("now", "in the tables now"),
    ]
    rows = []
    for row in stream.partitions:
        middle = row.skipped if stream.skips else row.replayed
        rows.append([row.topic, str(row.partition), *map(_span, (row.before, middle, row.now))])
    left, left_out = stream.left_out, ""
    if left.partitions:
        partitions = counted(left.partitions, "more partition")
        left_out = f"{partitions} with {counted(left.records, 'record')} not shown: these have the fewest."
    section: str = macros(SECTIONS).offsets(stream.stream, plots.offsets(stream), legend, done, left_out, rows)
    return section


def _span(span: Span) -> str:
    return f"{span[0]:,} to {span[1] - 1:,}" if span[0] < span[1] else "none"


def _batches(stream: StreamFacts) -> str:
    series = (("replaced", stream.replaced), ("replay", stream.replayed))
    legend = [("before", "batches that were replaced"), ("replay", "batches of the replay")]
    words = "Rows written to the primary table per batch, in the order of the batches. "
    if max(len(each.columns) and each.columns[0].batches for _, each in series) > 1:
        legend.append(("most", "rows of the largest batch in a column"))
        words += "A column joins several batches and has their mean. "
    words += "" if plots.shares_scale(stream) else "The two plots have different scales."
    rows = [
        [
            name,
            *(f"{number:,}" for number in (each.batches, each.records, each.rows)),
            f"{1_000 * each.rows / each.records:,.1f}" if each.records else "",
            _duration(each),
        ]
        for name, each in series
    ]
    cut = f"Only the newest {READ:,} batches are counted." if any(each.cut for _, each in series) else ""
    section: str = macros(SECTIONS).batches(stream.stream, plots.batches(stream), legend, words, cut, rows)
    return section


def _duration(series: BatchSeries) -> str:
    """To a tenth of a second below a minute, otherwise in whole seconds."""
    seconds = series.seconds
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(timedelta(seconds=round(seconds)))


def difference_section(d: Difference) -> str:
    """One table's difference: numbers, plots by time and by key, sums, and some rows."""
    keys = d.by_key
    differing = d.only_old + d.only_new + d.changed
    without_time = differing - sum(sum(each[1:]) for each in d.timeline.periods) if d.timeline.periods else 0
    shown = f"the {len(keys.largest)} with most differences" if keys.groups > len(keys.largest) else "all of them"
    unit = "rows that differ" if plots.counts_rows(keys) else "values that differ, as each key has one row"
    sums = [(column, sides) for column, sides in d.totals.items() if any(side is not None for side in sides)]
    head, rows = sample_table(d.sample)
    section: str = macros(SECTIONS).difference(
        {
            "table": d.table,
            "unknown": d.unknown,
            "figures": [FIGURES, figures(d)],
            "time_column": d.time_column,
            "without_time": f"{counted(without_time, 'differing row')} without a time not shown."
            if without_time
            else "",
            "by_time_plot": plots.by_time(d) if d.timeline.periods else "",
            "periods": [
                [since, *(f"{n:,}" for n in RowCounts.of(*counts, keyed=d.keyed))] for since, *counts in d.by_time
            ],
            "by_key_plot": plots.by_key(d) if keys.largest else "",
            "key_columns": ", ".join(keys.columns),
            "by_key_words": f"{counted(keys.groups, 'key')} with differences; {shown}, by the number of {unit}.",
            "key_rows": [
                [key, *(f"{n:,}" for n in (changed, came, gone, values))]
                for key, gone, came, changed, values in keys.largest
            ],
            "sums": [[column, str(old), str(new)] for column, (old, new) in sums[:_COLUMNS]],
            "sums_over": d.read_words(),
            "sample_head": head,
            "sample_rows": rows,
        }
    )
    return section


def figures(d: Difference) -> list[str]:
    """The cells of a table whose columns are `FIGURES`."""
    return ["?" if d.unknown else f"{n:,}" for n in d.figures.values()]


def sample_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Column names and the rows' values as text.

    A row with the values of both sides has them as `<column> published` and `<column> rebuilt`; such a pair is left out
    if it is equal in every row.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    shown = [column for column in columns if not _equal(column, rows)]
    return shown, [[_text(row[column]) if column in row else "" for column in shown] for row in rows]


def _equal(column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if both sides of the column are the same in all rows."""
    for side, other in ((" published", " rebuilt"), (" rebuilt", " published")):
        if column.endswith(side):
            twin = column.removesuffix(side) + other
            return all(column in row and twin in row and row[column] == row[twin] for row in rows)
    return False


def _text(value: object) -> str:
    if isinstance(value, datetime):
        text = f"{value:%Y-%m-%d %H:%M:%S}" + (f".{value:%f}" if value.microsecond else "")
    elif isinstance(value, date):
        text = value.isoformat()
    else:
        text = "null" if value is None else str(value)
    return _cut(text, _CHARACTERS)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[:characters] + " ..."


def _plan_text(plan: str, explained: str) -> str:
    """The plan's text; of a very long one the beginning and the end."""
    lines = [_cut(line, 1_000) for line in explained.splitlines()]
    if len(lines) > _PLAN_LINES:
        half = _PLAN_LINES // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half:,} lines: {commands.show_plan(plan)}"]
    return "\n".join(lines) + "\n"


def _steps(plan: RecoveryPlan, journal: Journal) -> list[list[str]]:
    """One row per attempt at a stage: its start, its name, its duration, its outcome, and what it found."""
    rows: list[list[str]] = []
    begun = 0.0
    for line in journal.lines():
        if line.state == "begun":
            begun = line.at
            rows.append([instant_words(line.at), _stage(plan, line), "", "cut off", ""])
            continue
        findings = "; ".join(_finding(key, value) for key, value in line.found.items() if key not in _PLOTTED)
        rows[-1:] = [[instant_words(begun), _stage(plan, line), f"{line.at - begun:.1f} s", line.state, findings]]
    return rows


def _stage(plan: RecoveryPlan, line: Line) -> str:
    return line.stage if line.stream is None or len(plan.streams) == 1 else f"{line.stage} {line.stream}"


def _finding(key: str, value: Any) -> str:
    if key != "tables":
        return f"{key}: {_cut(str(value), 400)}"
    each = (
        f"{t['table']}: version {t['version']}, {t['came']:,} files came, {t['went']:,} went, {t['stayed']:,} stayed"
        for t in value[:_STEPS]
    )
    return "; ".join(each)
