"""The broker a command talks to, and its topics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestration.cli.output import say

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings
    from streaming_jobs.topology import Topology

PARTITIONS = 4
"""Of a topic that we create for a stream."""


@contextmanager
def broker_for_command(settings: Settings) -> Iterator[str]:
    """The configured cluster, the embedded broker of a running `recourse up`, or one of our own for the block."""
    from streaming_jobs.platform.broker import Broker, bootstrap_servers

    from orchestration.cli.setup import fetch_broker_jars
    from streaming_jobs.errors import BrokerUnreachable

    try:
        yield_this = bootstrap_servers(settings)
    except BrokerUnreachable:
        if settings.kafka.bootstrap_servers:
            raise
        fetch_broker_jars(settings)
        with Broker(settings) as broker:
            address = broker.start()
            say(f"embedded broker at {address}, for this command")
            yield address
        return
    yield yield_this


def create_topics(settings: Settings, topology: Topology, bootstrap: str) -> list[str]:
    """Create the source topics that do not exist, with records kept for ever, and return their names."""
    from streaming_jobs.sources.topics import Topics

    topics = Topics.of(settings.kafka, bootstrap)
    existing = topics.names()
    missing = [name for name in topology.topics if name not in existing]
    for name in missing:
        topics.create(name, PARTITIONS)
    return missing
