"""Connections to the clusters: the settings `kafka` as properties of librdkafka, and the reasons of failures.

A wrong password, or plain text sent to a TLS port, should be reported at once. librdkafka passes such reasons only to
`error_cb`, so `Failures` collects them there and every wait checks it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from streaming_jobs.declare.format import Refusal, RegisteredSchema
from streaming_jobs.declare.names import cluster_of, unknown_cluster
from streaming_jobs.errors import BrokerUnreachable, ConfigurationError, RecourseError, TransientError
from streaming_jobs.registry.schemas import StoredSchemas
from streaming_jobs.storage.files import scratch
from streaming_jobs.storage.locations import Location, StorePath, made_folder, remove_tree
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration, milliseconds

if TYPE_CHECKING:
    from streaming_jobs.ledger.positions import OffsetBounds
    from streaming_jobs.settings import ClusterSettings, KafkaSettings, Settings
    from streaming_jobs.sources.base import TopicInfo, TopicReader
    from streaming_jobs.sources.kafka import TopicClients


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


def client_config(kafka: KafkaSettings, bootstrap: str, topic: str = "") -> dict[str, Any]:
    """Properties of any confluent-kafka client of the topic's cluster; holds secrets, never print it.

    `bootstrap` is the address of the default cluster. Raises ConfigurationError for a cluster without settings.
    """
    cluster = kafka.of(topic)
    return _properties(cluster, bootstrap if cluster is kafka else cluster.bootstrap_servers)


def _properties(kafka: ClusterSettings, bootstrap: str) -> dict[str, Any]:
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


def _log_in(kafka: ClusterSettings) -> dict[str, Any]:
    """For a user with a password, a ticket of Kerberos, or tokens; librdkafka renews tickets and tokens."""
    if kafka.sasl_mechanism == "GSSAPI":
        keytab = kafka.sasl_kerberos_keytab
        # Without a keytab, whoever started the process renews its ticket, and librdkafka has nothing to run for it.
        ticket = {"kinit.cmd": "true"} if keytab is None else {"keytab": str(keytab)}
        named = {"service.name": kafka.sasl_kerberos_service_name, "principal": kafka.sasl_kerberos_principal}
        return {f"sasl.kerberos.{name}": value for name, value in {**named, **ticket}.items()}
    if kafka.sasl_mechanism != "OAUTHBEARER":
        return {"sasl.username": kafka.sasl_username, "sasl.password": kafka.sasl_password.get_secret_value()}
    if kafka.sasl_oauthbearer_callback:
        return {"oauth_cb": token_callback(kafka.sasl_oauthbearer_callback)}
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


@cache
def token_callback(name: str) -> Callable[[str], tuple[str, float]]:
    """The function that gives Kafka's client its tokens, by its name; raises ConfigurationError without one."""
    module, _, function = name.partition(":")
    try:
        fetch = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"kafka.sasl_oauthbearer_callback: {name} cannot be imported: {error}",
            "name a function as package.module:function, in a module that this process finds",
        ) from error

    def token(config: str) -> tuple[str, float]:
        try:
            given: tuple[str, float] = fetch(config)
        except Exception as error:  # librdkafka only hears that there is no token
            LIBRDKAFKA.error("%s raised %s", name, type(error).__name__)  # its text may have secrets
            raise
        return given

    return token


class Failures:
    """Collects the errors that librdkafka passes to its `error_cb`, and raises early for permanent errors.

    A refused log-in or handshake counts after `_GRACE` seconds of a call: a broker that stops while a client connects
    looks the same for a moment.
    """

    def __init__(self, bootstrap: str, topic: str = "") -> None:
        """`topic` is one of the cluster, whose settings the errors name."""
        self.bootstrap = bootstrap
        self.settings = f"kafka.clusters.{cluster}" if (cluster := cluster_of(topic)) else "kafka"
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
                f"check {self.settings}.security_protocol, the credentials and the certificates "
                f"(`{commands.settings()}`)",
            )

    def unreachable(self, doing: str, timeout: timedelta) -> BrokerUnreachable:
        reason = f" ({self._last})" if self._last else ""
        return BrokerUnreachable(
            f"{doing}: no answer from {self.bootstrap} within {format_duration(timeout)}{reason}",
            f"check that the broker runs and that {self.settings}.bootstrap_servers is right (`{commands.doctor()}`)",
        )


# The properties of Kafka's client in a file, for the Python processes that Spark starts.
#
# Credentials are neither in options nor in plans nor in what is pickled: those name the file only. It can be read
# by its owner alone, and lies in a scratch folder of the session (`streaming_jobs/storage/files.py`); if executors
# are on other machines, where state is, which they share with the driver. On a store the file is an object, and
# whoever may read below `state_dir` can read it. The next session of a home removes the file of a killed driver.

_TIMEOUT = "recourse.timeout.seconds"
_REGISTRY = "recourse.registry"
_CLUSTERS = "recourse.clusters"
_CALLBACK = "recourse.oauth_callback"
_SHARED = "_clients"
_LOOK_EVERY = 60.0


