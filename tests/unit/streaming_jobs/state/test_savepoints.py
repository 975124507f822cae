"""Savepoints: the checkpoint cut, the tables' files, how long they stay, and what they survive."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import zipfile
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from typing import Any
from urllib.parse import unquote

import pytest
from deltalake import DeltaTable

from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.settings import SavepointSettings
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.table_files import on_disk, table_files
from streaming_jobs.state import savepoint_retention, savepoints
from streaming_jobs.state.checkpoint import Checkpoint, copy, cut, cuttable, needed_state
from streaming_jobs.state.savepoint_retention import PeriodicSavepoints, expired, try_take
from streaming_jobs.state.savepoints import LINKS, Savepoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.delta_table import shorten_log
from tests.support.life import PER_BATCH, STREAM, Life

DAY = 86_400.0


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.of_batches(tmp_path, 6)


def test_a_cut_holds_what_spark_goes_on_from_and_an_id_of_its_own(life: Life, tmp_path: Path) -> None:
    checkpoint = StreamFolder.of(life.settings, STREAM.name).checkpoint(1)
    assert cuttable(checkpoint) == range(6)
    cut(checkpoint, 3, tmp_path / "cut")
    made = Checkpoint(tmp_path / "cut")
    made.check()
    assert (made.last_planned, made.last_committed) == (3, 3)
    assert made.end(3) == {"things": {0: 40}} and made.start(3) == {"things": {0: 30}}
    assert json.loads((tmp_path / "cut" / "metadata").read_text())["id"] != "x"
    assert not list(tmp_path.glob("*.partial"))


def test_a_cut_needs_the_entry_before_it(life: Life, tmp_path: Path) -> None:
    checkpoint = StreamFolder.of(life.settings, STREAM.name).checkpoint(1)
    for log in ("offsets", "commits"):
        for number in (0, 1, 2):
            (checkpoint.folder / log / str(number)).unlink()
    assert cuttable(checkpoint) == range(5, 6)
    with pytest.raises(UsageError, match="after batches 5 to 5, not after batch 3"):
        cut(checkpoint, 3, tmp_path / "cut")


def test_the_first_batch_can_be_cut_at_and_one_that_spark_has_not_committed_cannot(life: Life, tmp_path: Path) -> None:
    checkpoint = StreamFolder.of(life.settings, STREAM.name).checkpoint(1)
    cut(checkpoint, 0, tmp_path / "cut")
    Checkpoint(tmp_path / "cut").check()
    life.batch(6, commit=False)
    assert cuttable(checkpoint) == range(6)


def rocksdb(state: Path, last: int, snapshots: tuple[int, ...]) -> None:
    """State files as Spark lays them out, with a snapshot that names a file of its own."""
    place = state / "0" / "1"
    (place / "SSTs").mkdir(parents=True)
    (state / "0" / "_metadata").mkdir()
    (state / "0" / "_metadata" / "metadata").write_text("v1")
    for version in range(1, last + 1):
        (place / f"{version}_u{version}.changelog").write_text("x")
        (place / f"{version}_u{version}.changelog.crc").write_text("x")
    for version in snapshots:
        (place / "SSTs" / f"{version}-a.sst").write_text("x")
        with zipfile.ZipFile(place / f"{version}_u{version}.zip", "w") as packed:
            files = {"sstFiles": [{"localFileName": "1.sst", "dfsSstFileName": f"{version}-a.sst", "sizeBytes": 1}]}
            packed.writestr("metadata", "v1\n" + json.dumps(files))


def test_of_the_state_only_what_leads_to_the_version_is_taken_and_without_a_snapshot_all_changes(
    tmp_path: Path,
) -> None:
    rocksdb(tmp_path / "a", 35, (10, 20, 30))
    needed = {*needed_state(tmp_path / "a", 25)}
    assert needed == {
        "0/_metadata/metadata",
        "0/1/10_u10.zip",
        "0/1/20_u20.zip",
        "0/1/SSTs/10-a.sst",
        "0/1/SSTs/20-a.sst",
        *(f"0/1/{v}_u{v}.changelog{end}" for v in range(10, 26) for end in ("", ".crc")),
    }
    rocksdb(tmp_path / "b", 5, ())
    assert len([name for name in needed_state(tmp_path / "b", 4) if name.endswith(".changelog")]) == 4


def test_a_copy_shares_state_and_has_its_own_log(life: Life, tmp_path: Path) -> None:
    checkpoint = StreamFolder.of(life.settings, STREAM.name).checkpoint(1)
    rocksdb(checkpoint.folder / "state", 5, ())
    cut(checkpoint, 3, tmp_path / "cut")
    copy(tmp_path / "cut", tmp_path / "g0002")
    one, other = (tmp_path / name / "state" / "0" / "1" / "2_u2.changelog" for name in ("cut", "g0002"))
    assert one.samefile(other)
    one, other = (tmp_path / name / "offsets" / "3" for name in ("cut", "g0002"))
    assert not one.samefile(other) and one.read_text() == other.read_text()


def test_a_savepoint_is_the_stream_after_a_batch_and_taking_it_twice_is_taking_it_once(life: Life) -> None:
    taken = savepoints.take(life.settings, STREAM, life.record, 3, "purpose", "for a test")
    assert taken.id == "g0001-b000000003" and taken.ends == {"things": {0: 40}} and taken.code == ("a", "1", "")
    assert savepoints.take(life.settings, STREAM, life.record, 3, "time") == taken
    assert savepoints.savepoints(life.settings, STREAM.name) == [taken]
    files = savepoints.contents_of(life.settings, STREAM, taken)["things"].files.values()
    live = table_files(life.table, DeltaTable(life.table).version())
    assert {f.path for f in files} < set(live)
    assert sum(json.loads(f.stats or "")["numRecords"] for f in files) == 4 * PER_BATCH
    links = life.links(taken.id)
    for file in files:
        assert on_disk(life.table, file.path).samefile(on_disk(links, file.path))
    savepoints.drop(life.settings, STREAM, taken.id)
    assert savepoints.savepoints(life.settings, STREAM.name) == []
    assert not list(life.table.glob("_savepoints/*")) and life.rows() == list(range(60)), (
        "drop removes record and links"
    )


def test_a_batch_that_the_table_has_and_spark_has_not_is_not_in_the_savepoint_before_it(life: Life) -> None:
    life.batch(6, commit=False)
    taken = savepoints.take(life.settings, STREAM, life.record, 5, "code")
    files = savepoints.contents_of(life.settings, STREAM, taken)["things"].files.values()
    assert sum(json.loads(f.stats or "")["numRecords"] for f in files) == 6 * PER_BATCH


def test_files_stay_when_compaction_and_clean_up_remove_them(life: Life) -> None:
    taken = savepoints.take(life.settings, STREAM, life.record, 5, "time")
    keep_nothing = life.settings.table.model_copy(update={"deleted_file_retention": timedelta(0)})
    sink = life.sink()
    TableMaintenance(sink, keep_nothing, 1).compact()
    for file in life.table.rglob("*.parquet"):
        if "_savepoints" not in file.parts:
            os.utime(file, (time.time() - 3600,) * 2)
    sink.handle.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    TableMaintenance(life.sink(), keep_nothing, 1).remove_unlisted()
    links = life.links(taken.id)
    files = savepoints.contents_of(life.settings, STREAM, taken)["things"].files.values()
    assert len(files) > 5 and all(on_disk(links, file.path).stat().st_nlink == 1 for file in files)
    assert savepoints.cost(life.settings, STREAM, taken).alone >= sum(file.size for file in files)
    assert life.rows() == list(range(60))


def test_a_savepoint_of_an_older_batch_needs_the_tables_log(life: Life) -> None:
    shorten_log(life.table, 3)
    with pytest.raises(PreflightRefused, match="no longer shows g0001 batch 1"):
        savepoints.version_after(life.stored(), STREAM.name, Txn(1, 1))
    assert savepoints.version_after(life.stored(), STREAM.name, Txn(1, 5)) == 6


def made(age_hours: float, reason: str, now: float) -> Savepoint:
    at = now - age_hours * 3600
    return Savepoint("s", 1, int(at), at, reason, "", {}, {}, ("", ""), {}, ())  # type: ignore[arg-type]


def test_all_stay_for_two_days_then_one_a_day_for_two_weeks() -> None:
    now = 20_000 * DAY + DAY / 2
    taken = [made(hours, "time", now) for hours in range(0, 24 * 20, 6)]
    taken += [made(24 * 30, "purpose", now), made(24 * 13, "recovery", now), made(24 * 15, "recovery", now)]
    gone = expired(taken, SavepointSettings(), now)
    left = [s for s in taken if s not in gone]
    hours = sorted(round((now - s.taken_at) / 3600) for s in left if s.reason == "time")
    assert hours[:9] == list(range(0, 54, 6))
    assert len(hours) == 9 + 12 and all(later - sooner == 24 for sooner, later in pairwise(hours[9:]))
    assert [round((now - s.taken_at) / DAY) for s in left if s.reason != "time"] == [30, 13]
    assert expired([made(24 * 365, "time", now)], SavepointSettings(), now) == [], "the newest stays however old"


def test_the_keeper_takes_one_when_it_is_time_and_never_stops_the_stream(life: Life) -> None:
    settings = life.settings.model_copy(update={"savepoint": SavepointSettings(every=timedelta(seconds=0.05))})
    keeper = PeriodicSavepoints(settings, STREAM, life.record)
    keeper.after(5)
    assert savepoints.savepoints(settings, STREAM.name) == []
    time.sleep(0.06)
    keeper.after(5)
    assert keeper.settled(10)
    assert [s.id for s in savepoints.savepoints(settings, STREAM.name)] == ["g0001-b000000005"]
    time.sleep(0.06)
    keeper.after(77)  # a batch that cannot be cut at
    assert keeper.settled(10)
    off = PeriodicSavepoints(
        life.settings.model_copy(update={"savepoint": SavepointSettings(every=timedelta(0))}), STREAM, life.record
    )
    off.after(4)
    assert off.settled(10)
    assert len(savepoints.savepoints(settings, STREAM.name)) == 1


def test_a_periodic_savepoint_is_taken_beside_later_batches_and_is_of_its_own(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = life.settings.model_copy(update={"savepoint": SavepointSettings(every=timedelta(seconds=0.01))})
    keeper = PeriodicSavepoints(settings, STREAM, life.record)
    begun, go, taking = threading.Event(), threading.Event(), savepoints.take

    def waits(*arguments: Any) -> Savepoint:
        begun.set()
        assert go.wait(20)
        return taking(*arguments)

    monkeypatch.setattr("streaming_jobs.state.savepoints.take", waits)
    time.sleep(0.02)
    keeper.after(5)  # returns although the savepoint cannot be finished yet
    assert begun.wait(20) and not keeper.settled(0)
    life.batch(6)
    time.sleep(0.02)
    keeper.after(6)  # one at a time
    go.set()
    assert keeper.settled(20)
    (taken,) = savepoints.savepoints(settings, STREAM.name)
    content = savepoints.contents_of(settings, STREAM, taken)[STREAM.primary.name]
    assert taken.batch == 5 and taken.tables[0].version == DeltaTable(life.table).version() - 1
    assert content.pieces == taken.tables[0].files < len(DeltaTable(life.table).file_uris())


def test_a_savepoint_that_a_kill_left_half_taken_is_none_and_can_be_taken_again(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(savepoints, "list_links", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            savepoints.take(life.settings, STREAM, life.record, 5, "time")
    assert savepoints.savepoints(life.settings, STREAM.name) == []
    taken = savepoints.take(life.settings, STREAM, life.record, 5, "time")
    assert savepoints.savepoints(life.settings, STREAM.name) == [taken]


def test_links_of_a_savepoint_are_synced_by_their_folders_alone(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files were synced with their commits: 10,000 of them need no fsync each."""
    synced, fsync = list[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    taken = savepoints.take(life.settings, STREAM, life.record, 5, "time")
    assert not [path for path in synced if path.endswith(".parquet")]
    folders = {str(path.parent) for path in life.links(taken.id).rglob("*.parquet")}
    assert folders and folders <= set(synced) and str(life.links(taken.id)) in synced


def test_retention_looks_at_no_link_of_an_earlier_savepoint(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (3, 4):
        savepoints.take(life.settings, STREAM, life.record, number, "time")
    earlier = savepoints.savepoints(life.settings, STREAM.name)
    looked, stat = list[Path](), Path.stat

    def noted(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        looked.append(path)
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", noted)
    assert try_take(life.settings, STREAM, life.record, 5, "time") is not None
    assert not [path for path in looked for each in earlier if path.is_relative_to(life.links(each.id))]
    assert [path for path in looked if path.suffix == ".parquet"], "its own links are listed once"


def test_the_log_replayed_by_hand_is_deltalakes_list_through_checkpoint_and_compaction(life: Life) -> None:
    life.sink().handle.create_checkpoint()
    TableMaintenance(life.sink(), life.settings.table, 1).compact()
    life.batch(6)
    version = DeltaTable(life.table).version()
    for at in range(1, version + 1):
        files = table_files(life.table, at)
        listed = DeltaTable(life.table, version=at).get_add_actions(flatten=True)
        assert sorted(unquote(f) for f in files) == sorted(unquote(p) for p in listed["path"].to_pylist())
        assert sum(json.loads(f.stats or "")["numRecords"] for f in files.values()) == sum(
            listed["num_records"].to_pylist()
        )


def test_a_record_of_a_newer_format_is_refused_without_one_there_is_no_savepoint_and_prune_removes_the_rest(
    life: Life,
) -> None:
    taken = savepoints.take(life.settings, STREAM, life.record, 3, "purpose")
    path = savepoints.folder(life.settings, STREAM.name) / taken.id / "savepoint.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UsageError, match="newer version"):
        savepoints.savepoints(life.settings, STREAM.name)
    path.write_text(path.read_text().replace('"format": 2', '"format": 1').replace('"reason"', '"why"'))
    with pytest.raises(PreflightRefused, match="cannot be read") as refused:
        savepoints.savepoints(life.settings, STREAM.name)
    assert refused.value.next_step.startswith("use the version of recourse-streams that wrote it")
    path.write_text("{")
    with pytest.raises(PreflightRefused, match="cannot be read"):
        savepoints.savepoints(life.settings, STREAM.name)
    place = savepoints.folder(life.settings, STREAM.name) / taken.id
    shutil.move(place, place.with_name("away"))
    with pytest.raises(FileNotFoundError):  # one that is dropped at this moment does not come back without its content
        savepoints.keep_for(life.settings, taken, "recovery", "of a plan")
    shutil.move(place.with_name("away"), place)
    (place / "savepoint.json").unlink()
    assert savepoints.savepoints(life.settings, STREAM.name) == []
    assert savepoint_retention.prune(life.settings, STREAM) == []  # perhaps somebody is making it now
    os.utime(place, (time.time() - 7200,) * 2)
    assert savepoint_retention.prune(life.settings, STREAM) == [taken.id]
    assert not place.exists() and not life.links(taken.id).exists()


def test_code_is_the_one_that_ran_then(life: Life) -> None:
    from streaming_jobs.state.stream_record import CodeSince

    life.save(replace(life.record, code=(*life.record.code, CodeSince("b", "1", 1, 5, 0.0))))
    assert savepoints.take(life.settings, STREAM, life.record, 4, "code").code == ("a", "1", "")
    assert savepoints.take(life.settings, STREAM, life.record, 5, "code").code == ("b", "1", "")


def of_an_earlier_version(life: Life) -> None:
    """Savepoints without the list of their files."""
    for path in savepoints.folder(life.settings, STREAM.name).glob(f"*/{LINKS}"):
        path.unlink()


def rewritten(life: Life) -> None:
    """Every row is written anew; the old files go at once."""
    sink = life.sink()
    sink.handle.update(updates={"id": "id"}, error_on_type_mismatch=False)
    for path in life.table.rglob("*.parquet"):
        if "_savepoints" not in path.parts and str(path) not in set(DeltaTable(life.table).file_uris()):
            path.unlink()


def held(life: Life) -> int:
    """Bytes that only savepoints hold, counted by looking at every file."""
    files = {f.stat().st_ino: f.stat() for f in life.table.glob("_savepoints/**/*.parquet")}
    live = {Path(path).stat().st_ino for path in DeltaTable(life.table).file_uris()}
    return sum(status.st_size for inode, status in files.items() if inode not in live)


def test_savepoints_are_bounded_by_the_bytes_that_only_they_hold(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is followed by a rewrite of the whole table, so that each savepoint is a copy of its own."""
    taken = [savepoints.take(life.settings, STREAM, life.record, 5, "recovery")]
    for number in range(6, 12):
        life.batch(number)
        taken.append(savepoints.take(life.settings, STREAM, life.record, number, "time"))
        rewritten(life)
    one = held(life) // 7
    listed = savepoints.savepoints(life.settings, STREAM.name)
    gone = [s.id for s in savepoint_retention.beyond(life.settings, STREAM, listed, one * 4)]
    assert gone == [s.id for s in taken[1 : 1 + len(gone)]] and 2 <= len(gone) <= 5, "the oldest go first"
    for name in gone:
        savepoints.drop(life.settings, STREAM, name)
    assert held(life) <= one * 4
    bounded = life.settings.model_copy(update={"savepoint": SavepointSettings(max_mb=1)})
    assert savepoint_retention.prune(bounded, STREAM) == []
    monkeypatch.setattr(savepoint_retention, "_MB", 1)
    savepoint_retention.prune(bounded, STREAM)
    left = [s.id for s in savepoints.savepoints(bounded, STREAM.name)]
    assert left == [taken[0].id, taken[-1].id], "those of recoveries and the newest stay in any case"
    unbounded = life.settings.model_copy(update={"savepoint": SavepointSettings(max_mb=0)})
    assert savepoint_retention.prune(unbounded, STREAM) == []


def test_what_the_table_still_holds_costs_no_savepoint_its_life(life: Life) -> None:
    taken = [savepoints.take(life.settings, STREAM, life.record, number, "time") for number in (3, 4, 5)]
    places = savepoints.folder(life.settings, STREAM.name).rglob("*")
    size = sum(path.stat().st_size for path in places if path.is_file() and path.name not in (LINKS, "savepoint.json"))
    assert savepoint_retention.beyond(life.settings, STREAM, taken, size) == []
    assert savepoint_retention.beyond(life.settings, STREAM, taken, size - 1) == taken[:1]


def test_files_with_the_same_number_on_two_file_systems_are_two_files(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State and tables may lie on two, and each numbers its files by itself."""
    taken = [savepoints.take(life.settings, STREAM, life.record, number, "time") for number in (3, 4)]
    of_an_earlier_version(life)
    numbers: dict[Path, int] = {}
    lock = threading.Lock()
    stat = Path.stat

    def numbered(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        status = stat(path, follow_symlinks=follow_symlinks)
        if not S_ISREG(status.st_mode):
            return status
        state = path.is_relative_to(life.settings.state)
        with lock:  # threads of earlier tests look at files too
            place = numbers.setdefault(path, sum(each.is_relative_to(life.settings.state) == state for each in numbers))
        return os.stat_result((status.st_mode, place, 1 if state else 2, 1, 0, 0, 1000, 0, 0, 0))

    monkeypatch.setattr(Path, "stat", numbered)
    files = sum(savepoints.cost(life.settings, STREAM, savepoint).files for savepoint in taken)
    assert savepoint_retention.beyond(life.settings, STREAM, taken, files * 1000 - 1) == taken[:1]


def test_what_goes_while_it_is_measured_costs_no_savepoint(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """`recourse savepoints drop` by hand."""
    old = savepoints.take(life.settings, STREAM, life.record, 3, "time")
    of_an_earlier_version(life)
    links = life.links(old.id)
    stat = Path.stat

    def dropped(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.suffix == ".parquet" and path.is_relative_to(links):
            shutil.rmtree(links)
            monkeypatch.setattr(Path, "stat", stat)
        return stat(path, follow_symlinks=follow_symlinks)

    take = savepoints.take

    def taking(*arguments: Any) -> Savepoint:
        taken = take(*arguments)
        monkeypatch.setattr(Path, "stat", dropped)
        return taken

    monkeypatch.setattr("streaming_jobs.state.savepoints.take", taking)
    taken = try_take(life.settings, STREAM, life.record, 5, "time")
    assert not links.exists() and taken is not None
    assert taken in savepoints.savepoints(life.settings, STREAM.name)


def test_a_savepoint_that_was_taken_is_told_even_if_no_old_one_could_go(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr("streaming_jobs.state.savepoint_retention.prune", fails)
    taken = try_take(life.settings, STREAM, life.record, 5, "time")
    assert taken is not None and taken.batch == 5


def test_with_a_savepoint_old_checkpoints_go_and_an_undo_still_has_what_it_needs(life: Life) -> None:
    savepoint = savepoints.take(life.settings, STREAM, life.record, 5, "recovery")
    generations = tuple(Generation(n, float(n), "recovery") for n in range(1, 5))
    life.save(replace(life.record, generations=generations))
    here = StreamFolder.of(life.settings, STREAM.name).checkpoint(4).folder
    copy(savepoints.checkpoint_of(life.settings, savepoint), here)
    for number in (2, 3):
        StreamFolder.of(life.settings, STREAM.name).checkpoint(number).folder.mkdir()
    first = StreamFolder.of(life.settings, STREAM.name).checkpoint(1).folder
    assert try_take(life.settings, STREAM, life.record, 5, "time") is not None
    assert not first.exists() and here.exists()
    assert len(list(here.parent.glob("g000?"))) == 3
    Checkpoint(savepoints.checkpoint_of(life.settings, savepoint)).check()


def test_a_savepoint_outlives_the_declaration_of_its_tables(tmp_path: Path) -> None:
    """Such a stream does not start; what it has kept can still be looked at and dropped, and nothing new is kept."""
    both = replace(STREAM, sinks={**STREAM.sinks, "copies": Declared("copies")})

    life = Life.begin(tmp_path, both)
    for number in range(3):
        life.batch(number)
    taken = savepoints.take(life.settings, both, life.record, 1, "purpose")
    assert set(savepoints.contents_of(life.settings, STREAM, taken)) == {"things", "copies", "things_dead_letters"}
    assert savepoints.cost(life.settings, STREAM, taken) == savepoints.cost(life.settings, both, taken)
    with pytest.raises(PreflightRefused, match="no longer writes table copies"):
        savepoints.take(life.settings, STREAM, life.record, 2, "purpose")
    savepoints.drop(life.settings, STREAM, taken.id)
    assert not list(life.settings.tables.glob(f"*/_savepoints/*{taken.id}"))


def test_a_savepoint_from_before_an_accepted_change_is_not_what_an_abort_goes_back_to(life: Life) -> None:
    savepoint = savepoints.take(life.settings, STREAM, life.record, 5, "time")
    savepoints.drop_outdated(life.settings, STREAM, life.record, 5)
    assert savepoints.find(life.settings, STREAM.name, savepoint.id) == savepoint
    DeltaTable(life.table).delete("id = 1")
    savepoints.drop_outdated(life.settings, STREAM, life.record, 5)
    assert savepoints.find(life.settings, STREAM.name, savepoint.id) is None
    again = savepoints.take(life.settings, STREAM, life.record, 5, "time")
    assert again.tables[0].version > savepoint.tables[0].version
    savepoints.keep_for_recovery(life.settings, again)
    assert savepoints.savepoints(life.settings, STREAM.name)[0].reason == "recovery"
