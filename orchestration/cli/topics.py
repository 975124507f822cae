"""`recourse topics`: the topics that streams read, with their figures, as the broker has them now."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.invocation import invocation
from orchestration.cli.output import Output, OutputOption, log_to_stderr, number, print_table, say, show
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from streaming_jobs.runtime.unread import Unread
    from streaming_jobs.sources.topic_figures import TopicFigures

_KEEPS_ALL = -1


def topics(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="One topic, with its partitions; none: all.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, max=60, help="Time over which the rate is measured; 0: none.")] = 1.0,
    output: OutputOption = Output.text,
) -> None:
    """Print the topics that streams read: partitions, offsets, records per second, retention, and the readers' lag.

    With one TOPIC, also its partitions and the mean size of its newest records. Asks the broker.
    """
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.runtime.unread import unread_now
    from streaming_jobs.sources.topic_figures import look, with_rates, with_size
    from streaming_jobs.sources.topics import Topics
    from streaming_jobs.spelling import instead

    log_to_stderr()
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
    values: list[dict[str, Any]] = [{**each.as_json(), "lag": lags[topic]} for topic, each in figures.items()]
    show(output, values, lambda: _print(figures, lags, name))
    for missing in [name] if name and name not in figures else [each for each in declared if each not in figures]:
        if name in (None, missing):
            say(f"topic {missing} does not exist at {client.bootstrap}")


def _lag(unread: Unread | None, topic: str) -> int | None:
    """Unread records of one topic; None if the stream has no position yet."""
    return None if unread is None else sum(each.records for each in unread.partitions if each.topic == topic)


def _print(figures: dict[str, TopicFigures], lags: dict[str, dict[str, int | None]], name: str | None) -> None:
    columns = ["topic", "partitions", "records", "end", "records/s", "retention", "cleanup", "lag of readers"]
    rows = [
        [
            each.name,
            str(each.partitions),
            number(each.records),
            number(each.end),
            number(each.rate),
            retention_words(each.retention_ms),
            each.cleanup_policy,
            ", ".join(f"{stream} {number(lag)}" for stream, lag in lags[topic].items()),
        ]
        for topic, each in figures.items()
    ]
    if rows:
        print_table(columns, rows, right=columns[1:5])
    if name in figures:
        _print_partitions(figures[name])


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


def retention_words(ms: int) -> str:
    """The retention of a topic in words."""
    from streaming_jobs.durations import format_duration

    return "for ever" if ms == _KEEPS_ALL else format_duration(timedelta(milliseconds=ms))


def _size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} bytes"
