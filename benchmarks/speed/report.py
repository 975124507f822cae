"""The table that is printed: a line for each contestant and work, and then the goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.speed.goals import verdicts
from benchmarks.speed.results import Run, Spread, distinct, select

_BACKLOG = {
    "rate": "records/s",
    "steady_rate": "steady",
    "session_s": "session start s",
    "first_batch_s": "first batch s",
    "cpu_s": "CPU s",
    "peak_mb": "peak MB",
    "elsewhere": "other load",
}
_LIVE = {
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "worst_ms": "worst ms",
    "cores": "cores",
    "peak_mb": "peak MB",
    "session_s": "session start s",
    "first_batch_s": "first batch s",
    "elsewhere": "other load",
}


def markdown(runs: Sequence[Run]) -> str:
    """Everything as Markdown: medians, and in brackets the least and the greatest where there were several rounds."""
    parts = []
    for kind, figures in (("backlog", _BACKLOG), ("live", _LIVE)):
        own = select(runs, kind=kind)
        if own:
            parts.append(_table(["work", "contestant", *figures.values()], _lines(own, figures)))
    found = verdicts(runs)
    if found:
        each = (
            [
                v.goal.peer,
                v.goal.work,
                v.goal.kind,
                v.goal.figure + (f" / {v.goal.of}" if v.goal.of else ""),
                _number(v.reached),
                f"{'>=' if v.goal.at_least else '<='} {_number(v.goal.value)}",
                "yes" if v.met else "no",
            ]
            for v in found
        )
        parts.append(_table(["contestant", "work", "kind", "figure", "reached", "goal", "met"], each))
    return "\n".join(parts)


def _lines(runs: Sequence[Run], figures: dict[str, str]) -> Iterable[list[str]]:
    for work in distinct(runs, "work"):
        for peer in distinct(select(runs, work=work), "peer"):
            own = select(runs, work=work, peer=peer)
            yield [work, peer, *(_shown(Spread.of(own, figure)) for figure in figures)]


def _shown(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if spread.rounds == 1:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.least)}-{_number(spread.greatest)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", "---", *("---:" for _ in head[2:])]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *lines))
