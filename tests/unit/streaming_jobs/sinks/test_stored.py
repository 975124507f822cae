"""The contract of a stored table and of its store, kept by Delta tables, also on an object store, and in memory."""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql.types import LongType, StringType, StructField, StructType

from reprocessing.stages.publish import misfit
from streaming_jobs.declare.table import DeclaredTable, is_declared_table
from streaming_jobs.errors import Fenced, ForeignWrite, LeaseLost, OutputMismatch, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.schemas import DEAD_LETTERS
from streaming_jobs.sinks.stored import Content, SavedAs, StoredTable, TableStore, entries, newest
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.storage.locations import StorePath, delta_table, remove_tree
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.testing import MemoryDeclaration, MemoryLease, MemoryLeases, MemoryStore, MemoryTable
from tests.conftest import SettingsFactory

STREAM, TABLE = "orders", "placed"
COLUMNS = StructType([StructField("id", LongType()), StructField("place", StringType())])
OTHER = "other"


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "place": [f"p{n}" for n in ids]})


def entry(batch: int, generation: int = 1, kind: str = "batch", **more: object) -> LedgerEntry:
    return LedgerEntry(kind, STREAM, TABLE, generation, batch, **more)  # type: ignore[arg-type]


class Kind(Protocol):
    """The part of a test that differs between stores: writing rows."""

    declared: DeclaredTable

    @abstractmethod
    def meddle(self, table: StoredTable, ids: pa.Table) -> int:
        """A write of somebody else; its version."""


class InDelta:
    declared: DeclaredTable = Declared(TABLE)

    def meddle(self, table: StoredTable, ids: pa.Table) -> int:
        assert isinstance(table, DeltaSink)
        other = delta_table(table.path)
        write_deltalake(other, ids, mode="append")
        return delta_table(table.path).version()


class OnAStore(InDelta):
    pass


class InMemory:
    def __init__(self) -> None:
        self.declared: DeclaredTable = MemoryDeclaration(TABLE, MemoryStore())

    def meddle(self, table: StoredTable, ids: pa.Table) -> int:
        assert isinstance(table, MemoryTable)
        return table.write_as_somebody_else(ids)


@dataclass(frozen=True)
class Home:
    """A table that a stream has made, in the home of a test."""

    settings: Settings
    kind: Kind

    @property
    def store(self) -> TableStore:
        return store_of(self.kind.declared)

    def ensure(self, columns: StructType = COLUMNS, generation: int = 1) -> StoredTable:
        return self.store.ensure(self.settings, self.kind.declared, STREAM, columns, generation=generation)

    def open(self, settings: Settings | None = None) -> StoredTable:
        """The table as a process that has just started opens it."""
        table = self.store.open(settings or self.settings, self.kind.declared, STREAM)
        assert table is not None
        return table

    def batch(self, number: int, *ids: int, generation: int = 1) -> StoredTable:
        table = self.open()
        assert table.append(rows(*ids), entry(number, generation)) == table.version
        return table

    def below(self, folder: str) -> Settings:
        """The settings of another folder of tables."""
        tables = self.settings.tables
        return self.settings.with_tables(
            tables / folder if isinstance(tables, Path) else StorePath(f"{tables}/*/{folder}")
        )

    def create(self, folder: str, content: Content, made: LedgerEntry | None = None) -> StoredTable:
        return self.store.create(self.below(folder), self.kind.declared, STREAM, content, made)


@pytest.fixture(params=[InDelta, InMemory, OnAStore])
def home(request: pytest.FixtureRequest, settings: SettingsFactory) -> Home:
    flags = request.getfixturevalue("tables_on_a_store") if request.param is OnAStore else {}
    made = Home(settings(flags), request.param())
    made.ensure()
    return made


