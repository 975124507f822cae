"""The topology as text, in the manner of Kafka Streams' `describe`: a block for each stream, by sub-topology."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streaming_jobs.graph.graph import Graph, Node, source_node
from streaming_jobs.stream import Stream
from streaming_jobs.topology import Topology


def describe(topology: Topology, names: Iterable[str] = ()) -> str:
    """Sources, stream and sinks of the named streams, or of all; and who writes the ones and reads the others."""
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
    lines += [f"  -> table {table.name} (remembered deletes)" for table in stream.deletes]
    lines += [f"  -> table {name} (rows of {table} that rules set aside)" for table, name in stream.quarantines.items()]
    lines.append(f"  -> table {stream.dead_letters} (dead letters)")
    return "\n".join(lines) + "\n"


def _streams(words: str, streams: Sequence[Node]) -> str:
    """Such as `, read by totals`; empty without streams."""
    return f", {words} {', '.join(stream.name for stream in streams)}" if streams else ""
