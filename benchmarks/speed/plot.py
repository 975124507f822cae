"""The plot: rates from a backlog on the left, latencies live on the right, medians of the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.results import Run, Spread, distinct, select

_WIDTH = 0.8
_COLORS = ("#1b6ca8", "#74b3e0", "#d1495b", "#edae49", "#8d96a3", "#66a182", "#5c4d7d")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the plot; the file's ending says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    peers = distinct(runs, "peer")
    colors = {peer: _COLORS[place % len(_COLORS)] for place, peer in enumerate(peers)}
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    _bars(left, select(runs, kind="backlog"), colors, "steady_rate", None)
    left.set_title("backlog: records/s, steady")
    _bars(right, select(runs, kind="live"), colors, "p50_ms", "p99_ms")
    right.set_title("live, 2,000 records/s: latency ms, p50 (bar) and p99 (line)")
    right.set_yscale("log")
    right.set_ylim(bottom=20)
    left.yaxis.set_major_formatter("{x:,.0f}")
    right.yaxis.set_major_formatter("{x:,.0f}")
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=len(peers), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _bars(axes: Any, runs: Sequence[Run], colors: dict[str, str], figure: str, upper: str | None) -> None:
    works = distinct(runs, "work")
    for place, (peer, color) in enumerate(colors.items()):
        width = _WIDTH / len(colors)
        bars = []
        for number, work in enumerate(works):
            own = select(runs, work=work, peer=peer)
            middle, top = Spread.of(own, figure), Spread.of(own, upper) if upper else None
            if middle is not None:
                x = number - _WIDTH / 2 + (place + 0.5) * width
                bars.append((x, middle.median, max(top.median - middle.median, 0.0) if top else None))
        if bars:
            places, heights, rests = zip(*bars, strict=True)
            errors = ([0.0] * len(bars), list(rests)) if upper else None
            axes.bar(places, heights, width, label=peer, color=color, yerr=errors, capsize=2, ecolor="#444444")
    axes.set_xticks(range(len(works)), works)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