def ids(table: StoredTable, version: int | None = None) -> list[int]:
    """The rows as DataFusion reads them."""
    result = QueryBuilder().register("t", table.readable(version)).execute('SELECT id FROM "t" ORDER BY id').read_all()
    return list(pa.table(result)["id"].to_pylist())


def test_a_table_exists_once_it_was_made_and_opens_its_streams_generation(home: Home) -> None:
    assert is_declared_table(home.kind.declared) and not is_declared_table(TABLE)
    nothing = home.below("empty")
    assert home.store.open(nothing, home.kind.declared, STREAM) is None
    assert list(home.store.commits(nothing, home.kind.declared)) == []
    table = home.open()
    assert (table.name, table.owner, table.position) == (TABLE, STREAM, Txn(1, -1))
    assert table.schema.fieldNames() == ["id", "place"] and list(table.partition_by) == []
    assert ids(table) == [] and newest(table.commits(), STREAM) == (None, [])
    assert home.ensure().table_id == table.table_id == home.open().table_id, "making it again makes no other"
    remove_tree(home.settings.tables / TABLE)
    assert home.ensure(generation=3).table_id != table.table_id
    assert home.open().position == Txn(3, -1)


def test_a_table_gains_columns_and_takes_no_other_change(home: Home) -> None:
    home.batch(0, 1)
    wider = StructType([*COLUMNS.fields, StructField("price", LongType())])
    assert home.ensure(wider).schema.fieldNames() == ["id", "place", "price"]
    assert ids(home.open()) == [1] and home.open().position == Txn(1, 0)
    assert home.ensure(COLUMNS).schema.fieldNames() == ["id", "place", "price"], "older code leaves the column null"
    renamed = StructType([*COLUMNS.fields, StructField("cost", LongType())])
    for columns in (renamed, StructType([*wider.fields[:2], StructField("price", StringType())])):
        with pytest.raises(OutputMismatch):
            home.ensure(columns)


def test_a_content_without_another_has_only_the_pieces_that_the_other_lacks(home: Home) -> None:
    home.batch(0, 1)
    before = home.open().content()
    home.batch(1, 2)
    home.batch(2, 3)
    now = home.open().content()
    linked = home.create("linked", before).content()
    assert (now.pieces, now.without(linked).pieces, linked.without(now).pieces) == (3, 2, 0)
    assert ids(home.create("newer", now.without(linked))) == [2, 3]
    assert ids(home.create("nothing", linked.without(now))) == []


def test_a_content_is_told_by_its_pieces_and_not_by_its_rows(home: Home) -> None:
    table = home.batch(0, 1)
    first, version = table.content(), table.version
    assert table.has_content(first) and first.pieces == 1 == table.size()[0] and table.size()[1] > 0
    home.batch(1, 2)
    table = home.open()
    assert not table.has_content(first) and table.has_content(first, version) and ids(table, version) == [1]
    assert table.content(version).pieces == 1 and table.content().pieces == 2 and table.no_rows().pieces == 0
    assert not table.has_content(table.no_rows()) and table.complete(version)
    other = home.create("beside", table.no_rows())
    other.append(rows(1), entry(0))
    assert ids(other) == [1] and not other.has_content(first), "equal rows in another piece"


def test_its_commits_are_told_newest_first_with_their_entries(home: Home) -> None:
    home.batch(0, 1)
    table = home.batch(1, 2)
    foreign = home.kind.meddle(table, rows(3))
    commits = list(table.commits())
    assert [c.version for c in commits] == sorted((c.version for c in commits), reverse=True)
    assert [e.batch for _, e in entries(commits, 5)] == [1, 0] and [e.batch for _, e in entries(commits, 1)] == [1]
    commit, since = newest(commits, STREAM)
    assert commit is not None and commit.entry == entry(1) and [c.version for c in since] == [foreign]
    assert since[0].foreign_to(STREAM) and not commit.foreign_to(STREAM) and commit.foreign_to(OTHER)
    assert list(home.store.commits(home.settings, home.kind.declared)) == commits
    older = home.store.commits(home.settings, home.kind.declared, up_to=foreign - 1)
    assert list(older) == [c for c in commits if c.version < foreign]


