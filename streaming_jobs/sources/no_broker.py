"""The topics of a session whose streams read none, where no broker runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streaming_jobs.errors import BrokerUnreachable

if TYPE_CHECKING:
    from streaming_jobs.positions import OffsetBounds
    from streaming_jobs.sources.topics import TopicInfo


@dataclass(frozen=True)
class NoBroker:
    """A reader of topics that has none: each call raises the error with which the broker was looked for."""

    error: BrokerUnreachable

    def describe(self, name: str) -> TopicInfo | None:
        """Raises it."""
        raise self._again(name)

    def latest(self, name: str) -> dict[int, int]:
        """Raises it."""
        raise self._again(name)

    def high_watermarks(self, name: str) -> dict[int, int]:
        """Raises it."""
        raise self._again(name)

    def offsets(self, name: str) -> OffsetBounds:
        """Raises it."""
        raise self._again(name)

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:  # noqa: ARG002
        """Raises it."""
        raise self._again(name)

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:  # noqa: ARG002
        """Raises it."""
        raise self._again(name)

    def _again(self, name: str) -> BrokerUnreachable:
        return BrokerUnreachable(f"topic {name}: {self.error.found}", self.error.next_step)
