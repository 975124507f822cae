"""The sections of the settings: every field with its default, its bounds and its meaning.

`docs/settings.md` is written from them. `settings.py` combines them and reads the values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    model_validator,
)
from pydantic_settings import NoDecode

from streaming_jobs.declare.names import cluster_of, is_name, unknown_cluster
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration, parse_duration
from streaming_jobs.text.spelling import instead


def _from_text(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_duration(value)
        except ConfigurationError as error:
            raise ValueError(error.found) from error
    return value


Duration = Annotated[timedelta, BeforeValidator(_from_text), PlainSerializer(format_duration, return_type=str)]
"""A pydantic field type: a timedelta that is written and shown as text."""


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("has to be longer than 0")
    return value


def _long_enough(ttl: timedelta) -> timedelta:
    if ttl < timedelta(seconds=2):
        raise ValueError("a lease lasts 2 seconds at least: its renewals, four per ttl, must not miss it")
    return ttl


Span = Annotated[Duration, AfterValidator(_positive)]
"""A duration that is not 0."""


def _as_transaction(value: timedelta) -> timedelta:
    if value > timedelta(minutes=15):
        raise ValueError("is above 15 minutes, the bound that a broker has by default")
    return value


TransactionTimeout = Annotated[Span, AfterValidator(_as_transaction)]


def as_list(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.strip()
    return json.loads(text) if text.startswith("[") else [text] if text else []


Names = Annotated[list[str], NoDecode, BeforeValidator(as_list)]
"""A list; a text is a JSON list, or, without brackets, its only item."""


def is_remote(path: Any) -> bool:
    """True for an address such as `s3://bucket/tables`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def _on_this_machine(value: Any) -> Any:
    if is_remote(value):
        raise ValueError(f"'{value}' is an address; it has to be a folder that this machine sees")
    return value


_STORES = {"s3": "aws", "gs": "google", "abfss": "azure"}
"""The schemes of stores that tables can be on (S3, Google Cloud Storage, Azure), with the prefix of their options."""


_NO_CREDENTIALS = (
    "has a user or a password; credentials come from the environment, a web identity or the machine's role "
    "(docs/object-store.md)"
)
"""Without the value: messages are shown and logged."""


def _folder_or_url(value: Any) -> Any:
    if not is_remote(value):
        return value
    scheme, _, rest = str(value).partition("://")
    host = rest.partition("/")[0]
    # In the place of a user, abfss has the container. A secret may have a slash, after which its `@` is in the path.
    if ":" in host or ("@" in host and scheme != "abfss") or ("@" in rest and scheme not in _STORES):
        raise ValueError(_NO_CREDENTIALS)
    if scheme not in _STORES or not rest or rest.startswith("/"):
        raise ValueError(f"'{value}' is on no store that is supported: {', '.join(f'{s}://...' for s in _STORES)}")
    return str(value).rstrip("/")


LocalPath = Annotated[
    Path, BeforeValidator(_on_this_machine), AfterValidator(lambda path: path.expanduser().absolute())
]
"""A folder of this machine; absolute."""

FolderOrUrl = Annotated[
    str | Path,
    BeforeValidator(_folder_or_url),
    AfterValidator(lambda value: value if is_remote(value) else Path(value).expanduser().absolute()),
]
"""A folder, absolute, or the URL of a prefix of an object store."""

_MASTER = re.compile(
    r"local(\[(\*|\d+)(,\s*\d+)?\])?|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|spark://\S+|yarn|"
    r"k8s://(https?://)?[^\s/]+(/\S*)?"
)


def _checked_master(text: str) -> str:
    if _MASTER.fullmatch(text) is None:
        raise ValueError(
            f"'{text}' is not a master that is supported; write local[*], local[4], spark://host:7077, "
            "k8s://https://host:6443, or yarn"
        )
    return text


def _checked_program(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.-]+", text) is None:
        raise ValueError(f"'{text}' is not the name of a program; each worker finds it on its PATH")
    return text


Pace = Literal["live", "balanced", "economy"]
_MAX_PAUSE: dict[Pace, timedelta] = {
    "live": timedelta(seconds=2),
    "balanced": timedelta(seconds=2),
    "economy": timedelta(seconds=5),
}
_COMMIT_INTERVAL: dict[Pace, timedelta] = {
    "live": timedelta(milliseconds=20),
    "balanced": timedelta(milliseconds=250),
    "economy": timedelta(seconds=1),
}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def checked_trigger(text: str) -> str:
    """A trigger as written; raises ValueError for any other text."""
    word, _, interval = text.partition(" ")
    if text not in ("continuous", "available-now") and word != "every":
        raise ValueError(
            f"'{text}' is not a trigger; {instead(text, ('continuous', 'available-now', 'every 10 seconds'))}"
        )
    if word == "every":
        _parsed(lambda text: _positive(parse_duration(text)), interval)
    return text