def test_a_fence_moves_the_table_once_and_changes_no_row(home: Home) -> None:
    old = home.batch(0, 1)
    table, fence = home.open(), entry(-1, 2, "fence", plan="orders-0001")
    assert table.mark(fence) == table.version == home.open().version
    assert table.position == Txn(2, -1) == home.open().position and ids(table) == [1]
    commit, _ = newest(home.open().commits(), STREAM)
    assert commit is not None and commit.entry == fence and not commit.changes_data
    for again in (table, home.open()):
        assert again.mark(fence) is None and again.holds(fence)
    with pytest.raises(Fenced):
        old.mark(entry(1))
    with pytest.raises(Fenced):
        home.open().append(rows(2), entry(1))
    assert ids(home.open()) == [1] and home.open().version == table.version


def test_nothing_is_committed_after_a_change_of_somebody_else(home: Home) -> None:
    table = home.batch(0, 1)
    version = home.kind.meddle(table, rows(7))
    for commit in (table.mark, lambda made: table.replace_rows(table.no_rows(), made, "r-1"), table.holds):
        with pytest.raises(ForeignWrite, match=f"version {version} of table {TABLE}"):
            commit(entry(-1, 2, "fence"))
    assert ids(home.open()) == [1, 7] and home.open().version == version
    assert home.open().mark(entry(-1, 2, "fence")) == version + 1, "a driver that opens it since has been asked before"


def replaced(home: Home) -> tuple[StoredTable, Content, LedgerEntry]:
    """A table of two batches, what it is to hold (the first and another row), and the entry of the publish."""
    home.batch(0, 1)
    staged = home.create("_staging", home.open().content(), entry(0, 2, "publish"))
    assert staged.append(rows(20), entry(1, 2)) == staged.version
    home.batch(1, 2)
    return home.open(), staged.content(), entry(1, 2, "publish", plan="orders-0001")


def test_rows_are_replaced_in_one_commit_however_often_it_is_tried(home: Home) -> None:
    table, content, made = replaced(home)
    before = table.version
    done = table.replace_rows(content, made, "r-orders-0001")
    assert (done.version, done.came, done.went, done.stayed) == (before + 1, 1, 1, 1)
    for each in (table, home.open()):
        assert ids(each) == [1, 20] and each.has_content(content) and each.position == Txn(2, 1)
        assert each.replace_rows(content, made, "r-orders-0001").version is None
        assert each.version == before + 1 == home.open().version
    assert ids(table, before) == [1, 2], "who reads the version of before reads its rows"
    commit, foreign = newest(table.commits(), STREAM)
    assert commit is not None and (commit.entry, commit.changes_data, foreign) == (made, True, [])
    if isinstance(home.settings.tables, Path):
        shutil.rmtree(home.settings.tables / "_staging")
    else:
        remove_tree(home.below("_staging").tables / TABLE / "_delta_log")
    assert ids(home.open()) == [1, 20], "staging was not needed any more"


def test_a_publish_of_what_the_table_holds_changes_no_row(home: Home) -> None:
    table = home.batch(0, 1)
    done = table.replace_rows(table.content(), entry(0, 2, "publish"), "r-1")
    assert (done.came, done.went, done.stayed) == (0, 0, 1) and ids(table) == [1]
    commit, _ = newest(table.commits(), STREAM)
    assert commit is not None and commit.version == done.version and not commit.changes_data


