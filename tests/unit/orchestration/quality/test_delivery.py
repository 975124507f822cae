"""Alerts to a webhook and by e-mail: what arrives, what counts as a failure, and that no secret is told."""

from __future__ import annotations

import threading
from email import message_from_string
from typing import Any

import pytest

from orchestration.quality import delivery
from orchestration.quality.delivery import mail, post, receivers
from orchestration.quality.transitions import Transition
from streaming_jobs.settings_sections import QualitySettings
from tests.support.receivers import mail_server, webhook

SECRET = "s3cret"
RED = Transition("a:1", "health", "orders", "orders", "failed", "passed", "it is dead", 1_000_000.0, "r1")
GREEN = Transition("b:2", "rows", "stock", "stock", "passed", "failed", "all is well", 1_000_001.0, "")


def settings(**values: Any) -> QualitySettings:
    return QualitySettings(**values)


def test_the_webhook_gets_all_changes_in_one_request() -> None:
    with webhook() as receiver:
        assert post(settings(webhook=receiver.url), [RED, GREEN]) == ""
    (body,) = receiver.bodies
    assert body["text"] == ("orders: check health is red: it is dead\nstock: check rows is green again: all is well")
    first = body["alerts"][0]
    assert (first["id"], first["state"], first["before"], first["colour"]) == ("a:1", "failed", "passed", "red")
    assert (first["table"], first["stream"], first["check"], first["run"]) == ("orders", "orders", "health", "r1")
    assert first["time"] == "1970-01-12T13:46:40+00:00"
    assert receiver.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404, 429, 500, 503])
def test_any_other_answer_is_a_failure_and_a_redirect_is_not_followed(status: int) -> None:
    with webhook(status=status) as receiver:
        failure = post(settings(webhook=receiver.url), [RED])
    assert failure == f"the webhook answered {status}"
    assert receiver.paths == ["/services/T000/s3cret"]


def test_a_webhook_that_is_away_hangs_or_is_no_url_is_a_failure_that_does_not_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT", 0.2)
    with webhook() as receiver:
        gone = receiver.url
    released = threading.Event()
    with webhook(hangs=released) as receiver:
        slow = post(settings(webhook=receiver.url), [RED])
        released.set()
    failures = [
        slow,
        post(settings(webhook=gone), [RED]),
        post(settings(webhook=f"ftp://host/{SECRET}"), [RED]),
        post(settings(webhook=f"http://host:port{SECRET}/x"), [RED]),
        post(settings(webhook=f"http://no such host/{SECRET}"), [RED]),
        post(settings(webhook=f"http://{SECRET}.invalid/"), [RED]),
        post(settings(webhook=f"http://127.0.0.1\r\n{SECRET}/"), [RED]),
    ]
    assert all(failures)
    assert not [text for text in failures if SECRET in text or "host" in text or "127.0.0.1" in text]


def test_the_e_mail_says_all_changes_and_has_the_same_id_when_it_is_sent_again() -> None:
    with mail_server() as receiver:
        values = settings(email_to=["a@b.example", "c@d.example"], smtp_port=receiver.port)
        assert [mail(values, [RED, GREEN]) for _ in range(2)] == ["", ""]
    assert receiver.to[:2] == ["a@b.example", "c@d.example"]
    first, again = (message_from_string(text) for text in receiver.messages)
    assert first["Subject"] == "orders: check health is red, and 1 more"
    assert first["From"] == "recourse@localhost"
    assert first["Message-ID"] == again["Message-ID"]
    body = str(first.get_payload())
    for text in ("it is dead", "run r1", "stock: check rows is green again"):
        assert text in body


def test_a_mail_server_that_is_away_or_refuses_every_address_is_a_failure_and_one_of_two_is_not() -> None:
    with mail_server(refused=frozenset({"a@b.example"})) as receiver:
        one = settings(email_to=["a@b.example"], smtp_port=receiver.port)
        two = settings(email_to=["a@b.example", "c@d.example"], smtp_port=receiver.port)
        assert "SMTPRecipientsRefused" in mail(one, [RED])
        assert mail(two, [RED]) == ""
    assert "did not take it" in mail(two, [RED])
    assert "did not take it" in mail(settings(email_to=["a\n@b"], smtp_port=receiver.port), [RED])


def test_receivers_are_those_that_the_settings_name() -> None:
    assert receivers(settings()) == []
    assert receivers(settings(webhook="http://x", email_to=["a@b"])) == ["webhook", "e-mail"]
