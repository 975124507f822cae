"""The runs of a comparison: their file, their tables beside what the product is to reach, and their plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run import Row, machine, markdown, panels
from benchmarks.speed.records import FORMATS, OPERATORS, WORKS

Run = dict[str, Any]
MARK = "kafka-streams"
_BACKLOG = {"rate": "records/s", "steady_rate": "steady"}
_LIVE = {"p50_ms": "p50 ms", "p99_ms": "p99 ms", "worst_ms": "worst ms", "cores": "cores"}
_BOTH = {"session_s": "session start s", "first_batch_s": "first batch s"}
_COLUMNS = {
    "backlog": {**_BACKLOG, **_BOTH, "cpu_s": "CPU s", "peak_mb": "peak MB", "elsewhere": "other load"},
    "live": {**_LIVE, "peak_mb": "peak MB", **_BOTH, "elsewhere": "other load"},
}


def load(path: Path) -> list[Run]:
    """The runs in a file; none if there is no such file."""
    return list(json.loads(path.read_text())["runs"]) if path.exists() else []


def save(path: Path, runs: Sequence[Run]) -> None:
    """Write machine and runs; several commands may add to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    path.write_text(f'{{"machine": {json.dumps(machine())},\n "runs": [\n{lines}\n]}}\n')


def select(runs: Sequence[Run], **wanted: str) -> list[Run]:
    return [run for run in runs if all(run.get(key) == value for key, value in wanted.items())]


def distinct(runs: Sequence[Run], key: str) -> list[str]:
    """The values that occur, in the order of their first run."""
    return list(dict.fromkeys(str(run[key]) for run in runs))


def values_of(runs: Sequence[Run], figure: str) -> list[float]:
    return [float(run[figure]) for run in runs if figure in run]


@dataclass(frozen=True)
class Goal:
    """A figure of a contestant that is to be at least, or at most, `value`.

    With `of`, `value` times the figure of that peer, with `of_work`, of the contestant itself for that work.
    """

    peer: str
    work: str
    kind: str
    figure: str
    value: float
    at_least: bool = False
    of: str | None = None
    of_work: str | None = None

    @property
    def mark(self) -> str | None:
        """The peer or the work with which the figure is compared."""
        return self.of or self.of_work

    def reached(self, runs: Sequence[Run]) -> float | None:
        """What the runs reached of it; None where there are no runs for it."""
        judged = [(self.peer, self.work)]
        if self.mark:
            judged.append((self.of or self.peer, self.of_work or self.work))
        found = [values_of(select(runs, peer=p, work=w, kind=self.kind), self.figure) for p, w in judged]
        if not all(found):
            return None
        reached, *mark = (statistics.median(values) for values in found)
        return float(reached / mark[0] if mark else reached)

    def met(self, reached: float) -> bool:
        return reached >= self.value if self.at_least else reached <= self.value


def goals() -> Iterator[Goal]:
    """All of them. Rates are records a second, latencies ms, memory MB."""
    for work, steady in zip(WORKS, (1.2, 1.0, 1.0), strict=True):
        yield Goal("recourse", work, "backlog", "steady_rate", steady, at_least=True, of=MARK)
    for work, longer in zip(WORKS, (2.0, 3.0, 2.5), strict=True):
        yield Goal("topics", work, "backlog", "steady_rate", 0.8, at_least=True, of=MARK)
        yield from (Goal("topics-live", work, "live", figure, longer, of=MARK) for figure in ("p50_ms", "p99_ms"))
    for work, p50, p99 in zip(WORKS, (150, 300, 200), (300, 450, 400), strict=True):
        yield from (Goal("live", work, "live", f, v) for f, v in (("p50_ms", p50), ("p99_ms", p99), ("peak_mb", 900)))
    for work in FORMATS:
        yield Goal("recourse", work, "backlog", "steady_rate", 1.2, at_least=True, of_work="stateless")
    for work in OPERATORS:
        yield Goal("recourse", work, "backlog", "steady_rate", 0.7, at_least=True, of=MARK)
    for kind in ("backlog", "live"):
        yield Goal("recourse", "stateless", kind, "session_s", 3.5)
    yield Goal("recourse", "stateless", "backlog", "first_batch_s", 2.5)
    yield Goal("recourse", "stateless", "live", "cores", 0.4)
    yield Goal("economy", "stateless", "live", "cores", 0.2)


def tables(runs: Sequence[Run]) -> str:
    """Medians, in brackets the least and the greatest where there were several rounds; then the goals."""
    parts = [markdown(_lines(select(runs, kind=kind), columns)) for kind, columns in _COLUMNS.items()]
    judged = [_judged(goal, reached) for goal in goals() if (reached := goal.reached(runs)) is not None]
    return "\n".join(part for part in (*parts, markdown(judged)) if part)


def _lines(runs: Sequence[Run], columns: dict[str, str]) -> list[Row]:
    lines: list[Row] = []
    for work in distinct(runs, "work"):
        for peer in distinct(select(runs, work=work), "peer"):
            chosen = select(runs, work=work, peer=peer)
            figures = {column: _spread(values_of(chosen, figure)) for figure, column in columns.items()}
            lines.append({"work": work, "contestant": peer, **figures})
    return lines


def _judged(goal: Goal, reached: float) -> Row:
    return {
        "contestant": goal.peer,
        "work": goal.work,
        "kind": goal.kind,
        "figure": goal.figure + (f" / {goal.mark}" if goal.mark else ""),
        "reached": _number(reached),
        "goal": f"{'>=' if goal.at_least else '<='} {_number(goal.value)}",
        "met": "yes" if goal.met(reached) else "no",
    }


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return _number(values[0]) if values else "-"
    return f"{_number(statistics.median(values))} ({_number(min(values))}-{_number(max(values))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


_WIDTH = 0.8
_COLORS = ("#1b6ca8", "#74b3e0", "#d1495b", "#edae49", "#8d96a3", "#66a182", "#5c4d7d")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Rates from a backlog, latencies live, medians of the rounds."""
    peers = distinct(runs, "peer")
    colors = {peer: _COLORS[number % len(_COLORS)] for number, peer in enumerate(peers)}
    with panels(path, 1, 2, (12, 4.5)) as (left, right):
        _bars(left, select(runs, kind="backlog"), colors, "steady_rate", None)
        left.set_title("backlog: records/s, steady")
        _bars(right, select(runs, kind="live"), colors, "p50_ms", "p99_ms")
        right.set_title("live, 2,000 records/s: latency ms, p50 (bar) and p99 (line)")
        right.set_yscale("log")
        right.set_ylim(bottom=20)


def _bars(axes: Any, runs: Sequence[Run], colors: dict[str, str], figure: str, upper: str | None) -> None:
    works, width = distinct(runs, "work"), _WIDTH / len(colors)
    for place, (peer, color) in enumerate(colors.items()):
        for number, work in enumerate(works):
            chosen = select(runs, work=work, peer=peer)
            if heights := values_of(chosen, figure):
                height = statistics.median(heights)
                rest = max(statistics.median(values_of(chosen, upper)) - height, 0.0) if upper else None
                x, label = number - _WIDTH / 2 + (place + 0.5) * width, peer if number == 0 else None
                axes.bar(x, height, width, label=label, color=color, yerr=rest and [[0.0], [rest]], capsize=2)
    axes.set_xticks(range(len(works)), works)
    axes.yaxis.set_major_formatter("{x:,.0f}")
