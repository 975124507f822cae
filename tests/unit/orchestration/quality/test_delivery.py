"""Alerts to a webhook and by e-mail: what arrives, what counts as a failure, and that no secret is told."""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
from dataclasses import replace
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

from orchestration.quality import alerts
from orchestration.quality.alerts import Failure, beat, mail, payload, post, receivers
from orchestration.quality.transitions import Transition
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import QualitySettings
from tests.support.receivers import mail_server, webhook

SECRET = "s3cret"
RED = Transition(
    "a:1",
    "health",
    "orders",
    "orders",
    "failed",
    "passed",
    "it is dead",
    1_000_000.0,
    "r1",
    "recourse streams status orders",
)
GREEN = Transition("b:2", "rows", "stock", "stock", "passed", "failed", "all is well", 1_000_001.0, "")


def settings(**values: Any) -> Settings:
    return Settings(home=Path("/shop"), quality=QualitySettings(**values))


def test_the_webhook_gets_all_changes_in_one_request() -> None:
    with webhook() as receiver:
        assert post(settings(webhook=receiver.url, ui_url="http://ui:3000/"), [RED, GREEN]) is None
    (body,) = receiver.bodies
    assert body["text"].splitlines() == [
        "[critical] orders: check health is red: it is dead",
        "next: recourse streams status orders",
        "http://ui:3000/runs/r1",
        "[info] stock: check rows is green again: all is well",
        "http://ui:3000/assets/stock?view=checks&checkDetail=rows",
        f"host {socket.gethostname()}, home /shop",
    ]
    assert (body["host"], body["home"]) == (socket.gethostname(), "/shop")
    first = body["alerts"][0]
    assert (first["severity"], first["command"]) == ("critical", "recourse streams status orders")
    assert (first["link"], first["host"], first["home"]) == ("http://ui:3000/runs/r1", socket.gethostname(), "/shop")
    assert (first["id"], first["state"], first["before"], first["colour"]) == ("a:1", "failed", "passed", "red")
    assert (first["table"], first["stream"], first["check"], first["run"]) == ("orders", "orders", "health", "r1")
    assert first["time"] == "1970-01-12T13:46:40+00:00"
    assert receiver.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("host", ["discord.com", "discordapp.com"])
def test_a_webhook_of_discord_gets_content_that_it_takes(host: str) -> None:
    discord = settings(webhook=f"https://{host}/api/webhooks/1/{SECRET}")
    assert payload(discord, [RED, GREEN]) == {"content": payload(settings(), [RED, GREEN])["text"]}
    (content,) = payload(discord, [replace(RED, text="x" * 3000)]).values()
    assert len(content) == 2000
    assert "text" in payload(settings(webhook=f"https://hooks.example.com/{host}"), [RED])


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404, 429, 500, 503])
def test_any_other_answer_is_a_failure_and_a_redirect_is_not_followed(status: int) -> None:
    with webhook(status=status) as receiver:
        failure = post(settings(webhook=receiver.url), [RED])
    assert failure == Failure(f"the webhook answered {status}", refused=status == 400)
    assert receiver.paths == ["/services/T000/s3cret"]


def test_a_webhook_that_is_away_hangs_or_is_no_url_is_a_failure_that_does_not_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alerts, "TIMEOUT", 0.2)
    with webhook() as receiver:
        gone = receiver.url
    released = threading.Event()
    with webhook(hangs=released) as receiver:
        slow = post(settings(webhook=receiver.url), [RED])
        released.set()
    failures = [
        slow,
        post(settings(webhook=gone), [RED]),
        post(settings(webhook=f"http://host:port{SECRET}/x"), [RED]),
        post(settings(webhook=f"http://no such host/{SECRET}"), [RED]),
        post(settings(webhook=f"http://{SECRET}.invalid/"), [RED]),
        post(settings(webhook=f"http://127.0.0.1\r\n{SECRET}/"), [RED]),
    ]
    assert all(failures)
    texts = [failure.text for failure in failures if failure is not None]
    assert not [text for text in texts if SECRET in text or "host" in text or "127.0.0.1" in text]