def _checked_start(text: str) -> str:
    """A start position as written; raises ValueError for any other text."""
    if text not in ("earliest", "latest"):
        try:
            zone = datetime.fromisoformat(text).tzinfo
        except ValueError:
            zone = None
        if zone is None:
            raise ValueError(
                f"'{text}' is not a start; write earliest, latest, or a time with zone: 2026-11-21T08:00:00+00:00"
            )
    return text


def _parsed(parse: Callable[[str], object], text: str) -> None:
    try:
        parse(text)
    except ConfigurationError as error:
        raise ValueError(f"{error.found}; {error.next_step}") from error


Trigger = Annotated[str, AfterValidator(checked_trigger)]
Start = Annotated[str, AfterValidator(_checked_start)]


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


def in_this_process(master: str) -> bool:
    """True if the driver's JVM is the only executor of this Spark master."""
    return master == "local" or master.startswith("local[")


_DEPLOY_MODE = "spark.submit.deployMode"
_WATERMARK_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"
_IMAGES = frozenset({"spark.kubernetes.container.image", "spark.kubernetes.executor.container.image"})


class SparkSettings(Section):
    """The session's JVM."""

    master: Annotated[str, AfterValidator(_checked_master)] = Field(
        "local[*]",
        description="local[N], local-cluster[...], spark://host:port, k8s://https://host:port or yarn; its executors "
        "share tables and state with the driver (docs/cluster.md)",
    )
    driver_host: str = Field(
        "", description="name or address by which executors reach the driver; empty: 127.0.0.1 with a local master"
    )
    bind_address: str = Field("", description="address at which the driver listens; empty: driver_host's")
    executor_python: Annotated[str, AfterValidator(_checked_program)] = Field(
        "python3", description="Python of executors on other machines, by its name on each worker's PATH"
    )
    driver_memory_mb: int = Field(1536, ge=512, description="heap of the driver's JVM, MB")
    shuffle_partitions: int = Field(
        0,
        ge=0,
        description="partitions of a shuffle; 0: one per core, of the executors that a cluster has when the session "
        "starts; pinned by the first start of a stream",
    )
    reading_tasks: int = Field(
        0, ge=0, description="tasks that read a large batch; 0: one per core that is there when the batch is planned"
    )
    extra: dict[str, str] = Field(default_factory=dict, description="any further Spark properties")
    split_sessions: bool = Field(
        True,
        description="streams with newer code start in a second process (and JVM) while the others of their session "
        "run on; false: the whole session restarts",
    )

    @model_validator(mode="after")
    def _can_reach_executors(self) -> Self:
        if self.extra.get(_WATERMARK_POLICY, "min") != "min":
            raise ValueError(
                f"{_WATERMARK_POLICY} is not min: the records of a topic that is behind would be dropped as late; for "
                "a topic without records there is idle_after (docs/streams.md)"
            )
        if self.extra.get(_DEPLOY_MODE, "client") != "client":
            raise ValueError(f"{_DEPLOY_MODE} is not client: the session itself is the driver of its queries")
        if self.master.startswith("k8s://"):
            if not self.extra.keys() & _IMAGES:
                raise ValueError("spark.extra lacks spark.kubernetes.container.image, the image of the executors' pods")
            if not self.driver_host:
                raise ValueError(
                    "spark.driver_host is empty, and pods reach the driver by it: the name of a headless service, or "
                    "the address of the driver's pod"
                )
        return self

    @property
    def has_executors(self) -> bool:
        """True if executors run beside the driver, here or on other machines."""
        return not in_this_process(self.master)


