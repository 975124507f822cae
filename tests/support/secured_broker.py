"""A broker with a second listener, at which clients log in, and with ACLs; its administrator needs no log-in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from streaming_jobs.platform import broker as broker_module
from streaming_jobs.platform import ports
from streaming_jobs.platform.broker import Broker, server_properties
from streaming_jobs.settings import Settings


@contextmanager
def secured_broker(
    home: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str, module: str
) -> Iterator[tuple[str, str]]:
    """Its addresses: for the administrator, and for who logs in by this mechanism and JAAS module."""
    port = ports.free_port()

    def properties(data: Path, plain: int, controller: int) -> Mapping[str, str]:
        usual = server_properties(data, plain, controller)
        listener = f",SECURE://{ports.HOST}:{port}"
        return usual | {
            "listeners": usual["listeners"] + listener,
            "advertised.listeners": usual["advertised.listeners"] + listener,
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SECURE:SASL_PLAINTEXT",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:recourse",
            "sasl.enabled.mechanisms": mechanism,
            f"listener.name.secure.{mechanism.lower()}.sasl.jaas.config": module,
        }

    monkeypatch.setattr(broker_module, "server_properties", properties)
    with Broker(Settings.load({"home": home})) as broker:
        yield broker.start(), f"{ports.HOST}:{port}"
