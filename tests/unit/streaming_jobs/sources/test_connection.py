"""One security section, spelt right for both clients; secrets stay out of texts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from pydantic import SecretStr

from streaming_jobs.errors import BrokerUnreachable, ConfigurationError
from streaming_jobs.positions import OffsetBounds
from streaming_jobs.settings import KafkaSettings
from streaming_jobs.sources import connection
from streaming_jobs.sources.connection import Failures, client_config, spark_options
from streaming_jobs.sources.topics import Topics

SCRAM = KafkaSettings(security_protocol="SASL_SSL", sasl_username="jo", sasl_password=SecretStr('p"a\\ss'))


def test_plain_text_needs_no_security_keys() -> None:
    keys = client_config(KafkaSettings(), "h:1").keys() | spark_options(KafkaSettings(), "h:1").keys()
    assert not [key for key in keys if "sasl" in key or "ssl" in key]


def test_scram_is_spelt_for_both_clients() -> None:
    config, options = client_config(SCRAM, "h:1"), spark_options(SCRAM, "h:1")
    assert config["security.protocol"] == options["kafka.security.protocol"] == "SASL_SSL"
    assert config["sasl.mechanism"] == options["kafka.sasl.mechanism"] == "SCRAM-SHA-512"
    assert (config["sasl.username"], config["sasl.password"]) == ("jo", 'p"a\\ss')
    assert options["kafka.sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="jo" password="p\\"a\\\\ss";'
    )


def test_plain_log_in_uses_its_own_module() -> None:
    kafka = KafkaSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", sasl_username="jo")
    assert ".plain.PlainLoginModule required" in spark_options(kafka, "h:1")["kafka.sasl.jaas.config"]


def test_certificates_are_paths_for_one_and_text_for_the_other(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    for name, path in files.items():
        path.write_text(f"-----{name}-----")
    kafka = KafkaSettings(
        security_protocol="SSL",
        ssl_ca_location=files["ca"],
        ssl_certificate_location=files["cert"],
        ssl_key_location=files["key"],
    )
    config, options = client_config(kafka, "h:1"), spark_options(kafka, "h:1")
    assert config["ssl.ca.location"] == str(files["ca"])
    assert config["ssl.key.location"] == str(files["key"])
    assert options["kafka.ssl.truststore.certificates"] == "-----ca-----"
    assert options["kafka.ssl.keystore.certificate.chain"] == "-----cert-----"
    assert options["kafka.ssl.keystore.key"] == "-----key-----"
    assert options["kafka.ssl.keystore.type"] == options["kafka.ssl.truststore.type"] == "PEM"


def test_a_certificate_that_is_not_there_names_the_setting(tmp_path: Path) -> None:
    kafka = KafkaSettings(security_protocol="SSL", ssl_ca_location=tmp_path / "none.pem")
    with pytest.raises(ConfigurationError, match=r"kafka\.ssl_ca_location"):
        spark_options(kafka, "h:1")
    with pytest.raises(ConfigurationError, match="ca"):
        Topics.of(kafka, "h:1")


def test_spark_does_not_wait_minutes_for_a_port_that_does_not_answer() -> None:
    options = spark_options(KafkaSettings(timeout=timedelta(seconds=7)), "h:1")
    assert options["kafka.request.timeout.ms"] == options["kafka.default.api.timeout.ms"] == "7000"


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


def test_a_broker_that_answers_again_clears_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_GRACE", 0.0)
    failures = Failures("h:1")
    failures(KafkaError(KafkaError._TRANSPORT, "SSL handshake failed: Disconnected"))
    failures.succeeded()
    failures.check()


def test_a_handshake_cut_off_by_a_broker_going_down_is_not_yet_a_refusal() -> None:
    failures = Failures("h:1")
    failures.begin()
    failures(KafkaError(KafkaError._TRANSPORT, "might be caused by incorrect security.protocol configuration"))
    failures.check()
    assert "security.protocol" in str(failures.unreachable("describe", timedelta(seconds=1)))


def test_counts_are_between_first_and_next_offset() -> None:
    offsets = OffsetBounds(earliest={0: 5, 1: 0}, latest={0: 9, 1: 3})
    assert offsets.counts == {0: 4, 1: 3}
    assert offsets.total == 7
