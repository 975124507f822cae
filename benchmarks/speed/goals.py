"""What the product is to reach, beside what it reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.speed.records import WORKS
from benchmarks.speed.results import Run, Spread, select

MARK = "kafka-streams"


@dataclass(frozen=True)
class Goal:
    """A figure of a contestant that is to be at least, or at most, `value`; with `of`, times that peer's figure."""

    peer: str
    work: str
    kind: str
    figure: str
    value: float
    at_least: bool = False
    of: str | None = None


@dataclass(frozen=True)
class Verdict:
    """A goal, what was reached of it, and whether that is enough."""

    goal: Goal
    reached: float
    met: bool


def goals() -> list[Goal]:
    """All of them. Rates are records a second, latencies ms, memory MB."""
    found = []
    for work, steady in (("stateless", 1.2), ("windowed", 1.0), ("running", 1.0)):
        found.append(Goal("recourse", work, "backlog", "steady_rate", steady, at_least=True, of=MARK))
    for work in WORKS:
        found.append(Goal("topics", work, "backlog", "steady_rate", 0.8, at_least=True, of=MARK))
        found += [Goal("topics-live", work, "live", figure, 2.0, of=MARK) for figure in ("p50_ms", "p99_ms")]
    for work, p50, p99 in (("stateless", 150, 300), ("windowed", 300, 450), ("running", 200, 400)):
        found.append(Goal("live", work, "live", "p50_ms", p50))
        found.append(Goal("live", work, "live", "p99_ms", p99))
        found.append(Goal("live", work, "live", "peak_mb", 900))
    for work, kind in (("stateless", "backlog"), ("stateless", "live")):
        found.append(Goal("recourse", work, kind, "session_s", 3.5))
    found.append(Goal("recourse", "stateless", "backlog", "first_batch_s", 2.5))
    found.append(Goal("recourse", "stateless", "live", "cores", 0.4))
    found.append(Goal("economy", "stateless", "live", "cores", 0.2))
    return found


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Of every goal for which there are runs."""
    found = []
    for goal in goals():
        own = Spread.of(select(runs, peer=goal.peer, work=goal.work, kind=goal.kind), goal.figure)
        mark = Spread.of(select(runs, peer=goal.of, work=goal.work, kind=goal.kind), goal.figure) if goal.of else None
        if own is None or (goal.of and mark is None):
            continue
        reached = own.median / mark.median if mark else own.median
        found.append(Verdict(goal, reached, reached >= goal.value if goal.at_least else reached <= goal.value))
    return found
