"""Connections to the cluster: the settings `kafka` as properties of librdkafka, and the reasons of failures.

A wrong password, or plain text sent to a TLS port, should be reported at once. librdkafka passes such reasons only to
`error_cb`, so `Failures` collects them there and every wait checks it.
"""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from streaming_jobs.durations import format_duration, milliseconds
from streaming_jobs.errors import BrokerUnreachable, ConfigurationError

if TYPE_CHECKING:  # the planner and the workers import this module, and settings take a tenth of a second
    from streaming_jobs.settings import KafkaSettings

_REFUSALS = {KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED}
_DISCONNECTED = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}
_REFUSAL_HINTS = ("security.protocol", "handshake failed")
_AWAITED = "SASL OAUTHBEARER token"
_TOKEN_REFUSED = re.compile(
    r"(invalid|unauthorized)_client|invalid_(request|grant|scope)|unsupported_grant_type|access_denied|HTTP\D*40[0134]"
)
"""RFC 6749, 5.2. Whatever else keeps a token away, such as an address that does not answer, may pass."""
_GRACE = 2.0
LIBRDKAFKA = logging.getLogger("recourse.librdkafka")
"""The logger of Kafka's client, which otherwise writes to stderr, into progress bars."""
LIBRDKAFKA.addHandler(logging.NullHandler())


def client_config(kafka: KafkaSettings, bootstrap: str) -> dict[str, Any]:
    """Properties of any confluent-kafka client that talks to `bootstrap`; holds secrets, never print it."""
    config: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "security.protocol": kafka.security_protocol,
        "socket.timeout.ms": max(1000, milliseconds(kafka.timeout)),
        "socket.connection.setup.timeout.ms": max(1000, milliseconds(kafka.timeout)),
        "reconnect.backoff.ms": 10,
        "reconnect.backoff.max.ms": 500,
        "logger": LIBRDKAFKA,
    }
    if kafka.security_protocol.startswith("SASL_"):
        config |= {"sasl.mechanism": kafka.sasl_mechanism, **_log_in(kafka)}
    if kafka.security_protocol.endswith("SSL"):
        for key, path in (
            ("ssl.ca.location", kafka.ssl_ca_location),
            ("ssl.certificate.location", kafka.ssl_certificate_location),
            ("ssl.key.location", kafka.ssl_key_location),
        ):
            if path is not None:
                config[key] = str(path)
        if password := kafka.ssl_key_password.get_secret_value():
            config["ssl.key.password"] = password
    return config | kafka.extra


def _log_in(kafka: KafkaSettings) -> dict[str, str]:
    """Of a user with a password, or of a client that fetches tokens; librdkafka renews them by itself."""
    if kafka.sasl_mechanism != "OAUTHBEARER":
        return {"sasl.username": kafka.sasl_username, "sasl.password": kafka.sasl_password.get_secret_value()}
    if not kafka.sasl_oauthbearer_token_endpoint_url:
        return {}
    values = {
        "method": "oidc",
        "token.endpoint.url": kafka.sasl_oauthbearer_token_endpoint_url,
        "client.id": kafka.sasl_oauthbearer_client_id,
        "client.secret": kafka.sasl_oauthbearer_client_secret.get_secret_value(),
        "scope": kafka.sasl_oauthbearer_scope,
        "extensions": kafka.sasl_oauthbearer_extensions,
    }
    return {f"sasl.oauthbearer.{name}": value for name, value in values.items() if value}


class Failures:
    """Collects the errors that librdkafka passes to its `error_cb`, and raises early for those that will not pass.

    A refused log-in or handshake counts after `_GRACE` seconds of a call: a broker that stops while a client connects
    looks the same for a moment.
    """

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.disconnected = False
        self._last = ""
        self._refused = ""
        self._begun = time.monotonic()

    def __call__(self, error: KafkaError) -> None:
        """The `error_cb`: it only stores the error; an exception in here would be lost in librdkafka's callback."""
        self._last = error.str()
        if error.code() in _DISCONNECTED:
            self.disconnected = True
        if _AWAITED in self._last and not _TOKEN_REFUSED.search(self._last):
            self.disconnected = True
        elif error.code() in _REFUSALS or any(hint in self._last for hint in _REFUSAL_HINTS):
            self._refused = self._last

    def begin(self) -> None:
        """Start the grace period of a call."""
        self._begun = time.monotonic()

    def succeeded(self) -> None:
        """Forget earlier refusals: the broker has answered."""
        self._last = self._refused = ""
        self.disconnected = False

    def check(self) -> None:
        """Raise ConfigurationError if a handshake or a log-in is refused."""
        if self._refused and time.monotonic() - self._begun > _GRACE:
            raise ConfigurationError(
                f"the broker at {self.bootstrap} refused the connection: {self._refused}",
                "check kafka.security_protocol, the credentials and the certificates (`recourse config show`)",
            )

    def unreachable(self, doing: str, timeout: timedelta) -> BrokerUnreachable:
        """The error for a deadline that passed."""
        reason = f" ({self._last})" if self._last else ""
        return BrokerUnreachable(
            f"{doing}: no answer from {self.bootstrap} within {format_duration(timeout)}{reason}",
            "check that the broker runs and that kafka.bootstrap_servers is right (`recourse doctor`)",
        )
