"""The sections of the settings about Kafka: the clusters, and the embedded broker."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from streaming_jobs.declare.names import cluster_of, is_name, unknown_cluster
from streaming_jobs.settings_sections import Duration, Section

_GUARANTEED = re.compile(
    r"acks|request\.required\.acks|auto\.(commit|offset)\..*|offset\.store\..*|check\.crcs|group\..*|isolation\.level"
    r"|enable\.(auto\.commit|auto\.offset\.store|gapless\.guarantee|idempotence|partition\.eof)|transaction.*"
    r"|max\.in\.flight.*|message\.(send\.max\.retries|timeout\.ms)|delivery\..*|retries|partitioner|consume\..*"
    r"|(msg_)?partitioner.*|.*_cb|plugin\.library\.paths|test\..*"
)
"""Exactly-once reads, exactly-once writes and partitioning by key depend on Recourse's values of these properties."""
_HAVE_SETTINGS = {
    "bootstrap.servers": "kafka.bootstrap_servers",
    "metadata.broker.list": "kafka.bootstrap_servers",
    "security.protocol": "kafka.security_protocol",
    "socket.timeout.ms": "kafka.timeout",
    "compression.type": "topic_sink.compression",
    "compression.codec": "topic_sink.compression",
    "linger.ms": "topic_sink.linger",
    "queue.buffering.max.ms": "topic_sink.linger",
    "batch.size": "topic_sink.batch_kb",
    "message.max.bytes": "topic_sink.max_record_kb",
}


def _free_for_the_user(extra: dict[str, str]) -> dict[str, str]:
    """Properties that Recourse does not need for itself; raises ValueError for others."""
    for name in extra:
        as_setting = f"kafka.{name.replace('mechanisms', 'mechanism').replace('.', '_')}"
        own = as_setting.removeprefix("kafka.") in ClusterSettings.model_fields
        if (setting := as_setting if own else _HAVE_SETTINGS.get(name)) is not None:
            raise ValueError(f"'{name}' has a setting of its own: {setting}")
        if _GUARANTEED.fullmatch(name):
            raise ValueError(f"'{name}' is for Recourse to choose: its exactly-once delivery rests on it")
    return extra


def _checked_function(name: str) -> str:
    if name and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", name) is None:
        raise ValueError(f"'{name}' is not a function; write package.module:function")
    return name


class ClusterSettings(Section):
    """The connection of Kafka's clients to one cluster."""

    bootstrap_servers: str = Field("", description="host:port,...; empty: the embedded broker")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="how connections to the cluster are protected, as Kafka names it"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI"] = Field(
        "SCRAM-SHA-512", description="how a user logs in, with the two SASL protocols; GSSAPI is Kerberos"
    )
    sasl_username: str = Field("", description="the user, with the two SASL protocols; not for OAUTHBEARER and GSSAPI")
    sasl_password: SecretStr = Field(SecretStr(""), description="the user's password; never shown")
    sasl_oauthbearer_token_endpoint_url: str = Field(
        "", description="address that issues tokens to clients (OAuth 2.0 client credentials), for OAUTHBEARER"
    )
    sasl_oauthbearer_client_id: str = Field("", description="the client's id at that address")
    sasl_oauthbearer_client_secret: SecretStr = Field(SecretStr(""), description="the client's secret; never shown")
    sasl_oauthbearer_scope: str = Field("", description="scope of the token, if the address asks for one")
    sasl_oauthbearer_extensions: str = Field(
        "", description="name=value,... sent with the token: logicalCluster and identityPoolId of Confluent Cloud"
    )
    sasl_oauthbearer_callback: Annotated[str, AfterValidator(_checked_function)] = Field(
        "",
        description="package.module:function that returns a token and the time of its end (s since 1970), in place of "
        "the address",
    )
    sasl_kerberos_service_name: str = Field("kafka", description="name of the brokers' principal, for GSSAPI")
    sasl_kerberos_principal: str = Field("", description="the client's principal, for GSSAPI")
    sasl_kerberos_keytab: Path | None = Field(
        None, description="keytab of that principal, for GSSAPI; empty: the ticket cache of the process"
    )
    ssl_ca_location: Path | None = Field(None, description="PEM file of the certificate authority")
    ssl_certificate_location: Path | None = Field(None, description="PEM file of the client certificate")
    ssl_key_location: Path | None = Field(None, description="PEM file of the client key")
    ssl_key_password: SecretStr = Field(
        SecretStr(""), description="password of the client key, if it has one; never shown"
    )
    extra: Annotated[dict[str, str], AfterValidator(_free_for_the_user)] = Field(
        default_factory=dict,
        repr=False,
        description="further properties of librdkafka, for every client (docs/secure.md)",
    )
    timeout: Duration = Field(timedelta(seconds=15), description="time limit of one request to the cluster")

    @model_validator(mode="after")
    def _can_log_in(self) -> Self:
        if not self.security_protocol.startswith("SASL"):
            return self
        if self.sasl_mechanism == "GSSAPI":
            if not self.sasl_kerberos_principal:
                raise ValueError("sasl_kerberos_principal is empty, and GSSAPI needs it")
        elif self.sasl_mechanism != "OAUTHBEARER":
            if not self.sasl_username:
                raise ValueError(f"sasl_username is empty, and {self.security_protocol} needs a user")
        elif self.sasl_oauthbearer_callback:
            if self.sasl_oauthbearer_token_endpoint_url:
                raise ValueError("sasl_oauthbearer_callback and _token_endpoint_url are both set; one gives tokens")
        elif not any(name.startswith("sasl.oauthbearer.") for name in self.extra):  # another way to a token
            for name in ("token_endpoint_url", "client_id", "client_secret"):
                value = getattr(self, key := f"sasl_oauthbearer_{name}")
                if not (value.get_secret_value() if isinstance(value, SecretStr) else value):
                    raise ValueError(f"{key} is empty, and OAUTHBEARER needs it")
        return self


def _checked_clusters(clusters: dict[str, ClusterSettings]) -> dict[str, ClusterSettings]:
    for name, cluster in clusters.items():
        if not is_name(name):
            raise ValueError(
                f"'{name}' is not a cluster's name: use lower-case letters, digits and '_', a letter first"
            )
        if not cluster.bootstrap_servers:
            raise ValueError(f"{name}.bootstrap_servers is empty; the embedded broker is for the default cluster only")
    return clusters


class KafkaSettings(ClusterSettings):
    """The default cluster. Empty servers mean the embedded broker. Topics of other clusters name theirs."""

    group_prefix: str = Field(
        "",
        description="commit each stream's offsets to the consumer group of this prefix and its name, for lag exporters "
        "and Kafka's tools, in the cluster of each topic; no other group may begin with it; empty: none",
    )
    clusters: Annotated[dict[str, ClusterSettings], AfterValidator(_checked_clusters)] = Field(default_factory=dict)

    def of(self, topic: str) -> ClusterSettings:
        """The settings of a topic's cluster; raises ConfigurationError for a cluster that has none."""
        if not (name := cluster_of(topic)):
            return self
        if name not in self.clusters:
            raise unknown_cluster(topic, self.clusters)
        return self.clusters[name]


class BrokerSettings(Section):
    """The embedded broker."""

    port: int = Field(0, ge=0, le=65535, description="the broker's port; 0: a free port, kept between runs")
    heap_mb: int = Field(64, ge=48, description="heap of the broker's JVM, MB")
