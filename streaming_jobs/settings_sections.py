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
    model_validator,
)
from pydantic_settings import NoDecode

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
    state_partitions: int = Field(
        0,
        ge=0,
        description="partitions of a stream's state, fixed by its first start; 0: spark.shuffle_partitions; 1: a small "
        "batch runs as one task",
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
