"""`recourse send`: the lines of a file as records of a topic, for a person who tries a stream."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import number, say
from streaming_jobs.errors import UsageError
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.declare.format import Schemas
    from streaming_jobs.stream import KafkaTopic


def send(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic that a stream reads.", show_default=False)],
    file: Annotated[str, typer.Argument(metavar="FILE", help="One record per line; - is stdin.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Send to a configured cluster without asking.")] = False,
) -> None:
    """Send each line of a file to a topic as a record without a key; a second call sends the lines again.

    Lines that the topic's format refuses are sent too: the stream sets them aside as dead letters.
    """
    from orchestration.cli.children import stop_signals_interrupt
    from orchestration.cli.preparations import broker_for_command, create_topics
    from streaming_jobs.registry.schemas import StoredSchemas
    from streaming_jobs.sources.producing import NewRecord, produce
    from streaming_jobs.text.spelling import instead

    call = invocation(context)
    declared = call.topology.topics
    if topic not in declared:
        raise UsageError(f"no stream reads a topic '{topic}'", instead(topic, declared))
    lines = [line for line in _content(file).splitlines() if line.strip()]
    refusals = _refusals(declared[topic], StoredSchemas.of_settings(call.settings), lines)
    embedded = not call.settings.kafka.bootstrap_servers
    if (servers := call.settings.kafka.of(topic).bootstrap_servers) and not yes:
        _ask(f"send {number(len(lines))} records to topic {topic} of {servers}?", topic)
    with stop_signals_interrupt(), broker_for_command(call.settings) as bootstrap:
        create_topics(call.settings, call.topology, bootstrap, ours=embedded)
        sent = produce(call.settings.kafka, bootstrap, topic, map(NewRecord, lines))
    say(f"sent {number(sent)} records to topic {topic}")
    for reason, count in refusals.items():
        say(f"  {number(count)} of them will be dead letters: {reason}")


def _content(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", "name a file with one record per line") from error


def _refusals(topic: KafkaTopic, schemas: Schemas, lines: list[bytes]) -> Counter[str]:
    """The number of lines that the topic's format refuses, by reason."""
    refused = topic.bound(schemas).value.reader().read(lines).refused
    return Counter(refusal.reason for refusal in refused.values())


def _ask(question: str, topic: str) -> None:
    if not sys.stdin.isatty():
        command = commands.send(topic, "FILE", yes=True)
        raise UsageError(f"{question} nobody to ask: there is no terminal, and --yes was not given", f"run {command}")
    typer.confirm(question, abort=True, err=True)
