"""The parts of a stream's code, declaration and settings, as a running session has them.

They are written to `<state>/<stream>/declaration.json` when the stream starts. A deploy compares them with those on
disk, so that it can say what has changed and not only that something has. Values are hashes or words of the
declaration; a free Spark property, which may be a password, is a hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog

from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import TransientError
from streaming_jobs.runtime.code_version import code_parts, loaded_code
from streaming_jobs.settings import Settings
from streaming_jobs.state.records import json_bytes
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import KafkaTopic, Stream

log = structlog.get_logger()

Parts = Mapping[str, str]
"""The name of a part -> its value, such as `column n of topic things` -> `bigint`."""

_LOADED: dict[Callable[..., object], dict[str, str]] = {}


def parts_of(stream: Stream, settings: Settings) -> dict[str, str]:
    """All parts of a stream; the code is that which this process has loaded, read once."""
    if stream.function not in _LOADED:
        _LOADED[stream.function] = code_parts(stream, settings.flows)
    return {**_LOADED[stream.function], **dict(_declared(stream)), **dict(_settings(stream.name, settings))}


def note(stream: Stream, settings: Settings) -> None:
    """Write the parts of a stream that starts; without them a deploy says only that the code has changed."""
    code = loaded_code(stream, settings.flows)
    try:
        value = {"code": code.hash, "parts": parts_of(stream, settings)}
        StreamFolder.of(settings, stream.name).declaration.put(json_bytes(value), durable=False)
    except (OSError, TransientError) as error:  # a full disk stops no stream
        log.warning("the parts of the code could not be written", stream=stream.name, reason=str(error))


def noted(settings: Settings, stream: str, code: str) -> Parts | None:
    """The parts that the session with this code has written; None without parts, or if other code wrote them."""
    try:
        found = StreamFolder.of(settings, stream).declaration.read()
        value = json.loads(found.data if found is not None else "")
        return dict(value["parts"]) if value["code"] == code else None
    except (OSError, TransientError, ValueError, KeyError, TypeError):  # never written, truncated, or out of reach
        return None


def changes(before: Parts, after: Parts) -> list[str]:
    """The differences in words, such as `setting trigger: continuous -> every 10 seconds`."""
    words = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if name.startswith(_WORDED):
            words.append(
                f"{name}: {old} -> {new}" if old and new else f"{'new' if new else 'gone'}: {name} ({new or old})"
            )
        else:
            words.append(f"{'changed' if old and new else 'new' if new else 'gone'}: {name}")
    return words


_WORDED = ("topic ", "table ", "rule ", "setting ")


def _declared(stream: Stream) -> Iterator[tuple[str, str]]:
    for source in stream.sources.values():
        of_topic = isinstance(source, KafkaTopic)
        place = f"topic {source.name}" if of_topic else f"table {source.name} as a source"
        for field in (source.records.schema if isinstance(source, KafkaTopic) else source.columns).fields:
            yield (
                f"{place}: column {field.name}",
                field.dataType.simpleString() + ("" if field.nullable else " not null"),
            )
        for name in ("event_time", "lateness", *(["tombstones"] if of_topic else []), "max_ahead"):
            if (value := getattr(source, name)) is not None:
                yield f"{place}: {name}", str(value)
    for lookup in stream.lookups.values():
        place = f"table {lookup.name} that is looked up"
        yield place, str(lookup.path or "below tables")
        for field in lookup.columns.fields:
            yield f"{place}: column {field.name}", field.dataType.simpleString()
    named: list[tuple[str, DeclaredTable]] = [(table.name, table) for table in stream.sinks.values()]
    for name, table in [*named, *((each.ledger_name, each) for each in stream.postgres_tables.values())]:
        place = f"table {name}"
        yield place, table.mode
        for option in ("keys", "order_by", "delete_when", "partition_by", "emit"):
            if value := getattr(table, option):
                yield f"{place}: {option}", value if isinstance(value, str) else ", ".join(value)
        for field in table.schema.fields if table.schema is not None else ():
            yield f"{place}: column {field.name}", field.dataType.simpleString()
        for rule in stream.rules_of(name).rules:
            yield f"rule {rule.name} of table {name}", f"{rule.on_fail} if {rule.words}"
    yield from _topic_sinks(stream)


def _topic_sinks(stream: Stream) -> Iterator[tuple[str, str]]:
    for sink in stream.topic_sinks.values():
        place = f"topic {sink.name}: written"
        yield from ((f"{place} {name}", value) for name, value in sink.options.items())
        for field in sink.topic.value.schema.fields:
            yield f"{place} column {field.name}", field.dataType.simpleString()


def _settings(stream: str, settings: Settings) -> Iterator[tuple[str, str]]:
    sections: dict[str, Any] = {
        "": settings.for_stream(stream),
        "spark.": settings.spark,
        "table.": settings.table,
        "savepoint.": settings.savepoint,
    }
    for prefix, section in sections.items():
        for name, value in section.model_dump(mode="json").items():
            if isinstance(value, dict):
                value = f"({hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]})"
            yield f"setting {prefix}{name}", str(value)
