"""The schemas that streams have used, in a folder beside the state; a registry is asked for the others.

    <state>/_schemas/id-7.json             the registry's schema 7
    <state>/_schemas/guid-<uuid>.json      a schema by its UUID
    <state>/_schemas/subject-<hash>.json   the id of a schema that a stream writes
    <state>/_schemas/id-9.unknown.json     since when it is known that the registry does not have schema 9

A schema is in the folder before a record is read by it, so replays need no registry. That a schema is unknown for too
long is written down as well: from then on its records are dead letters, however often a range is read.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.declare.format import Refusal, RegisteredSchema
from streaming_jobs.errors import ConfigurationError, RecourseError, SchemaUnavailable, setup_error
from streaming_jobs.registry.client import Registry, RegistryAddress
from streaming_jobs.storage.files import write_json
from streaming_jobs.storage.locations import Location, StorePath, at, made_folder
from streaming_jobs.text.durations import format_duration

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings


@dataclass(frozen=True)
class StoredSchemas:
    """The schemas of a registry, kept in a folder; `registers`: also those that streams write."""

    folder: Location
    address: RegistryAddress
    unknown_for: timedelta = timedelta(0)
    registers: bool = False

    @classmethod
    def of_settings(cls, settings: Settings) -> StoredSchemas:
        own = settings.registry
        address = RegistryAddress.of(own)
        return cls(settings.schemas, address, own.unknown_for, own.register_schemas)

    def values(self) -> dict[str, Any]:
        """As JSON, secrets included."""
        folder, options = str(self.folder), getattr(self.folder, "options", None)
        seconds = self.unknown_for.total_seconds()
        place = {"folder": folder, "options": None if options is None else dict(options)}
        return {**place, "address": self.address.values(), "unknown_for": seconds, "registers": self.registers}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> StoredSchemas:
        folder, options = values["folder"], values["options"]
        address = values["address"]
        return cls(
            Path(folder) if options is None else at(folder, options),
            RegistryAddress(**{**address, "urls": tuple(address["urls"])}),
            timedelta(seconds=values["unknown_for"]),
            values["registers"],
        )

    @cached_property
    def _registry(self) -> Registry:
        return Registry(self.address)

    def of(self, prefixes: Sequence[bytes]) -> Mapping[bytes, RegisteredSchema | Refusal]:
        """By prefix the schema, or a refusal; raises SchemaUnavailable after all of them have been looked up."""
        known: dict[bytes, RegisteredSchema | Refusal] = {}
        awaited: list[str] = []
        for prefix in prefixes:
            name = name_of(prefix)
            found = self._stored(name) or self._fetched(prefix, name)
            if found is None:
                awaited.append(name)
            else:
                known[prefix] = found
        if awaited:
            raise SchemaUnavailable(
                f"the registry does not know {', '.join(awaited[:5])}, which records name"
                + (f", and {len(awaited) - 5} more" if len(awaited) > 5 else ""),
                f"check that the producer uses this registry; after {format_duration(self.unknown_for)} the records "
                "are dead letters (registry.unknown_for)",
            )
        return known

    def prefix(self, subject: str, schema: RegisteredSchema) -> bytes:
        """The prefix of values that are written by this schema, which has to be one of the subject."""
        digest = hashlib.sha256(json.dumps([subject, asdict(schema)]).encode()).hexdigest()[:32]
        if (stored := self._read(f"subject-{digest}")) is not None:
            return _prefix(stored["id"])
        number = self._registry.look_up(subject, schema)
        if number is None and self.registers:
            number = self._registry.register(subject, schema)
        if number is None:
            raise ConfigurationError(
                f"the registry has no schema of subject {subject} that is the declared one",
                "register the schema, or let streams do so: registry.register_schemas",
            )
        self._write(f"id-{number}", asdict(schema))
        self._write(f"subject-{digest}", {"subject": subject, "id": number})
        return _prefix(number)

    def _stored(self, name: str) -> RegisteredSchema | Refusal | None:
        if (stored := self._read(name)) is None:
            return None
        if (unknown := stored.get("unknown")) is not None:
            return Refusal("unknown_schema", str(unknown))
        return RegisteredSchema(stored["kind"], stored["text"], stored["references"])

    def _fetched(self, prefix: bytes, name: str) -> RegisteredSchema | Refusal | None:
        """The registry's answer, stored; None if the registry may yet get to know the schema."""
        number = prefix[1:]
        by_number = len(number) == 4
        fetched = (
            self._registry.by_id(int.from_bytes(number, "big"))
            if by_number
            else self._registry.by_guid(str(uuid.UUID(bytes=number)))
        )
        if fetched is not None:
            self._write(name, asdict(fetched))
            return fetched
        now, mark = time.time(), f"{name}.unknown"
        since = (self._read(mark) or {}).get("since", now)
        if since == now:
            self._write(mark, {"since": since})
        if now - since < self.unknown_for.total_seconds():
            return None
        words = f"the registry does not know schema {name}, after {format_duration(self.unknown_for)}"
        self._write(name, {"unknown": words, "since": since})
        return Refusal("unknown_schema", words)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with self._reached():
                stored = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return stored if isinstance(stored, dict) else None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        with self._reached():
            place = made_folder(self.folder) / f"{name}.json"
            if isinstance(place, StorePath):
                place.write_bytes(json.dumps(content).encode())
            else:
                write_json(place, content)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Errors of the folder's disk as those of a session: else they would be taken for a fault of the format."""
        try:
            yield
        except (RecourseError, FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise setup_error(error, self.folder) or SchemaUnavailable(
                f"the stored schemas in {self.folder} cannot be reached: {error.strerror or error}",
                "check the disk of the folder (registry.schemas_dir); nothing is lost, a later attempt continues",
            ) from error


def name_of(prefix: bytes) -> str:
    """The name of a schema's file: `id-7`, or `guid-` and a UUID."""
    number = prefix[1:]
    return f"id-{int.from_bytes(number, 'big')}" if len(number) == 4 else f"guid-{uuid.UUID(bytes=number)}"


def _prefix(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big")
