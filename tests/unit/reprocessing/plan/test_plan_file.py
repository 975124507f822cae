"""A plan and its journal on disk: read as they were written, and refused when somebody has changed them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reprocessing.explainer import _from_archives
from reprocessing.plan.journal import Journal
from reprocessing.plan.plan import (
    Base,
    Checks,
    PlannedAgainst,
    RecoveryPlan,
    SawTable,
    SawTopic,
    StreamRecoveryPlan,
    moved,
)
from reprocessing.plan.plan_file import folder, load, names, names_of, next_id, save, sealed, undos_of
from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.settings import Settings
from streaming_jobs.storage.object_files import Found, LocalFiles, ObjectHandle
from tests.support.life import Life
from tests.support.memory_files import MemoryFiles
from tests.support.objects import path_of
from tests.support.rewind import planned as planned_stream


def test_what_moved_is_told_and_the_streams_own_progress_is_not(life: Life) -> None:
    plan = planned_stream(life)
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
    plan = planned_stream(life)
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


OFFSETS = {"things": {partition: 10 * partition + 3 for partition in range(12)}}
"""More than ten partitions: as text they are in another order than as numbers."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load({"home": tmp_path})


def stream_plan(name: str) -> StreamRecoveryPlan:
    first, last = dict.fromkeys(range(12), 0), dict.fromkeys(range(12), 500)
    return StreamRecoveryPlan(
        id=name,
        stream="things",
        kind="rewind",
        target="offsets 0:3",
        wanted=OFFSETS,
        notes=("moved back",),
        saw=PlannedAgainst(
            generation=2,
            batch=5,
            code=CodeVersion("fixed", "1.0"),
            tables=(SawTable("things", "primary", "table-id", 7, 3, 1234, "upsert"),),
            topics=(SawTopic("things", "topic-id", first, last),),
        ),
        base=Base("g0002-b000000003", 2, 3, OFFSETS),
        stateful=True,
        rate=10.5,
        record_bytes=80.0,
        checks=Checks(("id >= 0",), 0.05),
        staging=name,
        discards_state=True,
    )


def planned(settings: Settings) -> RecoveryPlan:
    name = next_id(settings, "things")
    others = replace(stream_plan(name), stream="others", staging=f"{name}.others")
    plan = sealed(RecoveryPlan(name, 1.0, (stream_plan(name), others)))
    save(settings, plan)
    return plan


def test_a_plan_is_read_as_it_was_written_and_not_when_it_was_changed(settings: Settings) -> None:
    plan = planned(settings)
    assert load(settings, plan.id) == plan and names(settings) == [plan.id]
    only = plan.of("others")
    assert (only.records, only.seconds, only.generation) == (12 * 500 - sum(OFFSETS["things"].values()), 5304 / 10.5, 3)
    path = folder(settings, plan.id) / "plan.json"
    value = json.loads(path.read_text())
    value["streams"][1]["base"]["batch"] = 4
    path.write_text(json.dumps(value))
    with pytest.raises(UsageError, match="changed by hand"):
        load(settings, plan.id)


def test_a_plan_of_an_earlier_version_is_read_and_a_suite_added_by_hand_is_refused(settings: Settings) -> None:
    """It lacks the fields that came later, and its fingerprint is the same."""
    plan = planned(settings)
    path = folder(settings, plan.id) / "plan.json"
    value = json.loads(path.read_text())
    for each in value["streams"]:
        del each["checks"]["suites"], each["until"], each["wrong_from"], each["ends_written"], each["void"]
        del each["append_rate"]
        for topic in each["saw"]["topics"]:
            del topic["archive"], topic["first"], topic["continues"]
    path.write_text(json.dumps(value))
    assert load(settings, plan.id) == plan
    empty = replace(plan, streams=tuple(replace(each, append_rate=0.0) for each in plan.streams))
    assert sealed(empty).fingerprint == plan.fingerprint, "a field that came later does not count while it is empty"
    value["streams"][0]["checks"]["suites"] = ["plausible"]
    path.write_text(json.dumps(value))
    with pytest.raises(UsageError, match="changed by hand"):
        load(settings, plan.id)