def test_a_publish_brings_new_columns_and_no_other_change_of_them(home: Home) -> None:
    home.batch(0, 1)
    content = home.create("_staging", home.open().content()).content()
    staged = home.store.ensure(
        home.below("_staging"),
        home.kind.declared,
        STREAM,
        StructType([*COLUMNS.fields, StructField("price", LongType())]),
        generation=2,
    )
    assert misfit(home.open(), staged) == []
    home.open().replace_rows(staged.content(), entry(0, 2, "publish"), "r-1")
    assert home.open().schema.fieldNames() == ["id", "place", "price"] and home.open().has_content(content)
    assert misfit(home.open(), home.create("older", content)) == [
        f"column price of table {TABLE} is long, in the rebuilt one gone"
    ]


def test_a_table_that_begins_with_a_content_says_how_far_it_goes(home: Home) -> None:
    content, made = home.batch(0, 1).content(), entry(0, 2, "publish", note="of a savepoint")
    for table in (home.create("_staging", content, made), home.open(home.below("_staging"))):
        assert table.position == Txn(2, 0) and table.has_content(content) and table.owner == STREAM
        assert table.table_id != home.open().table_id and table.schema == home.open().schema
        commit, foreign = newest(table.commits(), STREAM)
        assert commit is not None and commit.entry == made and not foreign
    unnamed = home.create("_look", content)
    assert unnamed.position is None and ids(unnamed) == [1] and entries(unnamed.commits(), 9) == []
    home.open(home.below("_staging")).append(rows(5), entry(1, 2))
    assert ids(home.open()) == [1] == ids(unnamed), "each continues on its own"


@pytest.mark.parametrize("how", [shutil.move, shutil.rmtree])
def test_a_table_moves_and_goes_with_its_folder(home: Home, how: Callable[..., object]) -> None:
    if not isinstance(home.settings.tables, Path):  # a store has no folders
        remove_tree(home.create("partial", home.batch(0, 1).content()).path)
        assert home.store.open(home.below("partial"), home.kind.declared, STREAM) is None
        return
    content = home.batch(0, 1).content()
    home.create("partial", content)
    place = home.settings.tables / "partial"
    how(place, home.settings.tables / "done") if how is shutil.move else how(place)
    assert home.store.open(home.below("partial"), home.kind.declared, STREAM) is None
    if how is shutil.move:
        assert home.open(home.below("done")).has_content(content)
    assert ids(home.open()) == [1]


def test_what_a_savepoint_retains_outlives_the_tables_own_rows(home: Home, tmp_path: Path) -> None:
    table = home.batch(0, 1)
    version, columns = table.version, table.schema
    saved = SavedAs(STREAM, "g0001-b000000000", tmp_path / "savepoint")
    saved.folder.mkdir()
    home.batch(1, 2)
    retained = home.store.retain([(home.open(), version)], saved)
    assert [(t.name, t.table_id, t.version, t.partition_by, t.files) for t in retained] == [
        (TABLE, table.table_id, version, (), 1)
    ]
    assert StructType.fromJson(json.loads(retained[0].schema)) == columns
    table = home.open()
    table.replace_rows(table.no_rows(), entry(1, 2, "publish"), "r-1")
    for file in (home.settings.tables / TABLE).glob("*.parquet"):
        if isinstance(file, Path):  # maintenance leaves the object (test_on_a_store.py)
            file.unlink()
    content = home.store.retained(home.settings, retained, saved)[TABLE]
    assert content.pieces == 1 and ids(home.create("again", content)) == [1]
    assert table.has_content(content, version) if not isinstance(home.kind, InDelta) else True
    assert table.complete(version) == (not isinstance(home.settings.tables, Path) or isinstance(table, MemoryTable))
    for _ in range(2):
        home.store.release(home.settings, saved)
    assert not [place for place in home.store.retained_in(home.settings, TABLE, saved) if place.exists()]
    shutil.rmtree(saved.folder)
    with pytest.raises((OSError, LookupError)):
        home.store.retained(home.settings, retained, saved)
    assert ids(home.open(home.below("again"))) == [1], "what was made of it stays"


