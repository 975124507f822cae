"""The broker that a command uses, and its topics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestration.cli.output import say

if TYPE_CHECKING:
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.settings import Settings

PARTITIONS = 4
"""Number of partitions of a topic that a command creates for a stream."""


def restart_if_dead(broker: Broker) -> None:
    """Start the broker again if it has died; raises SetupError if it does not come up."""
    if not broker.running():
        say("the broker has died; starting it again")
        broker.restart()


@contextmanager
def broker_for_command(settings: Settings, needs: str = "") -> Iterator[str]:
    """Address of the configured cluster, of the broker of a running `recourse up`, or of one started for the block.

    `needs` is the reason that is printed before one is started.
    """
    from orchestration.cli.setup import fetch_jars
    from streaming_jobs.errors import BrokerUnreachable
    from streaming_jobs.platform.broker import Broker, bootstrap_servers

    try:
        address = bootstrap_servers(settings)
    except BrokerUnreachable:
        if needs:
            say(f"{needs}; none runs, so the embedded one is started for this command")
        fetch_jars(settings, broker=True, spark=False)
        with Broker(settings) as broker:
            address = broker.start()
            say(f"embedded broker at {address}, for this command")
            yield address
        if needs:
            say("the embedded broker has been ended again")
        return
    yield address


def create_topics(settings: Settings, topology: Topology, bootstrap: str, *, ours: bool) -> list[str]:
    """Create the missing source topics, whose records never expire, and return their names.

    Raises SetupError if the cluster is not `ours`: a misspelt name would become an empty topic there.
    """
    from streaming_jobs.errors import SetupError
    from streaming_jobs.sources.topics import Topics

    topics = Topics.of(settings.kafka, bootstrap)
    existing = topics.names()
    missing = [name for name in topology.topics if name not in existing]
    if missing and not ours:
        raise SetupError(
            f"{bootstrap} has no topic {', '.join(missing)}, or this user may not see it",
            "correct the name in the stream's source, or create the topic with the partitions and the retention that "
            "it needs; Recourse creates topics only on its embedded broker",
        )
    for name in missing:
        topics.create(name, PARTITIONS)
    return missing
