"""An S3 server for tests: moto in a child process, behind a recorder of requests that also makes them fail on demand.

The server of moto checks a condition and writes afterwards; the recorder lets one write through at a time, so that
conditions hold as those of S3 do. It repeats moto's answer to a read until the next write: tables on a store are opened
by thousands of reads of the same objects, which take moto two milliseconds each.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import unquote
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

_CONTROL = "/_control/"
_WRITES = ("PUT", "POST", "DELETE")
_CONDITIONS = ("MATCH", "NONE_MATCH", "MODIFIED_SINCE", "UNMODIFIED_SINCE")
BUCKET = "lake"

Kind = Literal["refused", "unavailable", "denied", "answer lost", "slow", "condition ignored"]
_STATUS = {
    "refused": "412 Precondition Failed",
    "unavailable": "503 Slow Down",
    "denied": "403 Forbidden",
    "answer lost": "503 Slow Down",
}


@dataclass(frozen=True)
class Request:
    """One request as the server saw it; `key` is the object's path with the bucket, `condition` its If- header."""

    method: str
    key: str
    query: str
    condition: str
    status: int


@dataclass
class Fault:
    """What happens to the next `times` requests of a method whose key matches a pattern.

    "answer lost": the server obeys and answers 503. "slow": the server waits `seconds` before it obeys. "condition
    ignored": it writes whatever the condition says, as servers without conditional writes do.
    """

    kind: Kind
    method: str = "PUT"
    key: str = ""
    times: int = 1
    seconds: float = 0.0

    def meets(self, method: str, key: str) -> bool:
        return self.times > 0 and method == self.method and re.search(self.key, key) is not None


@dataclass(frozen=True)
class StoreServer:
    """The running server, with one bucket. Options give `open_store` and deltalake access to it.

    One that is not `recorded` knows neither its requests nor faults.
    """

    endpoint: str
    url: str = f"s3://{BUCKET}"
    options: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = True

    def requests(self) -> list[Request]:
        """The requests since the last `clear`, oldest first."""
        return [Request(**each) for each in self._ask("requests")]

    def clear(self) -> None:
        """Forget requests and faults."""
        if self.recorded:
            self._ask("clear", {})

    def inject(self, fault: Fault) -> None:
        self._ask("fault", asdict(fault))

    def unconditional_writes(self, pattern: str) -> list[str]:
        """The keys that match and were written without a condition: of `_delta_log`, offsets and leases none may be."""
        return [
            each.key
            for each in self.requests()
            if each.method == "PUT" and not each.condition and re.search(pattern, each.key)
        ]

    def _ask(self, what: str, value: object | None = None) -> Any:
        body = None if value is None else json.dumps(value).encode()
        with urlopen(HttpRequest(f"{self.endpoint}{_CONTROL}{what}", body), timeout=5) as answer:
            return json.loads(answer.read())


@contextmanager
def store_server() -> Iterator[StoreServer]:
    """Start the server at a free port of 127.0.0.1; it ends with the block, or with this process."""
    child = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=without_credentials()
    )
    try:
        assert child.stdout is not None
        yield server_at(f"http://127.0.0.1:{int(child.stdout.readline())}")
    finally:
        child.kill()
        child.wait()


def server_at(endpoint: str) -> StoreServer:
    """The server at an address, with the credentials of tests."""
    return StoreServer(
        endpoint,
        options={
            "aws_endpoint": endpoint,
            "aws_region": "us-east-1",
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "allow_http": "true",
            "timeout": "5s",
        },
    )