def client_file(settings: Settings, bootstrap: str) -> Location:
    """A new file for the cluster at `bootstrap` and the others, for this process and its session's executors."""
    kafka = settings.kafka
    values = _written(kafka, bootstrap)
    values[_CLUSTERS] = {name: _written(each, each.bootstrap_servers) for name, each in kafka.clusters.items()}
    values[_REGISTRY] = StoredSchemas.of_settings(settings).values()
    folder: Location = scratch(settings.home, "kafka").folder
    if settings.spark.has_executors:
        folder = _shared(settings, folder.name)
    if isinstance(folder, StorePath):
        place = folder / f"client-{uuid.uuid4().hex}.json"
        place.write_bytes(json.dumps(values).encode())
        return place
    descriptor, name = tempfile.mkstemp(dir=folder, prefix="client-", suffix=".json")  # for its owner alone
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(values, file)
    return Path(name)


def _written(kafka: ClusterSettings, bootstrap: str) -> dict[str, Any]:
    """One cluster as JSON, secrets included."""
    config = _properties(kafka, bootstrap)
    for not_json in ("logger", "oauth_cb"):
        config.pop(not_json, None)
    return {**config, _TIMEOUT: kafka.timeout.total_seconds(), _CALLBACK: kafka.sasl_oauthbearer_callback}


def _shared(settings: Settings, own: str) -> Location:
    """A folder where state is for the process with the scratch folder `own`; removes those of ended processes."""
    home = hashlib.sha256(f"{socket.gethostname()} {settings.home.absolute()}".encode()).hexdigest()[:16]
    folders = made_folder(settings.state / _SHARED / home)
    scratch_folders = scratch(settings.home, "kafka").folder.parent
    for old in folders.iterdir():
        if not (scratch_folders / old.name).exists():
            remove_tree(old)
    return made_folder(folders / own)


def read_client_file(place: Location, topic: str) -> tuple[dict[str, Any], timedelta]:
    """The properties for a topic's cluster, and the deadline of a read.

    Raises TransientError if the session that wrote them has ended, ConfigurationError for a cluster without settings.
    An object of a store never changes, so each process reads it once.
    """
    values = _values(place)
    values.pop(_REGISTRY, None)
    clusters = values.pop(_CLUSTERS, {})
    if name := cluster_of(topic):
        if name not in clusters:
            raise unknown_cluster(topic, clusters)
        values = clusters[name]
    timeout = timedelta(seconds=float(values.pop(_TIMEOUT)))
    if callback := values.pop(_CALLBACK, ""):
        values["oauth_cb"] = token_callback(callback)
    return {**values, "logger": LIBRDKAFKA}, timeout


@dataclass(frozen=True)
class SessionSchemas:
    """The schemas of a session's registry, in any of its processes; the log-in is in the file `client`."""

    client: Location

    def of(self, prefixes: Sequence[bytes]) -> Mapping[bytes, RegisteredSchema | Refusal]:
        return self._stored.of(prefixes)

    def prefix(self, subject: str, schema: RegisteredSchema) -> bytes:
        return self._stored.prefix(subject, schema)

    @property
    def _stored(self) -> StoredSchemas:
        return StoredSchemas.from_values(_values(self.client)[_REGISTRY])


def _values(place: Location) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(
            _read_once(place) if isinstance(place, StorePath) else place.read_text(encoding="utf-8")
        )
    except (OSError, ValueError) as error:
        raise TransientError(
            f"the Kafka client's properties are gone: {place}",
            "the session has ended, or this executor does not share state with the driver",
        ) from error
    return values


@cache
def _read_once(place: StorePath) -> str:
    return place.read_text()


_LOOKED: dict[StorePath, float] = {}
"""When this process last looked for a session's object; seconds of the monotonic clock."""


def is_client_gone(place: Location) -> bool:
    """True if the file was removed, so that its session has ended; a store is asked once a minute at most."""
    if not isinstance(place, StorePath):
        return not place.exists()
    if time.monotonic() - _LOOKED.setdefault(place, time.monotonic()) < _LOOK_EVERY:
        return False
    _LOOKED[place] = time.monotonic()
    try:
        gone = not place.is_file()
    except RecourseError:  # the store does not answer at the moment
        return False
    if gone:
        del _LOOKED[place]
    return gone


def remove_client_file(place: Location) -> None:
    """Remove a file of `client_file`, and the lists of columns in use beside it.

    What a store that does not answer keeps is removed by the next session of this home.
    """
    try:
        for file in place.parent.glob(f"{place.stem}*"):
            file.unlink(missing_ok=True)
    except RecourseError as error:
        import structlog  # not in executors' Python, which start often

        structlog.get_logger().warning(
            "the Kafka client's properties stay in the store", file=str(place), reason=error.found
        )


# The topics of a session whose streams read none, where no broker runs.


@dataclass(frozen=True)
class NoBroker:
    """A reader of topics that has none: each call raises the error with which the broker was looked for."""

    error: BrokerUnreachable

    def describe(self, name: str) -> TopicInfo | None:
        raise self._again(name)

    def latest(self, name: str) -> dict[int, int]:
        raise self._again(name)

    def high_watermarks(self, name: str) -> dict[int, int]:
        raise self._again(name)

    def offsets(self, name: str) -> OffsetBounds:
        raise self._again(name)

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:  # noqa: ARG002
        raise self._again(name)

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:  # noqa: ARG002
        raise self._again(name)

    def _again(self, name: str) -> BrokerUnreachable:
        return BrokerUnreachable(f"topic {name}: {self.error.found}", self.error.next_step)


@dataclass
class Connection:
    """A session's connection to the cluster.

    `client` is the file with the properties of Kafka's client, for the processes that Spark starts; the client `quick`
    gives up after 2 s. `clients` makes those of these processes; None: clients of Kafka.
    """

    client: Location
    topics: TopicReader
    quick: TopicReader
    clients: TopicClients | None = None
