"""The requests to a schema registry with the interface of Confluent's, such as Apicurio's or Karapace's."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote

from streaming_jobs.declare.format import RegisteredSchema
from streaming_jobs.errors import ConfigurationError, SchemaUnavailable
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.settings import RegistrySettings

_UNKNOWN = {40401, 40402, 40403}
"""Subject, version or schema not found; a 404 of another kind comes from something that is no registry."""
_JSON = "application/vnd.schemaregistry.v1+json"
_MOST_BYTES = 8 << 20
"""Of an answer."""


@dataclass(frozen=True)
class RegistryAddress:
    """Where the registry is, and how to log in; holds secrets, which `repr` leaves out. Seconds."""

    urls: tuple[str, ...]
    timeout: float
    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    ca: str = ""
    certificate: str = ""

    @classmethod
    def of(cls, settings: RegistrySettings) -> RegistryAddress:
        return cls(
            tuple(settings.url),
            settings.timeout.total_seconds(),
            settings.username,
            settings.password.get_secret_value(),
            settings.token.get_secret_value(),
            str(settings.ssl_ca_location or ""),
            str(settings.ssl_certificate_location or ""),
        )

    def values(self) -> dict[str, Any]:
        """As JSON, secrets included; `RegistryAddress(**values)` reads it."""
        return asdict(self)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could carry the log-in to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Registry:
    """The registry at an address. Its methods raise SchemaUnavailable if it does not answer, and ConfigurationError.

    None as an answer: the registry does not have it.
    """

    def __init__(self, address: RegistryAddress) -> None:
        self._address = address

    def by_id(self, number: int) -> RegisteredSchema | None:
        return self._schema(self._ask(f"/schemas/ids/{number}"))

    def by_guid(self, guid: str) -> RegisteredSchema | None:
        return self._schema(self._ask(f"/schemas/guids/{guid}"))

    def latest(self, subject: str) -> RegisteredSchema | None:
        """The newest version of a subject."""
        return self._schema(self._ask(f"/subjects/{quote(subject, safe='')}/versions/latest"))

    def look_up(self, subject: str, schema: RegisteredSchema) -> int | None:
        """The id of the schema, if the subject has it."""
        answer = self._ask(f"/subjects/{quote(subject, safe='')}", _as_request(schema))
        return None if answer is None else int(answer["id"])

    def register(self, subject: str, schema: RegisteredSchema) -> int:
        """The id of the schema, which is a version of the subject from now on."""
        answer = self._ask(f"/subjects/{quote(subject, safe='')}/versions", _as_request(schema))
        if answer is None:
            raise SchemaUnavailable(f"the registry did not take the schema of {subject}", "see its log")
        return int(answer["id"])

    def _schema(self, answer: Any) -> RegisteredSchema | None:
        if answer is None:
            return None
        references: dict[str, str] = {}
        for each in answer.get("references") or ():
            path = f"/subjects/{quote(each['subject'], safe='')}/versions/{int(each['version'])}"
            used = self._schema(self._ask(path))
            if used is None:
                raise SchemaUnavailable(f"the registry lacks {each['name']}, which a schema uses", "register it")
            references |= {**used.references, each["name"]: used.text}
        return RegisteredSchema(answer.get("schemaType") or "AVRO", answer["schema"], references)

    def _ask(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        if not self._address.urls:
            raise ConfigurationError(
                "records name a schema of a registry, and registry.url is empty",
                f"set registry.url (`{commands.settings()}`)",
            )
        reason = ""
        for url in self._address.urls:
            try:
                return self._answer(url, path, content)
            except (URLError, HTTPException, OSError, ValueError, KeyError, TypeError) as error:
                cause = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
                reason = f"{type(cause).__name__}: {cause}"[:300]
                if isinstance(cause, ssl.SSLCertVerificationError):
                    raise ConfigurationError(
                        f"the certificate of the registry at {url} is not valid: {cause.verify_message}",
                        "set registry.ssl_ca_location to the certificate of its authority",
                    ) from error
        raise SchemaUnavailable(
            f"the registry at {', '.join(self._address.urls)} does not answer {path}: {reason}",
            "check that it runs, and registry.url; nothing is lost, a later attempt continues",
        )

    def _answer(self, url: str, path: str, content: Mapping[str, Any] | None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        headers = {"Accept": f"{_JSON}, application/json", **self._log_in}
        if body is not None:
            headers["Content-Type"] = _JSON
        request = urllib.request.Request(url + path, body, headers)  # noqa: S310 - the settings check the scheme
        try:
            with self._opener.open(request, timeout=self._address.timeout) as answer:
                return json.loads(answer.read(_MOST_BYTES))
        except HTTPError as error:
            with error:
                said = _error(error)
            if error.code == 404 and said[0] in _UNKNOWN:
                return None
            if error.code in (401, 403):
                raise ConfigurationError(
                    f"the registry at {url} refused {path}: HTTP {error.code}",
                    "check registry.username and .password, or .token, and their rights",
                ) from error
            if error.code in (409, 422):
                raise ConfigurationError(
                    f"the registry at {url} does not take the schema: {said[1]}",
                    "correct the schema, or the compatibility level of its subject",
                ) from error
            raise

    @cached_property
    def _log_in(self) -> dict[str, str]:
        if self._address.token:
            return {"Authorization": f"Bearer {self._address.token}"}
        if not self._address.username:
            return {}
        pair = f"{self._address.username}:{self._address.password}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        context = ssl.create_default_context(cafile=self._address.ca or None)
        if self._address.certificate:
            context.load_cert_chain(self._address.certificate)
        return urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))


def _as_request(schema: RegisteredSchema) -> dict[str, Any]:
    """Confluent's registry takes a schema without a type as Avro's; older ones know no other form of it."""
    kind = {} if schema.kind == "AVRO" else {"schemaType": schema.kind}
    return {"schema": schema.text, **kind}


def _error(error: HTTPError) -> tuple[int, str]:
    try:
        said = json.loads(error.read(_MOST_BYTES))
        return int(said.get("error_code", 0)), str(said.get("message", ""))[:300]
    except (ValueError, AttributeError, TypeError, OSError):
        return 0, ""
