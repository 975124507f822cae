"""A recovery as its report reads it: a plan and a journal, without tables, broker or Spark."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reprocessing.plan.journal import Journal
from reprocessing.plan.plan import Base, Checks, PlannedAgainst, RecoveryPlan, SawTable, SawTopic, StreamRecoveryPlan
from reprocessing.replay.difference import ByKey, ByTime, Difference, for_journal
from reprocessing.report.facts import BatchRows, BatchSeries
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.storage.object_files import LocalFiles, ObjectHandle

AT = 1_795_000_000.0
TOPIC = "stock_movements"


def plan_of(
    partitions: int = 2, *, skips: bool = False, savepoint: str | None = "g0001-b000000020", streams: int = 1
) -> RecoveryPlan:
    """A plan whose partitions end at about 30,000 and are replayed, or skipped from, about 15,000."""
    begin = {p: 15_000 + 37 * p for p in range(partitions)}
    latest = {p: 30_000 + 211 * p for p in range(partitions)}
    saw = PlannedAgainst(
        1,
        90,
        CodeVersion("aed9689c9efe", "0.1.0"),
        (SawTable("inventory", "primary", "id", 91, 4, 120_000, "upsert"),),
        (SawTopic(TOPIC, "topic-1", dict.fromkeys(begin, 2_000), latest),),
    )
    base = Base(savepoint, 1, 20 if savepoint else -1, {TOPIC: begin})
    wanted = {TOPIC: {p: end - 1_000 if skips else begin[p] + 400 for p, end in latest.items()}}
    each = [
        StreamRecoveryPlan(
            id="inventory-0001",
            stream="inventory" if number == 0 else f"inventory{number}",
            kind="skip" if skips else "rewind",
            target="before the first bad row: quantity < 0",
            wanted=wanted,
            notes=("196 rows are bad now",),
            saw=saw,
            base=base,
            stateful=False,
            rate=5_000.0,
            record_bytes=80.0,
            checks=Checks(("(quantity < 0) IS NOT TRUE",)),
            staging="inventory-0001",
        )
        for number in range(streams)
    ]
    return RecoveryPlan("inventory-0001", AT, tuple(each))


def batches_of(count: int, *, since: float = AT - 90_000, records: int = 430, seed: int = 7) -> list[BatchRows]:
    """Batches of a stream with a quiet time and a few large batches."""
    chance, at, batches = random.Random(seed), since, []
    for number in range(count):
        quiet = 0.2 if 0.4 < number / count < 0.55 else 1.0
        size = int(records * quiet * chance.uniform(0.6, 1.4) * (4 if chance.random() < 0.02 else 1))
        batches.append(BatchRows(at, 21 + number, int(size * 0.93), size))
        at += 86_000 / count
    return batches


def difference(*, keys: int = 60, table: str = "inventory", first_key: str = "bolt M6") -> Difference:
    """The differences of a table by item and hour, most of them in some hours of a day."""
    chance = random.Random(3)
    hour = int(AT) // 3_600 * 3_600 - 40 * 3_600
    periods = [
        (hour + 3_600 * n, chance.randrange(3), chance.randrange(6), int(80 / (1 + abs(n - 14) / 3)))
        for n in range(40)
        if n not in (5, 6, 7, 30)
    ]
    gone, came, changed = (sum(each[place] for each in periods) for place in (1, 2, 3))
    names = [first_key, *(f"{kind} {n}" for n in range(20) for kind in ("bolt", "washer", "hinge"))]
    largest = [(names[n], n % 3, n % 4, max(60 - 3 * n, 1), 130 - 3 * n) for n in range(min(keys, 20))]
    return Difference(
        table,
        20_140,
        20_163,
        gone,
        came,
        changed,
        {"quantity": (812_004, 799_310), "value": ("10211.50", "9800.25")},
        [{"item": "bolt M6", "quantity published": -20, "quantity rebuilt": 20}],
        "hour",
        keyed=True,
        timeline=ByTime(3_600, periods),
        by_key=ByKey(("item",), keys, largest),
    )


def journal_of(
    folder: Path,
    plan: RecoveryPlan,
    *,
    replaced: Sequence[BatchRows] = (),
    replayed: Sequence[BatchRows] = (),
    differences: Sequence[Difference] = (),
    until: str = "clean_up",
) -> Journal:
    """The journal of a plan that was carried out up to a stage."""
    journal = Journal(ObjectHandle(LocalFiles(folder), "journal.jsonl"))
    latest = dict(plan.streams[0].saw.topics[0].latest)
    base = plan.streams[0].base.ends[TOPIC]
    findings: dict[str, Mapping[str, Any]] = {
        "take_savepoint": {
            "savepoint": "g0001-b000000090",
            "batch": 90,
            "position": {TOPIC: {p: base[p] if plan.skips else end - 500 for p, end in latest.items()}},
            "starts": {TOPIC: dict.fromkeys(latest, 0)},
        },
        "fence": {},
        "prepare": {},
        "replay": {
            "batch": 95,
            "seconds": 6.1,
            "records": 30_000,
            "since": 0,
            "ends": {TOPIC: {p: end + 100 for p, end in latest.items()}},
            "batches": {
                "replaced": asdict(BatchSeries.of(replaced)),
                "replayed": asdict(BatchSeries.of(replayed)),
            },
        },
        "audit": {"differences": for_journal(differences)},
        "publish": {"tables": []},
        "skip": {"generation": 2},
        "switch_generation": {"generation": 2},
        "clean_up": {},
    }
    shared = ("audit", "clean_up")
    left_out = ("prepare", "replay", "audit", "publish", "switch_generation") if plan.skips else ("skip",)
    for stage, found in findings.items():
        for each in [None] if stage in shared else plan.names:
            if stage not in left_out:
                journal.write(stage, "begun", stream=each)
                journal.write(stage, "done", found, stream=each)
        if stage == until:
            break
    return journal
