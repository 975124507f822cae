"""Schemas are fetched once and kept beside the state; a registry that does not answer, or does not know one."""

from __future__ import annotations

import errno
import json
import os
import pickle
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.declare.format import Refusal, RegisteredSchema
from streaming_jobs.errors import ConfigurationError, SchemaUnavailable, SetupError
from streaming_jobs.registry.client import Registry, RegistryAddress
from streaming_jobs.registry.schemas import StoredSchemas
from streaming_jobs.settings import RegistrySettings
from streaming_jobs.sources.connection import SessionSchemas, client_file, read_client_file
from tests.conftest import SettingsFactory
from tests.support.registry import RegistryDouble, basic, served

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
TEXT = json.dumps(ORDER)


@pytest.fixture
def registry() -> Iterator[RegistryDouble]:
    with served(RegistryDouble()) as double:
        yield double


def schemas(registry: RegistryDouble, folder: Path, **options: Any) -> StoredSchemas:
    address = options.pop("address", RegistryAddress((registry.url,), 5.0))
    return StoredSchemas(folder / "_schemas", address, options.pop("unknown_for", timedelta(minutes=5)), **options)


def prefix(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big")


def test_a_schema_is_fetched_once_and_then_needs_no_registry(registry: RegistryDouble, tmp_path: Path) -> None:
    number = registry.register("orders-value", ORDER)
    by_guid = b"\1" + registry.guid(number).bytes
    wanted = {prefix(number): RegisteredSchema("AVRO", TEXT), by_guid: RegisteredSchema("AVRO", TEXT)}
    assert schemas(registry, tmp_path).of([prefix(number), by_guid]) == wanted
    assert registry.requests == [f"GET /schemas/ids/{number}", f"GET /schemas/guids/{registry.guid(number)}"]
    registry.fault = 503
    assert schemas(registry, tmp_path).of([prefix(number), by_guid]) == wanted
    assert len(registry.requests) == 2
    assert (tmp_path / "_schemas" / f"id-{number}.json").stat().st_mode & 0o077 == 0


def test_the_schemas_that_a_schema_uses_are_stored_with_it(registry: RegistryDouble, tmp_path: Path) -> None:
    registry.register("money", {"type": "record", "name": "Money", "fields": [{"name": "cents", "type": "long"}]})
    used = [{"name": "Money", "subject": "money", "version": 1}]
    number = registry.register("orders-value", ORDER, references=used)
    (found,) = schemas(registry, tmp_path).of([prefix(number)]).values()
    assert isinstance(found, RegisteredSchema) and list(found.references) == ["Money"]
    registry.fault = 503
    assert schemas(registry, tmp_path).of([prefix(number)]) == {prefix(number): found}


@pytest.mark.parametrize("status", [500, 503, 429, 302, 404])
def test_a_registry_that_does_not_answer_is_asked_again_later(
    registry: RegistryDouble, tmp_path: Path, status: int
) -> None:
    """Also 404, if it is not the registry that says so: a wrong address knows no schema."""
    registry.register("orders-value", ORDER)
    registry.fault = status
    with pytest.raises(SchemaUnavailable, match=r"does not answer /schemas/ids/1"):
        schemas(registry, tmp_path).of([prefix(1)])
    assert not (tmp_path / "_schemas").exists()
    assert registry.requests == ["GET /schemas/ids/1"], "a redirect is not followed: it could carry the log-in away"
    registry.fault = 0
    assert schemas(registry, tmp_path).of([prefix(1)])


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, SetupError), (errno.EIO, SchemaUnavailable)])
def test_a_disk_that_fails_is_no_fault_of_the_format(
    registry: RegistryDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    registry.register("orders-value", ORDER)
    with monkeypatch.context() as patch:
        patch.setattr("streaming_jobs.registry.schemas.write_json", failing)
        with pytest.raises(kind, match=os.strerror(number)):
            schemas(registry, tmp_path).of([prefix(1)])
        patch.setattr(Path, "read_text", failing)
        with pytest.raises(kind, match=os.strerror(number)):
            schemas(registry, tmp_path).of([prefix(1)])
    assert schemas(registry, tmp_path).of([prefix(1)])


def test_a_registry_that_is_not_there_is_no_verdict_on_records(tmp_path: Path) -> None:
    address = RegistryAddress(("http://127.0.0.1:9", "http://127.0.0.1:9"), 1.0)
    with pytest.raises(SchemaUnavailable, match=r"127.0.0.1:9.*does not answer"):
        StoredSchemas(tmp_path, address).of([prefix(1)])
    with pytest.raises(ConfigurationError, match="registry.url is empty"):
        StoredSchemas(tmp_path, RegistryAddress((), 1.0)).of([prefix(1)])


def test_the_second_address_answers_for_the_first(registry: RegistryDouble, tmp_path: Path) -> None:
    registry.register("orders-value", ORDER)
    address = RegistryAddress(("http://127.0.0.1:9", registry.url), 2.0)
    assert schemas(registry, tmp_path, address=address).of([prefix(1)])


def test_an_unknown_id_is_awaited_and_then_refuses_its_records_for_good(
    registry: RegistryDouble, tmp_path: Path
) -> None:
    waiting = schemas(registry, tmp_path, unknown_for=timedelta(seconds=0.3))
    with pytest.raises(SchemaUnavailable, match=r"does not know id-7, id-9, which"):
        waiting.of([prefix(7), prefix(9)])
    time.sleep(0.31)  # the time that the registry is given
    refused = waiting.of([prefix(7), prefix(9)])
    assert {each.reason for each in refused.values() if isinstance(each, Refusal)} == {"unknown_schema"}
    while registry.register("orders-value", {**ORDER, "doc": str(len(registry.schemas))}) < 9:
        pass
    again = schemas(registry, tmp_path)
    assert again.of([prefix(7), prefix(9)]) == refused, "a range has the same dead letters whenever it is read"
    assert isinstance(again.of([prefix(8)])[prefix(8)], RegisteredSchema)


def test_a_schema_that_arrives_in_time_is_used(registry: RegistryDouble, tmp_path: Path) -> None:
    with pytest.raises(SchemaUnavailable):
        schemas(registry, tmp_path).of([prefix(1)])
    registry.register("orders-value", ORDER)
    assert isinstance(schemas(registry, tmp_path).of([prefix(1)])[prefix(1)], RegisteredSchema)


def test_a_written_schema_is_looked_up_once(registry: RegistryDouble, tmp_path: Path) -> None:
    declared = RegisteredSchema("AVRO", TEXT)
    with pytest.raises(ConfigurationError, match=r"no schema of subject shop/orders-value"):
        schemas(registry, tmp_path).prefix("shop/orders-value", declared)
    registry.register("shop/orders-value", ORDER)
    assert schemas(registry, tmp_path).prefix("shop/orders-value", declared) == prefix(1)
    assert registry.requests[-1] == "POST /subjects/shop%2Forders-value"
    registry.fault = 503
    assert schemas(registry, tmp_path).prefix("shop/orders-value", declared) == prefix(1)
    assert schemas(registry, tmp_path).of([prefix(1)]) == {prefix(1): declared}, "its own reader needs no registry"


def test_a_schema_is_registered_by_choice_alone(registry: RegistryDouble, tmp_path: Path) -> None:
    declared = RegisteredSchema("AVRO", TEXT)
    assert schemas(registry, tmp_path, registers=True).prefix("orders-value", declared) == prefix(1)
    assert registry.subjects == {"orders-value": [1]}
    registry.refuses = "it removes a field without a default"
    with pytest.raises(ConfigurationError, match="removes a field without a default"):
        schemas(registry, tmp_path, registers=True).prefix("others-value", declared)


def test_the_newest_version_of_a_subject(registry: RegistryDouble) -> None:
    asked = Registry(RegistryAddress((registry.url,), 5.0))
    assert asked.latest("orders-value") is None
    registry.register("orders-value", {**ORDER, "doc": "first"})
    registry.register("orders-value", ORDER)
    assert asked.latest("orders-value") == RegisteredSchema("AVRO", TEXT)


def test_the_log_in_is_in_no_text_and_in_nothing_that_is_pickled(
    registry: RegistryDouble, settings: SettingsFactory
) -> None:
    registry.register("orders-value", ORDER)
    flags = {"registry.url": registry.url, "registry.username": "reader", "registry.password": "s3cret"}
    made = settings(flags)
    place = client_file(made, "h:1")
    assert "s3cret" not in repr(StoredSchemas.of_settings(made))
    packed = pickle.dumps(SessionSchemas(place))
    assert b"s3cret" not in packed
    assert pickle.loads(packed).of([prefix(1)])[prefix(1)] == RegisteredSchema("AVRO", TEXT)
    assert registry.log_ins == {basic("reader", "s3cret")}
    assert not any("registry" in key for key in read_client_file(place, "t")[0]), "librdkafka gets none of it"
    registry.fault = 401
    with pytest.raises(ConfigurationError, match="HTTP 401") as refused:
        SessionSchemas(place).of([prefix(2)])
    assert "s3cret" not in str(refused.value)


def test_a_token_logs_in_too(registry: RegistryDouble, tmp_path: Path) -> None:
    registry.register("orders-value", ORDER)
    schemas(registry, tmp_path, address=RegistryAddress((registry.url,), 5.0, token="t0ken")).of([prefix(1)])
    assert registry.log_ins == {"Bearer t0ken"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"registry.url": "http://user:s3cret@host"}, "no http or https URL without a user"),
        ({"registry.url": "host:8081"}, "no http or https URL"),
        ({"registry.username": "u", "registry.token": "t"}, "are both set"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: SettingsFactory, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as refused:
        settings(flags)
    assert "s3cret" not in str(refused.value)


def test_with_state_on_a_store_executors_find_the_schemas_there(
    registry: RegistryDouble, settings: SettingsFactory, tables_on_a_store: dict[str, Any]
) -> None:
    registry.register("orders-value", ORDER)
    made = settings({**tables_on_a_store, "state_dir": f"{tables_on_a_store['tables_dir']}-state"})
    made = made.model_copy(update={"registry": RegistrySettings(url=[registry.url])})
    there = json.loads(json.dumps(StoredSchemas.of_settings(made).values()))
    wanted = {prefix(1): RegisteredSchema("AVRO", TEXT)}
    assert StoredSchemas.from_values(there).of([prefix(1)]) == wanted
    registry.fault = 503
    assert StoredSchemas.from_values(there).of([prefix(1)]) == wanted
    assert (made.state / "_schemas" / "id-1.json").exists()


def test_a_replay_has_the_schemas_of_its_stream(settings: SettingsFactory, tmp_path: Path) -> None:
    made = settings({})
    replay = made.for_replay("orders", tmp_path / "replay", tmp_path / "tables")
    assert replay.state == tmp_path / "replay" and replay.schemas == made.schemas == made.state / "_schemas"
