"""The state beside the tables that outlasts their logs: the ledger file, the stream's record, the plans' outputs.

    <state>/<stream>/ledger/2026-11-21.jsonl[.gz]   a line per batch, kept for days
    <state>/<stream>/stream.json                    generations and where each began, topics, what was skipped
    <state>/<stream>/slices/<id>.json               ranges of rows that were rebuilt (`ChangedRows`)
    <state>/<stream>/redrives/<id>.json             what became of records that were set aside (`Redriven`)
    <state>/<stream>/outputs.json                   which rows the plans of the stream's code make of a record

The verifier has its own reader of these files, as it has one of the logs (`delta_log.py`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streaming_jobs.storage.locations import Location, StorePath, files_below
from streaming_jobs.verification.delta_log import Entry, Range, code_of, numbers
from streaming_jobs.verification.offset_ranges import Span

ACCEPTED = "a change of somebody else was accepted"
"""The reason why the rows of a table may differ from the records."""


@dataclass(frozen=True)
class CorrectedBatches:
    """The batches that a bounded recovery has corrected: after one generation and batch, up to another.

    `entry` represents all of them.
    """

    after: tuple[int, int]
    up_to: tuple[int, int]
    entry: Entry


@dataclass(frozen=True)
class Life:
    """One generation: its origin, and the number of its first batch."""

    number: int
    reason: str
    from_generation: int | None
    from_batch: int
    restarts: bool
    corrected: CorrectedBatches | None = None

    @property
    def first_batch(self) -> int:
        return 0 if self.restarts else self.from_batch + 1


@dataclass(frozen=True)
class PlanOutput:
    """The output of a plan for one table: the plan's nodes, and the columns that hold the record's place, if any."""

    nodes: tuple[str, ...]
    position: tuple[str, str] | None

    @property
    def one_row(self) -> bool:
        """True if every record makes exactly one row."""
        return set(self.nodes) <= _ROW_BY_ROW

    @property
    def one_row_at_most(self) -> bool:
        """True if no record makes two rows."""
        return set(self.nodes) <= _ROW_BY_ROW | _FEWER


_ROW_BY_ROW = {"Project", "SubqueryAlias", "EventTimeWatermark", "View"}
_FEWER = {"Filter", "Deduplicate", "DeduplicateWithinWatermark"}


@dataclass(frozen=True)
class StateEvidence:
    """The state beside one stream's tables. `topics` has by name the id and the offsets where the first start began."""

    lives: tuple[Life, ...]
    topics: Mapping[str, tuple[str, Mapping[int, int]]] = field(default_factory=dict)
    skipped: tuple[tuple[int, Span], ...] = ()
    accepted: Mapping[str, frozenset[int]] = field(default_factory=dict)
    lines: Mapping[tuple[int, int], Entry] = field(default_factory=dict, repr=False)
    outputs: Mapping[str, Mapping[str, PlanOutput]] = field(default_factory=dict)
    slices: tuple[ChangedRows, ...] = ()
    redriven: tuple[Redriven, ...] = ()

    @property
    def begins(self) -> dict[tuple[str, int], int]:
        """By topic and partition the offset where the first start began."""
        return {(topic, p): offset for topic, (_, start) in self.topics.items() for p, offset in start.items()}

    @classmethod
    def read(cls, state: Location, stream: str) -> StateEvidence | None:
        """Read the stream's state folder; None when the stream has none.

        Raises ValueError when its record cannot be read.
        """
        folder = state / stream
        try:
            value = json.loads((folder / "stream.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        try:
            return cls(
                lives=tuple(_life(stream, one) for one in value["generations"]),
                topics={t["name"]: (str(t["topic_id"]), numbers(t["start"])) for t in value["topics"]},
                skipped=tuple(
                    (int(v["generation"]), Span(v["topic"], int(v["partition"]), int(v["from"]), int(v["to"])))
                    for v in value["void_ranges"]
                ),
                accepted=_accepted(value["accepted"]),
                lines=dict(_ledger_lines(folder / "ledger", stream)),
                outputs=outputs_of(state, stream),
                slices=tuple(rebuilt_slices(folder / "slices")),
                redriven=tuple(redriven(folder / "redrives")),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / 'stream.json'} has no {error}") from error

    def changed(self, table: str) -> bool:
        """True if another writer's change to that table was accepted."""
        return bool(self.accepted.get(table))

    def slices_of(self, table: str) -> list[ChangedRows]:
        """The slices of that table that were rebuilt, or that wait for their commit."""
        return [one for one in self.slices if one.table == table]

    def redriven_into(self, table: str) -> list[ChangedRows]:
        """What redrives have changed in that table, or will change at their commit."""
        return [part for one in self.redriven for part in one.parts if part.table == table]

    def life(self, number: int) -> Life | None:
        return next((life for life in self.lives if life.number == number), None)


def _life(stream: str, value: Mapping[str, Any]) -> Life:
    return Life(
        int(value["number"]),
        str(value["reason"]),
        value.get("from_generation"),
        int(value.get("from_batch", -1)),
        bool(value.get("restarts", False)),
        _corrected(stream, int(value["number"]), value["corrected"]) if value.get("corrected") else None,
    )


def _corrected(stream: str, generation: int, value: Mapping[str, Any]) -> CorrectedBatches:
    after, up_to = ((int(at["generation"]), int(at["batch"])) for at in (value["after"], value["up_to"]))
    ranges = tuple(
        Range(r["topic"], str(r["topic_id"]), numbers(r["start"]), numbers(r["end"])) for r in value["offsets"]
    )
    entry = Entry("batch", stream, "", generation, up_to[1], ranges, value["rows"], str(value["code"]))
    return CorrectedBatches(after, up_to, entry)


def _accepted(values: list[Mapping[str, Any]]) -> dict[str, frozenset[int]]:
    tables = {str(value["table"]) for value in values}
    return {table: frozenset(int(v["version"]) for v in values if v["table"] == table) for table in tables}


def outputs_of(state: Location, stream: str) -> dict[str, dict[str, PlanOutput]]:
    """By code and table the outputs of the stream's plans."""
    try:
        value = json.loads((state / stream / "outputs.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {
        code: {
            table: PlanOutput(tuple(one["nodes"]), tuple(one["position"]) if one["position"] else None)
            for table, one in tables.items()
        }
        for code, tables in value["code"].items()
    }


def _ledger_lines(folder: Location, stream: str) -> Iterator[tuple[tuple[int, int], Entry]]:
    """Every complete line, oldest first; a line that a crash cut off is left out.

    A short line has the partitions that have moved since the full line that it names (`on`), which is before it in the
    file; without that one it is left out too. On a store a day is a folder of objects, named by their first batches.
    """
    if isinstance(folder, StorePath):
        names = sorted((name for name, _ in files_below(folder)))
        paths: list[Location] = [folder / name for name in names]
    else:
        paths = [*sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])]
    for path in paths:
        full: Mapping[str, Any] = {}
        for text in _content(path).split(b"\n"):
            try:
                value = json.loads(text)
                if "on" not in value:
                    full = value
                elif [full["g"], full["b"]] == value["on"]:
                    value = {**value, "offsets": _whole(value["offsets"], full["offsets"])}
                else:
                    continue
                entry = _entry(stream, value)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            yield (entry.generation, entry.batch), entry


def _whole(moved: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """The offsets of a short line with those of the partitions that stand where the full line ends."""
    whole = {}
    for topic, read in moved.items():
        still = {p: end for p, end in full[topic]["end"].items() if p not in read["end"]}
        whole[topic] = {**read, "start": {**still, **read["start"]}, "end": {**still, **read["end"]}}
    return whole


def _content(path: Location) -> bytes:
    """The content of a day's file, which a running driver may have compressed since it was listed."""
    try:
        return gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    except FileNotFoundError:
        return gzip.decompress((path.parent / f"{path.stem}.jsonl.gz").read_bytes())


def _entry(stream: str, value: Mapping[str, Any]) -> Entry:
    return Entry(
        kind="batch",
        stream=stream,
        table=str(value["table"]),
        generation=int(value["g"]),
        batch=int(value["b"]),
        ranges=tuple(
            Range(topic, str(read["id"]), numbers(read["start"]), numbers(read["end"]))
            for topic, read in value["offsets"].items()
        ),
        rows={name: int(count) for name, count in value["rows"].items()},
        code=code_of(str(value["code"][0]), value.get("note")),
    )


# Rebuilt slices and redrives, according to their files beside the state: no batch wrote their rows.
#
# A rebuilt slice holds what the function makes of its records, so a truth of the user's own still holds for every
# row. What the batches' entries say of the table changes: its number of rows, by that of each slice before and
# after.


@dataclass(frozen=True)
class ChangedRows:
    """A slice, or what a redrive does to one table: its numbers of rows before and after, and the code that made them.

    `version` is that of the table with it; `waits`: not committed yet.
    """

    table: str
    generation: int
    code: str
    before: int
    after: int
    waits: bool = False
    version: int | None = None

    def is_in(self, version: int) -> bool:
        """False if it is newer than this version of the table."""
        return self.version is None or self.version <= version


def rebuilt_slices(folder: Location) -> Iterator[ChangedRows]:
    """Yields committed slices, and slices that wait; raises ValueError for an unreadable file."""
    for value in _requests(folder):
        yield _changed(value, value)
        if aside := value.get("quarantine"):
            yield _changed(value, aside)


@dataclass(frozen=True)
class Redriven:
    """One redrive: what it changed in each table, and the records of which none, or no known row, became."""

    parts: tuple[ChangedRows, ...]
    without_row: tuple[tuple[str, int, int], ...]
    unknown: tuple[tuple[str, int, int], ...]


def redriven(folder: Location) -> Iterator[Redriven]:
    """Yields committed redrives, and redrives that wait; raises ValueError for an unreadable file."""
    for value in _requests(folder):
        by_outcome: dict[str, list[tuple[str, int, int]]] = {}
        for each in value["records"]:
            place = str(each["topic"]), int(each["partition"]), int(each["offset"])
            by_outcome.setdefault(str(each["outcome"]), []).append(place)
        yield Redriven(
            tuple(_changed(value, part) for part in value["parts"]),
            (*by_outcome.get("dropped", ()), *by_outcome.get("no row", ())),
            tuple(by_outcome.get("redriven", ())),
        )


def _requests(folder: Location) -> Iterator[dict[str, Any]]:
    """Yields the changes of a folder that were committed, or wait."""
    for path in sorted([*folder.glob("*.json"), *(folder / "waiting").glob("*.json")], key=str):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["state"] in ("committed", "committing", "waiting"):
                yield value
        except FileNotFoundError:  # it was committed since the folder was listed
            continue
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} has no {error}") from error


def _changed(request: Mapping[str, Any], part: Mapping[str, Any]) -> ChangedRows:
    try:
        entry = json.loads(part["entry"])
        return ChangedRows(
            str(part["table"]),
            int(entry["generation"]),
            str(entry["code"]["hash"]),
            int(entry["rows"]["before"]),
            int(entry["rows"]["after"]),
            request["state"] != "committed",
            part.get("version"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"change {request.get('id')} has no {error}") from error


def uncounted(slices: Sequence[ChangedRows], redriven: Sequence[ChangedRows], generation: int | None) -> str:
    """The reason why the rows of a table with these changes cannot be counted; empty if they can be."""
    if any(one.waits for one in slices):
        return "a slice of it waits for its commit"
    if any(one.waits for one in redriven):
        return "a redrive waits for its commit"
    if any(one.generation != generation for one in slices):
        return "slices of it were rebuilt before a recovery"
    if any(one.generation != generation for one in redriven):
        return "records were redriven before a recovery"
    return ""


def by_other_code(slices: Sequence[ChangedRows], codes: set[str]) -> bool:
    """True if the rows of a slice may be other rows than the batches' code made."""
    return bool(slices) and codes != {one.code for one in slices}
