"""One typed configuration: defaults, then `recourse.toml`, then environment, then flags; last one wins.

Environment names are `RECOURSE_` plus the field, two underscores between levels:
`RECOURSE_KAFKA__BOOTSTRAP_SERVERS`, `RECOURSE_STREAMS__AIRPORT_HOURS__LATENESS`.
`Settings.load()` keeps for every value where it came from; `recourse config show` prints both.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from streaming_jobs.durations import Duration, parse_duration
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.spelling import instead, nearest

CONFIG_FILE = "recourse.toml"
_NO_SETTINGS = ("RECOURSE_CONFIG", "RECOURSE_CRASH", "RECOURSE_RUN_ID", "RECOURSE_PARENT")
"""Variables that mean something, but set nothing."""
Pace = Literal["live", "economy"]
_MAX_PAUSE: dict[Pace, timedelta] = {"live": timedelta(seconds=2), "economy": timedelta(seconds=5)}
_COMMIT_INTERVAL: dict[Pace, timedelta] = {"live": timedelta(milliseconds=20), "economy": timedelta(milliseconds=500)}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def checked_trigger(text: str) -> str:
    """A trigger as written; raises ValueError for what is none."""
    word, _, interval = text.partition(" ")
    if text not in ("continuous", "available-now") and word != "every":
        raise ValueError(
            f"'{text}' is not a trigger; {instead(text, ('continuous', 'available-now', 'every 10 seconds'))}"
        )
    if word == "every":
        _parsed(parse_duration, interval)
    return text


def _checked_start(text: str) -> str:
    """A start position as written; raises ValueError for what is none."""
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


class KafkaSettings(_Section):
    """How Spark and confluent-kafka reach the cluster. Empty servers mean the embedded broker."""

    bootstrap_servers: str = Field("", description="host:port,...; empty: the embedded broker")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="how connections to the cluster are protected, as Kafka names it"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="how a user logs in, with the two SASL protocols"
    )
    sasl_username: str = Field("", description="the user, with the two SASL protocols")
    sasl_password: SecretStr = Field(SecretStr(""), description="the user's password; never shown")
    ssl_ca_location: Path | None = Field(None, description="PEM file of the certificate authority")
    ssl_certificate_location: Path | None = Field(None, description="PEM file of the client certificate")
    ssl_key_location: Path | None = Field(None, description="PEM file of the client key")
    timeout: Duration = Field(timedelta(seconds=15), description="for one request to the cluster")


class BrokerSettings(_Section):
    """The embedded broker."""

    port: int = Field(0, ge=0, le=65535, description="0: a free port, kept between runs")
    heap_mb: int = Field(64, ge=48, description="heap of the broker's JVM, MB")


class SparkSettings(_Section):
    """The session's JVM."""

    master: str = Field("local[*]", description="Spark's master URL")
    driver_memory_mb: int = Field(1536, ge=512, description="heap of the driver's JVM, MB")
    shuffle_partitions: int = Field(0, ge=0, description="0: one a core; pinned by the first start of a stream")
    extra: dict[str, str] = Field(default_factory=dict, description="any further Spark properties")


class StreamSettings(_Section):
    """How one stream runs. The section `stream` holds the defaults, `streams.<name>` one stream's own values."""

    start: Start = Field("earliest", description="earliest, latest, or an ISO time with zone; first start only")
    trigger: Trigger = Field("continuous", description="continuous, available-now, or 'every 10 seconds'")
    lateness: Duration | None = Field(None, description="replaces the watermark delay that the stream declares")
    max_offsets_per_trigger: int = Field(300_000, gt=0, description="records a batch, all partitions together")
    pace: Pace = Field("live", description="live: batches follow each other; economy: two a second, half the cores")
    min_commit_interval: Duration | None = Field(None, description="at most one batch in this time; default by pace")
    min_upsert_interval: Duration | None = Field(None, description="the same for upserts, which rewrite files")
    max_pause: Duration | None = Field(None, description="wait after a batch while few records come; default by pace")
    committer: Literal["auto", "direct", "spark"] = Field(
        "auto", description="who commits to Delta tables: direct is delta-rs, spark is delta-spark"
    )
    path: Literal["auto", "driver", "executor"] = Field(
        "auto", description="which way a batch's rows take to the table: through the driver's memory, or not"
    )
    driver_path_max_mb: int = Field(256, gt=0, description="a batch estimated above this goes through executors, MB")
    direct_merge_max_mb: int = Field(2048, gt=0, description="upserts into a larger table go through Spark's MERGE, MB")
    stop_deadline: Duration = Field(timedelta(seconds=30), description="for a batch to reach its border on stop")
    max_restarts: int = Field(5, ge=0, description="transient failures in a row before a stream is given up")
    stuck_after: Duration = Field(timedelta(minutes=5), description="red: unread records and no batch done; 0: never")
    late_after: Duration = Field(timedelta(minutes=10), description="red: records unread for longer; 0: never")

    def commit_interval(self, *, upsert: bool) -> timedelta:
        """The shortest time between the starts of two batches."""
        own = self.min_upsert_interval if upsert else None
        return next(
            (value for value in (own, self.min_commit_interval) if value is not None), _COMMIT_INTERVAL[self.pace]
        )

    @property
    def longest_wait(self) -> timedelta:
        """The longest pause after a batch while few records come (`streaming_jobs/runtime/pace.py`)."""
        return _MAX_PAUSE[self.pace] if self.max_pause is None else self.max_pause


