"""The versions of tables that a stream looks up: chosen once per batch, remembered, and the same in a replay."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from streaming_jobs import DeltaTable as Declared
from streaming_jobs import Json, KafkaTopic, Lookup, Stream, UsageError
from streaming_jobs.catalog.graph import Graph, describe
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import LookupVersionGone, PermanentError, TableAwaited
from streaming_jobs.ledger.entry import TableVersion
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.sources.planner import share, up_to_step
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.locations import StorePath, delta_options
from streaming_jobs.storage.object_files import LocalFiles, ObjectHandle
from streaming_jobs.table_sources.lookups import LookupChange, LookupHistory, LookupPins, LookupReading, Lookups
from streaming_jobs.table_sources.planner import RowBlocks
from streaming_jobs.table_sources.readers import TableReaders
from tests.conftest import SettingsFactory

THINGS = KafkaTopic("things", value=Json({"k": "string"}))
COLUMNS = schema_of({"k": "string", "rate": "bigint"})
RATES = Lookup("rates", schema=COLUMNS)


def looking_up(things: Any, rates: Any) -> Any:
    return things.join(rates, "k", "left")


def stream(lookup: Lookup = RATES) -> Stream:
    return Stream("values", looking_up, {"things": THINGS}, {"valued": Declared("valued")}, lookups={"rates": lookup})


# What a replay meets.


@st.composite
def first_runs(draw: st.DrawFn) -> list[LookupChange]:
    """The batches of a run over a topic with two partitions; now and then the table has a new version."""
    at, version, batches = {0: 0, 1: 0}, 0, []
    for _ in range(draw(st.integers(1, 8))):
        at = {p: offset + draw(st.integers(0, 20)) for p, offset in at.items()}
        version += draw(st.integers(0, 1))
        batches.append(LookupChange({"things": at}, {"rates": TableVersion(version, "id")}))
    return batches


def versions_of(batches: list[LookupChange]) -> dict[tuple[int, int], TableVersion]:
    """The version that each record met: partition and offset -> version."""
    met, start = dict[tuple[int, int], TableVersion](), {0: 0, 1: 0}
    for batch in batches:
        ends = batch.ends["things"]
        met |= {(p, offset): batch.versions["rates"] for p in ends for offset in range(start[p], ends[p])}
        start = dict(ends)
    return met


@given(first_runs(), st.integers(1, 30))
def test_each_record_of_a_replay_in_other_batches_meets_its_version(batches: list[LookupChange], size: int) -> None:
    history, last, at = LookupHistory.of(batches), batches[-1].ends["things"], {0: 0, 1: 0}
    replayed = []
    while at != last:
        end = share(at, up_to_step(at, last, history.steps("things")), size)
        assert end != at, "a replay moves on"
        replayed.append(LookupChange({"things": end}, history.at({"things": end})))
        at = end
    assert versions_of(replayed) == versions_of(batches)


def test_records_that_no_batch_had_read_and_a_table_that_was_not_looked_up_yet() -> None:
    one, two = {"rates": TableVersion(1, "id")}, {"rates": TableVersion(2, "id"), "names": TableVersion(7, "id")}
    history = LookupHistory.of(
        LookupChange({"things": {0: end}}, versions) for end, versions in ((5, {}), (10, one), (15, one), (20, two))
    )
    assert [change.ends["things"][0] for change in history.changes] == [5, 15, 20]
    assert history.at({"things": {0: 15}}) == {**two, **one}, "the names have the version in which they were first read"
    assert history.at({"things": {0: 3}}) == {**two, **one}
    assert history.at({"things": {0: 21}}) == history.at({"things": {0: 15, 1: 1}}) == {}
    assert history.steps("things") == ({0: 5}, {0: 15}, {0: 20})
    assert up_to_step({0: 15}, {0: 18, 1: 4}, history.steps("things")) == {0: 18, 1: 0}
    assert up_to_step({0: 20}, {0: 99, 1: 4}, history.steps("things")) == {0: 99, 1: 4}


class Counted(tuple[Any, ...]):
    """A tuple that counts how often one of its members is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_a_batch_of_a_replay_reads_few_of_many_changes() -> None:
    count, one = 20_000, {"names": TableVersion(7, "id")}
    changes = [LookupChange({"things": {0: 10 * n}}, {"rates": TableVersion(n, "id")}) for n in range(1, count)]
    history = LookupHistory(Counted([*changes, LookupChange({"things": {0: 10 * count}}, one)]))
    assert history.at({"things": {0: 1}}) == {"rates": TableVersion(1, "id"), **one}
    assert history.at({"things": {0: 123_456}}) == {"rates": TableVersion(12_346, "id"), **one}
    assert history.at({"things": {0: 10 * count}}) == one and history.at({"things": {0: 10 * count + 1}}) == {}
    steps = Counted(history.steps("things"))
    assert up_to_step({0: 123_450}, {0: 10**6}, steps) == {0: 123_460}
    few = 2 * math.ceil(math.log2(count))
    assert history.changes.reads <= count + 4 * few, "all of them once, then few for each batch"  # type: ignore[attr-defined]
    assert steps.reads <= few


