"""The plan of a recovery: frozen, fingerprinted, shown before it is applied.

`<state>/recoveries/<plan>/plan.json`. The fingerprint covers all of it, so a file that was edited by hand is refused.
What the plan saw of the world is in `saw`; `moved` says what of it is different now. That the stream has meanwhile
gone on by itself is no difference: the replay reads to the topic's end anyway.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from streaming_jobs.errors import UsageError
from streaming_jobs.files import private_folder, sync, write_json
from streaming_jobs.ledger import CodeVersion, Txn
from streaming_jobs.positions import TopicOffsets, decode, decode_partitions
from streaming_jobs.settings import Settings
from streaming_jobs.stream import checked_name

_FORMAT = 1
_ID = re.compile(r"[a-z][a-z0-9_]*-\d{4,}")


@dataclass(frozen=True)
class SawTable:
    """A table as the plan saw it: Delta id, version, live files and bytes, and how the stream writes it."""

    name: str
    role: Literal["primary", "secondary", "deletes"]
    table_id: str
    version: int
    files: int
    size: int
    mode: Literal["append", "upsert"]


@dataclass(frozen=True)
class SawTopic:
    """A topic as the plan saw it, offsets by partition."""

    name: str
    topic_id: str
    earliest: Mapping[int, int]
    latest: Mapping[int, int]


@dataclass(frozen=True)
class PlannedAgainst:
    """What the plan rests on. `code` is the function as it is now, which the replay will run."""

    generation: int
    batch: int
    code: CodeVersion
    tables: tuple[SawTable, ...]
    topics: tuple[SawTopic, ...]

    @property
    def txn(self) -> Txn:
        """Where the stream was."""
        return Txn(self.generation, self.batch)


@dataclass(frozen=True)
class Base:
    """What the replay starts from: a savepoint, or nothing at all (`savepoint` None: empty state, empty tables).

    In a plan that goes forward it is where the stream was when the plan was made.
    """

    savepoint: str | None
    generation: int
    batch: int
    ends: TopicOffsets


@dataclass(frozen=True)
class Checks:
    """What must hold before publishing: SQL conditions for every row of the primary table, and a bound on change.

    `max_changed` is the greatest share of the published table's rows that may change, go or come; None: any.
    """

    rules: tuple[str, ...] = ()
    max_changed: float | None = None


@dataclass(frozen=True)
class Plan:
    """A recovery of one stream. `undoes` names the plan that this one takes back.

    A plan that `skips` goes forward: nothing is replayed, and records from `base.ends` to `wanted` are never read. With
    `discards_state` the replay starts with the base's tables and empty state.
    """

    id: str
    stream: str
    made_at: float
    target: str
    wanted: TopicOffsets
    notes: tuple[str, ...]
    saw: PlannedAgainst
    base: Base
    stateful: bool
    rate: float | None
    record_bytes: float | None
    checks: Checks
    undoes: str | None = None
    skips: bool = False
    discards_state: bool = False
    fingerprint: str = ""

    @property
    def generation(self) -> int:
        """The generation it opens."""
        return self.saw.generation + 1

    @property
    def records(self) -> int:
        """Records to replay, as of when the plan was made."""
        return sum(end - begin for _, _, begin, end in self.ranges())

    @property
    def size(self) -> float | None:
        """Bytes of keys and values to replay, from records read at its beginning; None when none could be read."""
        return None if self.record_bytes is None else self.records * self.record_bytes

    @property
    def seconds(self) -> float | None:
        """How long the replay takes at the stream's own pace so far; None when that is not known."""
        return self.records / self.rate if self.rate else None

    def ranges(self) -> Iterator[tuple[str, int, int, int]]:
        """(topic, partition, first offset, offset after the last) of what is replayed."""
        for topic in () if self.skips else self.saw.topics:
            begins = self.base.ends.get(topic.name, {})
            for partition, end in sorted(topic.latest.items()):
                yield topic.name, partition, begins.get(partition, topic.earliest.get(partition, 0)), end

    def skipped(self) -> Iterator[tuple[str, int, int, int]]:
        """(topic, partition, first offset, offset after the last) of what is never read, as of when it was made."""
        if not self.skips:
            return
        for topic in self.saw.topics:
            for partition, end in sorted(self.wanted[topic.name].items()):
                begin = self.base.ends.get(topic.name, {}).get(partition, topic.earliest.get(partition, 0))
                if end > begin:
                    yield topic.name, partition, begin, end

    def sealed(self) -> Plan:
        """The plan with its fingerprint."""
        return replace(self, fingerprint=_fingerprint(asdict(self)))


def folder(settings: Settings, plan: str) -> Path:
    """A plan's folder; raises UsageError for a name that no plan has."""
    if not _ID.fullmatch(plan):
        raise UsageError(f"'{plan}' is not the name of a plan", "see `recourse recover list`")
    return settings.state / "recoveries" / plan


