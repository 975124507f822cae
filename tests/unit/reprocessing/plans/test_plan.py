"""A plan and the stream as it is now: what has moved since, other than its own progress."""

from __future__ import annotations

from dataclasses import replace

from reprocessing.plans.plan import moved
from streaming_jobs.ledger import CodeVersion
from tests.support.life import Life
from tests.support.rewind import planned


def test_what_moved_is_told_and_the_streams_own_progress_is_not(life: Life) -> None:
    plan = planned(life)
    saw = plan.saw
    further = replace(saw, batch=9, tables=tuple(replace(t, version=t.version + 7) for t in saw.tables))
    assert moved(plan, saw) == [] == moved(plan, further)
    topic = saw.topics[0]
    for now, words in (
        (replace(saw, generation=2), "in generation 2"),
        (replace(saw, batch=4), "at batch 4"),
        (replace(saw, code=CodeVersion("other", "1")), "the code is other"),
        (replace(saw, tables=(replace(saw.tables[0], table_id="x"), *saw.tables[1:])), "is another table"),
        (replace(saw, tables=(replace(saw.tables[0], version=0), *saw.tables[1:])), "at version 0"),
        (replace(saw, topics=(replace(topic, topic_id="y"),)), "deleted or made anew"),
        (replace(saw, topics=(replace(topic, latest={0: 60, 1: 0}),)), "has 2 partitions"),
        (replace(saw, topics=(replace(topic, earliest={0: 31}),)), "offsets 30 to 30"),
    ):
        assert len(changes := moved(plan, now)) == 1 and words in changes[0]
