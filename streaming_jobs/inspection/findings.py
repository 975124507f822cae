"""What an inspection finds, as data: kind, certainty, offsets, versions, batches, and the words for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from streaming_jobs.verification.offset_ranges import Span

Kind = Literal["missing", "doubled", "will_lose", "will_double", "repeated", "removed", "foreign", "unknown", "damaged"]
Certainty = Literal["certain", "likely", "unclear"]

MEANINGS: dict[Kind, str] = {
    "missing": "records that the job has passed, whose rows are not in the table",
    "doubled": "records whose rows are in the table more than once",
    "will_lose": "records that the next start of the job would pass without writing them",
    "will_double": "records that the next start of the job would write once more",
    "repeated": "batches that were merged more than once; by key, the rows are the same",
    "removed": "rows that another commit has taken out or replaced",
    "foreign": "commits of other programs",
    "unknown": "what checkpoint and log no longer tell",
    "damaged": "files that cannot be read",
}
ALARMING: tuple[Kind, ...] = ("missing", "doubled", "will_lose", "will_double")
"""The kinds for which an inspection ends with exit code 10, unless they are unclear."""


@dataclass(frozen=True)
class InspectionFinding:
    """One finding about a table. `reason` is a stable word for programs, such as `restored`.

    `spans` are the offsets; empty if they are not known, or if there are none. With `within`, the records are some of
    these offsets. `batches` are those of `checkpoint`; `counted`: the rows of the table confirm it.
    """

    kind: Kind
    certainty: Certainty
    reason: str
    table: str = field(kw_only=True)
    words: str
    next_step: str = ""
    spans: Sequence[Span] = ()
    within: bool = False
    versions: Sequence[int] = ()
    checkpoint: str = ""
    batches: Sequence[int] = ()
    counted: bool = False

    def __post_init__(self) -> None:
        for name in ("spans", "versions", "batches"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def alarming(self) -> bool:
        return self.kind in ALARMING and self.certainty != "unclear"

    @property
    def records(self) -> int:
        return sum(span.offsets for span in self.spans)

    def as_json(self) -> dict[str, Any]:
        spans = [{"topic": s.topic, "partition": s.partition, "start": s.start, "end": s.end} for s in self.spans]
        return {**asdict(self), "spans": spans, "records": self.records, "alarming": self.alarming}


def numbers_words(numbers: Sequence[int], noun: str, most: int = 6) -> str:
    """Numbers as ranges: `batches 3 to 5, 9`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in ranges[:most]]
    more = f" and {len(ranges) - most} more ranges" if len(ranges) > most else ""
    plural = noun if len(set(numbers)) == 1 else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{plural} {', '.join(parts)}{more}"