def test_companions_are_declared_in_the_same_store(home: Home) -> None:
    letters = home.store.companion("orders_dead_letters", "refused", owners=["us"], schema=DEAD_LETTERS)
    assert is_declared_table(letters) and store_of(letters) is home.store and letters.mode == "append"
    assert (letters.schema, list(letters.owners), letters.description) == (DEAD_LETTERS, ["us"], "refused")


def later(home: Home, folder: str, base: Content, now: Content, then: Content) -> tuple[StoredTable, tuple[int, int]]:
    """A table beside it that begins with `base`; the later rows are added, and how many pieces came whole and split."""
    made = home.create(folder, base)
    added = made.add_later_rows(now, then)
    return home.open(home.below(folder)), (added.whole, added.split)


def test_later_rows_are_added_as_the_pieces_that_hold_them(home: Home) -> None:
    first, then = home.batch(0, 1, 2).content(), home.batch(1, 3, 3, 4).content()
    now = home.batch(2, 3, 5).content()
    combined, pieces = later(home, "whole", first, now, then)
    assert ids(combined) == [1, 2, 3, 5] and pieces == (1, 0)
    assert now.without(then).without(combined.content()).pieces == 0, "the piece itself, not a copy"
    same, pieces = later(home, "none", then, then, then)
    assert ids(same) == [1, 2, 3, 3, 4] and pieces == (0, 0)


def test_a_piece_that_holds_earlier_rows_too_is_split_row_by_row(home: Home) -> None:
    """Equal rows count: of four, two are earlier ones."""
    then = home.batch(0, 1, 3, 3).content()
    now = home.create("now", home.open().no_rows())
    now.append(rows(1, 3, 3, 3, 3, 7), entry(0))
    now.append(rows(8), entry(1))
    combined, pieces = later(home, "split", home.open().no_rows(), now.content(), then)
    assert ids(combined) == [3, 3, 7, 8] and pieces == (1, 1)


def test_earlier_rows_that_are_gone_are_told(home: Home) -> None:
    then = home.batch(0, 1, 2).content()
    now = home.create("now", home.open().no_rows())
    now.append(rows(1, 3), entry(0))
    with pytest.raises(PreflightRefused, match="1 rows? of table placed that came before (is|are) no longer in it"):
        later(home, "gone", home.open().no_rows(), now.content(), then)


def test_later_rows_bring_their_columns(home: Home) -> None:
    then = home.batch(0, 1).content()
    home.ensure(StructType([*COLUMNS.fields, StructField("colour", StringType())]))
    table = home.open()
    assert table.append(rows(2).append_column("colour", pa.array(["red"])), entry(1)) == table.version
    combined, _ = later(home, "wider", then, table.content(), then)
    assert combined.schema.fieldNames() == ["id", "place", "colour"]
    shown = pa.table(QueryBuilder().register("t", combined.readable()).execute("SELECT id, colour FROM t").read_all())
    assert sorted(map(str, shown.to_pylist())) == ["{'id': 1, 'colour': None}", "{'id': 2, 'colour': 'red'}"]


def test_files_that_are_added_to_an_empty_table_do_not_hide_their_rows(settings: SettingsFactory) -> None:
    """A column that was added later has no bounds in them, so it must have none in the table either."""
    delta = Home(settings(), InDelta())
    delta.ensure()
    then = delta.batch(0, 1).content()
    delta.ensure(StructType([*COLUMNS.fields, StructField("size", LongType())]))
    table = delta.open()
    table.append(rows(2).append_column("size", pa.array([7])), entry(1))
    combined, _ = later(delta, "wider", table.no_rows(), table.content(), then)
    assert isinstance(combined, DeltaSink)
    found = DeltaTable(combined.path).to_pyarrow_table(filters=[("size", "=", 7)])
    assert found["id"].to_pylist() == [2]


# The epochs of the stream's leases: a driver that was paused, and wakes after another one took over, writes nothing.


