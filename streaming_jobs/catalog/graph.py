"""Topics, streams and tables as the nodes of a graph, whose edges go the way that records go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import fmean
from typing import Literal, NamedTuple

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.page import colours
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.text.spelling import counted
from streaming_jobs.text.svg import element, picture, rect, text, title

Kind = Literal["topic", "stream", "table"]


class Node(NamedTuple):
    """A topic, a stream or a table."""

    kind: Kind
    name: str


Edge = tuple[Node, Node]


@dataclass(frozen=True)
class Graph:
    """Nodes and edges without a cycle; both in order of the streams that they belong to.

    Dead letters, quarantines, late records and remembered deletes are not nodes: no stream reads them.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> Graph:
        edges: list[Edge] = []
        for stream in streams:
            node = Node("stream", stream.name)
            edges += [(source_node(source), node) for source in stream.sources.values()]
            edges += [(Node("table", lookup.place), node) for lookup in stream.lookups.values()]
            edges += [(node, Node("table", sink.name)) for sink in stream.sinks.values()]
            edges += [(node, Node("topic", sink.name)) for sink in stream.topic_sinks.values()]
            edges += [(node, Node("table", table.ledger_name)) for table in stream.postgres_tables.values()]
        return cls(tuple(dict.fromkeys(node for edge in edges for node in edge)), tuple(dict.fromkeys(edges)))

    def before(self, node: Node) -> list[Node]:
        """The nodes whose records reach it directly."""
        return [begin for begin, end in self.edges if end == node]

    def after(self, node: Node) -> list[Node]:
        """The nodes that its records reach directly."""
        return [end for begin, end in self.edges if begin == node]

    @cached_property
    def ranks(self) -> dict[Node, int]:
        """The number of edges of the longest way that leads to each node."""
        found: dict[Node, int] = {}

        def rank(node: Node) -> int:
            if node not in found:
                found[node] = max((rank(each) + 1 for each in self.before(node)), default=0)
            return found[node]

        for node in self.nodes:
            rank(node)
        return found

    @property
    def in_order(self) -> list[Node]:
        """The nodes, each after its predecessors."""
        return sorted(self.nodes, key=lambda node: self.ranks[node])

    def parts(self) -> list[Graph]:
        """The sub-topologies: nodes of two of them are not connected. The first has the first node."""
        left, found = list(self.nodes), []
        while left:
            reached, queue = {left[0]}, [left[0]]
            while queue:
                node = queue.pop()
                near = {*self.before(node), *self.after(node)} - reached
                reached |= near
                queue += near
            edges = tuple(edge for edge in self.edges if edge[0] in reached)
            found.append(Graph(tuple(node for node in self.nodes if node in reached), edges))
            left = [node for node in left if node not in reached]
        return found


def source_node(source: KafkaTopic | DeltaSource) -> Node:
    """The topic or the table that a stream reads."""
    return Node("topic" if isinstance(source, KafkaTopic) else "table", source.name)


# The topology as text, in the manner of Kafka Streams' `describe`: a block for each stream, by sub-topology.


def describe(topology: Topology, names: Iterable[str] = ()) -> str:
    """Sources, stream and sinks of the named streams, or of all; with the sources' writers and the sinks' readers."""
    whole = Graph.of(topology.streams.values())
    selected = {stream.name: stream for stream in topology.select(names)}
    parts = [[node.name for node in part.in_order if node.kind == "stream"] for part in whole.parts()]
    if len(parts) == 1 or len(selected) < len(topology.streams):
        return "\n".join(_block(stream, whole) for stream in selected.values())
    lines = []
    for number, part in enumerate(parts):
        lines += [f"Sub-topology {number}\n", *(_block(topology[name], whole) for name in part)]
    return "\n".join(lines)


