"""OpenLineage events: states, runs that keep their id, offsets and versions, and a receiver that fails meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from openlineage.client.serde import Serde
from pyspark.sql.types import LongType, StructField, StructType
from requests import HTTPError, Response

from orchestration.lineage import Lineage, Position, client, send
from streaming_jobs import DeltaSource, DeltaTable, Json, KafkaSink, KafkaTopic, Lookup, PostgresTable, stream
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status
from streaming_jobs.state.stream_history import note_session_event
from tests.conftest import SettingsFactory
from tests.support.timelines import NEW, OLD, lay_ledger, lay_sessions, ledger_line
from tests.support.worlds import PRIMARY, STREAM, parity

pytestmark = pytest.mark.slow

THEN = time.time() - 1000


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    return settings()


def events(home: Settings) -> list[dict[str, Any]]:
    made = Lineage(home, parity).since(Position())
    return [json.loads(Serde.to_json(event)) for event, _ in made]


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [event["eventType"] for event in found]


def test_a_session_is_a_run_with_its_batches_and_its_end(home: Settings) -> None:
    lay_ledger(home, [ledger_line(n, THEN + 10 + n) for n in range(5)])
    lay_sessions(home, (THEN, "started"), (THEN + 100, "stopped"))
    start, running, complete = events(home)
    assert kinds([start, running, complete]) == ["START", "RUNNING", "COMPLETE"]
    assert start["run"]["runId"] == running["run"]["runId"] == complete["run"]["runId"]
    assert (start["job"]["namespace"], start["job"]["name"]) == ("recourse", STREAM)
    batches = running["run"]["facets"]["recourse_batches"]
    assert (batches["first"], batches["last"], batches["generation"]) == (0, 4, 1)
    (topic,) = running["inputs"]
    assert topic["inputFacets"]["inputStatistics"]["rowCount"] == sum(
        end - begin for begin, end in batches["offsets"][topic["name"]].values()
    )
    output = next(one for one in running["outputs"] if one["name"].endswith(f"/{PRIMARY}"))
    assert output["facets"]["version"]["datasetVersion"] == str(batches["versions"][PRIMARY])
    assert output["outputFacets"]["outputStatistics"]["rowCount"] > 0 and output["namespace"] == "file"


def test_tables_that_are_read_and_topics_that_are_written_are_told_too(home: Settings) -> None:
    schema = StructType([StructField("n", LongType())])
    topic = KafkaTopic("things_out", value=Json(schema))

    names = Lookup("names", schema=schema, path=home.tables_folder.parent / "elsewhere" / "names")

    @stream(
        source=DeltaSource("things_in", schema=schema),
        lookups={"names": names},
        sink={"kept": DeltaTable("kept"), "out": KafkaSink(topic)},
    )
    def copied(things_in: Any, names: Any) -> Any:
        """Rows of a table, to a table and a topic."""

    write_deltalake(home.tables_folder / "things_in", pa.table({"n": [1]}))
    lay_sessions(home, (THEN, "started"), stream=copied.name)
    ((event, _),) = Lineage(home, copied).since(Position())
    told = json.loads(Serde.to_json(event))
    source, looked_up = told["inputs"]
    assert looked_up["name"] == str(home.tables_folder.parent / "elsewhere" / "names")
    assert source["name"] == str(home.tables_folder / "things_in")
    assert [field["name"] for field in source["facets"]["schema"]["fields"]] == ["n"]
    assert ("kafka://embedded", "things_out") in [(one["namespace"], one["name"]) for one in told["outputs"]]


def test_a_topic_is_named_by_the_servers_of_its_own_cluster(settings: SettingsFactory) -> None:
    home = settings({"kafka.clusters.eu.bootstrap_servers": "eu-1:9093,eu-2:9093"})

    @stream(
        source=KafkaTopic("orders", value=Json({"n": "int"}), cluster="eu"),
        sink=KafkaSink(KafkaTopic("orders", value=Json({"n": "int"}))),
    )
    def mirrored(orders: Any) -> Any:
        """Orders of one cluster in another."""

    lay_sessions(home, (THEN, "started"), stream=mirrored.name)
    ((event, _),) = Lineage(home, mirrored).since(Position())
    told = json.loads(Serde.to_json(event))
    assert [(one["namespace"], one["name"]) for one in told["inputs"]] == [("kafka://eu-1:9093", "orders")]
    assert ("kafka://embedded", "orders") in [(one["namespace"], one["name"]) for one in told["outputs"]]


@pytest.mark.parametrize(
    ("url", "server", "name"),
    [
        ("postgresql://me@db.example:5433/shop?sslmode=verify-full", "postgres://db.example:5433", "shop.sales.kept"),
        ("postgresql://me@/?host=/run", "postgres://localhost:5432", "me.sales.kept"),
    ],
)
def test_a_table_of_postgresql_has_the_name_that_its_other_readers_know(
    settings: SettingsFactory, url: str, server: str, name: str
) -> None:
    home = settings({"postgres.url": url, "postgres.database_schema": "sales"})
    topic = KafkaTopic("things", value=Json(StructType([StructField("n", LongType())])))

    @stream(source=topic, sink=PostgresTable("kept"))
    def kept(things: Any) -> Any:
        """Rows of a topic, to a table of PostgreSQL."""

    lay_sessions(home, (THEN, "started"), stream=kept.name)
    ((event, _),) = Lineage(home, kept).since(Position())
    outputs = [(each["namespace"], each["name"]) for each in json.loads(Serde.to_json(event))["outputs"]]
    assert (server, name) in outputs


def test_ends_are_told_apart(home: Settings) -> None:
    lay_sessions(home, (THEN, "started"), (THEN + 1, "failed"), (THEN + 2, "started"), (THEN + 3, "started"))
    found = events(home)
    assert kinds(found) == ["START", "FAIL", "START", "ABORT", "START"]
    assert found[0]["run"]["runId"] == found[1]["run"]["runId"] != found[2]["run"]["runId"]
    assert found[2]["run"]["runId"] == found[3]["run"]["runId"] != found[4]["run"]["runId"]
    assert found[1]["run"]["facets"]["errorMessage"]["message"]


def test_another_version_of_the_code_is_an_event_of_its_own(home: Settings) -> None:
    lay_sessions(home, (THEN, "started"))
    lay_ledger(home, [ledger_line(n, THEN + n, code=NEW if n > 2 else OLD) for n in (1, 2, 3, 4)])
    found = events(home)
    assert kinds(found) == ["START", "RUNNING", "RUNNING"]
    assert [one["run"]["facets"]["recourse_batches"]["last"] for one in found[1:]] == [2, 4]


def test_each_look_goes_on_behind_the_last_one_and_a_look_again_has_the_same_run(home: Settings) -> None:
    lay_sessions(home, (THEN, "started"))
    lay_ledger(home, [ledger_line(n, THEN + 10 + n) for n in range(3)])
    taken: dict[str, Position] = {}
    first: list[Any] = []
    assert send(home, [parity], taken, first.append).events == 2
    assert send(home, [parity], taken, first.append).events == 0
    lay_ledger(home, [ledger_line(n, THEN + 10 + n) for n in range(6)])
    again: list[Any] = []
    assert send(home, [parity], taken, again.append).events == 1
    assert again[0].run.facets["recourse_batches"].first == 3
    assert again[0].run.runId == first[0].run.runId


def refusal(status: int) -> HTTPError:
    answer = Response()
    answer.status_code = status
    return HTTPError(response=answer)


def test_an_event_that_was_not_taken_is_sent_again_and_those_before_it_are_not(home: Settings) -> None:
    lay_sessions(home, (THEN, "started"))
    lay_ledger(home, [ledger_line(n, THEN + 10 + n) for n in range(3)])
    taken: dict[str, Position] = {}
    got: list[str] = []

    def failing(event: Any) -> None:
        if got:
            raise refusal(503)
        got.append(event.eventType.value)

    first = send(home, [parity], taken, failing)
    assert (first.events, first.ended) == (1, "the receiver took no more: HTTPError 503")
    send(home, [parity], taken, lambda event: got.append(event.eventType.value))
    assert got == ["START", "RUNNING"]


def test_an_event_that_the_receiver_calls_wrong_holds_nothing_up(home: Settings) -> None:
    lay_sessions(home, (THEN, "started"), (THEN + 5, "stopped"))
    got: list[str] = []

    def refusing(event: Any) -> None:
        if event.eventType.value == "START":
            raise refusal(422)
        got.append(event.eventType.value)

    sent = send(home, [parity], {}, refusing)
    assert (sent.events, sent.refused, sent.ended, got) == (1, 1, "", ["COMPLETE"])


def test_a_look_ends_when_its_time_is_over(home: Settings) -> None:
    lay_sessions(home, (THEN, "started"), (THEN + 5, "stopped"))
    taken: dict[str, Position] = {}
    assert send(home, [parity], taken, lambda _: None, seconds=-1).ended == "the time of a look is over"
    assert send(home, [parity], taken, lambda _: None).events == 2


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """A server that notes what is posted to it: the address, and what came."""
    came: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            came.append((self.path, self.headers.get("Authorization"), json.loads(body)))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", came
        server.shutdown()


def test_the_receiver_gets_them_with_the_key(settings: SettingsFactory, receiver: tuple[str, list[Any]]) -> None:
    url, came = receiver
    home = settings({"lineage.url": url, "lineage.api_key": "hidden"})
    note_session_event(home, Status(STREAM), "started")
    assert send(home, [parity], {}, client(home).emit).events == 1
    ((path, key, event),) = came
    assert path == "/api/v1/lineage" and key == "Bearer hidden" and event["eventType"] == "START"
