"""After a power cut: what was journaled as done is there, and a stream continues exactly once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from reprocessing import executor
from reprocessing.plan.journal import Journal, Line, journal_of
from reprocessing.plan.plan import Checks, StreamRecoveryPlan
from reprocessing.plan.plan_file import load
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from reprocessing.replay import staging
from reprocessing.stages.recovery import Recovery, RecoveryContext, RecoveryEvents
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.preflight.findings import enforce
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.preflight.truncated_files import repair
from streaming_jobs.settings import Settings, TableSettings
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_files import on_disk
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from tests.support.batch_driver import Driver
from tests.support.life import STREAM, Life, Topics, plan_one, recovery
from tests.support.power import Power
from tests.support.worlds import PRIMARY, SECONDARY, Disk, lay_checkpoint, parity
from tests.unit.streaming_jobs.state.test_savepoints import rocksdb

pytestmark = pytest.mark.slow

RIGHT = list(range(60))
WRONG = sorted([*range(30), *(-n for n in range(30, 60))])


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    """Batches 0 to 2 are right, 3 to 5 wrong; the code that replays is right."""
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
    return Life.of_batches(tmp_path / "home", 6, wrong=range(3, 6), code="aaaxxx")


@pytest.fixture
def power(life: Life, monkeypatch: pytest.MonkeyPatch) -> Iterator[Power]:
    power = Power(life.settings.home, monkeypatch)
    yield power
    power.close()


def replayed(context: RecoveryContext) -> dict[str, Any]:
    """The batches after the savepoint, as the session would write them, into the workshop."""
    staged = Life(context.replay_settings)
    at = staged.at()
    assert at is not None
    for number in range(at.batch + 1, 6):
        staged.batch(number, generation=context.plan.generation, code="fixed")
    return {"batch": 5, "seconds": 0.1, "records": 30}


def topics() -> Any:
    return Topics(end=60)


def planned(life: Life) -> StreamRecoveryPlan:
    savepoints.take(life.settings, STREAM, life.record, 2, "purpose")
    return plan_one(planning_snapshot(life.settings, STREAM, topics()), Target("batch", "2"), Checks())


def whole(settings: Settings) -> None:
    """Every file that a table or a savepoint lists is there with all its bytes; every checkpoint can be read."""
    life = Life(settings)
    assert not [f for f in check_start(take_snapshot(settings, STREAM, topics())) if "cannot be read" in f.found]
    life.rows()
    for savepoint in savepoints.savepoints(settings, STREAM.name):
        for table, content in savepoints.contents_of(settings, STREAM, savepoint).items():
            files = content.files.values()
            assert [on_disk(content.root, f.path).stat().st_size for f in files] == [f.size for f in files], table
        Checkpoint(savepoints.checkpoint_of(settings, savepoint)).check()


def act(settings: Settings, plan: str, what: str) -> None:
    getattr(executor, what)(recovery(Life(settings), plan, topics(), replay=replayed))


def cut_after_each_line(power: Power, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Line, Settings]]:
    """From here on, each line of a journal leaves a home behind in which the power was cut right after it."""
    cuts: list[tuple[Line, Settings]] = []
    write = Journal.write

    def writing(self: Journal, *arguments: Any, **more: Any) -> None:
        write(self, *arguments, **more)
        home = power.cut(tmp_path / f"cut-{len(cuts)}")
        cuts.append((self.lines()[-1], Settings.load({"home": home})))

    monkeypatch.setattr(Journal, "write", writing)
    return cuts


def test_what_a_recovery_has_journaled_as_done_survives_a_power_cut(
    life: Life, power: Power, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(life).id
    with monkeypatch.context() as patched:
        cuts = cut_after_each_line(power, tmp_path, patched)
        act(life.settings, plan, "resume")
    assert life.rows() == RIGHT
    assert [(line.stage, line.state) for line, _ in cuts if line.state == "done"][-1] == ("clean_up", "done")
    for line, settings in cuts:
        lines = journal_of(settings, plan).lines()
        assert lines and lines[-1] == line, f"the journal itself lost {line.stage} {line.state}"
        whole(settings)
        done = {one.stage for one in lines if one.state == "done"}
        left = Life(settings)
        assert left.rows() == (RIGHT if "publish" in done else WRONG), f"after {line.stage} {line.state}"
        assert left.record.generation == (2 if "switch_generation" in done else 1)
        if line.state == "done":
            act(settings, plan, "resume")
            assert left.rows() == RIGHT and left.record.generation == 2
            assert not [f for f in check_start(take_snapshot(settings, STREAM, topics())) if f.severity == "refuse"]
            assert not (settings.tables / "_staging").exists()


def test_what_an_abort_has_journaled_as_done_survives_a_power_cut(
    life: Life, power: Power, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(life).id

    def refused(_: Recovery) -> bool:
        return False

    with pytest.raises(Exception, match="not confirmed"):
        executor.resume(recovery(life, plan, topics(), RecoveryEvents(confirm=refused), replay=replayed))
    with monkeypatch.context() as patched:
        cuts = cut_after_each_line(power, tmp_path, patched)
        act(life.settings, plan, "give_up")
    (begun, at_first), (done, at_last) = cuts
    assert (begun.state, done.state) == ("begun", "done")
    act(at_first, plan, "give_up")
    for settings in (at_first, at_last):
        whole(settings)
        left = Life(settings)
        assert left.rows() == WRONG and left.record.generation == 3
        assert StreamFolder.of(settings, STREAM.name).checkpoint(3).last_committed == 5
        assert not [f for f in check_start(take_snapshot(settings, STREAM, topics())) if f.severity == "refuse"]
    assert staging.settings_of(at_last, load(at_last, plan).of(STREAM.name)).tables.exists() is False


def test_a_savepoint_that_was_taken_survives_a_power_cut(life: Life, power: Power, tmp_path: Path) -> None:
    taken = savepoints.take(life.settings, STREAM, life.record, 4, "purpose")
    settings = Settings.load({"home": power.cut(tmp_path / "cut")})
    assert savepoints.savepoints(settings, STREAM.name) == [taken]
    whole(settings)


class Night:
    """A driver and Spark, step by step, on a home that may have lost power."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.disk = Disk(Settings.load({"home": home}))
        self.monkeypatch = monkeypatch

    def start(self) -> Driver:
        """Repair, preflight, and the tables opened; raises PreflightRefused."""
        repair(self.disk.settings, parity)
        enforce(self.disk.findings())
        return Driver(self.disk)

    def batches(self, driver: Driver, last: int, step: Callable[[str], None] = lambda _: None) -> None:
        """As Spark does: repeat the planned batch if it is not committed, then continue."""
        while (number := self.following()) <= last:
            self.disk.plan(number)
            step(f"planned {number}")
            driver.run(number, [10 * number, 10 * number + 1])
            step(f"returned {number}")
            lay_checkpoint(self.disk.folder, planned=number, committed=number)
            step(f"committed {number}")

    def following(self) -> int:
        """The batch that Spark would run now."""
        checkpoint = Checkpoint(self.disk.folder)
        checkpoint.check()
        planned, committed = checkpoint.last_planned, checkpoint.last_committed
        return 0 if planned is None else planned if planned != committed else planned + 1

    def crash_in(self, number: int) -> None:
        """Write a batch to the tables; Spark has not noted that it is done."""
        self.disk.plan(number)
        Driver(self.disk).run(number, [10 * number, 10 * number + 1])

    def rows(self, *tables: str) -> list[int]:
        """The rows of these tables, or of both."""
        return sorted(
            row
            for table in tables or (PRIMARY, SECONDARY)
            for row in DeltaTable(self.disk.table(table)).to_pyarrow_table()["n"].to_pylist()
        )


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    """A stream with tables and no batch."""
    night = Night(tmp_path / "home", monkeypatch)
    night.disk.open()
    return night