def _block(stream: Stream, graph: Graph) -> str:
    lines = [f"stream {stream.name}"]
    if stream.description:
        lines.append(f"    {stream.description.splitlines()[0]}")
    for parameter, source in stream.sources.items():
        node = source_node(source)
        watermark = f", watermark {source.time_column} - {source.lateness}" if source.event_time else ""
        writers = _streams("written by", graph.before(node))
        lines.append(f"  <- {node.kind} {source.name} as {parameter}{watermark}{writers}")
    for parameter, lookup in stream.lookups.items():
        writers = _streams("written by", graph.before(Node("table", lookup.place)))
        lines.append(f"  <- table {lookup.place} as {parameter} (looked up){writers}")
    for position, sink in enumerate(stream.sinks.values()):
        keys = f" by {', '.join(sink.keys)}" if sink.keys else ""
        partitions = f", partitioned by {', '.join(sink.partition_by)}" if sink.partition_by else ""
        emit = f", emit on {sink.emit}" if sink.emit else ""
        role = "primary" if position == 0 else "secondary"
        readers = _streams("read by", graph.after(Node("table", sink.name)))
        lines.append(f"  -> table {sink.name} ({role}, {sink.mode}{keys}{partitions}{emit}){readers}")
        lines += [f"       {rule.on_fail}: {rule.words}" for rule in stream.rules_of(sink.name).rules]
    for topic in stream.topic_sinks.values():
        key = f", key {topic.key}" if topic.key else ""
        route = f", or that in {topic.route}" if topic.route else ""
        readers = _streams("read by", graph.after(Node("topic", topic.name)))
        lines.append(f"  -> topic {topic.name}{route} (secondary, {topic.delivery.replace('_', ' ')}{key}){readers}")
    for database in stream.postgres_tables.values():
        keys = f" by {', '.join(database.keys)}" if database.keys else ""
        emit = f", emit on {database.emit}" if database.emit else ""
        lines.append(f"  -> PostgreSQL table {database.name} (secondary, {database.mode}{keys}{emit})")
    lines += [f"  -> table {table.name} (remembered deletes)" for table in stream.deletes]
    lines += [f"  -> table {name} (rows of {table} that rules set aside)" for table, name in stream.quarantines.items()]
    lines += [f"  -> table {name} (late records of {table})" for table, name in stream.late_tables.items()]
    lines.append(f"  -> table {stream.dead_letters} (dead letters)")
    return "\n".join(lines) + "\n"


def _streams(words: str, streams: Sequence[Node]) -> str:
    """Such as `, read by totals`; empty without streams."""
    return f", {words} {', '.join(stream.name for stream in streams)}" if streams else ""


# A graph as Mermaid text, which GitHub, GitLab and many wikis draw: https://mermaid.js.org/syntax/flowchart.html.

_SHAPES: dict[Kind, tuple[str, str]] = {"topic": ("([", "])"), "stream": ("[", "]"), "table": ("[(", ")]")}
_LOOKS: dict[Kind, str] = {
    "topic": "fill:#fff3d6,stroke:#9a6700,color:#1f2328",
    "stream": "fill:#dbeafe,stroke:#0969da,color:#1f2328",
    "table": "fill:#dcf5e3,stroke:#1a7f37,color:#1f2328",
}


def mermaid(graph: Graph) -> str:
    """The flowchart, from left to right; nodes are numbered, since names may be words of Mermaid's own."""
    ids = {node: f"n{number}" for number, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for node, name in ids.items():
        begin, end = _SHAPES[node.kind]
        lines.append(f'    {name}{begin}"{node.name}"{end}:::{node.kind}')
    lines += [f"    {ids[begin]} --> {ids[end]}" for begin, end in graph.edges]
    used = {node.kind for node in graph.nodes}
    lines += [f"    classDef {kind} {look}" for kind, look in _LOOKS.items() if kind in used]
    return "\n".join(lines) + "\n"


# A graph as an SVG picture: records go from left to right; one band for each sub-topology.
#
# Plain SVG: no script, nothing loaded, all text escaped; colours for a light and a dark background.

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