class StreamSettings(Section):
    """How a stream runs. The section `stream` has the defaults, `streams.<name>` one stream's own values."""

    start: Start = Field("earliest", description="earliest, latest, or an ISO time with zone; first start only")
    trigger: Trigger = Field("continuous", description="continuous, available-now, or 'every 10 seconds'")
    lateness: Duration | None = Field(None, description="replaces the watermark delay that the stream declares")
    max_offsets_per_trigger: int = Field(300_000, gt=0, description="records per batch, all partitions together")
    max_batch_mb: int = Field(256, gt=0, description="keys and values per batch, MB, by the mean size of a record")
    batch_seconds: Duration = Field(
        timedelta(seconds=3), description="target duration of a batch while there is a backlog"
    )
    pace: Pace = Field(
        "balanced", description="live: one batch after the other; balanced: four per second at most; economy: one"
    )
    min_commit_interval: Duration | None = Field(None, description="shortest time between two batches; default by pace")
    min_upsert_interval: Duration | None = Field(
        None, description="shortest time between two upserts, which rewrite files; default: min_commit_interval"
    )
    max_pause: Duration | None = Field(
        None, description="longest pause after a batch while few records arrive; default by pace"
    )
    committer: Literal["auto", "direct", "spark"] = Field(
        "auto", description="library that commits to Delta tables: direct is delta-rs, spark is delta-spark"
    )
    path: Literal["auto", "driver", "executor"] = Field(
        "auto", description="how a batch's rows reach the table: through the driver's memory or the executors"
    )
    driver_path_max_mb: int = Field(256, gt=0, description="batches estimated above this go through the executors, MB")
    direct_merge_max_mb: int = Field(2048, gt=0, description="upserts into a larger table go through Spark's MERGE, MB")
    stop_deadline: Duration = Field(
        timedelta(seconds=30), description="time that a stop gives the running batch to finish"
    )
    max_restarts: int = Field(
        5, ge=0, description="transient failures in a row before the session gives up on the stream"
    )
    await_table: Duration = Field(
        timedelta(minutes=10), description="how long a stream waits for a source table that does not exist yet"
    )
    replay_lookups: Literal["pinned", "newest"] = Field(
        "pinned",
        description="versions of the tables that a replay looks up: those of its first run, or the newest ones",
    )
    stuck_after: Duration = Field(
        timedelta(minutes=5), description="red if unread records wait and no batch has finished for this time; 0: never"
    )
    late_after: Duration = Field(timedelta(minutes=10), description="red if records stay unread for longer; 0: never")
    require_deploy: bool = Field(
        False, description=f"refuse to start changed code that `{commands.deploy()}` has not recorded"
    )

    def commit_interval(self, *, upsert: bool) -> timedelta:
        """The shortest time between the starts of two batches."""
        for_upserts = self.min_upsert_interval if upsert else None
        return next(
            (value for value in (for_upserts, self.min_commit_interval) if value is not None),
            _COMMIT_INTERVAL[self.pace],
        )

    @property
    def longest_wait(self) -> timedelta:
        """The longest pause after a batch while few records arrive (`streaming_jobs/runtime/batch_hooks.py`)."""
        return _MAX_PAUSE[self.pace] if self.max_pause is None else self.max_pause


class TableSettings(Section):
    """Maintenance of every table that Recourse creates. docs/disk.md shows the disk space that each value bounds."""

    log_retention: Duration = Field(
        timedelta(hours=1), description="retention of the table's own log (delta.logRetentionDuration)"
    )
    log_versions: int = Field(
        500, ge=0, description="most versions that the log keeps, whatever their age; 0: no such bound"
    )
    unread_retention: Duration = Field(
        timedelta(days=1), description="retention of versions, and their files, that a reading stream has not read yet"
    )
    unread_max_mb: int = Field(
        2_048,
        gt=0,
        description="most MB of those versions' commits and of files that only they hold; a slower reader is refused",
    )
    deleted_file_retention: Duration = Field(
        timedelta(hours=1), description="retention of files that no version of the table lists"
    )
    deleted_files_max_mb: int = Field(
        4096, ge=0, description="most MB of such files; above it the oldest are removed earlier"
    )
    checkpoint_interval: int = Field(50, gt=0, description="commits between two checkpoints of the table's log")
    compact_after_files: int = Field(100, ge=0, description="number of small files that starts a compaction; 0: never")
    target_file_mb: int = Field(64, gt=0, description="compaction leaves files of this size alone, MB")
    ledger_retention: Duration = Field(timedelta(days=14), description="retention of the ledger file beside the state")


