"""Recovery over three streams with topics between them: equal to the truth after kills, an undo, and an abort."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from orchestration.cli.demo import CHANGES, LEVELS, RIGHT_CHANGE, SHOP_STREAMS, WRONG_CHANGE, ShopStory
from orchestration.cli.text import FAILED
from reprocessing.plan.plan_file import load, undos_of
from reprocessing.stages.stages import stages_of
from streaming_jobs.platform.broker import Broker
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import topic_records
from streaming_jobs.verification.topic import CommittedReader, RawRecord
from tests.support.driver import command
from tests.support.stories import shop_story
from tests.support.topic_reader import committed

COUNT = 2_000
HALF = COUNT // 2
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def story(broker: Broker, tmp_path: Path) -> Iterator[ShopStory]:
    """Half of the orders read by the right code, half by the wrong one; the right one is deployed again."""
    with shop_story(broker, tmp_path / "shop", COUNT) as told:
        told.begin()
        told.feed(0, HALF)
        told.run_in_order()
        told.deploy(WRONG_CHANGE)
        told.feed(HALF, COUNT)
        told.run_in_order()
        told.compare(COUNT, right=False)
        told.deploy(RIGHT_CHANGE)
        yield told


def killed(story: ShopStory, point: str, *arguments: str) -> None:
    """Run a command that is killed at `stream:point:batch`, or whose driver is."""
    done = command(story.folder, {**story.environment(), "RECOURSE_CRASH": point}, *arguments)
    expected = -signal.SIGKILL
    if arguments[:2] == ("streams", "run"):  # the driver is a process of its own
        expected = FAILED
        assert "killed by SIGKILL" in done.stderr, done.stderr[-2000:]
    assert done.returncode == expected, (point, done.returncode, done.stderr[-2000:])


def planned(story: ShopStory) -> dict[str, Any]:
    record = json.loads((story.settings.state / "stock_changes" / "stream.json").read_text())
    arguments = ["recover", "plan", "stock_changes", "--before-code", record["code"][1]["hash"], "--output", "json"]
    plan: dict[str, Any] = json.loads(story.recourse(*arguments, quiet=True))
    return plan


def outside(story: ShopStory, group: str, offset: int) -> None:
    """A consumer that is not ours commits an offset."""
    consumer = Consumer({"bootstrap.servers": story.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(CHANGES, 0, offset)], asynchronous=False)
    consumer.close()


@pytest.mark.long  # test_recovery_through_tables.py has topics and tables
def test_a_bug_in_the_first_stream_is_put_right_in_all_and_taken_back(story: ShopStory) -> None:
    ends = Topics.of(story.settings.kafka, story.bootstrap).latest(CHANGES)
    outside(story, "billing", ends[0] - 10)
    plan = planned(story)
    name = plan["id"]
    shown = story.recourse("recover", "show", name, quiet=True)
    assert load(story.settings, name).names == SHOP_STREAMS
    assert f"consumer group billing has read {CHANGES} partition 0" in shown, shown
    assert f"{CHANGES}: " in shown and "become void" in shown, shown

    killed(story, "stock:recover_replay_ran:0", "recover", "apply", name, "--yes")
    refused = command(story.folder, story.environment(), "streams", "run", "stock", "--trigger", "available-now")
    assert refused.returncode != 0 and name in refused.stderr, refused.stderr[-500:]
    story.recourse("recover", "resume", name, "--yes", quiet=True)
    story.compare(COUNT, right=True)
    report = (story.settings.state / "recoveries" / name / "report.html").read_text()
    assert f"topic {CHANGES}" in report and f"topic {LEVELS}" in report
    partitions = len(Topics.of(story.settings.kafka, story.bootstrap).latest(CHANGES))
    headers = [dict(m.headers() or []) for m in committed(story.bootstrap, CHANGES, partitions)]
    again = [int(each["recourse.first_read"] or b"") / 1_000 for each in headers if "recourse.first_read" in each]
    assert 0 < len(again) < len(headers) and max(again) < load(story.settings, name).made_at
    told_to_readers_outside(story, name, len(again))

    killed(story, "stock_changes:recover_void_records_ran:0", "recover", "undo", name, "--yes")
    story.recourse("recover", "resume", undos_of(story.settings, name)[-1], "--yes", quiet=True)
    story.compare(COUNT, right=False)
    assert all(topic_records.load(story.settings, topic).under_way is None for topic in (CHANGES, LEVELS))  # type: ignore[union-attr]


def told_to_readers_outside(story: ShopStory, plan: str, replaced: int) -> None:
    """A consumer that leaves out the void offsets of the corrections has the records of right code."""
    document = json.loads(story.recourse("recover", "corrections", plan, "-o", "json", quiet=True))
    topics = {topic["topic"]: topic for stream in document["streams"] for topic in stream["topics"]}
    assert {CHANGES, LEVELS} == topics.keys()

    def within(kind: str, record: RawRecord) -> bool:
        ranges = [each for each in topics[CHANGES][kind] if each["partition"] == record.partition]
        return any(each["begin"] <= record.offset < each["end"] for each in ranges)

    records = kept(story, CHANGES)
    counting = [json.loads(each.value or b"{}") for each in records if not within("void", each)]
    truth = Counter((order.product, order.pieces) for order in story.all[:COUNT])
    assert Counter((each["product"], each["pieces"]) for each in counting) == truth
    assert sum(within("replaced_by", each) for each in records) == replaced


def compacted(story: ShopStory, topic: str) -> None:
    """Let the log cleaner remove every record of a topic but the newest of each key; returns when it has run."""
    place = ConfigResource(ConfigResource.Type.TOPIC, topic)
    wanted = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.001"}
    for name, value in wanted.items():
        place.add_incremental_config(ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET))
    admin = AdminClient({"bootstrap.servers": story.bootstrap})
    admin.incremental_alter_configs([place])[place].result(15)
    partitions = Topics.of(story.settings.kafka, story.bootstrap).latest(topic)
    before, until = len(kept(story, topic)), time.monotonic() + 150
    producer = Producer({"bootstrap.servers": story.bootstrap, "transactional.id": f"roll-{topic}"})
    producer.init_transactions(30)
    while len(kept(story, topic)) >= before:
        assert time.monotonic() < until, "the log cleaner has not run"
        producer.begin_transaction()  # an aborted record ends the segment, which only then is cleaned
        for partition in partitions:
            producer.produce(topic, key=b"none", value=b"none", partition=partition)
        producer.flush(15)
        producer.abort_transaction(30)
        time.sleep(1)


def kept(story: ShopStory, topic: str) -> list[RawRecord]:
    """The committed records that a topic has now."""
    found: list[RawRecord] = []
    CommittedReader.at(story.settings.kafka, story.bootstrap, topic).content(take=found.extend)
    return found


@pytest.mark.long
def test_a_compacted_topic_is_written_anew_though_its_cleaner_runs_between_the_steps(story: ShopStory) -> None:
    """From a savepoint its right records would be missing: the cleaner has removed them because of wrong ones."""
    compacted(story, LEVELS)
    record = json.loads((story.settings.state / "stock_changes" / "stream.json").read_text())
    asked = ["recover", "plan", "stock_changes", "--before-code", record["code"][1]["hash"], "--output", "json"]
    refused = command(story.folder, story.environment(), *asked)
    assert refused.returncode == 2 and f"topic {LEVELS} of stream stock is compacted" in refused.stderr
    assert "--rebuild stock" in refused.stderr, refused.stderr[-800:]
    plan = json.loads(story.recourse(*asked, "--rebuild", "stock", quiet=True))["id"]
    killed(story, "stock:recover_replay_ran:0", "recover", "apply", plan, "--yes")
    compacted(story, LEVELS)
    story.recourse("recover", "resume", plan, "--yes", quiet=True)
    story.compare(COUNT, right=True)


@pytest.mark.long
def test_a_second_recovery_goes_back_behind_the_first_one_and_a_third_is_given_up(story: ShopStory) -> None:
    first = planned(story)["id"]
    story.recourse("recover", "apply", first, "--yes", quiet=True)
    story.recourse("recover", "undo", first, "--yes", quiet=True)
    again = planned(story)["id"]  # it goes back behind what the first one has declared void
    killed(story, "stock_changes:secondary_committed:1", "recover", "apply", again, "--yes")
    story.recourse("recover", "resume", again, "--yes", quiet=True)
    story.compare(COUNT, right=True)

    last = planned(story)["id"]
    killed(story, "stock:recover_replay_ran:0", "recover", "apply", last, "--yes")
    story.recourse("recover", "abort", last, quiet=True)
    story.compare(COUNT, right=True)
    story.run_in_order()
    story.compare(COUNT, right=True)


@pytest.mark.long
def test_a_batch_that_only_the_topic_has_is_finished_first(story: ShopStory) -> None:
    story.deploy(WRONG_CHANGE)
    story.feed(0, 200)
    unfinished = ("streams", "run", "stock_changes", "--trigger", "available-now")
    killed(story, "stock_changes:secondary_committed:2", *unfinished)
    story.run_streams(["stock"])
    story.deploy(RIGHT_CHANGE)
    plan = planned(story)["id"]
    refused = command(story.folder, story.environment(), "recover", "apply", plan, "--yes")
    assert refused.returncode == 2 and "let the stream finish it" in refused.stderr, refused.stderr[-800:]
    story.run_streams(["stock_changes"])
    story.recourse("recover", "resume", plan, "--yes", quiet=True)
    story.all += story.all[:200]
    story.compare(len(story.all), right=True)


@pytest.mark.long
def test_beside_its_session_the_first_stream_is_followed_though_it_writes_a_topic_only(story: ShopStory) -> None:
    """Its table lists what each batch has written: so it has no row of a batch before the append."""
    with story.session() as check:

        def more(count: int) -> None:
            story.feed(0, count)
            story.all = [*story.all, *story.all[:count]]
            there = len(story.all)
            story.wait(lambda: len(story.counting(CHANGES)) == there, f"{there} changes", check)

        for count in (100, 150, 200):  # batches of their own
            more(count)
        plan = planned(story)["id"]
        killed(story, "stock_changes:recover_append_next:0", "recover", "apply", plan, "--yes")
        story.recourse("recover", "resume", plan, "--yes", quiet=True)
        more(300)
    story.run_in_order()
    story.compare(len(story.all), right=True)
    batches = [row for row in story.rows("stock_changes_batches") if row["generation"] == 2]
    assert len({row["batch"] for row in batches}) >= 2 and sum(row["records"] for row in batches) > HALF
    story.recourse("recover", "undo", plan, "--yes", quiet=True)
    story.run_in_order()
    wrong = Counter((each["product"], each["pieces"]) for each in story.counting(CHANGES))
    assert wrong != Counter((order.product, order.pieces) for order in story.all) and wrong.total() == len(story.all)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_killed_at_every_border_of_every_stage_of_every_stream(story: ShopStory) -> None:
    """Forward and back again, with a kill at another border each time."""
    plan = planned(story)["id"]
    stages = [(stage.name, stage.stream or SHOP_STREAMS[0]) for stage in stages_of(load(story.settings, plan))]
    borders = [f"{stream}:recover_{stage}_{side}:0" for stage, stream in stages for side in ("begun", "ran")]
    between = ("recover_fence_topic", "recover_publish_between", "recover_switch_generation_between")
    borders += [f"{stream}:{point}:0" for point in between for stream in SHOP_STREAMS[:2]]
    right = False
    for point in borders:
        if right:
            killed(story, point, "recover", "undo", plan, "--yes")
            story.recourse("recover", "resume", undos_of(story.settings, plan)[-1], "--yes", quiet=True)
        else:
            plan = planned(story)["id"]
            killed(story, point, "recover", "apply", plan, "--yes")
            story.recourse("recover", "resume", plan, "--yes", quiet=True)
        right = not right
        story.compare(COUNT, right=right)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_given_up_after_a_kill_at_every_border(story: ShopStory) -> None:
    plan = planned(story)["id"]
    stages = [(stage.name, stage.stream or SHOP_STREAMS[0]) for stage in stages_of(load(story.settings, plan))]
    story.recourse("recover", "abort", plan, quiet=True)
    before_publish = [
        (stage, stream)
        for stage, stream in stages
        if stage in ("take_savepoint", "fence", "void_records", "prepare", "replay", "audit")
    ]
    for stage, stream in before_publish:
        plan = planned(story)["id"]
        killed(story, f"{stream}:recover_{stage}_ran:0", "recover", "apply", plan, "--yes")
        story.recourse("recover", "abort", plan, quiet=True)
        story.compare(COUNT, right=False)
    story.recourse("recover", "apply", planned(story)["id"], "--yes", quiet=True)
    story.compare(COUNT, right=True)