def test_the_e_mail_says_all_changes_and_has_the_same_id_when_it_is_sent_again() -> None:
    with mail_server() as receiver:
        values = settings(email_to=["a@b.example", "c@d.example"], smtp_port=receiver.port)
        assert [mail(values, [RED, GREEN]) for _ in range(2)] == [None, None]
    assert receiver.to[:2] == ["a@b.example", "c@d.example"]
    first, again = (message_from_string(text) for text in receiver.messages)
    assert first["Subject"] == f"orders: check health is red, and 1 more ({socket.gethostname()})"
    assert first["From"] == "recourse@localhost"
    assert first["Message-ID"] == again["Message-ID"]
    body = str(first.get_payload())
    for text in (
        "it is dead",
        "run r1",
        "next: recourse streams status orders",
        "home /shop",
        "stock: check rows is green again",
    ):
        assert text in body


def test_a_mail_server_that_is_away_or_refuses_every_address_is_a_failure_and_one_of_two_is_not() -> None:
    with mail_server(refused=frozenset({"a@b.example"})) as receiver:
        one = settings(email_to=["a@b.example"], smtp_port=receiver.port)
        two = settings(email_to=["a@b.example", "c@d.example"], smtp_port=receiver.port)
        assert "SMTPRecipientsRefused" in text_of(mail(one, [RED]))
        assert mail(two, [RED]) is None
    assert "did not take it" in text_of(mail(two, [RED]))
    assert "did not take it" in text_of(mail(settings(email_to=["a\n@b"], smtp_port=receiver.port), [RED]))


def text_of(failure: Failure | None) -> str:
    assert failure is not None
    return failure.text


def test_receivers_are_those_that_the_settings_name_and_yellow_does_not_mail() -> None:
    assert receivers(QualitySettings()) == {}
    both = QualitySettings(webhook="http://x", email_to=["a@b"])  # type: ignore[arg-type]
    assert receivers(both) == {"webhook": "warning", "e-mail": "failed"}
    other = both.model_copy(update={"webhook_severity": "critical", "email_severity": "warning"})
    assert receivers(other) == {"webhook": "failed", "e-mail": "warning"}


def test_the_mail_server_is_logged_in_to_over_an_encrypted_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []

    class Server:
        def __init__(self, host: str, port: int, **options: Any) -> None:
            did.append((type(self).__name__, host, port))

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            did.append("end")

        def starttls(self, context: ssl.SSLContext) -> None:
            did.append(("starttls", context.check_hostname))

        def login(self, user: str, password: str) -> None:
            did.append((user, password))

        def send_message(self, message: object) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(smtplib, "SMTP", type("SMTP", (Server,), {}))
    monkeypatch.setattr(smtplib, "SMTP_SSL", type("SMTP_SSL", (Server,), {}))
    common = {"email_to": ["a@b"], "smtp_host": "relay", "smtp_user": "me", "smtp_password": SECRET}
    assert mail(settings(**common, smtp_port=587, smtp_security="starttls"), [RED]) is None
    assert mail(settings(**common, smtp_port=465, smtp_security="tls"), [RED]) is None
    assert did == [
        ("SMTP", "relay", 587), ("starttls", True), ("me", SECRET), "end",
        ("SMTP_SSL", "relay", 465), ("me", SECRET), "end",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="smtp_security"):
        settings(**common)


def test_the_heartbeat_is_a_call_of_its_url_and_a_failure_does_not_name_it() -> None:
    assert beat(settings()) is None
    with webhook() as receiver:
        assert beat(settings(heartbeat_url=receiver.url)) is None
        assert receiver.paths == ["/services/T000/s3cret"]
        receiver.status = 500
        assert beat(settings(heartbeat_url=receiver.url)) == Failure("the heartbeat's receiver answered 500")
    assert SECRET not in text_of(beat(settings(heartbeat_url=f"ftp://{SECRET}")))