def test_a_source_that_a_run_had_dropped_for_a_time_hides_none_of_its_earlier_versions() -> None:
    ends = [{"things": {0: 10}}, {"things": {0: 20}}, {"others": {0: 5}}, {"others": {0: 9}}, {"things": {0: 30}}]
    history = LookupHistory(tuple(LookupChange(end, {"names": TableVersion(n, "id")}) for n, end in enumerate(ends, 1)))
    found = [history.at({"things": {0: offset}})["names"].version for offset in (10, 11, 20, 21, 30)]
    assert found == [1, 2, 2, 5, 5]


# The choice, batch by batch.


class Running:
    """A stream of one generation: its checkpoint, its file of versions, and a table that changes."""

    def __init__(self, folder: Path, settings: SettingsFactory) -> None:
        self.offsets = folder / "g0001" / "offsets"
        self.offsets.mkdir(parents=True)
        self.checkpoint = Checkpoint(folder / "g0001")
        self.file = ObjectHandle(LocalFiles(folder), "lookups.json")
        self.settings = settings({"tables_dir": str(folder / "tables")})
        self.table = folder / "tables" / "rates"

    def write(self, rate: int) -> str:
        """A new version; returns the id of the table."""
        write_deltalake(str(self.table), pa.table({"k": ["a"], "rate": [rate]}), mode="overwrite")
        return str(DeltaTable(self.table).metadata().id)

    def plan(self, batch: int, end: int) -> None:
        text = f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps({"things": {"0": end}})}\n'
        (self.offsets / str(batch)).write_text(text)

    def pins(self, **options: Any) -> LookupPins:
        """What a query that starts now chooses with."""
        tables = Lookups(stream(), self.settings).tables()
        return LookupPins(1, self.checkpoint, self.file, tables, **options)

    def version(self, pins: LookupPins | None = None) -> int:
        return (pins or self.pins()).versions()["rates"].version


@pytest.fixture
def running(tmp_path: Path, settings: SettingsFactory) -> Running:
    return Running(tmp_path, settings)


def test_a_batch_keeps_its_version_whoever_asks_and_the_next_batch_has_the_newest(running: Running) -> None:
    running.write(1)
    running.plan(0, 10)
    pins = running.pins()
    assert running.version(pins) == 0
    running.write(2)
    assert running.version(pins) == running.version() == 0, "also after a restart"
    running.plan(1, 20)
    assert running.version(pins) == 1
    other_generation = replace(pins, generation=2)
    running.write(3)
    assert running.version(other_generation) == 2


def test_a_replay_asks_the_first_run_and_then_the_newest(running: Running) -> None:
    table_id = running.write(1)
    for rate in (2, 3):
        running.write(rate)
    first = LookupHistory.of([LookupChange({"things": {0: 10}}, {"rates": TableVersion(1, table_id)})])
    running.plan(0, 10)
    assert running.version(running.pins(first_run=first)) == 1
    running.plan(1, 20)
    assert running.version(running.pins(first_run=first)) == 2