def staging(settings: Settings, plan: str) -> Path:
    """Where a plan's staging tables lie: beside the tables, on the same file system."""
    return settings.tables / "_staging" / plan


def next_id(settings: Settings, stream: str) -> str:
    """A name that no plan has yet; its folder is made, so that two planners never get the same."""
    place = private_folder(settings.state / "recoveries")
    checked_name("stream", stream)
    taken = [int(p.name.rpartition("-")[2]) for p in place.glob(f"{stream}-*") if _ID.fullmatch(p.name)]
    number = max(taken, default=0) + 1
    while True:
        try:
            (place / f"{stream}-{number:04d}").mkdir(mode=0o700)
            return f"{stream}-{number:04d}"
        except FileExistsError:
            number += 1


def save(settings: Settings, plan: Plan) -> Path:
    """Write the plan; it is on disk when this returns."""
    path = private_folder(folder(settings, plan.id)) / "plan.json"
    write_json(path, {"format": _FORMAT, **asdict(plan)})
    sync(path.parent.parent)
    return path


def load(settings: Settings, name: str) -> Plan:
    """The plan of that name; raises UsageError if there is none or its file was changed by hand."""
    path = folder(settings, name) / "plan.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.pop("format") != _FORMAT:
            raise UsageError(f"{path} was written by a newer version", "use the newer recourse-streams")
        plan = _decoded(value)
    except FileNotFoundError:
        raise UsageError(f"there is no plan {name}", "see `recourse recover list`") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"plan {name} cannot be read: {error}", "make a new plan") from error
    if plan.fingerprint != _fingerprint(asdict(plan)) or plan.id != name:
        raise UsageError(f"plan {name} was changed by hand after it was made", "make a new plan")
    return plan


def names(settings: Settings) -> list[str]:
    """All plans, oldest first."""
    place = settings.state / "recoveries"
    found = [p for p in place.glob("*/plan.json") if _ID.fullmatch(p.parent.name)] if place.is_dir() else []
    return [path.parent.name for path in sorted(found, key=lambda path: path.stat().st_mtime)]


def moved(plan: Plan, now: PlannedAgainst) -> list[str]:
    """What has changed since the plan was made so that it no longer holds, in words."""
    saw, found = plan.saw, []
    if now.generation != saw.generation:
        found.append(f"the stream is in generation {now.generation}, the plan was made in {saw.generation}")
    elif now.batch < saw.batch:
        found.append(f"the stream is at batch {now.batch}, the plan saw batch {saw.batch}")
    if now.code != saw.code:
        found.append(f"the code is {now.code}, the plan was made for {saw.code}")
    tables = {table.name: table for table in now.tables}
    for table in saw.tables:
        other = tables.get(table.name)
        if other is None or other.table_id != table.table_id:
            found.append(f"table {table.name} is another table, or gone")
        elif other.version < table.version:
            found.append(f"table {table.name} is at version {other.version}, the plan saw {table.version}")
    topics = {topic.name: topic for topic in now.topics}
    for topic in saw.topics:
        seen = topics.get(topic.name)
        if seen is None or seen.topic_id != topic.topic_id:
            found.append(f"topic {topic.name} was deleted or made anew")
            continue
        if set(seen.latest) != set(topic.latest):
            found.append(f"topic {topic.name} has {len(seen.latest)} partitions, the plan saw {len(topic.latest)}")
        needed = [(t, p, end) for t, p, _, end in plan.skipped()] or [(t, p, begin) for t, p, begin, _ in plan.ranges()]
        for name, partition, begin in needed:
            if name == topic.name and (first := seen.earliest.get(partition, 0)) > begin:
                found.append(f"offsets {begin} to {first - 1} of {name}, partition {partition}, are gone since")
    return found


def _fingerprint(value: dict[str, Any]) -> str:
    text = json.dumps({**value, "fingerprint": ""}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _decoded(value: dict[str, Any]) -> Plan:
    saw, base, checks = value.pop("saw"), value.pop("base"), value.pop("checks")
    world = PlannedAgainst(
        generation=saw["generation"],
        batch=saw["batch"],
        code=CodeVersion(*saw["code"]),
        tables=tuple(SawTable(**table) for table in saw["tables"]),
        topics=tuple(
            SawTopic(t["name"], t["topic_id"], decode_partitions(t["earliest"]), decode_partitions(t["latest"]))
            for t in saw["topics"]
        ),
    )
    return Plan(
        **{
            **value,
            "notes": tuple(value["notes"]),
            "wanted": decode(value["wanted"]),
        },
        saw=world,
        base=Base(**{**base, "ends": decode(base["ends"])}),
        checks=Checks(tuple(checks["rules"]), checks["max_changed"]),
    )
