"""The doctor's lines about the schema registry: what is wrong, and the next step, each seen with a real HTTP server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from streaming_jobs.preflight import registry_checks as checks
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory
from tests.support.registry import RegistryDouble, served

FLOWS = "tests.support.registry_flows"
OLDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}
OTHER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}


@pytest.fixture
def double() -> Iterator[RegistryDouble]:
    with served(RegistryDouble()) as made:
        yield made


def lines(made: Settings) -> list[tuple[str, bool | None, str, str]]:
    return [(each.name, each.ok, each.found, each.fix) for each in checks.registry_checks(made)]


def test_a_project_without_a_registry_has_no_line_and_one_that_needs_it_is_told(settings: SettingsFactory) -> None:
    assert lines(settings()) == []
    ((name, ok, found, fix),) = lines(settings({"flows": [FLOWS]}))
    assert (name, ok) == ("registry", False) and "copied_orders, orders" in found and "registry.url" in fix


def test_every_subject_of_a_topic_that_is_read_or_written_is_looked_up_and_nothing_is_registered(
    settings: SettingsFactory, double: RegistryDouble
) -> None:
    double.register("orders-value", OLDER)
    made = settings({"flows": [FLOWS], "registry.url": double.url})
    found = {name: (ok, text) for name, ok, text, _ in lines(made)}
    ok, text = found["registry"]
    assert ok and text.startswith(f"{double.url} answers in ")
    assert found["subject orders-value"][0] is True and "fits the declared schema" in found["subject orders-value"][1]
    assert found["subject changes"][0] is None, "the events of an envelope: their producer has written nothing yet"
    assert (
        found["subject copies-value"][0] is False and "does not have the declared" in found["subject copies-value"][1]
    )
    assert not any(request.startswith("POST") and request.endswith("versions") for request in double.requests)
    assert not made.schemas.exists(), "nothing is stored"

    registers = settings({"flows": [FLOWS], "registry.url": double.url, "registry.register_schemas": True})
    assert ("subject copies-value", True) in [line[:2] for line in lines(registers)]
    double.register("copies-value", OLDER | {"fields": [{"name": "id", "type": "long"}]})
    assert ("subject copies-value", True) in [line[:2] for line in lines(made)]


def test_a_version_that_the_declared_schema_cannot_read_is_shown_before_a_record_of_it_comes(
    settings: SettingsFactory, double: RegistryDouble
) -> None:
    double.register("orders-value", OTHER)
    found = lines(settings({"flows": [FLOWS], "registry.url": double.url}))
    read = [each for each in found if each[0] == "subject orders-value"]
    assert [stream for _, _, text, _ in read for stream in ("copied_orders", "orders") if f"stream {stream} " in text]
    for _, ok, text, fix in read:
        assert ok is False and "string" in text and "at `$.id`" in text and "recourse schema orders-value" in fix


@pytest.mark.parametrize(
    ("status", "expected", "step"),
    [
        (401, "HTTP 401", "registry.username"),
        (403, "HTTP 403", "registry.username"),
        (500, "500", "check that it runs"),
    ],
)
def test_a_refused_log_in_and_a_registry_that_fails_are_told_apart(
    settings: SettingsFactory, double: RegistryDouble, status: int, expected: str, step: str
) -> None:
    double.fault = status
    made = settings({"registry.url": double.url, "registry.username": "jo", "registry.password": "TOPSECRET"})
    ((name, ok, found, fix),) = lines(made)
    assert (name, ok) == ("registry", False) and expected in found and step in fix
    assert "TOPSECRET" not in found + fix


def test_of_several_addresses_each_has_a_line(settings: SettingsFactory, double: RegistryDouble) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}"
    found = lines(settings({"registry.url": json.dumps([nobody, double.url])}))
    assert [(name, ok) for name, ok, _, _ in found] == [("registry", False), ("registry", True)]
    assert nobody in found[0][2]


def test_what_answers_without_being_a_registry_is_named(
    settings: SettingsFactory, double: RegistryDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: Any = (200, {"hello": "world"})
    monkeypatch.setattr(double, "answer", lambda *_: answer)
    ((_, ok, found, fix),) = lines(settings({"registry.url": double.url}))
    assert ok is False and "not as a registry" in found and "registry.url" in fix