class TopicSinkSettings(Section):
    """Topics that streams write (docs/kafka_sink.md)."""

    prefix: str = Field(
        "recourse",
        pattern=r"^[A-Za-z0-9._-]{1,60}$",
        description="begins transactional ids and, after two underscores, the topics of markers; keep it for ever",
    )
    acks: Literal["all", "1", "0"] = Field(
        "all", description="acknowledgements for at-least-once delivery; exactly-once delivery always waits for all"
    )
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        "lz4", description="compression of record batches"
    )
    linger: Duration = Field(
        timedelta(milliseconds=5), description="how long the producer waits for more records of a partition"
    )
    batch_kb: int = Field(
        1000, gt=0, description="most kB of a request's records for one partition, before compression"
    )
    max_record_kb: int = Field(1000, gt=0, description="larger records become dead letters, kB; a topic may allow less")
    buffer_mb: int = Field(64, gt=0, description="most MB of records in the client that are not acknowledged yet")
    headers: bool = Field(True, description="write stream, generation, batch and source position into each record")
    transaction_timeout: TransactionTimeout = Field(
        timedelta(seconds=60),
        description="time limit of one batch's transaction, after which the producer is replaced; 15 minutes at most",
    )


class LeaseSettings(Section):
    """The lease by which a stream has one driver at a time (docs/fencing.md). Stop all streams before a change."""

    kind: Literal["file", "expiring"] = Field(
        "file",
        description="file: a lock in the state folder, free when its driver and JVM have ended; expiring: renewed "
        "every ttl / 4, for a state folder whose locks not all machines see",
    )
    ttl: Annotated[Duration, AfterValidator(_long_enough)] = Field(
        timedelta(seconds=20),
        description="time after its last renewal at which an expiring lease ends; others take it after 1.25 ttl",
    )


class SavepointSettings(Section):
    """Savepoints that a stream's driver takes periodically. Those of a person or a recovery stay until dropped."""

    every: Duration = Field(
        timedelta(minutes=15), description="time between two savepoints of a stream; 0: none by time"
    )
    keep: Duration = Field(timedelta(hours=48), description="how long all savepoints are kept")
    keep_daily: Duration = Field(
        timedelta(days=14), description="how long the first savepoint of each day is kept after that"
    )
    keep_named: Duration = Field(
        timedelta(days=90), description="how long named savepoints are kept; 0: until the name is dropped"
    )
    keep_plans: Duration = Field(
        timedelta(days=30),
        description="retention of plans and reports of finished recoveries whose savepoints are gone; 0: for ever",
    )
    keep_generations: int = Field(
        2, ge=0, description="number of checkpoints of earlier generations that are kept, the newest first"
    )
    max_mb: int = Field(10_240, ge=0, description="most MB of files that only a stream's savepoints hold; 0: no bound")


class RecoverySettings(Section):
    """The replay of a recovery while its stream runs."""

    pace: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of the time for which the replay works; half of it at least while the stream is slower",
    )


class StorageSettings(Section):
    """The object store of URLs such as `s3://bucket/state`: how it is reached. Credentials are no settings: they come
    from the environment (`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY`, ...), a
    web identity, or the machine's role.
    """

    endpoint: str = Field("", description="http or https URL of another store than the cloud's own; empty: the cloud's")
    region: str = Field("", description="region of S3 buckets; empty: AWS_REGION, else us-east-1")
    allow_http: bool = Field(False, description="allow an endpoint without TLS")
    addressing: Literal["path", "virtual"] = Field(
        "path",
        description="where an S3 request names the bucket: path, or host name (virtual); an endpoint then names it",
    )
    timeout: Span = Field(timedelta(seconds=30), description="time limit of one request")

    @model_validator(mode="after")
    def _is_protected(self) -> Self:
        if "@" in self.endpoint:
            raise ValueError(f"storage.endpoint {_NO_CREDENTIALS}")
        if self.endpoint and not re.match(r"https?://[^/\s]+", self.endpoint):
            raise ValueError("storage.endpoint is no URL; it begins with https:// or http://")
        if self.endpoint.startswith("http://") and not self.allow_http:
            raise ValueError("storage.endpoint has no TLS; set storage.allow_http = true if that is intended")
        return self

    def options(self, url: str) -> dict[str, str]:
        """The options of the store that a URL names, for `open_store` and as deltalake's `storage_options`.

        Raises ConfigurationError for a URL of no known store.
        """
        kind = _STORES.get(scheme := url.partition("://")[0])
        if kind is None:
            raise ConfigurationError(f"'{scheme}' of {url} is no object store", instead(scheme, sorted(_STORES)))
        options = {"timeout": f"{round(self.timeout.total_seconds() * 1000)}ms"}
        if self.allow_http:
            options["allow_http"] = "true"
        if self.endpoint:
            options["google_base_url" if kind == "google" else f"{kind}_endpoint"] = self.endpoint.rstrip("/")
        if kind == "aws":
            options["aws_virtual_hosted_style_request"] = str(self.addressing == "virtual").lower()
            if self.region:
                options["aws_region"] = self.region
        return options
