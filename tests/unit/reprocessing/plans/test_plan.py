"""A plan and the stream as it is now: what has moved since, other than its own progress."""

from __future__ import annotations

from dataclasses import replace

from reprocessing.explainer import _from_archives
from reprocessing.plans.plan import moved
from streaming_jobs.ledger.entry import CodeVersion
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


def test_the_part_that_kafka_no_longer_has_comes_from_the_archive_and_may_grow(life: Life) -> None:
    plan = planned(life)
    (topic,) = plan.saw.topics
    ((name, partition, begin, end),) = plan.ranges()
    assert list(plan.archived()) == []
    with_archive = replace(topic, archive="things_archive", first={partition: begin + 7})
    archived = replace(plan, saw=replace(plan.saw, topics=(with_archive,)))
    assert list(archived.archived()) == [(name, partition, begin, begin + 7)]
    more = replace(with_archive, first={partition: end + 100})
    assert moved(archived, replace(archived.saw, topics=(more,))) == [], "the archive has what Kafka deleted since"
    all_of_it = replace(plan, saw=replace(plan.saw, topics=(more,)))
    assert list(all_of_it.archived()) == [(name, partition, begin, end)]
    text = "\n".join(_from_archives(archived))
    rest = end - begin - 7
    assert "7 records of them from table things_archive" in text and f"{rest} records of {name} from Kafka" in text
    assert f"partition {partition}: {begin} to {begin + 6}" in text
    assert list(_from_archives(plan)) == []
    hole = replace(topic, earliest={partition: begin + 1})
    assert "are gone since" in moved(archived, replace(archived.saw, topics=(hole,)))[0]