def without_credentials() -> dict[str, str]:
    """The environment of a server: it is no client of a store."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


Answer = tuple[str, list[tuple[str, str]], list[bytes]]
_OF_A_READ = ("REQUEST_METHOD", "QUERY_STRING", "HTTP_RANGE", *(f"HTTP_IF_{name}" for name in _CONDITIONS))


class Answers:
    """Answers to reads, repeated until a write: of an object until one of its key, of a listing until any.

    Writes come one by one. An answer is not kept if a write began or ended while it was asked for.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: dict[str, dict[tuple[object, ...], Answer]] = {}
        self.borders = 0
        """The number of begins and ends of writes."""

    def of_read(self, environ: Mapping[str, Any], ask: Callable[[], Answer]) -> Answer:
        key, read = environ["PATH_INFO"].strip("/"), tuple(environ.get(name) for name in _OF_A_READ)
        with self.lock:
            known, before = self.kept.get(key, {}).get(read), self.borders
        if known is not None:
            return known
        answer = ask()
        with self.lock:
            if self.borders == before:
                self.kept.setdefault(key, {})[read] = answer
        return answer

    def of_write(self, environ: Mapping[str, Any], ask: Callable[[], Answer]) -> Answer:
        key = environ["PATH_INFO"].strip("/")
        self._border(key)
        try:
            return ask()
        finally:
            self._border(key)

    def _border(self, written: str) -> None:
        """A write without a key may be one of any, such as a deletion of several; a read without one is a listing."""
        with self.lock:
            self.borders += 1
            for key in [key for key in self.kept if key == written or "/" not in key or "/" not in written]:
                del self.kept[key]


class _Recorder:
    """A WSGI application around moto's."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app = app
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock, self.writing = threading.Lock(), threading.Lock()
        self.answers = Answers()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, key = environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"])
        if key.startswith(_CONTROL):
            return self.control(key.removeprefix(_CONTROL), environ, start)
        with self.lock:
            fault = next((each for each in self.faults if each.meets(method, key)), None)
            if fault is not None:
                fault.times -= 1
        if fault is not None and fault.kind == "slow":
            time.sleep(fault.seconds)
        if fault is not None and fault.kind == "condition ignored":
            environ = {
                name: value for name, value in environ.items() if name not in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")
            }
        if fault is None or fault.kind in ("slow", "answer lost", "condition ignored"):
            status, headers, body = self.obeyed(environ, alone=method in _WRITES)
        else:
            _body(environ)
        if fault is not None and fault.kind not in ("slow", "condition ignored"):
            status, headers, body = _STATUS[fault.kind], [("Content-Type", "application/xml")], [b"<Error/>"]
        condition = next(
            (
                f"{name} {environ[each]}"
                for name in ("IF_MATCH", "IF_NONE_MATCH")
                if (each := f"HTTP_{name}") in environ
            ),
            "",
        )
        with self.lock:
            code = int(status.split()[0])
            self.requests.append(Request(method, key.lstrip("/"), environ["QUERY_STRING"], condition, code))
        start(status, headers)
        return body

    def obeyed(self, environ: dict[str, Any], *, alone: bool) -> Answer:
        def ask() -> Answer:
            answer: list[Any] = []
            body = [*self.app(environ, lambda status, headers, _=None: answer.extend((status, headers)))]
            return answer[0], answer[1], body

        if not alone:
            return self.answers.of_read(environ, ask)
        with self.writing:
            return self.answers.of_write(environ, ask)

    def control(self, what: str, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = _body(environ)
        with self.lock:
            if what == "fault":
                self.faults.append(Fault(**json.loads(body)))
            elif what == "clear":
                self.requests.clear()
                self.faults.clear()
            answer = [asdict(each) for each in self.requests] if what == "requests" else None
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]


def _body(environ: dict[str, Any]) -> bytes:
    data: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    return data


def _serve() -> None:
    import logging

    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        """Keeps a connection for further requests, which Werkzeug's handler does not."""

        protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1

        def run_wsgi(self) -> None:
            self.wfile.flush()  # "100 Continue", for a client that waits for it
            environ = self.environ = self.make_environ()
            chunked = "wsgi.input_terminated" in environ
            length = None if chunked else int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
            answer: list[Any] = []
            body = b"".join(recorder(environ, lambda status, headers: answer.extend((status, headers))))
            status, headers = answer
            code, _, words = status.partition(" ")
            self.send_response_only(int(code), words)
            for name, value in headers:
                self.send_header(name, value)
            if not any(name.lower() == "content-length" for name, _ in headers):
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    recorder = _Recorder(create_backend_app("s3"))  # moto alone would look for the service of each request
    server = make_server("127.0.0.1", 0, recorder, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    urlopen(HttpRequest(f"{endpoint}/{BUCKET}", method="PUT")).read()
    urlopen(HttpRequest(f"{endpoint}{_CONTROL}clear", b"{}")).read()
    print(server.server_port, flush=True)
    sys.stdin.read()  # ends with the parent


if __name__ == "__main__":
    _serve()
