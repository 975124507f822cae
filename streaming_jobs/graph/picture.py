"""A graph as an SVG picture: records go from left to right; one band for each sub-topology.

Plain SVG: no script, nothing loaded, all text escaped; colours for a light and a dark background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean

from streaming_jobs.graph.graph import Edge, Graph, Kind, Node
from streaming_jobs.page import colours
from streaming_jobs.spelling import counted
from streaming_jobs.svg import element, picture, rect, text, title

_LETTER, _PADDING, _HEIGHT, _ROW, _GAP, _EDGE, _BAND = 7.4, 16.0, 34.0, 52.0, 90.0, 24.0, 30.0
_SWEEPS = 4
"""Times that the nodes of all columns are put in the order of their neighbours; more changes little."""
_CORNERS: Mapping[Kind, float] = {"topic": _HEIGHT / 2, "stream": 5, "table": 0}

STYLE = (
    colours("svg", "ink", "soft", "back", "warn", "now", "good")
    + """
svg { --topic: #fff3d6; --stream: #dbeafe; --table: #dcf5e3 }
@media (prefers-color-scheme: dark) { svg { --topic: #3b2e0b; --stream: #0c2d5e; --table: #0f3a1d } }
text { font: 13px ui-monospace, monospace; fill: var(--ink) }
text.note { font: 12px system-ui, sans-serif; fill: var(--soft) }
.back { fill: var(--back) }
.edge { fill: none; stroke: var(--soft); stroke-width: 1.5 }
.topic { fill: var(--topic); stroke: var(--warn) } .stream { fill: var(--stream); stroke: var(--now) }
.table { fill: var(--table); stroke: var(--good) }
"""
)


def draw(graph: Graph) -> str:
    """The picture as an SVG file, with a legend."""
    bands, y, width = [], _EDGE + _BAND, 420.0
    for part in graph.parts():
        band = _Band(part, y)
        bands.append(band)
        y, width = y + band.height + _BAND, max(width, band.width)
    streams = sum(node.kind == "stream" for node in graph.nodes)
    children = [element("style", STYLE), rect(0, 0, width, y, class_="back"), *_legend()]
    children += [shape for band in bands for shape in band.shapes()]
    label = f"Topology: {counted(streams, 'stream')}"
    made = picture(width, y, [title(label), *children], label=label)
    return made.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


class _Band:
    """The places of one sub-topology's nodes, below `top`."""

    def __init__(self, graph: Graph, top: float) -> None:
        self.graph, self.top = graph, top
        self.columns = ordered(graph)
        self.widths = [max(len(node.name) for node in column) * _LETTER + 2 * _PADDING for column in self.columns]
        self.lefts = [_EDGE + sum(self.widths[:i]) + i * _GAP for i in range(len(self.columns))]
        self.width = self.lefts[-1] + self.widths[-1] + _EDGE
        rows = max(len(column) for column in self.columns)
        self.height = (rows - 1) * _ROW + _HEIGHT
        self.places = {
            node: (column, top + (rows - len(nodes)) * _ROW / 2 + row * _ROW)
            for column, nodes in enumerate(self.columns)
            for row, node in enumerate(nodes)
        }

    def shapes(self) -> list[str]:
        return [*(self._edge(edge) for edge in self.graph.edges), *(self._node(node) for node in self.graph.nodes)]

    def _node(self, node: Node) -> str:
        column, y = self.places[node]
        x, width, corner = self.lefts[column], self.widths[column], _CORNERS[node.kind]
        box = rect(x, y, width, _HEIGHT, hover=f"{node.kind} {node.name}", class_=node.kind, rx=corner)
        return box + text(x + width / 2, y + _HEIGHT / 2 + 4.5, node.name, text_anchor="middle")

    def _edge(self, edge: Edge) -> str:
        (begin, y), (end, below) = self.places[edge[0]], self.places[edge[1]]
        x, to = self.lefts[begin] + self.widths[begin], self.lefts[end]
        y, below, bend = y + _HEIGHT / 2, below + _HEIGHT / 2, _GAP / 2
        # An edge over several columns runs between the rows, so that it goes through no box.
        if end - begin > 1:
            lane = (y + below) / 2 + _ROW / 2 if abs(y - below) < 1 else (y + below) / 2
            middle = [f"{x + bend} {y} {x + bend} {lane} {x + _GAP} {lane}", f"L {to - _GAP} {lane}"]
            path = f"M {x} {y} C {middle[0]} {middle[1]} C {to - bend} {lane} {to - bend} {below} {to} {below}"
        else:
            path = f"M {x} {y} C {x + bend} {y} {to - bend} {below} {to} {below}"
        head = f"M {to - 7} {below - 4} L {to} {below} L {to - 7} {below + 4}"
        return element("path", d=f"{path} {head}", class_="edge")


def ordered(graph: Graph) -> list[list[Node]]:
    """The nodes by rank; within a rank in the order of their neighbours, so that few edges cross."""
    ranks = graph.ranks
    in_order = sorted(graph.nodes, key=lambda node: ranks[node])
    columns = [list(nodes) for _, nodes in groupby(in_order, key=lambda node: ranks[node])]
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            near = graph.before if sweep % 2 == 0 else graph.after
            places = _places(columns)
            column.sort(key=lambda node: fmean(places[each] for each in near(node) or [node]))
    return columns


def _places(columns: Sequence[Sequence[Node]]) -> dict[Node, float]:
    """Each node's height, from the middle of its column."""
    return {node: row - (len(column) - 1) / 2 for column in columns for row, node in enumerate(column)}


def _legend() -> list[str]:
    parts, x = [], _EDGE
    for kind, corner in _CORNERS.items():
        parts.append(rect(x, 12, 22, 14, class_=kind, rx=corner / 2))
        parts.append(text(x + 28, 23, kind, class_="note"))
        x += 90
    return parts
