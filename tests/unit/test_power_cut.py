"""After a power cut: what was journaled as done is there, and a stream goes on exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from reprocessing import executor, workshop
from reprocessing.journal import Journal, Line
from reprocessing.plan import Checks, Plan, load
from reprocessing.planner import make_plan
from reprocessing.situation import look
from reprocessing.targets import Target
from reprocessing.work import Talk, Work
from streaming_jobs import generation as generations
from streaming_jobs import savepoints
from streaming_jobs.checkpoint import Checkpoint
from streaming_jobs.preflight import verdicts
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.table_files import on_disk
from streaming_jobs.world import gather
from tests.unit.life import STREAM, Life, Topics
from tests.unit.power import Power

RIGHT = list(range(60))
WRONG = sorted([*range(30), *(-n for n in range(30, 60))])


class Found(Life):
    """A life that is on disk already."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    """Batches 0 to 2 are right, 3 to 5 wrong; the code that replays is right."""
    monkeypatch.setattr("streaming_jobs.code_version.package_version", lambda: "1")
    monkeypatch.setattr("reprocessing.stages.replay", replayed)
    life = Life(tmp_path / "home")
    for number in range(6):
        life.batch(number, wrong=number > 2, code="bug" if number > 2 else "a")
    return life


@pytest.fixture
def power(life: Life, monkeypatch: pytest.MonkeyPatch) -> Iterator[Power]:
    power = Power(life.settings.home, monkeypatch)
    yield power
    power.close()


def replayed(work: Work) -> dict[str, Any]:
    """The batches after the savepoint, as the session would write them, into the workshop."""
    staged = Found(work.own)
    at = staged.at()
    assert at is not None
    for number in range(at.batch + 1, 6):
        staged.batch(number, generation=work.plan.generation, code="fixed")
    return {"batch": 5, "seconds": 0.1, "records": 30}


def topics() -> Any:
    return Topics(end=60)


def planned(life: Life) -> Plan:
    savepoints.take(life.settings, life.record, 2, "purpose")
    return make_plan(look(life.settings, STREAM, topics()), Target("batch", "2"), Checks())


def whole(settings: Settings) -> None:
    """Every file that a table or a savepoint lists is there with all its bytes; every checkpoint can be read."""
    life = Found(settings)
    assert not [f for f in verdicts(gather(settings, STREAM, topics())) if "cannot be read" in f.found]
    life.rows()
    for savepoint in savepoints.savepoints(settings, STREAM.name):
        for table, files in savepoints.files_of(settings, savepoint).items():
            place = savepoints.links(settings, STREAM.name, table, savepoint.id)
            assert [on_disk(place, f.path).stat().st_size for f in files] == [f.size for f in files], unquote(table)
        Checkpoint(savepoints.checkpoint_of(settings, savepoint)).check()


def act(settings: Settings, plan: str, what: str) -> Work:
    return getattr(executor, what)(settings, STREAM, topics(), load(settings, plan), Talk())  # type: ignore[no-any-return]


def cut_after_each_line(power: Power, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Line, Settings]]:
    """From here on, each line of a journal leaves a home behind in which the power was cut right after it."""
    found: list[tuple[Line, Settings]] = []
    write = Journal.write

    def writing(self: Journal, *arguments: Any) -> None:
        write(self, *arguments)
        home = power.cut(tmp_path / f"cut-{len(found)}")
        found.append((self.lines()[-1], Settings.load({"home": home})))

    monkeypatch.setattr(Journal, "write", writing)
    return found


def test_what_a_recovery_has_journaled_as_done_survives_a_power_cut(
    life: Life, power: Power, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(life).id
    with monkeypatch.context() as patched:
        cuts = cut_after_each_line(power, tmp_path, patched)
        act(life.settings, plan, "resume")
    assert life.rows() == RIGHT
    assert [(line.stage, line.state) for line, _ in cuts if line.state == "done"][-1] == ("finish", "done")
    for line, settings in cuts:
        lines = Journal(settings.state / "recoveries" / plan / "journal.jsonl").lines()
        assert lines and lines[-1] == line, f"the journal itself lost {line.stage} {line.state}"
        whole(settings)
        done = {one.stage for one in lines if one.state == "done"}
        left = Found(settings)
        assert left.rows() == (RIGHT if "publish" in done else WRONG), f"after {line.stage} {line.state}"
        assert left.record.generation == (2 if "switch" in done else 1)
        if line.state == "done":
            act(settings, plan, "resume")
            assert left.rows() == RIGHT and left.record.generation == 2
            assert not [f for f in verdicts(gather(settings, STREAM, topics())) if f.severity == "refuse"]
            assert not (settings.tables / "_staging").exists()


def test_what_an_abort_has_journaled_as_done_survives_a_power_cut(
    life: Life, power: Power, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(life).id

    def refused(_: Work) -> bool:
        return False

    with pytest.raises(Exception, match="not confirmed"):
        executor.resume(life.settings, STREAM, topics(), load(life.settings, plan), Talk(confirm=refused))
    with monkeypatch.context() as patched:
        cuts = cut_after_each_line(power, tmp_path, patched)
        act(life.settings, plan, "give_up")
    (begun, at_first), (done, at_last) = cuts
    assert (begun.state, done.state) == ("begun", "done")
    act(at_first, plan, "give_up")
    for settings in (at_first, at_last):
        whole(settings)
        left = Found(settings)
        assert left.rows() == WRONG and left.record.generation == 3
        assert generations.checkpoint(settings, STREAM.name, 3).last_committed == 5
        assert not [f for f in verdicts(gather(settings, STREAM, topics())) if f.severity == "refuse"]
    assert workshop.settings_of(at_last, load(at_last, plan)).tables.exists() is False


def test_a_savepoint_that_was_taken_survives_a_power_cut(life: Life, power: Power, tmp_path: Path) -> None:
    taken = savepoints.take(life.settings, life.record, 4, "purpose")
    settings = Settings.load({"home": power.cut(tmp_path / "cut")})
    assert savepoints.savepoints(settings, STREAM.name) == [taken]
    whole(settings)
