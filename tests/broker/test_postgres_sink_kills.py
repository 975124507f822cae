"""Drivers that write tables of PostgreSQL, killed at every border of a batch: no row is lost or doubled."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.crash_points import POINTS, TOPIC_POINTS
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.conftest import SettingsFactory
from tests.support.driver import (
    CRASH,
    assert_chained,
    command,
    driver,
    finished,
    ledger,
    other_kills,
    produce,
    rows,
    variables,
)
from tests.support.postgres import Postgres, postgres_server
from tests.support.things import KEYS, expected_totals, thing
from tests.support.topic_reader import committed

FLOWS = "tests.support.postgres_flows"
STREAMS = "pg_copied,pg_kept,pg_beside,pg_totals"
COUNT = 6000


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres_server(dagster=False) as server:
        yield server


@pytest.fixture
def fed(settings: SettingsFactory, broker: Broker, server: Postgres) -> Iterator[tuple[Settings, str]]:
    """The topic `things` with 6,000 records, an empty topic, and a database without tables."""
    bootstrap = broker.start()
    server.execute("DROP SCHEMA public CASCADE")
    server.execute("CREATE SCHEMA public")
    made = settings({"kafka.bootstrap_servers": bootstrap, "postgres.url": server.url("postgres", "postgresql")})
    topics = Topics.of(made.kafka, bootstrap)
    for name in ("things", "halves", "__recourse.pg_beside.halves"):
        if topics.describe(name):
            topics.delete(name)
    topics.create("things", 2)
    topics.create("halves", 3)
    produce(bootstrap, "things", (thing(i) for i in range(COUNT)))
    yield made, bootstrap


def run(settings: Settings, bootstrap: str, streams: str, kill: str | None = None) -> tuple[int, str]:
    arguments = ("--trigger", "available-now", "--set", "stream.max_offsets_per_trigger=700", "--streams", streams)
    environment = {"RECOURSE_POSTGRES__URL": settings.postgres.url, **({"RECOURSE_CRASH": kill} if kill else {})}
    return finished(driver(settings, bootstrap, *arguments, flows=FLOWS, environment=environment))


KILLS = ("pg_kept:transaction_open:1", "pg_totals:secondary_committed:1")
MORE_KILLS = other_kills(STREAMS, KILLS)


def test_every_point_of_a_batch_is_killed_at() -> None:
    assert {kill.split(":")[1] for kill in (*KILLS, *MORE_KILLS)} == {*POINTS, *TOPIC_POINTS}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [KILLS, pytest.param(MORE_KILLS, marks=pytest.mark.long)])
def test_a_kill_at_any_point_of_a_batch_loses_and_doubles_no_row(
    fed: tuple[Settings, str], server: Postgres, kills: tuple[str, ...]
) -> None:
    settings, bootstrap = fed
    for kill in kills:
        code, output = run(settings, bootstrap, kill.partition(":")[0], kill)
        assert code == -signal.SIGKILL, f"{kill}: {output[-3000:]}"
    code, output = run(settings, bootstrap, STREAMS)
    assert code == 0, output[-3000:]
    check(settings, bootstrap, server)


def recourse(settings: Settings, bootstrap: str, *arguments: str, kill: str = "", code: int = 0) -> str:
    """What a command prints, or says if it has to fail."""
    environment = {**variables(settings.home, bootstrap, FLOWS), "RECOURSE_POSTGRES__URL": settings.postgres.url}
    done = command(settings.home, {**environment, **({CRASH: kill} if kill else {})}, *arguments)
    assert done.returncode == code, (arguments, done.stdout[-2000:], done.stderr[-2000:])
    return done.stderr if code else done.stdout


@pytest.mark.long
def test_records_are_skipped_though_a_table_cannot_be_rebuilt_and_each_other_row_is_there_once(
    fed: tuple[Settings, str], server: Postgres
) -> None:
    settings, bootstrap = fed
    there = [*range(COUNT)]

    def read(*numbers: int) -> None:
        """The stream reads what there is, so these numbers are in the table too, and nothing is wrong."""
        assert run(settings, bootstrap, "pg_copied")[0] == 0
        there.extend(numbers)
        assert sorted(n for (n,) in server.rows("SELECT n FROM pg_copies")) == there
        assert "wrong" not in recourse(settings, bootstrap, "verify", "pg_copied", "--finished")

    def plan() -> str:
        arguments = ("recover", "plan", "pg_copied", "--to-latest", "--output", "json")
        return str(json.loads(recourse(settings, bootstrap, *arguments))["id"])

    read()
    produce(bootstrap, "things", (thing(i) for i in range(COUNT, COUNT + 100)))
    skip = plan()
    kill = "pg_copied:recover_continue_table:0"
    recourse(settings, bootstrap, "recover", "apply", skip, "--yes", kill=kill, code=-signal.SIGKILL)
    recourse(settings, bootstrap, "recover", "resume", skip, "--yes")
    produce(bootstrap, "things", (thing(i) for i in range(COUNT + 100, COUNT + 150)))
    read(*range(COUNT + 100, COUNT + 150))
    refused = recourse(settings, bootstrap, "recover", "undo", skip, "--yes", code=2)
    assert "REC-043" in refused and "Put a table right" in refused

    produce(bootstrap, "things", (thing(i) for i in range(COUNT + 150, COUNT + 200)))
    given_up = plan()
    recourse(settings, bootstrap, "recover", "apply", given_up, "--yes", kill=kill, code=-signal.SIGKILL)
    recourse(settings, bootstrap, "recover", "abort", given_up)
    read(*range(COUNT + 150, COUNT + 200))
    assert "REC-043" in recourse(settings, bootstrap, "recover", "plan", "pg_copied", "--to-batch", "0", code=2)


def check(settings: Settings, bootstrap: str, server: Postgres) -> None:
    copies = server.rows("SELECT n, part, off, k FROM pg_copies")
    assert sorted(n for n, *_ in copies) == [*range(COUNT)]
    assert len({(part, off) for _, part, off, _ in copies}) == COUNT
    assert sorted(n for (n,) in server.rows("SELECT n FROM pg_second")) == [*range(2, COUNT, 3)]
    assert sorted(row["n"] for row in rows(settings, "pg_third")) == [*range(0, COUNT, 3)]
    halves = [json.loads(m.value() or b"")["n"] for m in committed(bootstrap, "halves", 3)]
    assert sorted(halves) == [*range(1, COUNT, 3)]
    newest = {KEYS[n % len(KEYS)]: n for n in range(COUNT)}
    kept = {key: n for key, n in newest.items() if n % 7 != 3}
    assert dict(server.rows("SELECT k, n FROM pg_newest")) == kept
    totals = {k: (c, s) for k, c, s in server.rows("SELECT k, c, s FROM pg_totals")}
    assert totals == {key: (c, s) for key, (c, s) in expected_totals(range(COUNT)).items()}
    for stream, table, primary in (
        ("pg_copied", "pg_copies", "pg_copied_batches"),
        ("pg_beside", "pg_second", "pg_third"),
    ):
        assert_chained(entries := ledger(settings, primary))
        assert sum(r.records for entry in entries for r in entry.offsets) == COUNT
        counted = sum(entry.rows.get(f"postgres:{table}", 0) for entry in entries)
        assert [(counted,)] == server.rows(f"SELECT count(*) FROM {table}")
        (row,) = server.rows(f"SELECT stream, generation, batch FROM recourse_ledger WHERE table_name = '{table}'")
        assert row == (stream, 1, entries[-1].batch)
