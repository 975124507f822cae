"""Streams that write tables of PostgreSQL, from end to end: a real broker, Spark and a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.preflight.doctor import check_postgres
from streaming_jobs.sinks.postgres.database import DatabaseRefused
from streaming_jobs.stream import Stream
from streaming_jobs.verification.verification import Options, verify_streams
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, on_topic, produce
from tests.support.postgres import Postgres, postgres_server
from tests.support.postgres_flows import pg_beside, pg_copied, pg_kept
from tests.support.things import KEYS, thing

COUNT = 2000
DATABASE = "sink"


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres_server(dagster=False) as server:
        yield server


@pytest.fixture
def made(bench: BenchFactory, topic: str, server: Postgres) -> Callable[..., Bench]:
    """Makes a bench with an empty database; the topic has 2,000 records."""
    server.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
    server.execute(f"CREATE DATABASE {DATABASE}")

    def make(**flags: object) -> Bench:
        flags = {
            "stream.max_offsets_per_trigger": 700,
            "postgres.url": server.url(DATABASE, "postgresql"),
            **{name.replace("__", "."): value for name, value in flags.items()},
        }
        home = bench(flags)
        if home.topics.describe(topic) is None:
            home.topics.create(topic, 2)
            produce(home.bootstrap, topic, (thing(i) for i in range(COUNT)))
        return home

    return make


def numbers(server: Postgres, table: str) -> list[int]:
    return [n for (n,) in server.rows(f"SELECT n FROM {table} ORDER BY n", DATABASE)]


@pytest.mark.parametrize("path", ["driver", "executor"])
def test_a_table_has_every_row_once_over_restarts_on_both_ways_of_a_batch(
    made: Callable[..., Bench], topic: str, server: Postgres, path: str
) -> None:
    home = made(stream__path=path)
    home.run(on_topic(pg_copied, topic))
    produce(home.bootstrap, topic, (thing(i) for i in range(COUNT, COUNT + 100)))
    home.run(on_topic(pg_copied, topic))
    assert numbers(server, "pg_copies") == [*range(COUNT + 100)]
    first = server.rows("SELECT k, n, extract(epoch FROM t)::float FROM pg_copies WHERE n = 7", DATABASE)
    assert first == [(KEYS[7 % len(KEYS)], 7, pytest.approx(1_704_067_200 + 0.07))]
    home.run(on_topic(pg_kept, topic))
    newest = {KEYS[n % len(KEYS)]: n for n in range(COUNT + 100)}
    kept = {key: n for key, n in newest.items() if n % 7 != 3}
    assert dict(server.rows("SELECT k, n FROM pg_newest", DATABASE)) == kept
    assert len(kept) + len(server.rows("SELECT k FROM pg_newest_deletes", DATABASE)) >= len(KEYS)
    assert not list((home.settings.tables_folder / "pg_copied_batches").glob("_postgres/*/*")), "no file is left"


def verified(home: Bench, flow: Stream) -> dict[str, str]:
    """The verdicts on tables of PostgreSQL, by comparison."""
    verdict, _ = verify_streams(home.settings, [flow], [], home.bootstrap, Options(finished=True))
    (one,) = verdict.streams
    return {c.what: c.verdict for c in one.comparisons if c.table.startswith("postgres:")}


def test_verify_proves_the_rows_and_finds_one_that_was_removed_or_doubled(
    made: Callable[..., Bench], topic: str, server: Postgres
) -> None:
    home, flow = made(), on_topic(pg_copied, topic)
    home.run(flow)
    home.run(on_topic(pg_kept, topic))
    assert verified(home, flow) == {"position": "ok", "row counts": "ok"}
    assert verified(home, on_topic(pg_kept, topic)) == {"position": "ok", "keys": "ok"}
    server.execute("DELETE FROM pg_copies WHERE n = 5", DATABASE)
    assert verified(home, flow) == {"position": "ok", "row counts": "wrong"}
    server.execute("UPDATE recourse_ledger SET entry = replace(entry, '\"batch\":2', '\"batch\":0')", DATABASE)
    assert verified(home, flow)["position"] == "wrong"


def test_a_database_that_is_away_is_tried_again_and_each_row_is_there_once(
    made: Callable[..., Bench], topic: str, server: Postgres
) -> None:
    home = made()
    running = home.start(on_topic(pg_copied, topic), "continuous")
    try:
        wait(home, running, lambda: numbers(server, "pg_copies") == [*range(COUNT)])
        server.execute(f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS false")
        server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{DATABASE}'")
        produce(home.bootstrap, topic, (thing(i) for i in range(COUNT, COUNT + 300)))
        wait(home, running, lambda: (running.status.error or {}).get("code") == "REC-041")
        assert not running.ended
        server.execute(f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS true")
        wait(home, running, lambda: numbers(server, "pg_copies") == [*range(COUNT + 300)])
        running.request_stop()
    finally:
        home.finish(running)


def wait(home: Bench, running: object, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        running.poll(home.spark)  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, running.status  # type: ignore[attr-defined]
        time.sleep(0.1)


def test_a_permanent_error_stops_the_stream_with_its_code_and_a_corrected_table_continues(
    made: Callable[..., Bench], topic: str, server: Postgres
) -> None:
    home, flow = made(), on_topic(pg_copied, topic)
    home.run(flow)
    server.execute("ALTER TABLE pg_copies ADD CONSTRAINT small CHECK (n < 2050)", DATABASE)
    produce(home.bootstrap, topic, (thing(i) for i in range(COUNT, COUNT + 100)))
    running = home.run(flow)
    error = running.status.error
    assert error is not None
    assert (error["code"], error["permanent"]) == (DatabaseRefused.code, True)
    assert "constraint small" in error["next"]
    server.execute("ALTER TABLE pg_copies DROP CONSTRAINT small", DATABASE)
    home.run(flow)
    assert numbers(server, "pg_copies") == [*range(COUNT + 100)]


def test_a_database_put_back_from_an_older_copy_is_refused_before_the_start(
    made: Callable[..., Bench], topic: str, server: Postgres
) -> None:
    home, flow = made(), on_topic(pg_copied, topic)
    home.run(flow)
    server.execute("UPDATE recourse_ledger SET entry = replace(entry, '\"batch\":2', '\"batch\":1')", DATABASE)
    with pytest.raises(PreflightRefused, match="is at g0001 batch 1, .* should be at g0001 batch 2"):
        home.start(flow)


def test_outputs_of_other_columns_are_refused_before_the_table_is_made(
    made: Callable[..., Bench], topic: str, server: Postgres
) -> None:
    nested = replace(pg_copied, function=lambda things: things.selectExpr("struct(n) AS pair"))
    running = made().run(on_topic(nested, topic))
    assert running.status.error is not None
    assert running.status.error["next"] == "write it as text: to_json(pair)"
    assert server.rows("SELECT to_regclass('pg_copies') IS NULL", DATABASE) == [(True,)]


def test_doctor_names_database_schema_and_rights(made: Callable[..., Bench], server: Postgres) -> None:
    check = check_postgres(made().settings)
    assert check.ok, check
    assert f"database {DATABASE}, schema public" in check.found
    missing = check_postgres(made(postgres__database_schema="nowhere").settings)
    assert missing.ok is False
    assert "nowhere" in missing.found


def test_a_table_a_topic_and_a_database_have_the_same_batches(
    made: Callable[..., Bench], topic: str, server: Postgres
) -> None:
    home = made()
    target = f"{topic}-out"
    home.topics.create(target, 3)
    sinks = {name: replace(s, topic=replace(s.topic, name=target)) for name, s in pg_beside.topic_sinks.items()}
    flow = replace(on_topic(pg_beside, topic), topic_sinks=sinks)
    home.run(flow)
    assert numbers(server, "pg_second") == [*range(2, COUNT, 3)]
    verdict, _ = verify_streams(home.settings, [flow], [], home.bootstrap, Options(finished=True))
    assert verdict.ok, verdict
