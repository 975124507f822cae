"""Receivers of alerts on loopback ports: an HTTP server and a small SMTP server, each remembering what it got."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Webhook:
    """A webhook; `status` is what it answers, `hangs` keeps it from answering, and `slow` until it is set.

    It answers 413 to what is longer than `longest`, and 400 to what has the text "unreadable".
    """

    port: int = 0
    status: int = 200
    hangs: threading.Event | None = None
    slow: threading.Event | None = None
    longest: int = 1_000_000
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/T000/s3cret"

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return [alert for body in self.bodies for alert in body.get("alerts", ())]


@contextmanager
def webhook(**options: Any) -> Iterator[Webhook]:
    """A webhook until the end of the block."""
    receiver = Webhook(**options)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if receiver.hangs is not None:
                receiver.hangs.wait(20)
                return
            if receiver.slow is not None:
                receiver.slow.wait(20)
            receiver.paths.append(self.path)
            status = 413 if len(body) > receiver.longest else 400 if b"unreadable" in body else receiver.status
            if status == 200:
                receiver.bodies.append(json.loads(body or "{}"))
                receiver.headers.append(dict(self.headers))
            self.send_response(status)
            if receiver.status in (301, 302, 307):
                self.send_header("Location", f"http://127.0.0.1:{receiver.port}/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", receiver.port), Handler) as server:
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@dataclass
class MailServer:
    """An SMTP server; addresses in `refused` are unknown to it, and each takes `seconds`."""

    port: int = 0
    refused: frozenset[str] = frozenset()
    seconds: float = 0.0
    to: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


@contextmanager
def mail_server(**options: Any) -> Iterator[MailServer]:
    """An SMTP server until the end of the block."""
    receiver = MailServer(**options)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.say("220 here")
            while line := self.rfile.readline().decode().strip():
                word = line[:4].upper()
                if word == "RCPT":
                    time.sleep(receiver.seconds)
                    address = line.partition("<")[2].partition(">")[0]
                    if address in receiver.refused:
                        self.say("550 unknown")
                        continue
                    receiver.to.append(address)
                elif word == "DATA":
                    self.say("354 go on")
                    lines: list[str] = []
                    while (text := self.rfile.readline().decode()) not in (".\r\n", ""):
                        lines.append(text)
                    receiver.messages.append("".join(lines))
                elif word == "QUIT":
                    self.say("221 bye")
                    return
                self.say("250 ok")

        def say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", receiver.port), Handler) as server:
        server.daemon_threads = True
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
