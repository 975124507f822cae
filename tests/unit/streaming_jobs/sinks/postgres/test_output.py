"""A table of PostgreSQL as a sink, on a real server, without Spark: a frame is an Arrow table."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pydantic import SecretStr
from pyspark.sql import types as T

from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.errors import Fenced, LeaseLost, LedgerConflict, OutputMismatch
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.settings import PostgresSettings
from streaming_jobs.sinks.base import BatchOfRows
from streaming_jobs.sinks.postgres.database import DatabaseRefused, DatabaseUnavailable
from streaming_jobs.sinks.postgres.ledger import look, take_over
from streaming_jobs.sinks.postgres.output import PostgresOutput
from streaming_jobs.sinks.postgres.rows import JudgedWrite
from streaming_jobs.sinks.schemas import POSITION_FIELD
from tests.support import ROOT
from tests.support.postgres import Postgres, postgres_server

pytestmark = pytest.mark.slow

PAIR = T.StructType([T.StructField("k", T.StringType()), T.StructField("n", T.LongType())])


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres_server(dagster=False) as server:
        yield server


@pytest.fixture(autouse=True)
def _empty(server: Postgres) -> None:
    server.execute("DROP SCHEMA public CASCADE")
    server.execute("CREATE SCHEMA public")


@dataclass
class Frame:
    """Rows in memory where Spark has a frame."""

    rows: pa.Table

    @property
    def columns(self) -> list[str]:
        return list(self.rows.column_names)

    def toArrow(self) -> pa.Table:
        return self.rows


@dataclass
class Lease:
    """A lease that nobody renews."""

    epoch: int
    expires: bool = True
    fenced: set[tuple[str, int]] = field(default_factory=set)
    lost: bool = False

    def check(self) -> None:
        if self.lost:
            raise LeaseLost("the lease has run out")

    def exceed(self, epoch: int) -> None:
        self.check()
        self.epoch = epoch + 1


def settings_of(server: Postgres, **more: Any) -> PostgresSettings:
    return PostgresSettings(url=server.url("postgres", "postgresql"), **more)


@pytest.fixture
def output(server: Postgres, tmp_path: Path) -> Iterator[Any]:
    made: list[PostgresOutput] = []

    def open_output(
        declared: PostgresTable, schema: T.StructType = PAIR, *, opens: bool = True, **options: Any
    ) -> PostgresOutput:
        options = {"stream": "flow", "generation": 1, "settings": settings_of(server), **options}
        made.append(PostgresOutput(declared, schema, tmp_path, **options))
        if opens:
            made[-1].open()
        return made[-1]

    yield open_output
    for each in made:
        each.close()


def entry(batch: int, *, generation: int = 1, end: int | None = None) -> LedgerEntry:
    ranges = (OffsetRange("things", "id", {0: batch * 10}, {0: batch * 10 + 10 if end is None else end}),)
    return LedgerEntry("batch", "flow", "postgres:t", generation, batch, ranges)


def prepared(to: PostgresOutput, rows: pa.Table, batch: int = 0) -> JudgedWrite:
    return to.prepare(Frame(rows), BatchOfRows(to.generation, batch, True, ["things"]))  # type: ignore[arg-type]


def pairs(*numbers: int, key: str = "x") -> pa.Table:
    return pa.table({"k": pa.array([key] * len(numbers), pa.string()), "n": pa.array(numbers, pa.int64())})


def write(to: PostgresOutput, batch: int, *numbers: int) -> int | None:
    return prepared(to, pairs(*numbers), batch).commit(entry(batch))


def test_a_batch_is_in_the_table_with_its_entry_and_only_once(output: Any, server: Postgres) -> None:
    table = output(PostgresTable("t"))
    assert write(table, 0, 1, 2) is not None
    assert write(table, 0, 1, 2) is None, "the table has it"
    assert server.rows("SELECT n FROM t ORDER BY n") == [(1,), (2,)]
    assert server.rows("SELECT table_name, stream, generation, batch, epoch FROM recourse_ledger") == [
        ("t", "flow", 1, 0, 0)
    ]
    again = output(PostgresTable("t"))
    assert again.newest_entry() == table.newest_entry() == entry(0)
    with pytest.raises(LedgerConflict, match="other offsets"):
        prepared(again, pairs(1)).commit(entry(0, end=7))
    assert write(again, 3, 9) is not None
    with pytest.raises(LedgerConflict, match="is at g0001 batch 3"):
        write(again, 2, 9)


def test_a_driver_that_ends_before_the_commit_leaves_neither_rows_nor_entry(output: Any, server: Postgres) -> None:
    def killed(batch: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(output(PostgresTable("t"), before_commit=killed), 0, 1)
    assert server.rows("SELECT * FROM t") == []
    next_driver = output(PostgresTable("t"))
    assert next_driver.position.batch == -1
    assert write(next_driver, 0, 1) is not None


def test_a_batch_whose_commit_failed_without_an_answer_is_written_once(output: Any, server: Postgres) -> None:
    def ended(batch: int) -> None:
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'recourse flow'"
        )

    table = output(PostgresTable("t"), before_commit=ended)
    with pytest.raises(DatabaseUnavailable):
        write(table, 0, 1)
    table.before_commit = lambda _: None
    table.refresh()
    assert write(table, 0, 1) is not None
    server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'recourse flow'")
    assert write(table, 1, 2) is not None, "an idle connection that is gone is replaced"
    assert server.rows("SELECT n FROM t ORDER BY n") == [(1,), (2,)]


def test_a_driver_of_an_older_generation_is_fenced(output: Any, server: Postgres) -> None:
    older = output(PostgresTable("t"))
    assert write(older, 4, 1) is not None
    newer = output(PostgresTable("t"), generation=2)
    assert (newer.position.generation, newer.position.batch) == (2, -1)
    with pytest.raises(Fenced, match="generation 2"):
        write(older, 5, 2)
    with pytest.raises(Fenced):
        output(PostgresTable("t"))
    assert server.rows("SELECT n FROM t") == [(1,)]


def test_a_driver_of_an_earlier_epoch_is_fenced_also_with_its_transaction_prepared(
    output: Any, server: Postgres
) -> None:
    zombie = output(PostgresTable("t"), lease=Lease(1))
    ready = prepared(zombie, pairs(1))
    output(PostgresTable("t"), lease=Lease(2))
    with pytest.raises(Fenced, match="epoch 2"):
        ready.commit(entry(0))
    assert server.rows("SELECT * FROM t") == []
    assert server.rows("SELECT epoch FROM recourse_ledger") == [(2,)]


def test_a_driver_that_has_lost_its_lease_writes_nothing(output: Any, server: Postgres) -> None:
    lease = Lease(1)
    table = output(PostgresTable("t"), lease=lease)
    lease.lost = True
    with pytest.raises(LeaseLost):
        write(table, 0, 1)
    assert server.rows("SELECT * FROM t") == []


def test_a_recovery_fences_earlier_drivers_and_lets_the_table_continue_in_a_later_generation(
    output: Any, server: Postgres
) -> None:
    zombie, lease = output(PostgresTable("t"), lease=Lease(1)), Lease(2)
    assert write(zombie, 4, 1) is not None
    ready = prepared(zombie, pairs(2), 5)
    take = partial(take_over, settings_of(server), "flow", "t", lease)
    assert [row.entry for row in (take(), take()) if row is not None] == [entry(4), entry(4)], "it stays at its batch"
    with pytest.raises(Fenced, match="epoch 2"):
        ready.commit(entry(5))
    moved = replace(entry(4, generation=2), offsets=())
    for _ in range(2):
        assert take(moved) is not None
    later = output(PostgresTable("t"), generation=2, lease=Lease(3))
    assert later.newest_entry() == moved
    assert prepared(later, pairs(3), 5).commit(entry(5, generation=2)) is not None
    with pytest.raises(LedgerConflict, match="is at g0002 batch 5"):
        take(moved)
    with pytest.raises(Fenced, match="generation 2"):
        take(entry(6))
    assert server.rows("SELECT n FROM t ORDER BY n") == [(1,), (3,)]
    assert take_over(settings_of(server), "flow", "other", lease) is None


def test_a_lease_whose_epochs_were_lost_gets_a_greater_one(output: Any) -> None:
    output(PostgresTable("t"), lease=Lease(7))
    lease = Lease(1)
    assert write(output(PostgresTable("t"), lease=lease), 0, 1) is not None
    assert lease.epoch == 8


def test_of_two_sessions_that_have_taken_the_lease_under_one_number_the_second_fences_the_first(output: Any) -> None:
    first = output(PostgresTable("t"), lease=Lease(3))
    ready = prepared(first, pairs(1))
    lease = Lease(3)
    second = output(PostgresTable("t"), lease=lease)
    assert lease.epoch == 4
    with pytest.raises(Fenced):
        ready.commit(entry(0))
    second.open()
    assert lease.epoch == 4, "another start of the same session keeps its number"
    assert write(second, 0, 1) is not None


def test_the_next_driver_waits_for_an_open_transaction_and_finds_its_batch(output: Any, server: Postgres) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def held(batch: int) -> None:
        inside.set()
        assert go_on.wait(30)

    first = output(PostgresTable("t"), before_commit=held, lease=Lease(1))
    writing = threading.Thread(target=write, args=(first, 0, 1))
    writing.start()
    assert inside.wait(30)
    found: list[Any] = []
    opening = threading.Thread(target=lambda: found.append(output(PostgresTable("t"), lease=Lease(2))))
    opening.start()
    opening.join(0.3)
    assert opening.is_alive(), "the open transaction has locked the row"
    go_on.set()
    writing.join(30)
    opening.join(30)
    assert found[0].position.batch == 0
    assert server.rows("SELECT n FROM t") == [(1,)]


def test_a_stream_commits_durably_and_reads_committed_rows_whatever_the_defaults_are(
    output: Any, server: Postgres
) -> None:
    server.execute("ALTER DATABASE postgres SET synchronous_commit = off")
    server.execute("ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'")
    seen: list[Any] = []

    def looked(batch: int) -> None:
        connection = table._database._connection
        names = ("synchronous_commit", "transaction_isolation")
        seen.extend(connection.execute(f"SHOW {name}").fetchone()[0] for name in names)

    try:
        table = output(PostgresTable("t"), before_commit=looked)
        assert write(table, 0, 1) is not None
    finally:
        server.execute("ALTER DATABASE postgres RESET ALL")
    assert seen == ["on", "read committed"]


def test_of_two_drivers_that_write_a_batch_at_the_same_time_one_writes_it(output: Any, server: Postgres) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def held(batch: int) -> None:
        inside.set()
        assert go_on.wait(30)

    second = output(PostgresTable("t"))
    first = output(PostgresTable("t"), before_commit=held)
    writing = threading.Thread(target=write, args=(first, 0, 1))
    writing.start()
    assert inside.wait(30)
    wrote: list[int | None] = []
    repeating = threading.Thread(target=lambda: wrote.append(write(second, 0, 1)))
    repeating.start()
    repeating.join(0.3)
    go_on.set()
    writing.join(30)
    repeating.join(30)
    assert wrote == [None]
    assert server.rows("SELECT n FROM t") == [(1,)]


def test_a_wait_for_another_transaction_ends(output: Any, server: Postgres) -> None:
    output(PostgresTable("t"))
    with psycopg.connect(server.url("postgres", "postgresql")) as other:
        other.execute("SELECT * FROM recourse_ledger FOR UPDATE")
        with pytest.raises(DatabaseUnavailable, match="REC-041.*opening table t"):
            output(PostgresTable("t"), settings=settings_of(server, transaction_timeout="200 milliseconds"))


EVERY = T.StructType(
    [
        T.StructField("flag", T.BooleanType()),
        T.StructField("tiny", T.ByteType()),
        T.StructField("small", T.ShortType()),
        T.StructField("whole", T.IntegerType()),
        T.StructField("long", T.LongType()),
        T.StructField("real", T.FloatType()),
        T.StructField("double", T.DoubleType()),
        T.StructField("price", T.DecimalType(38, 18)),
        T.StructField("select", T.StringType()),
        T.StructField('a "quoted" Name', T.StringType()),
        T.StructField("bytes", T.BinaryType()),
        T.StructField("day", T.DateType()),
        T.StructField("at", T.TimestampType()),
        T.StructField("wall", T.TimestampNTZType()),
    ]
)
VALUES: list[tuple[Any, ...]] = [
    (True, -128, -32768, -(2**31), -(2**63), 0.1, 0.1, Decimal("12345678901234567890.123456789012345678"), "", "a", b"",
     date(1, 1, 1), datetime(1, 1, 1, tzinfo=UTC), datetime(1, 1, 1)),
    (False, 127, 32767, 2**31 - 1, 2**63 - 1, float("inf"), float("-inf"), Decimal("-1E-18"), '"', "\\.", b"\x00\xff\\",
     date(9999, 12, 31), datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), datetime(9999, 12, 31, 23, 59, 59, 999999)),
    (None,) * 14,
    (True, 0, 0, 0, 0, -0.0, 5e-324, Decimal(0), "\r\n,;\t'\\N", "ö\U0001f600", b"\n",
     date(2024, 2, 29), datetime(2024, 3, 31, 1, 30, tzinfo=UTC), datetime(2024, 3, 31, 2, 30)),
]  # fmt: skip


def test_every_value_is_read_back_as_it_was_written(output: Any, server: Postgres) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    table = output(PostgresTable("t"), EVERY)
    schema = to_arrow_schema(EVERY, timezone="UTC")
    rows = pa.Table.from_pylist([dict(zip(EVERY.fieldNames(), row, strict=True)) for row in VALUES], schema)
    assert prepared(table, rows).commit(entry(0)) is not None
    columns = ", ".join(f'"{name}"' if '"' not in name else '"a ""quoted"" Name"' for name in EVERY.fieldNames())
    # As text, since Python has no years before 1 or after 9999 in other time zones.
    stored = server.rows(f"SET timezone = 'UTC'; SELECT {columns} FROM t")
    as_python = [tuple(bytes(v) if isinstance(v, memoryview) else v for v in row) for row in stored]
    real = [pa.array([row[5]], pa.float32())[0].as_py() for row in VALUES]
    wanted = [(*row[:5], real[i], *row[6:]) for i, row in enumerate(VALUES)]
    assert [(*row[:5], pa.array([row[5]], pa.float32())[0].as_py(), *row[6:]) for row in as_python] == wanted


def test_rows_that_the_table_cannot_hold_become_dead_letters(output: Any, server: Postgres) -> None:
    table = output(PostgresTable("t", keys=["k"]))
    texts = pa.array([b"good", b"a\x00b", b"\xff", None], pa.binary()).view(pa.string())
    rows = pa.table({"k": texts, "n": pa.array([1, 2, 3, 4], pa.int64())})
    write_ = prepared(table, rows)
    assert write_.rejected is not None
    reasons = write_.rejected["__reason"].to_pylist()
    assert sorted(reason or "null_key" for reason in reasons) == ["not_utf8", "nul_character", "null_key"]
    assert write_.commit(entry(0)) is not None
    assert server.rows("SELECT k, n FROM t") == [("good", 1)]


def test_several_rows_of_a_key_without_an_order_stop_the_stream(output: Any) -> None:
    with pytest.raises(OutputMismatch, match="several rows for the key"):
        prepared(output(PostgresTable("t", keys=["k"])), pairs(1, 2))


def test_the_last_row_read_wins_without_an_order_and_a_delete_removes_its_key(output: Any, server: Postgres) -> None:
    table = output(PostgresTable("t", keys=["k"], delete_when="n < 0"))

    def events(*rows: tuple[str, int]) -> pa.Table:
        made = pa.table({"k": [k for k, _ in rows], "n": pa.array([n for _, n in rows], pa.int64())})
        made = made.append_column("__topic", pa.array(["things"] * len(rows)))
        made = made.append_column("__partition", pa.array([0] * len(rows), pa.int32()))
        made = made.append_column("__offset", pa.array(range(len(rows)), pa.int64()))
        return made.append_column("__delete", pa.array([n < 0 for _, n in rows]))

    assert prepared(table, events(("a", 5), ("a", 3), ("b", 1), ("c", 2), ("c", -1))).commit(entry(0)) is not None
    assert server.rows("SELECT k, n FROM t ORDER BY k") == [("a", 3), ("b", 1)]
    only_deletes = prepared(table, events(("a", -1)), 1)
    assert only_deletes.rows == 1, "a batch of deletes alone is committed"
    assert only_deletes.commit(entry(1)) is not None
    assert server.rows("SELECT k, n FROM t") == [("b", 1)]


ORDERED = T.StructType(
    [*PAIR.fields, T.StructField("v", T.DoubleType()), T.StructField("w", T.StringType()), POSITION_FIELD]
)
CHANGES = PostgresTable("t", keys=["k"], order_by=["v", "w"], delete_when="n < 0")


@dataclass
class Model:
    """The same semantics, an event at a time."""

    rows: dict[str, tuple[Any, int]] = field(default_factory=dict)
    deleted: dict[str, Any] = field(default_factory=dict)

    def take(self, key: str, n: int, v: float | None, w: str | None, position: int) -> None:
        if n < 0 and v is None and w is None:
            self.rows.pop(key, None)
            self.deleted.pop(key, None)
            return
        number = None if v is None else (v != v, 0.0 if v != v else v + 0.0)
        order = (number is not None, number or 0, w is not None, (w or "").encode(), position)
        if n < 0:
            if key in self.rows and order >= self.rows[key][0]:
                del self.rows[key]
            self.deleted[key] = max(order, self.deleted.get(key, order))
        elif order >= self.deleted.get(key, order) and order >= self.rows.get(key, (order,))[0]:
            self.rows[key] = (order, n)


@pytest.mark.parametrize("seed", range(6))
def test_the_greatest_event_of_a_key_wins_whatever_the_batches_are(output: Any, server: Postgres, seed: int) -> None:
    chance, model = random.Random(seed), Model()
    table = output(CHANGES, ORDERED)
    numbers = [None, float("nan"), float("-inf"), -0.0, 0.0, 1.0, 2.0]
    events = [
        (
            chance.choice("abcäZ"),
            chance.choice([-1, i + 1]),
            chance.choice(numbers),
            chance.choice([None, "", "a", "B", "ä"]),
            i,
        )
        for i in range(400)
    ]
    for event in events:
        model.take(*event)
    batch = 0
    while events:
        cut = chance.randint(1, 60)
        part, events = events[:cut], events[cut:]
        rows = pa.table(
            {
                "k": pa.array([e[0] for e in part]),
                "n": pa.array([e[1] for e in part], pa.int64()),
                "v": pa.array([e[2] for e in part], pa.float64(), from_pandas=False),
                "w": pa.array([e[3] for e in part], pa.string()),
                "_position": pa.array([e[4] for e in part], pa.int64()),
                "__topic": pa.array(["things"] * len(part)),
                "__partition": pa.array([0] * len(part), pa.int32()),
                "__offset": pa.array([e[4] for e in part], pa.int64()),
                "__delete": pa.array([e[1] < 0 for e in part]),
            }
        )
        assert prepared(table, rows, batch).commit(entry(batch)) is not None
        batch += 1
    assert dict(server.rows("SELECT k, n FROM t")) == {key: n for key, (_, n) in model.rows.items()}
    remembered = {key for (key,) in server.rows("SELECT k FROM t_deletes")}
    assert model.deleted.keys() - model.rows.keys() <= remembered <= model.deleted.keys(), "a newer row serves as well"


def test_an_old_delete_is_forgotten(output: Any, server: Postgres) -> None:
    table = output(replace(CHANGES, deletes_kept="1 hour"), ORDERED)

    def event(key: str, n: int, v: float, position: int) -> pa.Table:
        values: Mapping[str, Any] = {"k": key, "n": n, "v": v, "w": "", "_position": position, "__topic": "things",
                                     "__partition": 0, "__offset": position, "__delete": n < 0}  # fmt: skip
        return pa.Table.from_pylist([values])

    assert prepared(table, event("a", -1, 5.0, 0)).commit(entry(0)) is not None
    assert prepared(table, event("a", 1, 4.0, 1)).commit(entry(1)) is not None
    assert server.rows("SELECT k FROM t") == [], "it is older than the delete"
    server.execute("UPDATE t_deletes SET _deleted_at = _deleted_at - interval '2 hours'")
    assert prepared(table, event("b", 1, 4.0, 2)).commit(entry(2)) is not None
    assert server.rows("SELECT * FROM t_deletes") == []
    assert prepared(table, event("a", 1, 4.0, 3)).commit(entry(3)) is not None
    assert server.rows("SELECT k FROM t ORDER BY k") == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("made", "declared", "text"),
    [
        ("CREATE TABLE t (k text, n integer)", PostgresTable("t"), "column n of .* is integer.*needs bigint"),
        ("CREATE TABLE t (k text, n bigint)", PostgresTable("t", keys=["k"]), "no unique index on its keys"),
        ("CREATE TABLE t (k text, n bigint, UNIQUE (k, n))", PostgresTable("t", keys=["k"]), "no unique index"),
        ("CREATE TABLE t (k text, n bigint, m int NOT NULL)", PostgresTable("t"), "column m .* NOT NULL"),
        ("CREATE TABLE t (k varchar(3), n bigint)", PostgresTable("t"), r"column k of .* is character varying\(3\)"),
        ("CREATE TABLE t (k text, n bigint GENERATED ALWAYS AS (1) STORED)", PostgresTable("t"), "generated by the"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_refused(
    output: Any, server: Postgres, made: str, declared: PostgresTable, text: str
) -> None:
    server.execute(made)
    with pytest.raises(OutputMismatch, match=text):
        output(declared)
    assert server.rows("SELECT to_regclass('recourse_ledger') IS NULL") == [(True,)], "nothing was changed"


def test_a_table_of_the_users_own_keeps_its_further_columns_and_gets_new_ones(output: Any, server: Postgres) -> None:
    server.execute("CREATE TABLE t (made timestamptz NOT NULL DEFAULT now(), k varchar UNIQUE, n numeric)")
    table = output(PostgresTable("t", keys=["k"]))
    assert write(table, 0, 7) is not None
    table.close()
    wider = T.StructType([*PAIR.fields, T.StructField("more", T.DoubleType())])
    table = output(PostgresTable("t", keys=["k"]), wider)
    assert prepared(table, pairs(8).append_column("more", pa.array([1.5])), 1).commit(entry(1)) is not None
    assert server.rows("SELECT made IS NOT NULL, k, n, more FROM t") == [(True, "x", 8, 1.5)]


def test_a_table_of_another_stream_is_refused(output: Any) -> None:
    output(PostgresTable("t"))
    with pytest.raises(LedgerConflict, match="stream flow writes the PostgreSQL table t"):
        output(PostgresTable("t"), stream="other")


def test_a_missing_right_and_a_constraint_are_permanent_and_name_the_remedy(output: Any, server: Postgres) -> None:
    table = output(PostgresTable("t"))
    server.execute("ALTER TABLE t ADD CONSTRAINT positive CHECK (n > 0)")
    with pytest.raises(DatabaseRefused, match="constraint positive") as refused:
        write(table, 0, -987654)
    assert "987654" not in str(refused.value), "the row is not shown"
    assert refused.value.__cause__ is None, "nor in a traceback"
    server.execute("CREATE ROLE reader LOGIN PASSWORD 'x'")
    server.execute("GRANT USAGE ON SCHEMA public TO reader")
    as_reader = PostgresSettings(url=server.url("postgres", "postgresql").replace(f"//{server.user}@", "//reader@"))
    with pytest.raises(DatabaseRefused, match=r"REC-042 .*permission denied"):
        output(PostgresTable("t"), settings=as_reader)
    server.execute("GRANT SELECT, INSERT, UPDATE ON recourse_ledger TO reader")
    server.execute("GRANT INSERT ON t TO reader")
    assert write(output(PostgresTable("t"), settings=as_reader), 0, 1) is not None, "these rights are enough"


def blocks(heading: str) -> list[str]:
    """The SQL under a heading of the page."""
    page = (ROOT / "docs" / "postgres_sink.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```sql\n(.*?)```", page, re.DOTALL)


def test_the_documented_rights_are_enough_for_tables_that_the_stream_does_not_make(
    output: Any, server: Postgres
) -> None:
    declared = replace(CHANGES, name="orders")
    server.execute("DROP ROLE IF EXISTS recourse_writer")
    server.execute("CREATE ROLE recourse_writer LOGIN")
    server.execute('CREATE TABLE orders (k text PRIMARY KEY, n bigint, v float8, w text, "_position" bigint)')
    server.execute(
        "CREATE TABLE orders_deletes "
        "(k text PRIMARY KEY, v float8, w text, _position bigint, _deleted_at timestamptz); "
        "CREATE INDEX ON orders_deletes (_deleted_at)"
    )
    (rights,) = blocks("Rights")
    for statement in rights.split(";")[:-1]:
        server.execute(
            statement.replace("DATABASE shop", "DATABASE postgres").replace("TO recourse", "TO recourse_writer")
        )
    server.execute("REVOKE ALL ON DATABASE postgres FROM PUBLIC")
    url = server.url("postgres", "postgresql").replace(f"//{server.user}@", "//recourse_writer@")
    table = output(declared, ORDERED, settings=PostgresSettings(url=url))
    row = {"k": "a", "n": 1, "v": 1.0, "w": "", "_position": 1, "__topic": "things", "__partition": 0, "__offset": 1}
    for batch, delete in enumerate((False, True)):
        rows = pa.Table.from_pylist([{**row, "__delete": delete, "_position": batch}])
        assert prepared(table, rows, batch).commit(entry(batch)) is not None
    assert server.rows("SELECT count(*) FROM orders") == [(0,)]


def test_a_table_is_put_right_by_a_second_stream_and_given_back_as_documented(output: Any, server: Postgres) -> None:
    wrong, right = output(PostgresTable("orders")), output(PostgresTable("orders_2"), stream="orders_2")
    assert write(wrong, 0, 1) is not None
    assert write(right, 0, 2) is not None
    wrong.close()
    switch, back = blocks("Put a table right")
    server.execute(switch)
    assert server.rows("SELECT n FROM orders") == [(2,)]
    server.execute(back)
    assert server.rows("SELECT n FROM orders") == [(1,)]
    again = output(PostgresTable("orders"))
    assert write(again, 1, 3) is not None, "the old stream continues where it was"
    assert server.rows("SELECT n FROM orders ORDER BY n") == [(1,), (3,)]


def test_a_server_that_is_away_is_transient_and_no_password_is_shown(output: Any, tmp_path: Path) -> None:
    away = PostgresSettings(
        url=f"postgresql://me@/nowhere?host={tmp_path}", password=SecretStr("s3cret"), connect_timeout="2 seconds"
    )
    table = output(PostgresTable("t"), settings=away, opens=False)
    with pytest.raises(DatabaseUnavailable, match="REC-041") as unavailable:
        table.open()
    assert "s3cret" not in f"{unavailable.value} {table!r}"
    assert (unavailable.value.__cause__, unavailable.value.__suppress_context__) == (None, True)


def test_a_user_that_the_server_refuses_is_permanent(output: Any, server: Postgres) -> None:
    nobody = PostgresSettings(url=server.url("postgres", "postgresql").replace(f"//{server.user}@", "//nobody_here@"))
    with pytest.raises(DatabaseRefused, match="does not exist"):
        output(PostgresTable("t"), settings=nobody)


def test_preflight_sees_table_and_entry_and_changes_nothing(output: Any, server: Postgres) -> None:
    assert look(settings_of(server), "flow", "t") == (False, None)
    assert server.rows("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]
    assert write(output(PostgresTable("t")), 0, 1) is not None
    exists, row = look(settings_of(server), "flow", "t")
    assert exists
    assert row is not None
    assert (row.stream, row.entry) == ("flow", entry(0))
