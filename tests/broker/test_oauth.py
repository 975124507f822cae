"""A stream logs in by tokens that its clients fetch, also in the processes that Spark starts, and renew."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from pyspark.sql import SparkSession

from streaming_jobs.errors import BrokerUnreachable, ConfigurationError
from streaming_jobs.sources.topics import Topics
from tests.broker.test_topic_sink import to_topic
from tests.conftest import SettingsFactory
from tests.support.driver import Bench, produce
from tests.support.secured_broker import secured_broker
from tests.support.things import thing
from tests.support.topic_flows import copied
from tests.support.topic_reader import committed
from tests.support.waiting import wait_for

IN, OUT, SECONDS = "oauth-in", "oauth-out", 4
MODULE = (
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
    'unsecuredLoginStringClaim_sub="broker";'
)
LOG_IN = "Basic " + base64.b64encode(b"recourse:hush").decode()


def token() -> str:
    """A token without a signature, which a broker takes that is not told of any issuer."""

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    now = int(time.time())
    return f"{part({'alg': 'none'})}.{part({'sub': 'recourse', 'iat': now, 'exp': now + SECONDS})}."


@contextmanager
def issuer() -> Iterator[tuple[str, list[str]]]:
    """The address that gives tokens to the client `recourse`, and the scopes that it was asked for."""
    scopes: list[str] = []

    class Requests(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            allowed = self.headers["Authorization"] == LOG_IN and form["grant_type"] == ["client_credentials"]
            scopes.extend(form["scope"] if allowed else [])
            answer = {"access_token": token(), "token_type": "Bearer", "expires_in": SECONDS}
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer if allowed else {"error": "invalid_client"}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/token", scopes
    finally:
        server.shutdown()
        server.server_close()


def test_a_stream_gets_its_tokens_of_a_function_in_each_process_that_has_a_client(
    settings: SettingsFactory,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = tmp_path / "calls"
    with secured_broker(tmp_path / "broker", monkeypatch, "OAUTHBEARER", MODULE) as (administrator, address):
        chosen: dict[str, Any] = {
            "kafka.bootstrap_servers": address,
            "kafka.security_protocol": "SASL_PLAINTEXT",
            "kafka.sasl_mechanism": "OAUTHBEARER",
            "kafka.sasl_oauthbearer_callback": f"{__name__}:token_of_function",
            "kafka.extra": {"sasl.oauthbearer.config": str(calls)},
        }
        home, flow = Bench(settings(chosen), address, spark), to_topic(copied, IN, OUT)
        for name in (IN, OUT):
            home.topics.create(name, 1)
        produce(administrator, IN, (thing(i) for i in range(500)))
        running = home.run(flow)
        assert running.status.state == "stopped", running.status.error
        assert len(committed(administrator, OUT, 1)) == 500
        assert len(set(calls.read_text().split())) > 1, "the planner is a process of its own"
        said = calls.read_text()
        wait_for(lambda: calls.read_text() != said, "a client that renews its token")
        without = settings(chosen | {"kafka.sasl_oauthbearer_callback": f"{__name__}:raising"})
        with pytest.raises(BrokerUnreachable, match="sasl_oauthbearer_callback gave no token"):
            Topics.of(without.kafka, address)
        assert "raising raised ValueError" in caplog.text and "hush" not in caplog.text


def token_of_function(config: str) -> tuple[str, float]:
    """A token; notes the process in the file that the property `sasl.oauthbearer.config` names."""
    with Path(config).open("a") as calls:
        calls.write(f"{os.getpid()}\n")
    return token(), time.time() + SECONDS


def raising(_: str) -> tuple[str, float]:
    raise ValueError("the service of tokens did not like hush")


def test_a_stream_reads_and_writes_topics_by_tokens_that_are_renewed(
    settings: SettingsFactory, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        secured_broker(tmp_path / "broker", monkeypatch, "OAUTHBEARER", MODULE) as (administrator, address),
        issuer() as (url, scopes),
    ):
        chosen: dict[str, Any] = {
            "kafka.bootstrap_servers": address,
            "kafka.security_protocol": "SASL_PLAINTEXT",
            "kafka.sasl_mechanism": "OAUTHBEARER",
            "kafka.sasl_oauthbearer_token_endpoint_url": url,
            "kafka.sasl_oauthbearer_client_id": "recourse",
            "kafka.sasl_oauthbearer_client_secret": "hush",
            "kafka.sasl_oauthbearer_scope": "kafka",
        }
        home, flow = Bench(settings(chosen), address, spark), to_topic(copied, IN, OUT)
        for name in (IN, OUT):
            home.topics.create(name, 1)
        for first in (0, 500):
            produce(administrator, IN, (thing(i) for i in range(first, first + 500)))
            running = home.run(flow)
            assert running.status.state == "stopped", running.status.error
            assert len(committed(administrator, OUT, 1)) == first + 500
            fetched = len(scopes)
            wait_for(lambda fetched=fetched: len(scopes) > fetched, "a client that renews its token")
        assert home.topics.describe(IN) is not None and set(scopes) == {"kafka"}
        refused = Topics.of(settings(chosen | {"kafka.sasl_oauthbearer_client_secret": "wrong"}).kafka, address)
        with pytest.raises(ConfigurationError, match="invalid_client"):
            refused.describe(IN)
