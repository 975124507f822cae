"""The records that a stream's formats refuse, and their comparison with the table of dead letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.offset_ranges import Packed, place_of, shown, unpacked
from streaming_jobs.verification.subject import Comparison
from streaming_jobs.verification.topic import RawRecord

TOMBSTONE = "tombstone"
OF_ROWS = frozenset({"null_key", "not_utf8", "time_out_of_range", "partition_value"})
"""Reasons for refused output rows, of which a record may have several; other reasons are for records, once each."""
_IN_WORDS = {"event_time_ahead": "for an event time that is too far ahead"}
"""Reasons for refused records that no format gives."""
_SHOWN = 5

Judge = Callable[[Sequence[RawRecord]], Mapping[int, str]]
"""The reasons why a format refuses values, by the index of their records; no value is null."""


@dataclass
class Refusals:
    """By topic and place the reason why a format refuses a record; `take` is called with all records.

    `judges` has by topic what judges its records. Topics in `keeps` pass a null value to the stream. `code` has the
    hashes of the code that declares these formats: they do not decide on records that other code has read. Empty: on
    all records.
    """

    judges: Mapping[str, Judge]
    keeps: frozenset[str] = frozenset()
    reasons: frozenset[str] = frozenset()
    found: dict[str, dict[int, str]] = field(default_factory=dict)
    code: frozenset[str] = frozenset()
    drops: bool = False
    """True if the stream drops what its format refuses, so that no dead letter is due."""

    def take(self, records: Sequence[RawRecord]) -> None:
        """Judge the next records of a topic."""
        topic = records[0].topic
        found = self.found.setdefault(topic, {})
        valued = [record for record in records if record.value is not None]
        if topic not in self.keeps:
            found |= {record.place: TOMBSTONE for record in records if record.value is None}
        if valued:
            found |= {valued[number].place: reason for number, reason in self.judges[topic](valued).items()}


def compare_letters(
    table: str, rows: pa.Table, covered: Mapping[str, Packed], refusals: Refusals, others: str = ""
) -> tuple[list[Comparison], dict[str, tuple[Packed, Packed]]]:
    """Compare dead letters with what the formats refuse among the covered records that the topics still hold.

    `covered` are the records that were read with these formats; `others` names the other batches, in words.
    Also returns by topic the positions of missing records, and of records with two dead letters.
    """
    faults: list[str] = []
    places: dict[str, tuple[Packed, Packed]] = {}
    compared = 0
    again: Counter[str] = Counter()
    for topic, known in covered.items():
        mine = [row for row in rows.to_pylist() if row["topic"] == topic and row["offset"] is not None]
        letters = {place_of(row["partition"], row["offset"]): row["reason"] for row in mine}
        single = [place_of(r["partition"], r["offset"]) for r in mine if r["reason"] not in OF_ROWS]
        unique, counts = np.unique(np.array(single, dtype=np.int64), return_counts=True)
        due = {place: why for place, why in refusals.found.get(topic, {}).items() if _in(place, known)}
        here = {place: why for place, why in letters.items() if _in(place, known)}
        missing = np.array(sorted(due.keys() - here.keys()), dtype=np.int64)
        twice = unique[counts > 1]
        places[topic] = (missing, twice)
        faults += _listed(topic, missing, "refused by the format and not among the dead letters")
        faults += _listed(topic, twice, "among the dead letters more than once")
        other = [place for place, why in here.items() if place in due and why != due[place]]
        faults += [f"{_named(topic, [p])} has the reason {here[p]}, not {due[p]}" for p in other[:_SHOWN]]
        more = {place: why for place, why in here.items() if place not in due}
        good = [p for p, why in more.items() if why in refusals.reasons]
        faults += _listed(topic, good, "among the dead letters, and the format refuses nothing about that")
        compared += len(due)
        again.update(why for why in more.values() if why not in refusals.reasons)
    notes = f"; not compared: {others}" if others else ""
    if faults:
        return [Comparison(table, "dead letters", "wrong", "; ".join(faults) + notes)], places
    if others and not any(len(known) for known in covered.values()):
        return [Comparison(table, "dead letters", "not compared", f"all is of {others}")], places
    text = f"{counted(compared, 'refused record', 'is', 'are')} there, each once, with the reason that its format gives"
    if again:
        text += f"; {', '.join(_in_words(again))}: not computed again"
    return [Comparison(table, "dead letters", "ok", text + notes)], places


def _in_words(reasons: Counter[str]) -> Iterator[str]:
    """Numbers of dead letters with a reason that no format gives, by kind, in words."""
    rows = sum(count for why, count in reasons.items() if why in OF_ROWS)
    if rows:
        yield f"{counted(rows, 'record')} of refused output rows (a null key, for one)"
    for why, count in sorted(reasons.items()):
        if why not in OF_ROWS:
            yield f"{counted(count, 'record')} refused {_IN_WORDS.get(why, 'with the reason')} ({why})"


def _in(place: int, known: Packed) -> bool:
    at = int(np.searchsorted(known, place))
    return at < len(known) and int(known[at]) == place


def _listed(topic: str, places: Sequence[int] | Packed, what: str) -> list[str]:
    return [f"{counted(len(places), 'record', 'is', 'are')} {what}: {_named(topic, places)}"] if len(places) else []


def _named(topic: str, places: Sequence[int] | Packed) -> str:
    return shown(unpacked(topic, (int(place) for place in places)))
