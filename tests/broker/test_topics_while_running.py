"""A topic that is cut under a running stream: the stream stops with the range that is lost."""

from __future__ import annotations

from tests.broker.conftest import BenchFactory
from tests.broker.test_refusals import cut
from tests.support.driver import assert_chained, ledger, on_topic, produce, rows
from tests.support.things import plain, thing
from tests.support.waiting import wait_for

RECORDS, CUT = 120_000, 110_000
"""The cut lies far behind what was fetched ahead, some ten thousand records: that much the stream goes on reading."""


def test_a_topic_truncated_past_the_position_of_a_running_stream_stops_it_with_the_lost_range(
    bench: BenchFactory, topic: str
) -> None:
    made = bench({"stream.max_offsets_per_trigger": 1000, "stream.min_commit_interval": "10 ms"})
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(RECORDS)))
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or (running.status.batch or 0) >= 1, "the second batch")
    cut(made, topic, CUT)
    made.finish(running, 180)
    assert running.status.state == "failed" and running.status.error is not None
    assert running.status.error["code"] == "REC-022", running.status.error
    read = len(rows(made.settings, "plain"))
    assert 0 < read < CUT
    assert f"to {CUT - 1} of topic {topic}, partition 0, are gone" in running.status.error["found"]
    assert sorted(row["n"] for row in rows(made.settings, "plain")) == list(range(read))
    assert_chained(ledger(made.settings, "plain"))
