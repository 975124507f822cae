"""One security section, spelt right for the client; secrets stay out of texts."""

from __future__ import annotations

import pickle
import stat
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from pydantic import SecretStr

from streaming_jobs.errors import BrokerUnreachable, ConfigurationError, TransientError
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.settings import ClusterSettings, KafkaSettings, Settings
from streaming_jobs.sources import connection
from streaming_jobs.sources.connection import (
    Failures,
    client_config,
    client_file,
    is_client_gone,
    read_client_file,
    remove_client_file,
)
from streaming_jobs.sources.record_blocks import note_used
from streaming_jobs.sources.topics import Topics
from streaming_jobs.storage.locations import StorePath, files_below
from tests.conftest import SettingsFactory
from tests.support.store_server import Fault, StoreServer

SCRAM = KafkaSettings(security_protocol="SASL_SSL", sasl_username="jo", sasl_password=SecretStr('p"a\\ss'))


def test_plain_text_needs_no_security_keys_and_a_log_in_is_spelt_as_librdkafka_wants_it() -> None:
    assert not [key for key in client_config(KafkaSettings(), "h:1") if "sasl" in key or "ssl" in key]
    config = client_config(SCRAM, "h:1")
    assert (config["security.protocol"], config["sasl.mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")
    assert (config["sasl.username"], config["sasl.password"]) == ("jo", 'p"a\\ss')
    assert client_config(KafkaSettings(extra={"client.rack": "eu-1a"}), "h:1")["client.rack"] == "eu-1a"


OAUTH = KafkaSettings(
    security_protocol="SASL_SSL",
    sasl_mechanism="OAUTHBEARER",
    sasl_oauthbearer_token_endpoint_url="https://login.example.com/token",
    sasl_oauthbearer_client_id="recourse",
    sasl_oauthbearer_client_secret=SecretStr("hush"),
    sasl_oauthbearer_extensions="logicalCluster=lkc-1,identityPoolId=pool-1",
)


def test_a_client_that_fetches_tokens_is_spelt_as_librdkafka_wants_it() -> None:
    config = client_config(OAUTH, "h:1")
    assert {key.removeprefix("sasl."): value for key, value in config.items() if key.startswith("sasl.")} == {
        "mechanism": "OAUTHBEARER",
        "oauthbearer.method": "oidc",
        "oauthbearer.token.endpoint.url": "https://login.example.com/token",
        "oauthbearer.client.id": "recourse",
        "oauthbearer.client.secret": "hush",
        "oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool-1",
    }
    Producer({**config, "error_cb": lambda _: None}).flush(0)  # librdkafka was built with what these need


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ('{"error":"invalid_client"}', True),
        ("Failed to connect to login.example.com port 443: Could not connect to server", False),
        ("Could not resolve host: login.example.com", False),
    ],
)
def test_a_token_that_is_refused_is_an_error_and_one_that_is_late_is_not(
    monkeypatch: pytest.MonkeyPatch, answer: str, refused: bool
) -> None:
    monkeypatch.setattr(connection, "_GRACE", 0.0)
    failures = Failures("h:1")
    text = f"Failed to acquire SASL OAUTHBEARER token: {answer}"
    failures(KafkaError(KafkaError._AUTHENTICATION, text))
    if refused:
        with pytest.raises(ConfigurationError, match="invalid_client"):
            failures.check()
    else:
        failures.check()
        assert answer in failures.unreachable("describe", timedelta(seconds=1)).found


