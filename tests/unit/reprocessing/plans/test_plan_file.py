"""Plans on disk: read as they were written, also by an earlier version, and refused when somebody has changed them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from reprocessing.plans.journal import Journal
from reprocessing.plans.plan import Base, Checks, PlannedAgainst, RecoveryPlan, SawTable, SawTopic, StreamPlan, moved
from reprocessing.plans.plan_file import folder, load, names, names_of, next_id, save, sealed, undos_of
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.settings import Settings

OFFSETS = {"things": {partition: 10 * partition + 3 for partition in range(12)}}
"""More than ten partitions: as text they are in another order than as numbers."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load({"home": tmp_path})


def stream_plan(name: str) -> StreamPlan:
    first, last = dict.fromkeys(range(12), 0), dict.fromkeys(range(12), 500)
    return StreamPlan(
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


def test_a_plan_from_before_there_were_suites_is_read_and_a_suite_added_by_hand_is_refused(settings: Settings) -> None:
    plan = planned(settings)
    path = folder(settings, plan.id) / "plan.json"
    value = json.loads(path.read_text())
    for each in value["streams"]:
        del each["checks"]["suites"]
    path.write_text(json.dumps(value))
    assert load(settings, plan.id) == plan
    value["streams"][0]["checks"]["suites"] = ["plausible"]
    path.write_text(json.dumps(value))
    with pytest.raises(UsageError, match="changed by hand"):
        load(settings, plan.id)


@pytest.fixture
def earlier(settings: Settings) -> Path:
    """A plan that version 0.1.0 has written."""
    path = folder(settings, "things-0001") / "plan.json"
    path.parent.mkdir(parents=True)
    return Path(shutil.copy(Path(__file__).with_name("format-1.json"), path))


def test_a_plan_of_an_earlier_version_is_one_of_one_stream(settings: Settings, earlier: Path) -> None:
    plan = load(settings, "things-0001")
    assert plan.streams == (stream_plan("things-0001"),)
    assert (plan.made_at, plan.undoes, plan.names) == (1795351846.25, None, ("things",))
    value = json.loads(earlier.read_text())
    value["rate"] = 11.0
    earlier.write_text(json.dumps(value))
    with pytest.raises(UsageError, match="changed by hand"):
        load(settings, "things-0001")


def test_a_journal_of_an_earlier_version_is_of_the_only_stream(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    line = {"stage": "keep", "state": "done", "at": 1.0, "found": {"savepoint": "g0001-b000000003"}}
    journal.path.write_text(json.dumps(line) + "\n")
    assert journal.done("keep", "things") == line["found"] == journal.of("things").done("keep")
    journal.of("things").write("fence", "begun")
    assert journal.begun("fence", "things") and not journal.begun("fence", "others") and not journal.begun("fence")


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


def test_plans_of_an_earlier_version_are_found_by_their_own_file(settings: Settings) -> None:
    plan = planned(settings)
    (folder(settings, plan.id) / "about.json").unlink()
    assert names_of(settings, "others") == [plan.id] and not names_of(settings, "more")


def test_the_undos_of_a_plan_are_found_in_files_of_both_formats(settings: Settings, earlier: Path) -> None:
    assert undos_of(settings, "things-0001") == []
    undo = replace(planned(settings), undoes="things-0001")
    save(settings, sealed(undo))
    assert undos_of(settings, "things-0001") == [undo.id]
    value = json.loads(earlier.read_text())
    earlier.write_text(json.dumps({**value, "undoes": undo.id}))
    assert undos_of(settings, undo.id) == ["things-0001"]


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


def test_a_plan_remembers_what_comes_from_an_archive_and_older_plans_keep_their_fingerprint(settings: Settings) -> None:
    name = next_id(settings, "things")
    plain = stream_plan(name)
    kept = replace(plain.saw.topics[0], archive="things_archive", first=dict.fromkeys(range(12), 20))
    plan = sealed(RecoveryPlan(name, 1.0, (replace(plain, saw=replace(plain.saw, topics=(kept,))),)))
    save(settings, plan)
    assert load(settings, name) == plan
    older = planned(settings)
    file = folder(settings, older.id) / "plan.json"
    value = json.loads(file.read_text())
    for each in value["streams"]:
        for topic in each["saw"]["topics"]:
            del topic["archive"], topic["first"]
    file.write_text(json.dumps(value))
    assert load(settings, older.id) == older


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