def test_a_version_that_is_gone_is_named_with_the_remedy_and_the_setting_takes_the_newest(running: Running) -> None:
    running.write(1)
    running.plan(0, 10)
    assert running.version() == 0
    for rate in (2, 3):
        running.write(rate)
    DeltaTable(running.table).create_checkpoint()
    (running.table / "_delta_log" / f"{0:020}.json").unlink()
    (table,), pins = running.pins().tables.values(), running.pins()
    with pytest.raises(LookupVersionGone, match=r"looked up version 0 of table rates.*cleaned up") as raised:
        table.content(pins.versions()["rates"])
    assert 'streams.values.replay_lookups = "newest"' in raised.value.next_step
    assert running.version(running.pins(newest=True)) == 2


def test_a_table_that_was_made_anew_has_none_of_its_former_versions(running: Running) -> None:
    running.write(1)
    running.plan(0, 10)
    pinned = running.pins().versions()["rates"]
    shutil.rmtree(running.table)
    running.write(5)
    (table,) = running.pins().tables.values()
    with pytest.raises(LookupVersionGone, match="deleted and made anew"):
        table.content(pinned)


def test_a_second_driver_of_the_batch_takes_what_the_first_one_has_written(running: Running) -> None:
    running.write(1)
    running.plan(0, 10)
    slow = running.pins()
    read = slow.file.read

    class Paused(ObjectHandle):
        def read(self) -> Any:
            if (found := read()) is None:  # meanwhile the other driver pins a newer version
                running.write(2)
                assert running.version() == 1
            return found

    assert running.version(replace(slow, file=Paused(slow.file.files, slow.file.name))) == 1


def test_a_table_that_is_missing_is_awaited_and_a_damaged_file_named(running: Running) -> None:
    with pytest.raises(TableAwaited, match="stream values looks up table rates, and there is none at"):
        running.pins()
    running.write(1)
    running.plan(0, 10)
    running.file.put(b"[]")
    with pytest.raises(PermanentError, match=r"cannot be read .*lookups\.json"):
        running.version()


def test_the_parts_are_those_of_the_batchs_version_and_one_without_rows_for_an_empty_table(running: Running) -> None:
    running.write(1)
    running.plan(0, 10)
    pins = running.pins()
    versions = pins.tables["rates"].versions
    blocks = RowBlocks(DeltaSource("rates", schema=COLUMNS), versions, "all")
    reading = LookupReading("lookup", {}, blocks=blocks, pins=pins)

    def rows() -> list[dict[str, Any]]:
        return [row for part in reading.parts() for block in reading.read(part) for row in block.to_pylist()]

    assert rows() == [{"k": "a", "rate": 1}]
    DeltaTable(running.table).delete()
    assert rows() == [{"k": "a", "rate": 1}]
    parts = reading.parts()
    for file in running.table.glob("*.parquet"):
        file.unlink()
    with pytest.raises(LookupVersionGone, match="was deleted before it was read"):
        list(reading.read(parts[0]))
    running.plan(1, 20)
    assert len(reading.parts()) == 1 and rows() == []


