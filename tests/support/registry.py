"""A schema registry in this process: the requests that Recourse makes, with the answers of Confluent's registry."""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

_UNKNOWN = {"subject": 40401, "version": 40402, "schema": 40403}


@dataclass
class RegistryDouble:
    """Schemas by id, and by subject the ids of its versions.

    `fault` is the HTTP status of every answer, if set; with `faults`, of so many answers.
    """

    schemas: dict[int, dict[str, Any]] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    log_ins: set[str | None] = field(default_factory=set)
    """The headers `Authorization` of the requests."""
    fault: int = 0
    faults: int = 0
    refuses: str = ""
    """The reason for which a schema is not registered."""
    url: str = ""

    def register(self, subject: str, schema: Any, kind: str = "AVRO", references: Any = ()) -> int:
        """The id of the schema, a version of the subject from now on."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        content = {"schema": text, "schemaType": kind, "references": list(references)}
        number = next((known for known, each in self.schemas.items() if each == content), len(self.schemas) + 1)
        self.schemas[number] = content
        versions = self.subjects.setdefault(subject, [])
        if number not in versions:
            versions.append(number)
        return number

    def guid(self, number: int) -> uuid.UUID:
        """The UUID of a schema."""
        return uuid.uuid5(uuid.NAMESPACE_OID, self.schemas[number]["schema"])

    def answer(self, method: str, path: str, content: Any) -> tuple[int, Any]:
        """Status and body."""
        if fault := self.fault:
            self.faults -= 1
            self.fault = 0 if self.faults == 0 else fault
            return fault, {"error_code": fault, "message": "as the test wants it"}
        match [unquote(part) for part in path.strip("/").split("/")], method:
            case ["schemas", "ids", number], "GET":
                found = self.schemas.get(int(number))
            case ["schemas", "guids", guid], "GET":
                found = next((each for known, each in self.schemas.items() if str(self.guid(known)) == guid), None)
            case ["subjects", subject, "versions", version], "GET":
                versions = self.subjects.get(subject, [])
                if not versions:
                    return self._unknown("subject")
                found = self.schemas[versions[-1 if version == "latest" else int(version) - 1]]
            case ["subjects", subject, "versions"], "POST":
                if self.refuses:
                    return 409, {"error_code": 409, "message": self.refuses}
                return 200, {"id": self.register(subject, content["schema"], content.get("schemaType", "AVRO"))}
            case ["subjects", subject], "POST":
                for known in self.subjects.get(subject, ()):
                    if json.loads(self.schemas[known]["schema"]) == json.loads(content["schema"]):
                        return 200, {"id": known, "subject": subject}
                return self._unknown("schema" if subject in self.subjects else "subject")
            case _:
                return 404, "<html>there is nothing here</html>"
        return self._unknown("schema") if found is None else (200, found)

    @staticmethod
    def _unknown(what: str) -> tuple[int, Any]:
        return 404, {"error_code": _UNKNOWN[what], "message": f"{what} not found"}


def basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


@contextmanager
def served(double: RegistryDouble) -> Iterator[RegistryDouble]:
    """The registry at `url` until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, content: Any) -> None:
            double.requests.append(f"{self.command} {self.path}")
            double.log_ins.add(self.headers["Authorization"])
            status, body = double.answer(self.command, self.path, content)
            self.send_response(status)
            if status in (301, 302, 307, 308):
                self.send_header("Location", f"{double.url}/elsewhere")
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    double.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
