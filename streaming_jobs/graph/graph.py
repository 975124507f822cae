"""Topics, streams and tables as the nodes of a graph, whose edges go the way that records go."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from streaming_jobs.delta_source import DeltaSource
from streaming_jobs.stream import KafkaTopic, Stream

Kind = Literal["topic", "stream", "table"]


class Node(NamedTuple):
    """A topic, a stream or a table."""

    kind: Kind
    name: str


Edge = tuple[Node, Node]


@dataclass(frozen=True)
class Graph:
    """Nodes and edges without a cycle; both in order of the streams that they belong to.

    Dead letters, quarantines and remembered deletes are no nodes: they lead nowhere.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> Graph:
        """The graph of these streams."""
        edges: list[Edge] = []
        for stream in streams:
            node = Node("stream", stream.name)
            edges += [(source_node(source), node) for source in stream.sources.values()]
            edges += [(node, Node("table", sink.name)) for sink in stream.sinks.values()]
            edges += [(node, Node("topic", sink.name)) for sink in stream.topic_sinks.values()]
        return cls(tuple(dict.fromkeys(node for edge in edges for node in edge)), tuple(dict.fromkeys(edges)))

    def before(self, node: Node) -> list[Node]:
        """The nodes whose records reach it directly."""
        return [begin for begin, end in self.edges if end == node]

    def after(self, node: Node) -> list[Node]:
        """The nodes that its records reach directly."""
        return [end for begin, end in self.edges if begin == node]

    def downstream(self, streams: Collection[str]) -> list[str]:
        """The streams that read, directly or through others, what these streams write; in the order of records."""
        reached = {Node("stream", name) for name in streams}
        for node in self.in_order:
            if any(each in reached for each in self.before(node)):
                reached.add(node)
        return [node.name for node in self.in_order if node in reached and node.kind == "stream"]

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
        """The nodes, each after all that its records come from."""
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