@pytest.mark.slow
def test_table_checkpoint_and_versions_may_all_be_on_a_store(
    settings: SettingsFactory, tables_on_a_store: dict[str, Any]
) -> None:
    home = settings({**tables_on_a_store, "state_dir": f"{tables_on_a_store['tables_dir']}-state"})
    elsewhere = home.tables / "reference" / "rates"
    assert isinstance(elsewhere, StorePath)
    looking = stream(Lookup("rates", schema=COLUMNS, path=elsewhere.url))

    def write(rate: int) -> None:
        content = pa.table({"k": ["a"], "rate": [rate]})
        write_deltalake(str(elsewhere), content, mode="overwrite", storage_options=delta_options(elsewhere))

    write(1)
    folder = StreamFolder.of(home, looking.name)
    checkpoint = folder.checkpoint(1)
    (checkpoint.folder / "offsets" / "0").write_bytes(b'v1\n{}\n{"things": {"0": 10}}')
    tables = Lookups(looking, home).tables()
    blocks = RowBlocks(DeltaSource("rates", schema=COLUMNS), tables["rates"].versions, "all")
    for rate in (1, 2):
        pins = LookupPins(1, checkpoint, folder.lookups, tables)
        reading: LookupReading = pickle.loads(pickle.dumps(LookupReading("l", {}, blocks=blocks, pins=pins)))
        [block] = [block for part in reading.parts() for block in reading.read(part)]
        assert block.to_pylist() == [{"k": "a", "rate": 1}], "also after the table has changed"
        write(rate + 1)
    assert folder.lookups.read() is not None


# Declarations.


def test_the_columns_are_those_of_the_writer_unless_the_lookup_declares_its_own() -> None:
    def rates(things: Any) -> Any:
        return things

    writer = Stream("rates", rates, {"things": THINGS}, {"rates": Declared("rates", schema=COLUMNS, keys=["k"])})
    found = Topology.of([writer, stream(Lookup("rates"))])
    assert found["values"].lookups["rates"].columns == RATES.columns
    assert found.looking_up("rates") == ["values"]
    assert ("table", "rates") in {(begin.kind, begin.name) for begin, _ in Graph.of([found["values"]]).edges}
    assert "<- table rates as rates (looked up), written by rates" in describe(found, ["values"])
    with pytest.raises(UsageError, match=r"column other of table rates, which has none"):
        Topology.of([writer, stream(Lookup("rates", schema=schema_of({"other": "string"})))])
    with pytest.raises(UsageError, match="whose columns no stream here declares"):
        Topology.of([stream(Lookup("rates"))])


def test_streams_that_look_up_what_they_make_are_refused() -> None:
    with pytest.raises(UsageError, match="looks up table valued, which it writes"):
        stream(Lookup("valued", schema=COLUMNS))
    elsewhere = stream(Lookup("valued", schema=COLUMNS, path="/elsewhere/valued"))
    assert elsewhere.lookups["rates"].path == "/elsewhere/valued"

    def rates(things: Any, valued: Any) -> Any:
        return things

    back = {"valued": Lookup("valued", schema=COLUMNS)}
    other = Stream("rates", rates, {"things": THINGS}, {"rates": Declared("rates")}, lookups=back)
    with pytest.raises(UsageError, match="read what they write: values -> table valued -> rates -> table rates"):
        Topology.of([stream(), other])


@pytest.mark.parametrize(
    ("lookups", "refusal"),
    [
        ({"rates": "rates"}, "is 'rates', not a Lookup"),
        ({"prices": RATES}, r"its lookups \['prices'\]"),
        ({"rates": Lookup("rates", schema=COLUMNS), "more": Lookup("rates", schema=COLUMNS)}, "takes"),
    ],
)
def test_what_is_no_lookup_is_refused(lookups: Mapping[str, Any], refusal: str) -> None:
    with pytest.raises(UsageError, match=refusal):
        Stream("values", looking_up, {"things": THINGS}, {"valued": Declared("valued")}, lookups=lookups)


def test_a_lookup_is_part_of_the_code_and_no_other_stream_has_another_version() -> None:
    other = replace(stream(), lookups={"rates": replace(RATES, path="/elsewhere")})
    described = replace(stream(), lookups={"rates": replace(RATES, description="of today")})
    assert code_version(stream(), []).hash == code_version(described, []).hash != code_version(other, []).hash


def test_all_versions_of_a_table_that_is_looked_up_stay_within_the_bounds(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flows = Topology.of([stream()])
    monkeypatch.setattr(Topology, "load", classmethod(lambda cls, modules: flows))
    assert [need.first for need in TableReaders.of(settings(), "rates").needs()] == [0]
    assert not TableReaders.of(settings(), "other").needs()
