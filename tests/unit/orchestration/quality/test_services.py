"""Alerts to services of apprise, on loopback receivers that refuse, are slow, or are down."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from orchestration.quality import services
from orchestration.quality.alerts import LONGEST_TICK, Courier, deliver_all, receivers, tell_service
from orchestration.quality.job_notifications import send
from orchestration.quality.transitions import Alerts, DeliveryFailure, ObservedCheck, Receiver, Transition, by_stream
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.platform import extras
from streaming_jobs.settings import Settings, load
from tests.support.receivers import Webhook, webhook
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

NOW = 1_000_000.0
TOKEN = "s3cret-token"


@pytest.fixture
def service() -> Iterator[Webhook]:
    with webhook() as hook:
        yield hook


@pytest.fixture
def logged() -> Iterator[StringIO]:
    """What the process logs at every level; caplog has the loggers that keep their records to themselves as well."""
    text, root = StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


def url(service: Webhook, path: str = TOKEN, kind: str = "json") -> str:
    return f"{kind}://127.0.0.1:{service.port}/{path}"


def settings(home: Path, *urls: str, **quality: Any) -> Settings:
    return load(
        {"home": home, "quality.services": list(urls), **{f"quality.{k}": v for k, v in quality.items()}}
    ).settings


def change(number: int, text: str = "the stream is dead", state: str = "failed") -> Transition:
    return Transition(
        f"id-{number}",
        f"check-{number}",
        "orders",
        "orders",
        state,
        "passed",
        text,
        NOW,
        "",
        f"run {number}",  # type: ignore[arg-type]
    )


def delivered(
    home: Settings, waiting: dict[str, Receiver], within: float = LONGEST_TICK
) -> tuple[dict[str, Receiver], str]:
    courier = Courier(lambda name, some: tell_service(home, name, some))
    left, words = deliver_all(waiting, NOW, courier, time.monotonic() + within)
    return left, "; ".join(words)


def queued(home: Settings, *changes: Transition) -> dict[str, Receiver]:
    return {name: Receiver(changes) for name in receivers(home.quality)}


def test_a_message_has_what_changed_what_to_run_and_the_kind_of_the_worst(tmp_path: Path, service: Webhook) -> None:
    home = settings(tmp_path, url(service))
    left, words = delivered(home, queued(home, change(1), change(2, "late", "warning")))
    (body,) = service.bodies
    assert body["type"] == "failure" and body["title"].startswith("orders: check check-1 is red, and 1 more (")
    assert "[critical] orders: check check-1 is red: the stream is dead\nnext: run 1" in body["message"]
    assert "[warning] orders: check check-2 is yellow: late" in body["message"]
    assert words.endswith(": 2 sent") and not next(iter(left.values())).waiting


def test_a_refused_message_is_dropped_and_logged_and_blocks_no_other(tmp_path: Path, service: Webhook) -> None:
    home = settings(tmp_path, url(service))
    left, words = delivered(home, queued(home, *map(change, range(3)), change(3, "unreadable"), change(4)))
    told = "\n".join(body["message"] for body in service.bodies)
    assert [f"check-{n} is red" in told for n in range(5)] == [True, True, True, False, True]
    assert words.endswith(": 4 sent") and not next(iter(left.values())).waiting


def test_messages_that_are_too_long_together_are_halved_and_a_long_one_alone_is_cut(
    tmp_path: Path, service: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apprise.plugins.custom_json import NotifyJSON

    monkeypatch.setattr(NotifyJSON, "body_maxlen", 500)
    home = settings(tmp_path, url(service))
    _, words = delivered(home, queued(home, *(change(n, "x" * 100) for n in range(8)), change(8, "y" * 900)))
    assert words.endswith(": 9 sent")
    assert max(len(body["message"]) for body in service.bodies) <= 500
    told = "\n".join(body["message"] for body in service.bodies)
    assert all(f"check-{n} is red" in told for n in range(9))


def test_a_service_that_answers_413_gets_fewer_at_a_time(tmp_path: Path, service: Webhook) -> None:
    service.longest = 900
    home = settings(tmp_path, url(service))
    _, words = delivered(home, queued(home, *(change(n, "x" * 200) for n in range(5))))
    assert words.endswith(": 5 sent") and len(service.bodies) > 1


def test_a_slow_service_ends_at_the_deadline_and_one_that_is_down_waits_while_the_others_get_theirs(
    tmp_path: Path, service: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "TIMEOUT", 1.0)
    services._asset.cache_clear()
    monkeypatch.setattr(services, "_asset", services._asset.__wrapped__)
    with webhook(hangs=threading.Event()) as slow:
        home = settings(
            tmp_path, url(slow, kind="gotify", path="AAAAAAAAAAAAAAA"), "json://127.0.0.1:1/x", url(service)
        )
        begun = time.monotonic()
        left, words = delivered(home, queued(home, change(1)))
        assert time.monotonic() - begun < 10
        assert slow.hangs is not None
        slow.hangs.set()
    waiting = {name.partition(" ")[0] for name, receiver in left.items() if receiver.waiting}
    assert waiting == {"gotify", "json"} and len(service.bodies) == 1
    assert "did not answer within 1 s; 0 sent, 1 wait" in words and "could not be reached; 0 sent, 1 wait" in words
    assert all(receiver.next_try > NOW for receiver in left.values() if receiver.waiting)


def test_services_that_use_a_tick_up_leave_the_others_their_queue(tmp_path: Path, service: Webhook) -> None:
    home = settings(tmp_path, url(service))
    left, words = delivered(home, queued(home, change(1)), within=5.0)
    assert next(iter(left.values())).waiting and words.endswith("1 wait for the next tick") and not service.bodies


def test_no_name_no_failure_and_no_log_shows_the_token(tmp_path: Path, service: Webhook, logged: StringIO) -> None:
    service.status = 500
    home = settings(tmp_path, url(service), f"nonsense://{TOKEN}/x", f"slack://{TOKEN}")
    left, words = delivered(home, queued(home, change(1)))
    shown = f"{words} {left} {logged.getvalue()} {home!r} {home.model_dump_json()}"
    assert "answered 500" in words and words.count("apprise does not know this URL, or it lacks a part") == 2
    assert TOKEN not in shown


def test_a_worker_that_ends_after_its_deadline_logs_no_token_and_the_records_of_others_pass(
    tmp_path: Path, logged: StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "TIMEOUT", 0.5)
    monkeypatch.setattr(services, "_asset", services._asset.__wrapped__)
    with webhook(slow=threading.Event()) as slow:
        home = settings(tmp_path, url(slow))
        _, words = delivered(home, queued(home, change(1)))
        assert "did not answer within 0.5 s" in words and slow.slow is not None
        slow.slow.set()
        wait_for(lambda: bool(slow.bodies), "the late delivery")
    others = logging.getLogger("urllib3.connectionpool")
    others.debug("GET /of-another")
    wait_for(lambda: not _working("apprise"), "the end of the late worker")
    assert TOKEN not in logged.getvalue() and "GET /of-another" in logged.getvalue()
    assert logging.getLogger("apprise").propagate is False


def _working(name: str) -> bool:
    """True while the worker of a service reads its answer."""
    return any(
        name in frame.filename
        for thread in threading.enumerate()
        if thread.ident in sys._current_frames()
        for frame in traceback.extract_stack(sys._current_frames()[thread.ident])
    )


def test_a_delivery_in_one_thread_hides_no_record_of_another(
    tmp_path: Path, service: Webhook, logged: StringIO
) -> None:
    home = settings(tmp_path, url(service))
    delivered(home, queued(home, change(1)))  # the libraries are imported
    service.slow = threading.Event()
    thread = threading.Thread(target=delivered, args=(home, queued(home, change(2))))
    thread.start()
    logging.getLogger("urllib3.connectionpool").debug("GET /of-another")
    service.slow.set()
    thread.join()
    assert len(service.bodies) == 2 and "GET /of-another" in logged.getvalue() and TOKEN not in logged.getvalue()


def test_a_redirect_is_not_followed(tmp_path: Path, service: Webhook) -> None:
    service.status = 307
    home = settings(tmp_path, url(service))
    _, words = delivered(home, queued(home, change(1)))
    assert "answered 307" in words and service.paths == [f"/{TOKEN}"]


def test_without_the_extra_the_failure_names_it(
    tmp_path: Path, service: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(extras.EXTRAS, "alerts", ("no_such_package",))
    home = settings(tmp_path, url(service))
    _, words = delivered(home, queued(home, change(1)))
    assert "quality.services needs recourse-streams[alerts], which is not installed; 0 sent, 1 wait" in words


def test_a_dead_stream_is_one_message_however_many_tables_it_has(tmp_path: Path, service: Webhook) -> None:
    home = settings(tmp_path, url(service))
    seen = [ObservedCheck("health", table, 1, "failed", "orders is dead", NOW, stream="orders") for table in "abc"]
    alerts, _ = Alerts().look(by_stream(seen, "health"), receivers(home.quality), NOW)
    delivered(home, dict(alerts.receivers))
    (body,) = service.bodies
    assert body["title"].startswith("a, b, c: check health is red (") and body["message"].count("[critical]") == 1


def test_severity_and_names_follow_the_settings(tmp_path: Path) -> None:
    home = settings(tmp_path, "json://h/one", "json://h/two", services_severity="critical")
    named = receivers(home.quality)
    assert set(named.values()) == {"failed"} and len(named) == 2
    assert services.named([SecretStr("json://h/one")]).keys() < named.keys(), "the order does not matter"
    with pytest.raises(ConfigurationError, match=r"quality.services .*item 1 is no URL of apprise"):
        settings(tmp_path, "hooks.slack.com/T0/B0")


def test_notifications_of_jobs_reach_services_too(tmp_path: Path, service: Webhook) -> None:
    home = settings(tmp_path, url(service))
    (name,) = services.named(home.quality.services)
    failure: DeliveryFailure | None = send(home, name, [replace(change(1), title="job nightly: run 1 failed")])
    assert failure is None and service.bodies[0]["title"].startswith("job nightly: run 1 failed")


def test_the_name_of_a_service_has_nothing_of_a_password_and_outlives_it() -> None:
    def name(url: str) -> str:
        return next(iter(services.named([SecretStr(url)])))

    mail = "mailtos://ops:{}@smtp.example.com:587?to=a@x.org"
    assert name(mail.format("one")) == name(mail.format("p@ss:2")) != name("mailtos://dev:one@smtp.example.com:587")
    assert name("mailtos://example.com?user=ops&pass=one&to=a") == name("mailtos://example.com?user=ops&pass=2&to=a")
    assert name("slack://A/B/one/#x") != name("slack://A/B/two/#x"), "of such a service the token is the address"
