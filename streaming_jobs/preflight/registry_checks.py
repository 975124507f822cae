"""The doctor's lines about the schema registry: its addresses, and the subjects of the streams' topics.

Every question is one that streams ask too. Nothing is registered, and nothing stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.format import Refusal
from streaming_jobs.errors import RecourseError
from streaming_jobs.formats.framing import Registered
from streaming_jobs.preflight.doctor import DoctorCheck
from streaming_jobs.registry.client import Registry, RegistryAddress
from streaming_jobs.registry.schemas import StoredSchemas
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings
    from streaming_jobs.stream import KafkaTopic

_ASK = 5.0
_NOBODY_S = "recourse-doctor"
"""A subject that no topic has: a registry answers that it does not know it."""


@dataclass(frozen=True)
class _Use:
    """A topic of a stream whose records name schemas; `written`: the stream writes it."""

    stream: str
    topic: str
    format: Registered
    written: bool


def registry_checks(settings: Settings) -> Iterator[DoctorCheck]:
    """Yields a line for each address of the registry and for each subject; none if no stream needs a registry.

    Takes up to 5 s for each address and for each subject.
    """
    uses = _uses(settings)
    address = RegistryAddress.of(settings.registry)
    if not address.urls:
        if uses:
            streams = ", ".join(sorted({use.stream for use in uses}))
            found = f"registry.url is empty, and records of stream {streams} name schemas of a registry"
            yield DoctorCheck("registry", False, found, f"set registry.url (`{commands.settings()}`)")
        return
    address = replace(address, timeout=min(address.timeout, _ASK))
    reached = [check_address(address, url, uses[0].format.subject if uses else _NOBODY_S) for url in address.urls]
    yield from reached
    if any(check.ok for check in reached):
        registry = Registry(address)
        for use in uses:
            yield check_subject(registry, use, registers=settings.registry.register_schemas)


def check_address(address: RegistryAddress, url: str, subject: str) -> DoctorCheck:
    """One address of the registry: it answers the log-in of the settings."""
    began = time.monotonic()
    try:
        Registry(replace(address, urls=(url,))).latest(subject)
    except RecourseError as error:
        return DoctorCheck("registry", False, error.found, error.next_step)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of an answer that is none of a registry's
        found = f"{url} answers, but not as a registry does: {type(error).__name__}: {error}"
        return DoctorCheck("registry", False, found, "correct registry.url; Apicurio's ends with /apis/ccompat/v7")
    return DoctorCheck("registry", True, f"{url} answers in {(time.monotonic() - began) * 1000:.0f} ms")


def check_subject(registry: Registry, use: _Use, *, registers: bool) -> DoctorCheck:
    """The subject of a topic: its newest version is readable by the declared schema, or the declared one is there."""
    name, what = f"subject {use.format.subject}", f"of topic {use.topic}, which stream {use.stream}"
    declared = use.format.format
    try:
        if use.written:
            known = registry.look_up(use.format.subject, declared.registered)
            if known is not None:
                return DoctorCheck(name, True, f"{what} writes, has the declared schema with id {known}")
            found = f"{what} writes, does not have the declared schema"
            if registers:
                return DoctorCheck(name, True, f"{found}; the stream's start registers it")
            return DoctorCheck(
                name, False, found, "register the schema, or let streams do so: registry.register_schemas"
            )
        newest = registry.latest(use.format.subject)
        if newest is None:
            found = f"{what} reads, is not in the registry: its producer has written nothing yet, or names it otherwise"
            return DoctorCheck(name, None, found, f"look for its name, and declare it: {_declared(declared)}")
        reader = declared.reader_of(newest, declared.schema.fieldNames())
    except RecourseError as error:
        return DoctorCheck(name, False, error.found, error.next_step)
    if isinstance(reader, Refusal):
        found = f"{what} reads: the newest version does not fit the declared schema: {reader.detail}"
        return DoctorCheck(name, False, found, f"compare both: {commands.schema(use.format.subject)}")
    return DoctorCheck(name, True, f"{what} reads: its newest version fits the declared schema")


def _declared(value: object) -> str:
    return f"{type(value).__name__}(..., subject='...')"


def _uses(settings: Settings) -> Sequence[_Use]:
    """The uses of subjects, in the order of streams; none if the streams cannot be loaded."""
    try:
        streams = Topology.load(settings.flows).streams.values()
    except RecourseError:  # another line of the doctor says so
        return ()
    schemas = StoredSchemas.of_settings(settings)
    uses: list[_Use] = []
    for stream in streams:
        topics: list[tuple[KafkaTopic, bool]] = [(topic, False) for topic in stream.topics]
        topics += [(sink.topic, True) for sink in stream.topic_sinks.values()]
        for topic, written in topics:
            if (registered := _registered(topic.bound(schemas).value)) is not None:
                uses.append(_Use(stream.name, topic.name, registered, written))
    return uses


def _registered(value: Any) -> Registered | None:
    """The format whose records name schemas: the topic's own, or one in its envelope."""
    while value is not None and not isinstance(value, Registered):
        value = getattr(value, "value", None)
    return value if value is not None and value.format.ids != "none" else None