def test_the_plans_of_a_stream_are_found_without_reading_any_in_full(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan has hundreds of kB with a thousand partitions, and every start asks for the plans of its stream."""
    plan = planned(settings)
    read, text = list[str](), Path.read_text

    def noted(path: Path, *arguments: str, **more: str) -> str:
        read.append(path.name)
        return text(path, *arguments, **more)

    monkeypatch.setattr(Path, "read_text", noted)
    assert (
        names_of(settings, "others") == [plan.id]
        and not names_of(settings, "more")
        and not undos_of(settings, "a-0001")
    )
    assert "plan.json" not in read


def test_the_undos_of_a_plan_are_found(settings: Settings) -> None:
    first = planned(settings)
    assert undos_of(settings, first.id) == []
    undo = sealed(replace(planned(settings), undoes=first.id))
    save(settings, undo)
    assert undos_of(settings, first.id) == [undo.id]


def test_the_plans_of_a_stream_are_all_that_it_is_in(settings: Settings) -> None:
    plan = planned(settings).id
    assert names_of(settings, "things") == [plan] == names_of(settings, "others") and not names_of(settings, "more")
    for file in ("plan.json", "about.json"):
        (folder(settings, plan) / file).write_text("{")
    assert names_of(settings, "things") == [plan] and not names_of(settings, "others")


@pytest.mark.parametrize("name", ["../things-0001", "things", "things-1", "Things-0001", "things-0009"])
def test_a_name_that_no_plan_has(settings: Settings, name: str) -> None:
    with pytest.raises(UsageError, match="not the name of a plan|there is no plan"):
        load(settings, name)


def test_no_two_plans_have_the_same_name(settings: Settings) -> None:
    assert [next_id(settings, "things") for _ in range(3)] == ["things-0001", "things-0002", "things-0003"]
    assert next_id(settings, "others") == "others-0001"


def test_a_plan_remembers_what_comes_from_an_archive(settings: Settings) -> None:
    name = next_id(settings, "things")
    plain = stream_plan(name)
    kept = replace(plain.saw.topics[0], archive="things_archive", first=dict.fromkeys(range(12), 20))
    plan = sealed(RecoveryPlan(name, 1.0, (replace(plain, saw=replace(plain.saw, topics=(kept,))),)))
    save(settings, plan)
    assert load(settings, name) == plan


def test_a_plan_remembers_the_versions_of_a_table_and_is_moved_when_one_of_them_is_gone(settings: Settings) -> None:
    plan = planned(settings).of("things")
    table = SawTopic("numbers", "table-id", {0: 0}, {0: 50}, continues={0: 10})
    of_table = replace(
        plan, saw=replace(plan.saw, topics=(table,)), base=Base(None, 2, -1, {"numbers": {0: 20}}), wanted={}
    )
    saved = sealed(RecoveryPlan(plan.id, 1.0, (of_table,)))
    save(settings, saved)
    assert load(settings, plan.id) == saved and of_table.unit == "version" and plan.unit == "record"
    for first, lost in ((20, False), (21, True)):
        now = replace(of_table.saw, topics=(replace(table, continues={0: first}),))
        assert bool(moved(of_table, now)) is lost
    from_the_start = replace(of_table, base=Base(None, 2, -1, {"numbers": {0: 0}}))
    assert not moved(from_the_start, replace(of_table.saw, topics=(replace(table, continues={0: 45}),)))


def test_a_journal_line_that_a_kill_cut_off_counts_as_not_written(tmp_path: Path) -> None:
    journal = Journal(ObjectHandle(LocalFiles(tmp_path), "plan/journal.jsonl"))
    assert journal.outcome == "planned"
    journal.write("take_savepoint", "begun")
    journal.write("take_savepoint", "done", {"savepoint": "x"})
    with path_of(journal.handle).open("ab") as file:
        file.write(b'{"stage":"fence","sta')
    assert [line.stage for line in journal.lines()] == ["take_savepoint", "take_savepoint"]
    journal.write("fence", "begun")
    assert (
        journal.done("take_savepoint") == {"savepoint": "x"}
        and journal.begun("fence")
        and journal.done("fence") is None
    )
    assert journal.outcome == "applying"
    journal.write("audit", "failed", {"error": "no"})
    assert journal.outcome == "refused"
    journal.write("abort", "begun")
    assert journal.outcome == "aborting"
    journal.write("abort", "done")
    assert journal.outcome == "aborted"


def test_two_processes_cannot_both_add_the_next_line_of_a_journal(tmp_path: Path) -> None:
    files = MemoryFiles()
    journal = Journal(ObjectHandle(files, "journal.jsonl"))
    journal.write("take_savepoint", "begun")

    class Slow(MemoryFiles):
        """Another process adds a line between the read and the write."""

        def read(self, name: str) -> Found | None:
            found = files.read(name)
            journal.write("abort", "begun")
            return found

    with pytest.raises(TransientError, match="is being written by another process"):
        Journal(ObjectHandle(Slow(_objects=files._objects), "journal.jsonl")).write("fence", "begun")
    assert [line.stage for line in journal.lines()] == ["take_savepoint", "abort"]


def test_a_journal_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    """Its stages have other names, and its lines no stream if the plan has only one."""
    journal = Journal(ObjectHandle(LocalFiles(tmp_path), "journal.jsonl"))
    lines = [
        {"stage": stage, "state": "done", "at": 1.0, "found": {"stage": stage}}
        for stage in ("keep", "settle", "combine", "switch")
    ]
    path_of(journal.handle).write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = ("take_savepoint", "void_records", "add_later_rows", "switch_generation", "continue_generation")
    assert [journal.of("things").done(stage) for stage in now] == [
        {"stage": stage} for stage in ("keep", "settle", "combine", "switch", "switch")
    ]
    assert journal.done("take_savepoint", "things") is not None and journal.outcome == "applying"
    journal.of("things").write("fence", "begun")
    assert journal.begun("fence", "things") and not journal.begun("fence", "others") and not journal.begun("fence")
    journal.write("finish", "done")
    assert journal.outcome == "published" and journal.of("things").outcome == "published"
