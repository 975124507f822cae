"""The outcome of a plan, as a page that can be archived and sent: `<state>/recoveries/<plan>/report.html`.

The page is self-contained: no script, nothing loaded, every text escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from reprocessing.explainer import explain
from reprocessing.planning.targets import instant_words
from reprocessing.plans.journal import Journal, Line
from reprocessing.plans.plan import RecoveryPlan
from reprocessing.rebuild.audit import Difference, paired
from streaming_jobs.files import write_atomic

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre { background: #f6f6f4; padding: 1rem; overflow-x: auto; font-size: 13px }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td:not(:last-child) { white-space: nowrap }
td.n { text-align: right; font-variant-numeric: tabular-nums }
"""


def write_report(path: Path, plan: RecoveryPlan, journal: Journal, differences: Sequence[Difference]) -> None:
    """Write the page anew; only its owner can read it."""
    write_atomic(path, page(plan, journal, differences))


def page(plan: RecoveryPlan, journal: Journal, differences: Sequence[Difference]) -> str:
    """The page as HTML. `differences` are those of the audit; if empty, those in the journal are shown."""
    noted = (journal.done("audit") or {}).get("differences", [])
    differences = differences or [Difference.decode(each) for each in noted]
    title = escape(f"Recovery {plan.id}: {journal.outcome}")
    parts = [
        f"<h1>{title}</h1>",
        f"<pre>{escape(explain(plan))}</pre>",
        "<h2>What was done</h2>",
        _steps(plan, journal),
    ]
    if differences:
        parts += ["<h2>Rebuilt rows against the published ones</h2>", *(_difference(d) for d in differences)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _steps(plan: RecoveryPlan, journal: Journal) -> str:
    """One row per attempt at a stage: its start, its duration, and its outcome."""
    rows: list[list[str]] = []
    begun = 0.0
    for line in journal.lines():
        if line.state == "begun":
            begun = line.at
            rows.append([instant_words(line.at), _stage(plan, line), "", "cut off", ""])
            continue
        findings = "; ".join(_finding(key, value) for key, value in line.found.items() if key != "differences")
        rows[-1:] = [[instant_words(begun), _stage(plan, line), f"{line.at - begun:.1f} s", line.state, findings]]
    return _table(["begun", "stage", "took", "", "found"], rows)


def _finding(key: str, value: Any) -> str:
    if key != "tables":
        return f"{key}: {_short(value)}"
    each = (
        f"{t['table']}: version {t['version']}, {t['came']:,} files came, {t['went']:,} went, {t['stayed']:,} stayed"
        for t in value
    )
    return "; ".join(each)


def _difference(d: Difference) -> str:
    counts = [[f"{n:,}" for n in (d.old_rows, d.new_rows, d.corrected, d.new, d.gone)]]
    parts = [
        f"<h3>{escape(d.table)}</h3>",
        _table(["published", "rebuilt", "corrected", "new", "gone"], counts, numbers=True),
    ]
    totals = [[column, str(old), str(new)] for column, (old, new) in d.totals.items()]
    if totals:
        parts.append(_table(["sum of", "published", "rebuilt"], totals))
    if d.by_time:
        periods = [[since, *(f"{n:,}" for n in paired(*counts, keyed=d.keyed))] for since, *counts in d.by_time]
        parts.append(_table([f"{d.time_column} from", "corrected", "new", "gone"], periods))
    if d.sample:
        parts.append(_table(["some rows that differ"], [[_short(row)] for row in d.sample]))
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    cell = '<td class="n">' if numbers else "<td>"
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"{cell}{escape(text)}</td>" for text in row) + "</tr>" for row in rows]
    return "<table>" + "\n".join(lines) + "</table>"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else text[:400] + " ..."


def _stage(plan: RecoveryPlan, line: Line) -> str:
    return line.stage if line.stream is None or len(plan.streams) == 1 else f"{line.stage} {line.stream}"
