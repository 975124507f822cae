"""Inspections of many generated histories: every planted loss and double is found, and none that is not there.

The truth is what the generator holds of the table's rows; no finding is compared with what an inspection has read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from streaming_jobs.inspection.counted_offsets import OffsetColumns
from streaming_jobs.inspection.coverage import RECREATED
from streaming_jobs.inspection.findings import InspectionFinding
from streaming_jobs.inspection.inspection import Inspection, inspect
from streaming_jobs.verification.offset_ranges import Span
from tests.support.plain_histories import TOPIC, JobKind, PlainJob, Record

pytestmark = pytest.mark.slow
COLUMNS = OffsetColumns("partition", "offset")
ALL: tuple[JobKind, ...] = ("sink", "append", "append-once", "merge")
SIGNED: tuple[JobKind, ...] = ("sink", "append-once")
SEEDS = 3


def calm(job: PlainJob) -> None:
    job.run(job.chance.randint(3, 8))
    job.run(job.chance.randint(1, 4))


def calm_with_maintenance(job: PlainJob) -> None:
    for _ in range(3):
        job.run(job.chance.randint(2, 4))
        job.optimize()


def killed_after_the_plan(job: PlainJob) -> None:
    job.run(job.chance.randint(2, 5), kill="planned")
    job.run(3)


def killed_after_the_write(job: PlainJob) -> None:
    job.run(job.chance.randint(2, 5), kill="written")
    job.run(3)


def killed_in_the_last_batch(job: PlainJob) -> None:
    job.run(job.chance.randint(2, 5), kill="written")


def killed_again_and_again(job: PlainJob) -> None:
    for _ in range(4):
        job.run(job.chance.randint(1, 3), kill=job.chance.choice(["planned", "written"]))
    job.run(2)


def reset_to_latest(job: PlainJob) -> None:
    job.run(4)
    job.produce(10)
    job.new_checkpoint(list(job.ends))
    job.run(3)


def reset_to_earliest(job: PlainJob) -> None:
    job.run(4)
    job.new_checkpoint([0] * job.partitions)
    job.run(3)


def reset_at_the_last_record(job: PlainJob) -> None:
    job.run(4)
    job.new_checkpoint(job.position)
    job.run(3)


def reset_while_a_batch_was_planned(job: PlainJob) -> None:
    job.run(4, kill="planned")
    job.produce(5)
    job.new_checkpoint(list(job.ends))
    job.run(3)


def restored(job: PlainJob) -> None:
    job.run(job.chance.randint(4, 7))
    job.restore(job.version - job.chance.randint(1, 3))
    job.run(job.chance.randint(0, 3))


def restored_and_back(job: PlainJob) -> None:
    job.run(5)
    newest = job.version
    job.restore(newest - 2)
    job.restore(newest)
    job.run(2)


def restored_and_read_again(job: PlainJob) -> None:
    job.run(5)
    ends = [job.batches[number].end for number in sorted(job.batches)]
    job.restore(job.version - 2)
    job.new_checkpoint(ends[-3])
    job.run(3)


def optimized_and_restored(job: PlainJob) -> None:
    job.run(3)
    job.optimize()
    job.run(2)
    job.optimize()
    job.restore(job.version - 2)
    job.run(2)


def table_from_a_backup(job: PlainJob) -> None:
    job.run(6)
    job.put_back_table(job.version - 2)
    job.run(job.chance.randint(1, 3))


def table_from_before_the_second_checkpoint(job: PlainJob) -> None:
    job.run(4)
    version = job.version
    job.new_checkpoint(job.position)
    job.run(3)
    job.put_back_table(version)


def checkpoint_from_a_backup(job: PlainJob) -> None:
    job.run(6)
    job.put_back_checkpoint(max(job.batches) - 2)
    job.run(5)


def checkpoint_from_a_backup_not_yet_started(job: PlainJob) -> None:
    job.run(6)
    job.put_back_checkpoint(max(job.batches) - 2)


def checkpoint_wiped_under_the_same_id(job: PlainJob) -> None:
    job.run(4)
    job.produce(8)
    job.wipe_checkpoint(list(job.ends))
    job.run(job.chance.randint(2, 7))


def new_checkpoint_under_the_same_application(job: PlainJob) -> None:
    job.run(4)
    job.produce(8)
    job.new_checkpoint(list(job.ends))
    job.run(job.chance.randint(2, 7))


def set_back_by_hand(job: PlainJob) -> None:
    job.run(5)
    job.edit_checkpoint(job.batches[2].end)
    job.run(3)


def set_forward_by_hand(job: PlainJob) -> None:
    job.run(5)
    job.produce(9)
    job.edit_checkpoint(list(job.ends))
    job.run(3)


def topic_created_again(job: PlainJob) -> None:
    job.run(5)
    job.recreate_topic()
    job.run(4, size=3)


def file_lost(job: PlainJob) -> None:
    job.run(5)
    job.lose_file()


def rows_deleted_on_purpose(job: PlainJob) -> None:
    job.run(5)
    job.delete_rows(0.5)
    job.run(2)


def rows_of_another_program(job: PlainJob) -> None:
    job.run(4)
    job.append_by_hand(17)
    job.run(3)


def few_entries_left(job: PlainJob) -> None:
    job.run(12)
    job.retain(5)


def few_entries_left_and_restored(job: PlainJob) -> None:
    job.run(6)
    job.restore(job.version - 2)
    job.run(6)
    job.retain(4)


def read_again_long_ago(job: PlainJob) -> None:
    """The restored records were read again, by batches of which the second checkpoint has forgotten the offsets."""
    job.run(5)
    job.restore(job.version - 2)
    job.new_checkpoint([0] * job.partitions)
    job.run(10)
    job.retain(4)


def filters(job: PlainJob) -> None:
    """A job that keeps every second record, and none of one batch."""
    job.keep = lambda record: record[2] % 2 == 0
    job.run(3)
    job.keep = lambda record: False
    job.run(1)
    job.keep = lambda record: record[2] % 2 == 0
    job.run(3)


def log_cut(job: PlainJob) -> None:
    job.run(8)
    job.cut_log()
    job.run(3)


def log_cut_and_restored(job: PlainJob) -> None:
    job.run(5)
    job.cut_log()
    job.run(4)
    job.restore(job.version - 2)
    job.run(1)


def checkpoint_copied(job: PlainJob) -> None:
    job.run(6, kill="written")
    job.run(3)
    job.copy_checkpoint()


def checkpoint_deleted(job: PlainJob) -> None:
    job.run(4)
    job.produce(8)
    job.delete_checkpoint(job.chance.choice([list(job.ends), [0] * job.partitions]))
    job.run(3)


def everything(job: PlainJob) -> None:
    job.run(3, kill="written")
    job.run(3)
    job.restore(job.version - 1)
    job.optimize()
    job.run(2)
    job.produce(6)
    job.new_checkpoint(list(job.ends))
    job.run(2, kill="planned")
    job.run(2)


def by_chance(job: PlainJob) -> None:
    """Twelve days in which anything may happen that leaves offsets known."""
    steps: list[Callable[[PlainJob], None]] = [
        lambda job: job.run(2),
        lambda job: job.run(job.chance.randint(1, 3), kill="planned"),
        lambda job: job.run(job.chance.randint(1, 3), kill="written"),
        lambda job: job.optimize(),
        lambda job: job.append_by_hand(23),
        lambda job: job.restore(job.chance.randint(max(job.version - 3, 0), job.version - 1)),
    ]
    if job.kind != "append-once":  # its application would be known to a second checkpoint
        steps.append(lambda job: job.new_checkpoint([job.chance.randint(max(e - 9, 0), e) for e in job.position]))
    job.run(3)
    for _ in range(12):
        job.chance.choice(steps)(job)
    job.run(1)


@dataclass(frozen=True)
class Story:
    """What happens, to which kinds of jobs. `hidden`: the log cannot tell all of it, and the rows can.

    `since`: nothing is left of the first checkpoint, so only records from the second one's start on can be judged.
    """

    act: Callable[[PlainJob], None]
    kinds: tuple[JobKind, ...] = ALL
    hidden: bool = False
    since: bool = False
    expects: tuple[str, ...] = ()
    """The reasons of findings of which one must be there, if rows are missing or doubled, or would be."""


STORIES = [
    Story(calm),
    Story(calm_with_maintenance),
    Story(killed_after_the_plan),
    Story(killed_after_the_write, expects=("ran_again",)),
    Story(killed_in_the_last_batch, expects=("will_repeat",)),
    Story(killed_again_and_again, expects=("ran_again",)),
    Story(reset_to_latest, ("sink", "append", "merge"), expects=("reset",)),
    Story(reset_to_earliest, ("sink", "append", "merge"), expects=("read_again",)),
    Story(reset_at_the_last_record, ("sink", "append", "merge")),
    Story(reset_while_a_batch_was_planned, ("sink", "append", "merge"), expects=("reset",)),
    Story(restored, expects=("restored",)),
    Story(restored_and_back),
    Story(restored_and_read_again, ("sink", "append", "merge")),
    Story(optimized_and_restored, expects=("restored",)),
    Story(table_from_a_backup, expects=("not_written",)),
    Story(table_from_before_the_second_checkpoint, expects=("not_written", "skipped")),
    Story(checkpoint_from_a_backup, ("sink", "append-once"), expects=("skipped", "put_back")),
    Story(checkpoint_from_a_backup, ("append",), hidden=True, expects=("like_a_batch",)),
    Story(checkpoint_from_a_backup_not_yet_started, SIGNED, expects=("ahead",)),
    Story(checkpoint_wiped_under_the_same_id, ("sink",), since=True, expects=("skipped",)),
    Story(new_checkpoint_under_the_same_application, ("append-once",), expects=("skipped", "reset")),
    Story(set_back_by_hand, ("sink", "append", "append-once"), expects=("read_again", "set_back")),
    Story(set_forward_by_hand, expects=("not_written",)),
    Story(topic_created_again, expects=("recreated", "set_back")),
    Story(file_lost, expects=("lost_file",)),
    Story(rows_deleted_on_purpose),
    Story(rows_of_another_program),
    Story(few_entries_left),
    Story(few_entries_left_and_restored, SIGNED, expects=("restored",)),
    Story(read_again_long_ago, ("sink", "append", "merge"), hidden=True, expects=("retained",)),
    Story(filters),
    Story(log_cut),
    Story(log_cut_and_restored, expects=("restored",)),
    Story(checkpoint_copied, expects=("ran_again",)),
    Story(checkpoint_deleted, ("sink",), hidden=True, expects=("other_query",)),
    Story(by_chance, ALL),
    Story(everything, ("sink", "append", "merge"), expects=("restored", "reset")),
]
CASES = [
    pytest.param(story, kind, seed, id=f"{story.act.__name__}-{kind}-{seed}")
    for story in STORIES
    for kind in story.kinds
    for seed in range(15 if story.act is by_chance else SEEDS)
]


def test_there_are_more_than_a_hundred_histories() -> None:
    assert len(CASES) >= 100
    assert len({story.act for story in STORIES}) >= 25


@pytest.mark.parametrize(("story", "kind", "seed"), CASES)
def test_each_loss_and_double_is_found_and_no_other(tmp_path: Path, story: Story, kind: JobKind, seed: int) -> None:
    job = PlainJob(tmp_path, random.Random(f"{story.act.__name__} {kind} {seed}"), kind)
    story.act(job)
    if seed == 1 and not any(
        story.act is act for act in (checkpoint_from_a_backup, set_back_by_hand, set_forward_by_hand)
    ):
        job.copy_checkpoint()  # the times of the files must not matter
    found = inspect(job.checkpoints, [job.table])
    shown = "\n".join(f"{f.kind} {f.certainty} {f.reason} {f.spans} {f.within} {f.words}" for f in found.findings)
    context = f"{shown}\nmissing {sorted(job.missing)}\ndoubled {sorted(job.doubled)}"
    harm = bool(job.missing or job.doubled)
    if harm and story.expects:
        assert {finding.reason for finding in found.findings} & set(story.expects), context
    if story.act not in (rows_of_another_program, checkpoint_from_a_backup, by_chance):
        assert "like_a_batch" not in {finding.reason for finding in found.findings}, context
    if story.act is not table_from_before_the_second_checkpoint:
        assert "no_commit" not in {finding.reason for finding in found.findings}, context
    if not story.hidden:
        for kinds, truth in (("missing", job.missing), ("doubled", job.doubled)):
            known = {r for r in truth if not story.since or r[2] >= job.start[r[1]]}
            compare([f for f in found.findings if f.kind == kinds], known, context)
        if not harm and not any(each.startswith(("will", "ahead")) for each in story.expects):
            assert not found.alarming, context
    else:
        assert not found.alarming, f"nothing is claimed that cannot be known\n{context}"
    by_rows = inspect(job.checkpoints, [job.table], COLUMNS)
    if "not_counted" in {finding.reason for finding in by_rows.findings}:
        assert story.act in (file_lost, topic_created_again, set_back_by_hand)
    else:
        assert story.act is not file_lost
        counted(by_rows, job, context)


def compare(findings: Iterable[InspectionFinding], truth: set[Record], context: str) -> None:
    """All records of exact findings are true ones; each wide finding has a true one; no true one is left over.

    An unclear finding may have none: it says so, and alarms nobody.
    """
    exact, wide, unnamed = set[Record](), set[Record](), False
    for finding in findings:
        records = {record for span in finding.spans for record in places(span)}
        if finding.within or finding.certainty == "unclear":
            assert records & truth or finding.certainty == "unclear", f"{finding.reason}: none of these\n{context}"
            wide |= records
        elif records:
            exact |= records
        else:
            assert truth, context
            unnamed = True
    assert exact - wide <= truth, f"not so: {sorted(exact - truth)}\n{context}"
    left = truth - exact - wide
    assert not left or unnamed, f"not found: {sorted(left)}\n{context}"


def places(span: Span) -> Iterable[Record]:
    life = span.topic.count(RECREATED)
    assert span.topic == TOPIC + RECREATED * life
    return [(life, span.partition, offset) for offset in range(span.start, span.end)]


def counted(found: Inspection, job: PlainJob, context: str) -> None:
    """By the rows themselves every double is exact, and so is every loss that the checkpoints know of."""
    exact = {
        kind: {record for each in found.findings if each.kind == kind for span in each.spans for record in places(span)}
        for kind in ("missing", "doubled", "unknown")
    }
    claims = [each for each in found.findings if each.kind in ("missing", "doubled") and each.certainty != "certain"]
    assert all(each.certainty == "unclear" and job.removed for each in claims), context
    assert exact["doubled"] == job.doubled, context
    unclear = {record for each in claims for span in each.spans for record in places(span)}
    assert exact["missing"] - unclear <= job.missing, context
    assert exact["missing"] | exact["unknown"] <= job.missing | job.removed, context
    named = {record for table in found.tables for span in table.read for record in places(span)}
    assert (job.missing & named) <= exact["missing"] | exact["unknown"], context
