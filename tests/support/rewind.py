"""A plan that rewinds the stream of `life.py` to a batch, and its replay, written by hand."""

from __future__ import annotations

from reprocessing.plan.plan import Base, Checks, PlannedAgainst, RecoveryPlan, SawTable, SawTopic, StreamRecoveryPlan
from reprocessing.plan.plan_file import next_id, save, sealed
from reprocessing.replay import staging
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.state import savepoints
from tests.support.life import STREAM, TOPIC, TOPIC_ID, Life


def planned(life: Life, batch: int | None = 2) -> StreamRecoveryPlan:
    taken = None if batch is None else savepoints.take(life.settings, STREAM, life.record, batch, "recovery")
    tables = tuple(
        SawTable(t.name, t.role, t.table_id, 1, 1, 1, "append")  # type: ignore[arg-type]
        for t in life.record.tables
    )
    name = next_id(life.settings, STREAM.name)
    plan = StreamRecoveryPlan(
        id=name,
        stream=STREAM.name,
        kind="rewind",
        target="batch 2",
        wanted={TOPIC: {0: 30}},
        notes=(),
        saw=PlannedAgainst(1, 5, CodeVersion("fixed", "1"), tables, (SawTopic(TOPIC, TOPIC_ID, {0: 0}, {0: 60}),)),
        base=Base(taken.id, 1, 2, taken.ends) if taken else Base(None, 1, -1, {TOPIC: {0: 0}}),
        stateful=False,
        rate=10.0,
        record_bytes=None,
        checks=Checks(("id >= 0",), 0.6),
        staging=name,
    )
    save(life.settings, sealed(RecoveryPlan(name, 1.0, (plan,))))
    return plan


def replay(life: Life, plan: StreamRecoveryPlan, last: int = 5) -> None:
    """Write the batches after the savepoint into the staging folders, as the session would."""
    replay_settings = staging.settings_of(life.settings, plan)
    staged = Life(replay_settings)
    for number in range(3, last + 1):
        staged.batch(number, generation=plan.generation, code="fixed")
