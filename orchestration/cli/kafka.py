"""The broker that a command uses, and its topics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestration.cli.output import say

if TYPE_CHECKING:
    from streaming_jobs.platform.broker import Broker
    from streaming_jobs.settings import Settings
    from streaming_jobs.topology import Topology

PARTITIONS = 4
"""Number of partitions of a topic that a command creates for a stream."""


class BrokerKeeper:
    """Restarts the broker when it has died; raises SetupError when that happens too often."""

    def __init__(self, broker: Broker, *, most: int = 5, within: float = 300.0) -> None:
        self._broker, self._most, self._within = broker, most, within
        self._restarts: list[float] = []

    def look_after(self) -> None:
        """Restart the broker if it has died; call this about once per second."""
        from streaming_jobs.errors import SetupError

        if self._broker.running():
            return
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < self._within] + [now]
        if len(self._restarts) > self._most:
            raise SetupError(
                f"the broker died {len(self._restarts)} times within {self._within / 60:.0f} minutes",
                "look into broker.log in the logs folder (`recourse config show home`); `recourse doctor` may tell",
            )
        say("the broker has died; starting it again")
        self._broker.restart()


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


def create_topics(settings: Settings, topology: Topology, bootstrap: str) -> list[str]:
    """Create the missing source topics, whose records never expire, and return their names."""
    from streaming_jobs.sources.topics import Topics

    topics = Topics.of(settings.kafka, bootstrap)
    existing = topics.names()
    missing = [name for name in topology.topics if name not in existing]
    for name in missing:
        topics.create(name, PARTITIONS)
    return missing