class StreamOverrides(_Section):
    """One stream's own values; what is not set comes from the section `stream`."""

    start: Start | None = None
    trigger: Trigger | None = None
    lateness: Duration | None = None
    max_offsets_per_trigger: int | None = Field(None, gt=0)
    pace: Pace | None = None
    min_commit_interval: Duration | None = None
    min_upsert_interval: Duration | None = None
    max_pause: Duration | None = None
    committer: Literal["auto", "direct", "spark"] | None = None
    path: Literal["auto", "driver", "executor"] | None = None
    driver_path_max_mb: int | None = Field(None, gt=0)
    direct_merge_max_mb: int | None = Field(None, gt=0)
    stop_deadline: Duration | None = None
    max_restarts: int | None = Field(None, ge=0)
    stuck_after: Duration | None = None
    late_after: Duration | None = None


class TableSettings(_Section):
    """Upkeep of every table we create. docs/disk.md says what each value bounds."""

    log_retention: Duration = Field(
        timedelta(hours=1), description="of the table's own log (delta.logRetentionDuration)"
    )
    log_versions: int = Field(500, ge=0, description="versions kept in the log, however young; 0: no such bound")
    deleted_file_retention: Duration = Field(timedelta(hours=1), description="of files no version of the table lists")
    deleted_files_max_mb: int = Field(4096, ge=0, description="of such files, MB; above it the oldest go earlier")
    checkpoint_interval: int = Field(50, gt=0, description="commits between two checkpoints of the table's log")
    compact_after_files: int = Field(100, ge=0, description="small files in a table that start a compaction; 0: never")
    target_file_mb: int = Field(64, gt=0, description="files of this size are left alone by compaction, MB")
    ledger_retention: Duration = Field(timedelta(days=14), description="of the ledger file beside the state")


class SavepointSettings(_Section):
    """Savepoints that a stream's driver takes by itself; those on purpose and of recoveries stay until dropped."""

    every: Duration = Field(timedelta(minutes=15), description="between two of a stream; 0: none by time")
    keep: Duration = Field(timedelta(hours=48), description="all of them")
    keep_daily: Duration = Field(timedelta(days=14), description="then the first of each day")
    keep_generations: int = Field(2, ge=0, description="checkpoints of generations that are over, the newest ones")
    max_mb: int = Field(10_240, ge=0, description="that only a stream's savepoints hold, MB; 0: no bound")


class DagsterSettings(_Section):
    """The Dagster processes that `recourse up` starts, and how sessions report to them."""

    host: str = Field("127.0.0.1", description="address that the UI listens on; the UI asks for no password")
    port: int = Field(3000, ge=0, le=65535, description="of the UI; 0: a free port")
    observe_every: Duration = Field(timedelta(seconds=60), description="between two reports on a table at work")
    materialize_every: Duration = Field(timedelta(minutes=1), description="between two materialisations of a table")
    stale_after: Duration = Field(timedelta(seconds=60), description="a session without heartbeat is declared dead")
    max_session: Duration = Field(timedelta(hours=24), description="then a continuous session ends and the next begins")
    keep_runs: Duration = Field(timedelta(days=7), description="of finished sessions, of tables' figures")
    keepalive: bool = Field(True, description="start continuous jobs by themselves and after a failure")