def leased(table: StoredTable, leases: MemoryLeases, generation: int = 1) -> MemoryLease:
    """A driver's lease, under which it writes the table from now on. The lease before has run out."""
    leases.held.clear()
    lease = leases.acquire(STREAM, purpose="session", wait=0)
    table.under(lease, generation)
    return lease


@pytest.mark.parametrize("wakes", ["before the check", "after the check"])
def test_a_paused_driver_writes_nothing_after_another_one_took_the_table_over(home: Home, wakes: str) -> None:
    leases = MemoryLeases(expires=True)
    old, new = home.open(), home.open()
    assert old.epoch == 0, "no lease has written the table yet"
    leased(old, leases)
    old.append(rows(1), entry(0))
    if wakes == "after the check":
        assert not old.holds(entry(1))
    leased(new, leases)
    with pytest.raises(Fenced, match=f"table {TABLE} is in epoch 2, the lease of this driver is of epoch 1"):
        old.append(rows(2), entry(1))
    new.append(rows(2), entry(1))
    for again in (entry(1), entry(2), entry(2, kind="fence"), entry(2, kind="publish")):
        with pytest.raises(Fenced):
            old.append(rows(9), again)
    with pytest.raises(Fenced):
        old.mark(entry(0, 2, kind="fence"))
    with pytest.raises(Fenced):
        old.replace_rows(old.no_rows(), entry(0, 2, kind="publish"), "r-plan")
    assert ids(home.open()) == [1, 2] and home.open().epoch == 2


def test_the_fence_of_an_epoch_leaves_position_rows_and_newest_entry_and_is_committed_once(home: Home) -> None:
    leases = MemoryLeases(expires=True)
    before = home.batch(0, 1).version
    taken = home.open()
    lease = leased(taken, leases)
    assert taken.version == before + 1 and taken.epoch == lease.epoch == 1
    newest_commit, foreign = newest(taken.commits(), STREAM)
    assert newest_commit is not None and newest_commit.entry == entry(0) and not foreign
    fence = next(iter(taken.commits()))
    assert fence.entry is not None and fence.entry.kind == "upkeep" and not fence.changes_data
    assert entries(taken.commits(), 5)[0][1] == entry(0), "no ledger shows the fence"
    restarted = home.open()
    restarted.under(lease, 1)
    assert restarted.version == taken.version and taken.holds(entry(0)) and not taken.holds(entry(1))


def test_leases_that_end_with_their_process_need_no_fence_and_their_commits_carry_the_epoch(home: Home) -> None:
    leases, before = MemoryLeases(), home.open().version
    table, other = home.open(), home.open()
    leased(table, leases)
    assert table.version == before and table.epoch == 0
    table.append(rows(1), entry(0))
    assert table.version == before + 1 and home.open().epoch == 1
    leased(other, leases)
    other.append(rows(2), entry(1))
    with pytest.raises(Fenced):
        table.append(rows(3), entry(2))


def test_no_commit_is_made_after_the_end_of_the_lease(home: Home) -> None:
    table = home.open()
    lease = leased(table, MemoryLeases(expires=True))
    lease.lost = True
    with pytest.raises(LeaseLost):
        table.append(rows(1), entry(0))
    with pytest.raises(LeaseLost):
        table.mark(entry(0))
    assert ids(table) == []


def test_a_lease_whose_number_was_lost_gets_one_greater_than_the_tables(home: Home) -> None:
    leases, table = MemoryLeases(expires=True), home.open()
    for _ in range(5):
        leased(table, leases)
    anew, opened = MemoryLeases(expires=True), home.open()
    lease = leased(opened, anew)
    assert lease.epoch == opened.epoch == 6
    with pytest.raises(Fenced):
        table.append(rows(1), entry(0))
    other = anew.acquire("other", purpose="session", wait=0)
    anew.held.clear()
    with pytest.raises(LeaseLost):  # another driver's lease gets no new number
        home.open().under(other, 1)
