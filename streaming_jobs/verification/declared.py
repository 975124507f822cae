"""Subject and refusals of a verification, from a stream's declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from streaming_jobs.catalog.archive import is_archive
from streaming_jobs.verification.dead_letters import Refusals
from streaming_jobs.verification.subject import QUARANTINED, Subject, Table

if TYPE_CHECKING:
    from streaming_jobs.declare.format import BlockReader
    from streaming_jobs.stream import Stream


def subject_of(stream: Stream) -> Subject:
    first, *others = (topic.name for topic in stream.sources.values())
    aside = stream.quarantines
    tables = [
        Table(sink.name, sink.name if number else "written", tuple(sink.keys), aside.get(sink.name, ""))
        for number, sink in enumerate((stream.primary, *stream.secondary))
    ]
    tables += [Table(table.name, "", tuple(table.keys)) for table in stream.deletes]
    tables += [Table(name, f"{QUARANTINED}{table}") for table, name in aside.items()]
    tables.append(Table(stream.dead_letters, "dead_letters"))
    return Subject(
        stream=stream.name,
        table=stream.primary.name,
        topic=first,
        others=tuple(others),
        tables=tuple(tables),
        reads_void=is_archive(stream),
    )


def refusals_of(stream: Stream, code: frozenset[str] = frozenset()) -> Refusals:
    """The refusals of the stream's formats, empty until records are taken; `code` is the code that declares them."""
    topics = stream.topics
    return Refusals(
        readers={topic.name: _reader(topic.records) for topic in topics},
        keeps=frozenset(topic.name for topic in topics if topic.tombstones == "keep"),
        reasons=frozenset(reason for topic in topics for reason in getattr(topic.records, "reasons", ())),
        code=code,
    )


def _reader(value: Any) -> Callable[[bytes], str | None] | None:
    """A function that gives the reason why a format refuses a value; None for a format that only Spark can read."""
    if hasattr(value, "reader"):
        return _verdict(value.reader([]))  # of no columns: single records are judged several times faster
    if not hasattr(value, "read"):
        return None

    def reason(text: bytes) -> str | None:
        try:
            value.read(text)
        except Exception as error:  # noqa: BLE001 - formats of others raise what they like; they name a reason, or
            return str(getattr(error, "reason", "unreadable"))  # diagnose calls what they raise unreadable
        return None

    return reason


def _verdict(reader: BlockReader) -> Callable[[bytes], str | None]:
    def reason(text: bytes) -> str | None:
        refused = reader.read([text]).refused
        return refused[0].reason if refused else None

    return reason
