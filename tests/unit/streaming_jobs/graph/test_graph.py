"""The graph of a topology, and its pictures."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from streaming_jobs import Json
from streaming_jobs.catalog.graph import Graph, Node, describe, draw, mermaid, ordered
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream

VALUE = Json(StructType([StructField("n", LongType())]))


def made(name: str, topics: list[str], tables: list[str]) -> Stream:
    """A stream of these topics and tables."""
    sources = {f"p{number}": KafkaTopic(topic, VALUE) for number, topic in enumerate(topics)}
    function = (lambda p0: p0) if len(topics) == 1 else (lambda p0, p1: p0)  # type: ignore[misc]
    return Stream(name, function, sources, {table: DeltaTable(table) for table in tables})


SVG = "{http://www.w3.org/2000/svg}"
SHOP = [made("orders", ["orders.v1"], ["orders", "lines"]), made("totals", ["orders.v1", "rates"], ["totals"])]
LONE = made("lone", ["lone"], ["lone"])


def test_topics_streams_and_tables_are_nodes_once_and_edges_go_as_records_do() -> None:
    graph = Graph.of(SHOP)
    topic, orders, totals = Node("topic", "orders.v1"), Node("stream", "orders"), Node("stream", "totals")
    assert graph.after(topic) == [orders, totals]
    assert graph.after(orders) == [Node("table", "orders"), Node("table", "lines")]
    assert graph.before(totals) == [topic, Node("topic", "rates")]
    assert len(graph.nodes) == len(set(graph.nodes)) == 7
    assert graph.ranks[topic] == 0 and graph.ranks[totals] == 1 and graph.ranks[Node("table", "lines")] == 2


def test_sub_topologies_share_nothing_and_are_numbered() -> None:
    parts = Graph.of([*SHOP, LONE]).parts()
    assert [{node.name for node in part.nodes if node.kind == "stream"} for part in parts] == [
        {"orders", "totals"},
        {"lone"},
    ]
    for one, other in combinations(parts, 2):
        assert not set(one.nodes) & set(other.nodes)
    assert Graph.of([]).parts() == []
    topology = Topology.of([*SHOP, LONE])
    heads = [line for line in describe(topology).splitlines() if not line.startswith(" ") and line]
    assert heads == ["Sub-topology 0", "stream lone", "Sub-topology 1", "stream orders", "stream totals"]
    assert describe(topology, ["lone"]).startswith("stream lone\n  <- topic lone as p0\n")


def chain() -> Graph:
    """Three streams: a reads a topic, b reads a's table, c reads the tables of both."""
    a, b, c = (Node("stream", name) for name in "abc")
    topic, of_a, of_b, of_c = Node("topic", "in"), Node("table", "a"), Node("table", "b"), Node("table", "c")
    edges = ((topic, a), (a, of_a), (of_a, b), (b, of_b), (of_a, c), (of_b, c), (c, of_c))
    return Graph((topic, a, of_a, b, of_b, c, of_c), edges)


def test_mermaid_has_a_shape_per_kind_and_no_name_is_read_as_its_own_word() -> None:
    assert mermaid(Graph.of([made("end", ["in.v1"], ["end"])])) == (
        "flowchart LR\n"
        '    n0(["in.v1"]):::topic\n'
        '    n1["end"]:::stream\n'
        '    n2[("end")]:::table\n'
        "    n0 --> n1\n"
        "    n1 --> n2\n"
        "    classDef topic fill:#fff3d6,stroke:#9a6700,color:#1f2328\n"
        "    classDef stream fill:#dbeafe,stroke:#0969da,color:#1f2328\n"
        "    classDef table fill:#dcf5e3,stroke:#1a7f37,color:#1f2328\n"
    )


@pytest.mark.parametrize("graph", [Graph.of([*SHOP, LONE]), chain(), Graph.of([])], ids=["shop", "chain", "empty"])
def test_the_picture_is_svg_with_every_node_inside_and_no_box_on_another(graph: Graph) -> None:
    svg = draw(graph)
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    root = ET.fromstring(svg)
    wide, high = (float(size) for size in root.attrib["viewBox"].split()[2:])
    found = (box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None)
    boxes = [[float(box.attrib[side]) for side in ("x", "y", "width", "height")] for box in found]
    assert len(boxes) == len(graph.nodes)
    assert all(x >= 0 and y >= 0 and x + w <= wide and y + h <= high for x, y, w, h in boxes)
    for (x, y, w, h), (x2, y2, w2, h2) in combinations(boxes, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_names_are_escaped_in_the_picture_and_neighbours_stand_side_by_side() -> None:
    svg = draw(Graph((Node("topic", "<a&b>"),), ()))
    assert "<a&b>" not in svg and "&lt;a&amp;b&gt;" in svg
    topics, streams = [Node("topic", name) for name in "wxyz"], [Node("stream", name) for name in "zyxw"]
    edges = tuple((topic, next(s for s in streams if s.name == topic.name)) for topic in topics)
    columns = ordered(Graph((*topics, *streams), edges))
    assert [node.name for node in columns[0]] == [node.name for node in columns[1]]
    assert not re.search(r"nan", draw(Graph((*topics, *streams), edges)))


def test_the_topology_reads_as_text() -> None:
    timed = KafkaTopic(
        "prices", value=Json(StructType([StructField("n", TimestampType())])), event_time="n", lateness="6 hours"
    )
    totals = DeltaTable("totals", keys=["k"], partition_by=["k"])
    sums = Stream("sums", lambda p: p, {"p": timed}, {"x": totals, "y": DeltaTable("y")}, "Sums.\n\nMore.")
    assert describe(Topology.of([sums])) == (
        "stream sums\n"
        "    Sums.\n"
        "  <- topic prices as p, watermark n - 6 hours\n"
        "  -> table totals (primary, upsert by k, partitioned by k)\n"
        "  -> table y (secondary, append)\n"
        "  -> table sums_dead_letters (dead letters)\n"
    )
