"""`recourse topics`: the topics that streams read, with their figures, as the broker has them now."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import Output, OutputOption, number, print_table, say, show
from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from orchestration.cli.options import Invocation
    from streaming_jobs.runtime.lag import Unread
    from streaming_jobs.settings import Settings
    from streaming_jobs.sources.topics import TopicFigures
    from streaming_jobs.state.topic_records import VoidRange

_SAMPLES = 1_000
"""Records from which a schema is made, at most."""


def topics(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="One topic, with its partitions; none: all.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, max=60, help="Time over which the rate is measured; 0: none.")] = 1.0,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print a draft of a schema for the JSON records of any TOPIC instead.")
    ] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print the topics that streams read: partitions, offsets, records per second, retention, and the readers' lag.

    With one TOPIC, also its partitions, the mean size of its newest records, and its void ranges. Asks the broker.
    """
    if schema:
        _schema(invocation(context), name, output)
        return
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.runtime.lag import unread_now
    from streaming_jobs.sources.topics import Topics, look, with_rates, with_size
    from streaming_jobs.text.spelling import instead

    call = invocation(context)
    declared = list(call.topology.topics)
    if name is not None and name not in declared:
        raise UsageError(f"no stream reads a topic '{name}'", instead(name, declared))
    client = Topics.of(call.settings.kafka, bootstrap_servers(call.settings))
    figures = look(client, [name] if name else declared)
    if seconds and figures:
        figures = with_rates(client, figures, seconds)
    if name in figures:
        figures[name] = with_size(client, figures[name])
    readers = {topic: call.topology.readers(topic) for topic in declared}
    reading = {stream for topic in figures for stream in readers[topic]}
    unread = unread_now(call.settings, [call.topology[stream] for stream in sorted(reading)])
    lags = {topic: {each: _lag(unread.get(each), topic) for each in readers[topic]} for topic in figures}
    void = {topic: _void(call.settings, each) for topic, each in figures.items()}
    values: list[dict[str, Any]] = [
        {**each.as_json(), "lag": lags[topic], "void": [dataclasses.asdict(v) for v in void[topic]]}
        for topic, each in figures.items()
    ]
    show(output, values, lambda: _print(figures, lags, void, name))
    for missing in [name] if name and name not in figures else [each for each in declared if each not in figures]:
        if name in (None, missing):
            where = call.settings.kafka.of(missing).bootstrap_servers or client.bootstrap
            say(f"topic {missing} does not exist at {where}")


def _schema(call: Invocation, name: str | None, output: Output) -> None:
    """Print a schema that the newest records of a topic fit; the topic may be one that no stream reads yet."""
    from streaming_jobs.formats.json_samples import sampled_schema
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.sources.topics import Topics
    from streaming_jobs.text import commands

    if name is None:
        raise UsageError("--schema is for one topic, and none is named", f"name it: {commands.topic_schema('TOPIC')}")
    client = Topics.of(call.settings.kafka, bootstrap_servers(call.settings))
    sampled = sampled_schema(client.newest_values(name, _SAMPLES))
    if not sampled.schema:
        raise UsageError(
            f"no schema: of {counted(sampled.samples, 'record')} of topic {name}, none is a JSON object with fields",
            "send some records first, or read their values as they are: value=Text() or Raw()",
        )
    value = {"topic": name, **dataclasses.asdict(sampled)}
    show(output, value, lambda: print(f"Json({json.dumps(sampled.schema, indent=4)})"))
    say(f"made from {counted(sampled.samples, 'record')} of topic {name}; other records may not fit it")
    for remark in sampled.remarks:
        say(f"  {remark}")
    for reason, count in sampled.refused.items():
        say(f"  {number(count)} of them would be dead letters: {reason}")


def _lag(unread: Unread | None, topic: str) -> int | None:
    """Unread records of one topic; None if the stream has no position yet."""
    return None if unread is None else sum(each.records for each in unread.partitions if each.topic == topic)


def _void(settings: Settings, figures: TopicFigures) -> list[VoidRange]:
    """The void ranges of a topic that hold now, in the order of offsets."""
    from streaming_jobs.state import topic_records

    record = topic_records.load(settings, figures.name)
    if record is None or record.topic_id != figures.id:
        return []
    holding = [each for each in record.void if each.generation in {0, *record.path}]
    return sorted(holding, key=lambda each: (each.partition, each.begin))


def _print(
    figures: dict[str, TopicFigures],
    lags: dict[str, dict[str, int | None]],
    void: dict[str, list[VoidRange]],
    name: str | None,
) -> None:
    columns = ["topic", "partitions", "records", "void", "end", "records/s", "retention", "cleanup", "lag of readers"]
    rows = [
        [
            each.name,
            str(each.partitions),
            number(each.records),
            number(_void_offsets(void[topic])),
            number(each.end),
            number(each.rate),
            each.retention,
            each.cleanup_policy,
            ", ".join(f"{stream} {number(lag)}" for stream, lag in lags[topic].items()),
        ]
        for topic, each in figures.items()
    ]
    if rows:
        print_table(columns, rows, right=columns[1:6])
    if name in figures:
        _print_partitions(figures[name])
        _print_void(void[name])


def _void_offsets(void: list[VoidRange]) -> int:
    """The number of void offsets; ranges of several plans may overlap."""
    from streaming_jobs.sources.void_ranges import VoidRanges

    joined = VoidRanges.of((each.partition, each.begin, each.end) for each in void)
    return sum(end - begin for spans in joined.spans.values() for begin, end in spans)


def _print_void(void: list[VoidRange]) -> None:
    """The ranges that no stream reads, with the plans that declared them."""
    from streaming_jobs.text.spelling import instant_words

    if void:
        rows = [[str(v.partition), number(v.begin), number(v.end), v.plan, instant_words(v.at)] for v in void]
        print()
        print_table(
            ["partition", "void from", "up to", "plan", "declared"], rows, right=("partition", "void from", "up to")
        )


def _print_partitions(figures: TopicFigures) -> None:
    if figures.record_bytes is not None and figures.bytes is not None:
        say(
            f"about {figures.record_bytes:,.0f} bytes of key and value per record (newest ones), "
            f"{_size(figures.bytes)} in all before compression"
        )
    columns = ["partition", "first", "end", "records", "records/s"]
    rates = figures.rates or {}
    rows = [
        [str(p), number(first), number(end), number(end - first), number(rates.get(p))]
        for p, end in sorted(figures.latest.items())
        for first in [figures.earliest.get(p, 0)]
    ]
    print()
    print_table(columns, rows, right=columns)


def _size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} bytes"