@pytest.fixture
def night(opened: Night) -> Night:
    """A stream with two batches."""
    opened.batches(Driver(opened.disk), 1)
    return opened


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))])
def test_after_a_power_cut_a_stream_goes_on_exactly_once(
    night: Night, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Cut at each sync and each step of two batches; what was not synced is lost (seed 0), or survives by chance."""
    driver = Driver(night.disk)
    chance = random.Random(seed)
    power = Power(night.disk.settings.home, monkeypatch)
    cuts: list[tuple[str, Path]] = []

    def cut(step: str) -> None:
        with power.one_at_a_time:
            if seed == 0 or chance.random() < 0.3:
                luck = (lambda: False) if seed == 0 else (lambda: chance.random() < 0.5)
                cuts.append((step, power.cut(tmp_path / f"cut-{len(cuts)}", luck)))

    power.after_sync = lambda: cut(f"sync {power.syncs}")
    with monkeypatch.context() as patched:
        patched.setattr(DeltaSink, "refresh", watched(DeltaSink.refresh, lambda: cut("commit")))
        night.batches(driver, 3, cut)
    power.close()
    monkeypatch.undo()
    assert len(cuts) > 8
    for step, home in cuts:
        later = Night(home, monkeypatch)
        later.batches(later.start(), 4)
        expected = [10 * number + place for number in range(5) for place in (0, 1)]
        assert later.rows() == expected, f"cut at {step}"


def watched(method: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    """The method, with a word after each call."""

    def call(*arguments: Any) -> Any:
        result = method(*arguments)
        tell()
        return result

    return call


def newest_file(night: Night) -> Path:
    """The newest data file of the primary table."""
    files = (night.disk.table(PRIMARY) / path for path in DeltaTable(night.disk.table(PRIMARY)).file_uris())
    return max((Path(str(path)) for path in files), key=lambda path: path.stat().st_mtime_ns)


def test_a_commit_whose_file_was_cut_off_goes_if_nothing_relies_on_it(night: Night) -> None:
    night.crash_in(2)
    newest_file(night).write_bytes(b"")
    night.batches(night.start(), 2)
    assert night.rows() == [0, 1, 10, 11, 20, 21]
    newest_file(night).write_bytes(b"")  # Spark has noted the batch: its records are not read again
    with pytest.raises(PreflightRefused, match="of table evens, which version 3 added, is gone or cut off"):
        night.start()


def test_what_was_being_written_beside_the_log_goes(night: Night) -> None:
    log = night.disk.table(PRIMARY) / "_delta_log"
    torn = [log / f"{2:020d}.checkpoint.parquet", log / "_last_checkpoint", log / f"{9:020d}.json"]
    torn[2] = log / f"{DeltaTable(night.disk.table(PRIMARY)).version() + 1:020d}.json"
    rocksdb(night.disk.folder / "state", 4, (2, 4))
    (night.disk.folder / "state" / "0" / "1" / "SSTs" / "4-a.sst").write_bytes(b"")
    for path in torn:
        path.write_bytes(b"")
    gone = repair(night.disk.settings, parity)
    assert {*torn, night.disk.folder / "state" / "0" / "1" / "4_u4.zip"} == set(gone)
    assert (night.disk.folder / "state" / "0" / "1" / "2_u2.zip").exists()
    assert repair(night.disk.settings, parity) == []
    night.batches(night.start(), 2)


def test_a_first_start_that_was_cut_off_begins_again(opened: Night) -> None:
    opened.disk.plan(0)
    (opened.disk.folder / "sources" / "0" / "0").write_bytes(b"")
    opened.batches(opened.start(), 1)
    assert opened.rows() == [0, 1, 10, 11]


def test_a_foreign_commit_is_not_judged(night: Night) -> None:
    write_deltalake(night.disk.table(PRIMARY), pa.table({"k": ["y"], "n": [7]}), mode="append")
    newest_file(night).unlink()
    with pytest.raises(PreflightRefused, match="is gone or cut off"):
        repair(night.disk.settings, parity)


def compacted(night: Night) -> Path:
    """Compact the primary table; returns the file of the compaction."""
    TableMaintenance(Driver(night.disk).sinks[PRIMARY], TableSettings(), 1).compact()
    assert len(DeltaTable(night.disk.table(PRIMARY)).file_uris()) == 1
    return newest_file(night)


def test_a_compaction_that_was_cut_off_goes_while_what_it_replaced_is_there(night: Night) -> None:
    compacted(night).write_bytes(b"")
    night.batches(night.start(), 2)
    assert night.rows(PRIMARY) == [0, 10, 20]


def test_a_compaction_that_is_damaged_after_what_it_replaced_was_swept_stays(night: Night) -> None:
    file = compacted(night)
    for old in set(night.disk.table(PRIMARY).glob("*.parquet")) - {file}:
        old.unlink()
    file.write_bytes(b"")
    before = listing(night.disk.settings)
    with pytest.raises(PreflightRefused, match=f"file {file.name} of table evens, which version"):
        repair(night.disk.settings, parity)
    assert listing(night.disk.settings) == before


def listing(settings: Settings) -> dict[Path, bytes]:
    """Every file of the logs and the checkpoints."""
    files = [*settings.tables.glob("*/_delta_log/*"), *settings.state.rglob("*")]
    return {path: path.read_bytes() for path in files if path.is_file()}


def test_a_publish_that_a_recovery_relies_on_stays(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is damaged once the record is in its generation, or the journal has it as done."""
    plan = planned(life).id
    with monkeypatch.context() as patched:
        patched.setattr("reprocessing.stages.stages.SwitchGeneration.run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            act(life.settings, plan, "resume")
    published = next(life.table.rglob(f"r-{plan}/**/*.parquet"))
    content = published.read_bytes()
    for finished in (False, True):
        if finished:
            act(life.settings, plan, "resume")
        published.unlink()  # the name in staging stays
        published.write_bytes(b"")
        before = listing(life.settings)
        with pytest.raises(PreflightRefused, match="is gone or cut off"):
            repair(life.settings, STREAM) if finished else act(life.settings, plan, "resume")
        after = listing(life.settings)
        assert {path: after.get(path) for path in before if "_delta_log" in path.parts} == {
            path: text for path, text in before.items() if "_delta_log" in path.parts
        }
        published.write_bytes(content)
    assert life.rows() == RIGHT


def test_a_publish_that_was_cut_off_is_made_again(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(life).id
    with monkeypatch.context() as patched:
        patched.setattr("reprocessing.stages.publish.PublishedTable", lambda table, *_: 1 / (table != "things"))
        with pytest.raises(ZeroDivisionError):
            act(life.settings, plan, "resume")
    log = life.table / "_delta_log"
    newest_commit = max(log.glob("*.json"))
    newest_commit.write_bytes(newest_commit.read_bytes()[:100])
    with pytest.raises(PreflightRefused, match="a recovery was writing it"):
        repair(life.settings, STREAM)
    act(life.settings, plan, "resume")
    assert life.rows() == RIGHT and life.record.generation == 2


@pytest.mark.parametrize("accepted", [False, True])
def test_a_commit_of_others_without_commit_info_is_whole(night: Night, accepted: bool) -> None:
    """Delta's protocol leaves it to the writer."""
    table = night.disk.table(PRIMARY)
    write_deltalake(table, pa.table({"k": ["y"], "n": [7]}), mode="append")
    commit = max((table / "_delta_log").glob("*.json"))
    commit.write_text("\n".join(line for line in commit.read_text().split("\n") if not line.startswith('{"commitInfo')))
    if accepted:
        record = stream_record.load(night.disk.settings, parity.name)
        assert record is not None
        right = stream_record.Accepted(PRIMARY, int(commit.stem), "mine", 1.7e9)
        stream_record.save(night.disk.settings, replace(record, accepted=(right,)))
    assert repair(night.disk.settings, parity) == []
    assert night.rows(PRIMARY) == [0, 7, 10]


def test_a_commit_of_ours_that_was_cut_off_between_two_lines_goes(night: Night) -> None:
    night.crash_in(2)
    commit = max((night.disk.table(PRIMARY) / "_delta_log").glob("*.json"))
    commit.write_bytes(commit.read_bytes().split(b"\n")[0] + b"\n")
    assert repair(night.disk.settings, parity) == [commit]
    night.batches(night.start(), 2)
    assert night.rows() == [0, 1, 10, 11, 20, 21]


@pytest.mark.parametrize("killed", [False, True])
def test_what_repeats_a_torn_commit_goes_before_it(night: Night, killed: bool) -> None:
    """A checkpoint of a version whose commit is gone is loaded as that version, with its torn files."""
    night.crash_in(2)
    table = DeltaTable(night.disk.table(PRIMARY))
    table.create_checkpoint()
    log = night.disk.table(PRIMARY) / "_delta_log"
    name = f"{table.version():020d}"
    beside = [log / "_last_checkpoint", log / f".{name}.json.crc", log / f"{name}.checkpoint.parquet"]
    for path in (beside[1], sum_ := log / f"{name}.crc"):
        path.write_text("{}")
    newest_file(night).write_bytes(b"")
    if killed:  # an older release removed the commit first
        (log / f"{name}.json").unlink()
    gone = repair(night.disk.settings, parity)
    assert gone == [*beside, sum_, *([] if killed else [log / f"{name}.json"])]
    night.batches(night.start(), 2)
    assert night.rows() == [0, 1, 10, 11, 20, 21]


@pytest.mark.parametrize("lost", ["empty", "gone"])
def test_a_lost_note_on_the_very_first_batch_takes_the_plan_of_the_second_with_it(opened: Night, lost: str) -> None:
    opened.batches(Driver(opened.disk), 0)
    opened.disk.plan(1)
    note = opened.disk.folder / "commits" / "0"
    note.write_bytes(b"") if lost == "empty" else note.unlink()
    opened.batches(opened.start(), 1)
    assert opened.rows() == [0, 1, 10, 11]


def test_lost_lines_of_the_ledger_are_added_again_before_a_later_batch_makes_a_hole_of_them(life: Life) -> None:
    """The ledger file is not synced: a power cut takes its last lines, and the table's log still has the batches."""
    (day,) = life.ledger_file.folder.glob("*.jsonl")
    before = [line.read().entry for lines in life.ledger_file.days(STREAM.name) for line in lines]
    day.write_bytes(b"".join(day.read_bytes().splitlines(keepends=True)[:3]) + b'{"g":1,"b":3,"t":17')
    repair(life.settings, STREAM)
    repair(life.settings, STREAM)
    life.batch(6)
    found = [line.read() for lines in life.ledger_file.days(STREAM.name) for line in lines]
    assert [line.entry.batch for line in found] == list(range(7))
    assert [line.entry.offsets for line in found[:6]] == [each.offsets for each in before]
    assert [line.versions["things"] for line in found] == sorted({line.versions["things"] for line in found})
