"""Void ranges of topics, as a verification leaves them out: nobody reads these offsets, so no row is due for them.

    <state>/_topics/<topic>.json    all ranges ever, each with the generation of the writer that declared it, and the
                                    path of the writer's generations: those on it hold

The verifier has its own reader of this file too. Archives copy void records like all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from streaming_jobs.verification.lineage import Coverage
from streaming_jobs.verification.offset_ranges import Span, merged, without
from streaming_jobs.verification.topic import PartitionContent, TopicContent


@dataclass(frozen=True)
class VoidOffsets:
    """The void ranges of some topics, and by topic the plan that appends to it now, which may not be over.

    `changed` are the topics whose ranges are others than before.
    """

    spans: tuple[Span, ...] = ()
    under_way: Mapping[str, str] | None = None
    changed: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        state: Path | None,
        topics: Mapping[str, TopicContent],
        names: Sequence[str],
        before: Mapping[str, str | None] | None = None,
    ) -> VoidOffsets:
        """Those of these topics; an earlier topic of the same name does not count. Raises ValueError if damaged.

        `before` is what `recorded` has given.
        """
        found: list[Span] = []
        under_way: dict[str, str] = {}
        for name in names:
            path = None if state is None else state / "_topics" / f"{name}.json"
            if path is None or name not in topics or not path.exists():
                continue
            try:
                value = json.loads(path.read_text(encoding="utf-8"))
                if value["topic_id"] != topics[name].topic_id:
                    continue
                holds = {0, *value["path"]}  # 0: of an earlier writer, for ever
                found += [
                    Span(name, int(v["partition"]), int(v["begin"]), int(v["end"]))
                    for v in value["void"]
                    if v["generation"] in holds and v["begin"] < v["end"]
                ]
                if value["under_way"] is not None:
                    under_way[name] = str(value["under_way"])
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} has no {error}") from error
        now = recorded(state, before or ())
        changed = tuple(name for name in names if name in now and now[name] != (before or {})[name])
        return cls(tuple(merged(found)), under_way, changed)

    def left(self, topics: Mapping[str, TopicContent]) -> Mapping[str, TopicContent]:
        """The topics without the void records; their first and last offsets stay."""
        if not self.spans:
            return topics
        return {
            name: replace(topic, partitions={p: self._left(name, p, part) for p, part in topic.partitions.items()})
            for name, topic in topics.items()
        }

    def taken_out(self, covered: Coverage) -> Coverage:
        """The coverage without void offsets, which count as skipped."""
        if not self.spans:
            return covered
        skipped = [part for span in self.spans for part in without(span, _of(covered.skipped, span))]
        return replace(
            covered,
            proved=self._without(covered.proved),
            unproved=self._without(covered.unproved),
            skipped=[*covered.skipped, *skipped],
            void=self.spans,
        )

    def _without(self, spans: Sequence[Span]) -> list[Span]:
        return [part for span in spans for part in without(span, _of(self.spans, span))]

    def _left(self, topic: str, partition: int, part: PartitionContent) -> PartitionContent:
        kept = np.ones(len(part.offsets), dtype=bool)
        for span in self.spans:
            if (span.topic, span.partition) == (topic, partition):
                kept &= (part.offsets < span.start) | (part.offsets >= span.end)
        keys = tuple(key for key, keep in zip(part.keys, kept, strict=True) if keep) if part.keys else ()
        return replace(part, offsets=part.offsets[kept], keys=keys)


NO_VOID = VoidOffsets()


def recorded(state: Path | None, names: Iterable[str]) -> dict[str, str | None]:
    """What the files of these topics hold now, None without one: read before the versions of the tables."""
    paths = {} if state is None else {name: state / "_topics" / f"{name}.json" for name in names}
    return {name: path.read_text(encoding="utf-8") if path.exists() else None for name, path in paths.items()}


def _of(spans: Iterable[Span], of: Span) -> list[Span]:
    """The spans of the same partition."""
    return [span for span in spans if (span.topic, span.partition) == (of.topic, of.partition)]