def test_certificates_are_paths(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    kafka = KafkaSettings(
        security_protocol="SSL",
        ssl_ca_location=files["ca"],
        ssl_certificate_location=files["cert"],
        ssl_key_location=files["key"],
        ssl_key_password=SecretStr("hush"),
    )
    config = client_config(kafka, "h:1")
    assert config["ssl.key.password"] == "hush"
    keys = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
    assert [config[key] for key in keys] == [str(files[name]) for name in ("ca", "cert", "key")]


def test_a_wrong_property_or_certificate_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ca"):
        Topics.of(KafkaSettings(security_protocol="SSL", ssl_ca_location=tmp_path / "none.pem"), "h:1")
    with pytest.raises(ConfigurationError, match="client.rak"):
        Topics.of(KafkaSettings(extra={"client.rak": "eu-1a"}), "h:1")


def test_the_clients_properties_go_to_other_processes_in_a_file_of_the_owner_alone(settings: SettingsFactory) -> None:
    made = settings()
    made = made.model_copy(update={"kafka": SCRAM.model_copy(update={"timeout": timedelta(seconds=7)})})
    path = client_file(made, "h:1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    config, timeout = read_client_file(path, "t")
    assert timeout == timedelta(seconds=7)
    assert config == client_config(made.kafka, "h:1")
    path.unlink()
    with pytest.raises(TransientError, match="properties are gone"):
        read_client_file(path, "t")


def test_kerberos_is_spelt_as_librdkafka_wants_it_and_a_client_without_it_says_so(tmp_path: Path) -> None:
    chosen = {"security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI", "sasl_kerberos_principal": "jo@EXAMPLE.COM"}
    config = client_config(KafkaSettings(**chosen, sasl_kerberos_keytab=tmp_path / "jo.keytab"), "h:1")
    assert {key: value for key, value in config.items() if key.startswith("sasl.")} == {
        "sasl.mechanism": "GSSAPI",
        "sasl.kerberos.service.name": "kafka",
        "sasl.kerberos.principal": "jo@EXAMPLE.COM",
        "sasl.kerberos.keytab": str(tmp_path / "jo.keytab"),
    }
    assert client_config(KafkaSettings(**chosen), "h:1")["sasl.kerberos.kinit.cmd"] == "true", "a ticket is there"
    with pytest.raises(ConfigurationError, match="GSSAPI") as absent:
        Topics.of(KafkaSettings(**chosen), "h:1")
    assert "docs/secure.md" in absent.value.next_step


def test_a_function_that_gives_tokens_goes_to_other_processes_by_its_name(settings: SettingsFactory) -> None:
    name = f"{__name__}:a_token"
    chosen = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER", "sasl_oauthbearer_callback": name}
    made = settings().model_copy(update={"kafka": KafkaSettings(**chosen)})
    place = client_file(made, "h:1")
    assert "oauth_cb" not in place.read_text()
    config, _ = read_client_file(place, "t")
    assert config == client_config(made.kafka, "h:1") and config["oauth_cb"]("") == ("token", 5.0)
    wrong = KafkaSettings(**{**chosen, "sasl_oauthbearer_callback": "no_such_module:function"})
    with pytest.raises(ConfigurationError, match="no_such_module"):
        client_config(wrong, "h:1")


def a_token(_: str) -> tuple[str, float]:
    return "token", 5.0


TWO = KafkaSettings(
    bootstrap_servers="h:1",
    timeout=timedelta(seconds=3),
    clusters={
        "eu": ClusterSettings(
            bootstrap_servers="eu:9093",
            security_protocol="SASL_SSL",
            sasl_username="eu",
            sasl_password=SecretStr("of-eu"),
            timeout=timedelta(seconds=8),
        )
    },
)


def test_each_cluster_has_clients_with_its_own_address_log_in_and_deadline(settings: SettingsFactory) -> None:
    ours, eu = client_config(TWO, "h:1", "orders"), client_config(TWO, "h:1", "orders@eu")
    assert ours["bootstrap.servers"] == "h:1" and not [key for key in ours if key.startswith("sasl")]
    assert (eu["bootstrap.servers"], eu["sasl.password"]) == ("eu:9093", "of-eu")
    made = settings().model_copy(update={"kafka": TWO})
    place = client_file(made, "h:1")
    assert read_client_file(place, "orders") == (ours, timedelta(seconds=3))
    assert read_client_file(place, "orders@eu") == (eu, timedelta(seconds=8))
    for unknown in (lambda: client_config(TWO, "h:1", "t@us"), lambda: read_client_file(place, "t@us")):
        with pytest.raises(ConfigurationError, match="topic t@us is of the cluster 'us'"):
            unknown()


def test_topics_of_a_cluster_are_those_of_one_client_and_failures_name_its_settings() -> None:
    topics = Topics.of(TWO, "h:1", timedelta(seconds=0.3))
    eu = topics.in_cluster("eu")
    assert (topics.bootstrap, eu.bootstrap) == ("h:1", "eu:9093")
    assert topics.in_cluster("eu") is eu and eu.in_cluster("eu") is eu and topics.in_cluster("") is topics
    with pytest.raises(ConfigurationError, match="cluster 'us'"):
        topics.describe("t@us")
    assert "kafka.clusters.eu.bootstrap_servers" in eu._failures.unreachable("x", timedelta(1)).next_step
    assert "that kafka.bootstrap_servers" in topics._failures.unreachable("x", timedelta(1)).next_step


def test_executors_of_other_machines_find_the_clients_properties_in_the_folder_of_state(
    settings: SettingsFactory, tmp_path: Path
) -> None:
    made = settings({"spark.master": "spark://there:7077", "state_dir": tmp_path / "shared"})
    path = client_file(made, "h:1")
    folders = tmp_path / "shared" / "_clients"
    assert folders in path.parents and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    killed = path.parent.with_name("kafka-of-a-driver-that-was-killed")
    killed.mkdir()
    elsewhere = folders / "another-home" / "kafka-of-its-driver"
    elsewhere.mkdir(parents=True)
    again = client_file(made, "h:1")
    assert again.parent == path.parent and path.exists(), "this process lives"
    assert not killed.exists() and elsewhere.exists(), "only drivers of this home are known to have ended"


@pytest.fixture
def on_a_store(settings: SettingsFactory, tables_on_a_store: dict[str, Any]) -> Settings:
    """Settings of a session with executors on other machines and its state on a store."""
    state = f"{tables_on_a_store['tables_dir']}-state"
    made = settings({**tables_on_a_store, "state_dir": state, "spark.master": "spark://there:7077"})
    return made.model_copy(update={"kafka": SCRAM})


def test_with_state_on_a_store_executors_find_the_clients_properties_there_and_nothing_names_a_secret(
    on_a_store: Settings, object_store: StoreServer
) -> None:
    place = client_file(on_a_store, "h:1")
    assert isinstance(place, StorePath) and place.url.startswith(f"{on_a_store.state}/_clients/")
    packed = pickle.dumps(place)
    assert b'p"a' not in packed and 'p"a' not in repr(place)
    object_store.clear()
    for _ in range(3):
        config, _ = read_client_file(pickle.loads(packed), "t")
        assert config == client_config(on_a_store.kafka, "h:1")
    assert len(object_store.requests()) == 1, "each process reads it once"
    note_used(place.parent / f"{place.stem}-kafka-s-value.json", ["_bad"])
    remove_client_file(place)
    assert list(files_below(on_a_store.state)) == []
    connection._read_once.cache_clear()  # as in another process
    with pytest.raises(TransientError, match="properties are gone"):
        read_client_file(place, "t")


def test_the_next_session_of_a_home_removes_the_object_of_a_killed_one(on_a_store: Settings) -> None:
    place = client_file(on_a_store, "h:1")
    assert isinstance(place, StorePath)
    killed = place.parent.parent / "kafka-of-a-driver-that-was-killed" / "client-1.json"
    elsewhere = place.parent.parent.parent / "another-home" / "kafka-of-its-driver" / "client-1.json"
    for each in (killed, elsewhere):
        each.write_bytes(b"{}")
    client_file(on_a_store, "h:1")
    assert place.is_file() and elsewhere.is_file() and not killed.is_file()


def test_a_store_that_does_not_answer_keeps_neither_a_session_from_its_end_nor_a_task_from_reading(
    on_a_store: Settings, object_store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = client_file(on_a_store, "h:1")
    now = time.monotonic()
    monkeypatch.setattr(connection.time, "monotonic", lambda: now)
    object_store.clear()
    assert not is_client_gone(place) and object_store.requests() == []
    now += 61
    object_store.inject(Fault("denied", "HEAD"))
    object_store.inject(Fault("denied", "GET"))  # of the list
    assert not is_client_gone(place)
    remove_client_file(place)
    assert place.is_file()
    now += 61
    remove_client_file(place)
    assert is_client_gone(place)


def test_nobody_at_the_port_is_told_within_the_deadline() -> None:
    topics = Topics.of(KafkaSettings(timeout=timedelta(milliseconds=300)), "127.0.0.1:1")
    with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1 within 300 ms"):
        topics.describe("flights")
    with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1 within 300 ms"):
        topics.names()


def test_a_refused_log_in_is_an_error_of_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_GRACE", 0.0)
    failures = Failures("h:1")
    failures.begin()
    failures(KafkaError(KafkaError._AUTHENTICATION, "SASL authentication error"))
    with pytest.raises(ConfigurationError, match="refused"):
        failures.check()


def test_a_broker_that_answers_again_clears_what_was_refused_and_a_handshake_cut_off_is_not_yet_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = Failures("h:1")
    failures.begin()
    failures(KafkaError(KafkaError._TRANSPORT, "might be caused by incorrect security.protocol configuration"))
    failures.check()
    assert "security.protocol" in str(failures.unreachable("describe", timedelta(seconds=1)))
    monkeypatch.setattr(connection, "_GRACE", 0.0)
    failures = Failures("h:1")
    failures(KafkaError(KafkaError._TRANSPORT, "SSL handshake failed: Disconnected"))
    failures.succeeded()
    failures.check()


def test_counts_are_between_first_and_next_offset() -> None:
    offsets = OffsetBounds(earliest={0: 5, 1: 0}, latest={0: 9, 1: 3})
    assert offsets.counts == {0: 4, 1: 3}
    assert offsets.total == 7
