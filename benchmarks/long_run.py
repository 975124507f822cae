"""A run of minutes or hours: figures sampled all the time, and whether any of them grows.

The time after the warm-up is divided into six parts. Of each part one value counts, as a rule the lowest one, so that a
burst is no growth. The growth is the slope over the parts (Theil and Sen), times the time of all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from benchmarks.feeds import YearByYear
from benchmarks.processes import Child
from benchmarks.run import Report, Row, panels, progress, verdict
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status, read_status

STREAMS = ("flights_clean", "airport_hours", "carrier_totals")
"""The shipped streams over the flights."""
PARTS = 6
WARM_UP = 40.0
BEHIND_S = 10.0
_TELL_EVERY = 10.0
Figures = dict[str, float]
"""By name; the first word says of what, such as "threads, JVM"."""


@dataclass(frozen=True)
class Times:
    """The times of a run, in seconds."""

    whole: float
    warm_up: float

    @classmethod
    def of(cls, minutes: float, warm_up_share: float) -> Times:
        """Raises ValueError for a run that is all warm-up."""
        whole = minutes * 60
        warm_up = max(WARM_UP, whole * warm_up_share)
        if whole < 1.5 * warm_up:
            raise ValueError(f"{minutes:g} minutes are too few: the warm-up takes {warm_up:.0f} s of them")
        return cls(whole, warm_up)

    @property
    def judged(self) -> float:
        """Seconds after the warm-up."""
        return self.whole - self.warm_up


@dataclass(frozen=True)
class Bound:
    """The growth that is too much, of each figure whose name begins so: a number, or a share of the first part if that
    is more. `of` is the value of a part; runs of less than `minutes` are not judged by it.
    """

    figures: str
    most: float
    share: float = 0.0
    of: Callable[[Sequence[float]], float] = min
    minutes: float = 0.0


class Sample(NamedTuple):
    """One look, `at` seconds after the streams ran."""

    at: float
    figures: Figures


@dataclass
class LongRun:
    """The samples of a run, and the last status of each stream; at its end a stream may be `behind` records behind."""

    times: Times
    behind: float
    samples: list[Sample] = field(default_factory=list)
    statuses: dict[str, Status] = field(default_factory=dict)

    def watch(self, session: Child, feeder: YearByYear, look: Callable[[float], Figures | None], every: float) -> None:
        """Look for the time of the run, and keep what a look finds; raises if the session or the feed ends."""
        began, tell_at = time.monotonic(), 0.0
        while (at := time.monotonic() - began) < self.times.whole:
            feeder.check()
            session.check()
            if (figures := look(at)) is not None:
                self.samples.append(Sample(at, figures))
                if at >= tell_at:
                    progress(f"{feeder.sent:,} records: {', '.join(f'{k} {v:.0f}' for k, v in figures.items())}")
                    tell_at = at + _TELL_EVERY
            time.sleep(max(0.0, every - (time.monotonic() - began - at)))

    def read_statuses(self, settings: Settings, streams: Sequence[str]) -> None:
        self.statuses |= {name: status for name in streams if (status := read_status(settings, name)) is not None}

    def verdicts(self, bounds: Sequence[Bound]) -> list[Row]:
        applied = [bound for bound in bounds if self.times.whole >= bound.minutes * 60]
        rows = [self._judged(name, bound) for bound in applied for name in self.names(bound.figures) or [bound.figures]]
        return rows + [self._stream(name, status) for name, status in self.statuses.items()]

    def names(self, prefix: str) -> list[str]:
        return sorted({name for sample in self.samples for name in sample.figures if name.startswith(prefix)})

    def _judged(self, name: str, bound: Bound) -> Row:
        length = self.times.judged / PARTS
        begins = [self.times.warm_up + part * length for part in range(PARTS)]
        parts = [[s.figures.get(name, 0.0) for s in self.samples if b <= s.at < b + length] for b in begins]
        if not all(parts) or name not in self.names(name):
            return judged_row(name, "", "", "not seen in some part", "", good=False)
        points = [(begin, bound.of(values)) for begin, values in zip(begins, parts, strict=True)]
        first, last = points[0][1], points[-1][1]
        grown, limit = slope(points) * self.times.judged, max(bound.most, first * bound.share)
        return judged_row(name, first, last, grown, limit, good=grown < limit)

    def _stream(self, name: str, status: Status) -> Row:
        good = status.state in ("running", "idle") and not status.restarts and (status.lag_records or 0) <= self.behind
        state = f"{status.state}, batch {status.batch}, {status.lag_records} behind, {status.restarts} restarts"
        return judged_row(f"stream {name}", "", state, "", f"no restart, {self.behind:,.0f} behind", good=good)

    def report(self, report: Report, rows: Sequence[Row], plot: Path | None) -> None:
        """Print what was judged, and all figures with their growth by the hour; keep the samples, draw them."""
        report.keep(samples=self.samples)
        report.table("verdicts", rows)
        after = [sample for sample in self.samples if sample.at >= self.times.warm_up] or self.samples
        first, last = after[0], after[-1]
        hours = max(last.at - first.at, 1.0) / 3600
        grown = {name: (value - first.figures.get(name, 0.0)) / hours for name, value in last.figures.items()}
        report.table("figures", [{"figure": k, "at the end": last.figures[k], "an hour": v} for k, v in grown.items()])
        if plot:
            draw(self.samples, plot)


def judged_row(what: str, first: object, last: object, grown: object, bound: object, *, good: bool) -> Row:
    parts = {"what": what, "first part": first, "last part": last}
    return {**parts, "growth": grown, "bound": bound, "verdict": verdict(good)}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope of all pairs of points (Theil and Sen): one part that differs does not decide."""
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def draw(samples: Sequence[Sample], path: Path) -> None:
    """A panel for each kind of figure, over the minutes."""
    kinds: dict[str, dict[str, None]] = {}
    for name in (name for sample in samples for name in sample.figures):
        kinds.setdefault(name.partition(",")[0], {})[name] = None
    minutes = [sample.at / 60 for sample in samples]
    with panels(path, len(kinds), 1, (10, 4 * len(kinds))) as axes:
        for panel, (kind, names) in zip(axes, kinds.items(), strict=True):
            for name in names:
                values = [sample.figures.get(name, float("nan")) for sample in samples]
                panel.plot(minutes, values, label=name.partition(", ")[2], linewidth=1.2)
            panel.set_title(kind)
            panel.set_ylim(bottom=0)
