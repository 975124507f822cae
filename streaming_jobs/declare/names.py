"""Checks of the names and parts in a declaration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from streaming_jobs.errors import ConfigurationError, UsageError
from streaming_jobs.text.durations import parse_duration
from streaming_jobs.text.spelling import instead

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
AT = "@"
"""Before the cluster's name in the name of a topic; no topic of Kafka has it in its own."""


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def checked_name(kind: str, name: str) -> str:
    """Return `name` if it can be a folder and an identifier; raises UsageError otherwise."""
    if not is_name(name):
        raise UsageError(
            f"'{name}' is not a {kind} name", "use lower-case letters, digits and '_', a letter first, 63 at most"
        )
    return name


# Topics of several clusters. `orders` is a topic of the default cluster, `orders@eu` the topic `orders` of the cluster
# `eu` in the settings `kafka.clusters`. Streams, positions, ledgers, records and commands have this whole name; only
# what talks to Kafka takes it apart.


def kafka_name(topic: str) -> str:
    """The name of a topic in its cluster."""
    return topic.partition(AT)[0]


def cluster_of(topic: str) -> str:
    """The cluster of a topic; empty: the default one."""
    return topic.partition(AT)[2]


def in_cluster(name: str, cluster: str) -> str:
    """The whole name of a topic with this name in its cluster; without a name it stands for any topic there."""
    return f"{name}{AT}{cluster}" if cluster else name


def is_topic_name(topic: str) -> bool:
    """True for a whole name that a topic can have."""
    name, at, cluster = topic.partition(AT)
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..") and (not at or is_name(cluster))


def unknown_cluster(topic: str, known: Iterable[str]) -> ConfigurationError:
    """The error for a topic whose cluster is none of these."""
    name = cluster_of(topic)
    return ConfigurationError(
        f"topic {topic} is of the cluster '{name}', which the settings do not have",
        f"set kafka.clusters.{name}.bootstrap_servers, or correct the name: {instead(name, known)}",
    )


def checked_names(what: str, option: str, names: object) -> tuple[str, ...]:
    """The names as a tuple; raises UsageError for a single text, which Python would read as a list of letters."""
    if isinstance(names, str):
        raise UsageError(f"{what}: {option} is the text '{names}', not a list", f"write {option}=['{names}']")
    items = tuple(names) if isinstance(names, Iterable) else (names,)
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in items):
        raise UsageError(f"{what}: {option} is {names!r}, not a list of names", f"write {option}=['first', 'second']")
    return items


def checked_choice(what: str, option: str, value: object, allowed: Sequence[str]) -> None:
    """Raise UsageError for a value that the option does not have."""
    if value not in allowed:
        raise UsageError(f"{what}: {option}='{value}'", instead(str(value), allowed))


def checked_time(what: str, option: str, text: str) -> timedelta:
    """The duration of an option; raises UsageError for a text that is none, and for one of 0."""
    if (duration := parse_duration(text, f"{what}: {option}")) <= timedelta(0):
        raise UsageError(f"{what}: {option} is {text}", "name a time above zero")
    return duration


def checked_schema(what: str, schema: StructType | Mapping[str, object] | None) -> StructType | None:
    """The schema, also of a mapping of names to types; raises UsageError for anything else."""
    if schema is None:
        return None
    from streaming_jobs.declare.schemas import schema_of  # here: declared without Spark

    try:
        return schema_of(schema)
    except UsageError as error:
        raise UsageError(f"{what}: {error.found}", error.next_step) from error


def check_event_time(source: str, column: str, schema: StructType, kind: str, otherwise: str) -> None:
    """Raise UsageError if a source lacks the column, or it has no timestamps; `otherwise` says how to make one."""
    names = schema.fieldNames()
    if column not in names:
        raise UsageError(f"{source}: event_time '{column}' is not a {kind}", instead(column, names))
    found = schema[column].dataType
    if found.typeName() not in ("timestamp", "timestamp_ntz"):
        raise UsageError(
            f"{source}: event_time '{column}' is {found.simpleString()}, not a timestamp",
            otherwise.format(column),
        )


def checked_parts(stream: str, option: str, parts: Iterable[object], kind: str, fits: Callable[[object], bool]) -> None:
    """Raise UsageError for a source or a sink of another type, such as a bare name; `kind` names the right type."""
    for part in parts:
        if not fits(part):
            example = f"{kind}({part!r}, ...)" if isinstance(part, str) else f"a {kind}"
            raise UsageError(f"stream {stream}: {option} is {part!r}, not a {kind}", f"write {example}")