class Settings(BaseSettings):
    """Everything that can be set. Paths are absolute after loading."""

    model_config = SettingsConfigDict(
        env_prefix="RECOURSE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    home: Path = Field(Path(".recourse"), description="state folder of the project; holds all that is below")
    state_dir: Path | None = Field(None, description="checkpoints, leases, status; default <home>/state")
    tables_dir: Path | None = Field(None, description="Delta tables; default <home>/tables")
    jars_dir: Path | None = Field(None, description="cache of jars; default: the user's cache folder")
    maven_repository: SecretStr = Field(SecretStr(""), description="mirror to fetch jars from; empty: jgo's default")
    flows: list[str] = Field(
        ["streaming_jobs.examples.flights.streams"], description="packages or modules that declare streams"
    )
    jobs: Path | None = Field(None, description="databricks.yml; default: beside the project, else the packaged one")
    target: str = Field("", description="target of databricks.yml; empty: its default one")
    kafka: KafkaSettings = KafkaSettings()
    broker: BrokerSettings = BrokerSettings()
    spark: SparkSettings = SparkSettings()
    stream: StreamSettings = StreamSettings()
    streams: dict[str, StreamOverrides] = Field(default_factory=dict)
    table: TableSettings = TableSettings()
    savepoint: SavepointSettings = SavepointSettings()
    dagster: DagsterSettings = DagsterSettings()

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, _settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values only as `load` has merged them."""
        return (init_settings,)

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None, *, config_file: Path | None = None) -> Settings:
        """Merge all layers; raises ConfigurationError naming the value and its origin."""
        return load(flags, config_file=config_file).settings

    @property
    def state(self) -> Path:
        """Folder of checkpoints, leases and status files."""
        return _absolute(self.state_dir or self.home / "state")

    @property
    def tables(self) -> Path:
        """Folder of the Delta tables."""
        return _absolute(self.tables_dir or self.home / "tables")

    @property
    def logs(self) -> Path:
        """Folder of log files."""
        return _absolute(self.home / "logs")

    @property
    def dagster_home(self) -> Path:
        """DAGSTER_HOME of this project."""
        return _absolute(self.home / "dagster")

    @property
    def broker_dir(self) -> Path:
        """Data and configuration of the embedded broker."""
        return _absolute(self.home / "broker")

    def for_stream(self, name: str) -> StreamSettings:
        """The values that hold for one stream: its own before the defaults."""
        own = self.streams.get(name)
        if own is None:
            return self.stream
        return self.stream.model_copy(update={k: v for k, v in own if v is not None})


@dataclass(frozen=True)
class Origin:
    """One setting as shown: dotted key, value as text, and the layer it came from."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Loaded:
    """Settings and, for every leaf, its origin."""

    settings: Settings
    origins: tuple[Origin, ...]


def load(flags: Mapping[str, Any] | None = None, *, config_file: Path | None = None) -> Loaded:
    """Read file, environment and flags (dotted keys or nested); later layers win."""
    path = config_file or Path(os.environ.get("RECOURSE_CONFIG", CONFIG_FILE))
    if config_file and not path.is_file():
        raise ConfigurationError(f"no configuration file at {path}", "check --config, or leave it out")
    layers: list[tuple[str, dict[str, Any]]] = []
    if path.is_file():
        try:
            layers.append((f"file {path}", tomllib.loads(path.read_text())))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{path} is not TOML: {error}", "correct the line named above") from error
    _refuse_unknown(os.environ)
    layers.append(("environment", EnvSettingsSource(Settings)()))
    layers.append(("flag", _nested(flags or {})))
    merged: dict[str, Any] = {}
    for _, layer in layers:
        merged = _merge(merged, layer)
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        origin = next((name for name, layer in reversed(layers) if _has(layer, first["loc"])), "default")
        unknown = first["type"] == "extra_forbidden"
        near = _nearest_setting(first["loc"]) if unknown else None
        meant = f"did you mean '{near}'? " if near else ""
        raise ConfigurationError(
            f"{key} ({origin}): {'no such setting' if unknown else first['msg'].removeprefix('Value error, ')}",
            f"{meant}correct or remove it; `recourse config show` then prints every setting",
        ) from error
    return Loaded(settings, tuple(_origins(settings, layers)))


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    """A misspelt variable must not be passed over; of nested names pydantic sees to all but the first part."""
    for name in environment:
        first = name.removeprefix("RECOURSE_").partition("__")[0].lower()
        if name.startswith("RECOURSE_") and name not in _NO_SETTINGS and first not in Settings.model_fields:
            near = nearest(first, Settings.model_fields)
            meant = f"did you mean '{name.replace(first.upper(), near.upper(), 1)}'? " if near else ""
            raise ConfigurationError(
                f"{name} (environment) is no setting",
                f"{meant}correct or unset it; `recourse config show` prints every setting",
            )


def _nearest_setting(location: Sequence[int | str]) -> str | None:
    """The dotted key that a key which is no setting probably means."""
    *parents, name = [str(part) for part in location]
    model: type[BaseModel] = Settings
    for part in parents:
        if part in model.model_fields:
            kind = model.model_fields[part].annotation
            model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else StreamOverrides
    near = nearest(name, model.model_fields)
    return ".".join((*parents, near)) if near else None


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flags.items():
        level = nested
        *parents, leaf = key.split(".")
        for parent in parents:
            level = level.setdefault(parent, {})
        level[leaf] = value
    return nested


def _merge(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _has(layer: Any, location: tuple[int | str, ...]) -> bool:
    for part in location:
        if not isinstance(layer, Mapping) or part not in layer:
            return False
        layer = layer[part]
    return True


def _leaves(
    value: BaseModel | Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    items = value.items() if isinstance(value, Mapping) else iter(value)
    for name, item in items:
        if isinstance(item, (BaseModel, Mapping)) and (isinstance(item, BaseModel) or item):
            yield from _leaves(item, (*prefix, name))
        else:
            yield (*prefix, name), item


def _origins(settings: Settings, layers: list[tuple[str, dict[str, Any]]]) -> Iterator[Origin]:
    from streaming_jobs.durations import format_duration

    for location, value in _leaves(settings):
        origin = next((name for name, layer in reversed(layers) if _has(layer, location)), "default")
        if location[0] == "streams" and value is None:
            continue
        if isinstance(value, SecretStr):
            shown = "(hidden)" if value.get_secret_value() else ""
        elif isinstance(value, timedelta):
            shown = format_duration(value)
        else:
            shown = "" if value is None else str(value)
        yield Origin(".".join(location), shown, origin)
