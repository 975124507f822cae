"""A session's connection to the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streaming_jobs.sources.base import TopicReader


@dataclass
class Connection:
    """A session's connection to the cluster: the file with the client's properties, for the processes that Spark
    starts, and two clients (`quick` gives up after 2 s).
    """

    client: Path
    topics: TopicReader
    quick: TopicReader
