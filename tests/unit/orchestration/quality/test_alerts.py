"""Alerts from Dagster's storage to real receivers: once for each change, later where a receiver was away."""

from __future__ import annotations

import json
import shutil
import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from email import message_from_string
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import structlog

from orchestration.event_table import synchronise
from orchestration.quality import alerts
from orchestration.quality.alerts import (
    LONGEST_TICK,
    CheckAlerts,
    Courier,
    DeliveryFailure,
    beat,
    deliver_all,
    mail,
    payload,
    post,
    receivers,
)
from orchestration.quality.suites import JOB, OP, run_config, run_tags
from orchestration.quality.transitions import LONGEST_PAUSE, Alerts, Receiver, Transition
from orchestration.sessions.health import CheckVerdict
from orchestration.sessions.ownership import WORKER_TAG, identity
from orchestration.sessions.runs import end_lost
from streaming_jobs.settings import Settings
from streaming_jobs.settings_services import QualitySettings
from tests.support.dagster_homes import planned
from tests.support.receivers import Webhook, mail_server, webhook
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

KEY = dg.AssetCheckKey(dg.AssetKey(["orders"]), "orders_rows")
SECRET = "s3cret"


def home(instance: dg.DagsterInstance) -> Settings:
    """The settings of the instance's home."""
    return Settings(home=Path(instance.root_directory).parent)


class Ticks:
    """The sensor with its cursor, and a clock of our own."""

    def __init__(self, instance: dg.DagsterInstance, **quality: Any) -> None:
        given = {"free_disk_mb": 0, "alert_after": "0 seconds", "email_severity": "warning", **quality}
        settings = Settings.load(
            {"home": home(instance).home, **{f"quality.{name}": value for name, value in given.items()}}
        )
        self.instance, self.alerts, self.cursor = instance, CheckAlerts({KEY: "orders"}, settings), ""
        self.later = 0.0

    def tick(self) -> str:
        """One tick in a new process, as far as the sensor can tell; returns what it says."""
        alerts, words = self.alerts.look(
            self.instance, Alerts.of_cursor(self.cursor), time.time() + self.later, time.monotonic() + LONGEST_TICK
        )
        self.cursor = alerts.cursor()
        return words

    def evaluate(self, passed: bool, text: str = "...", severity: str = "ERROR") -> None:
        verdict = CheckVerdict(passed, dg.AssetCheckSeverity[severity], "", text)
        self.instance.report_runless_asset_event(verdict.evaluation(KEY))


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as hook:
        yield hook


@pytest.fixture
def ticks(instance: dg.DagsterInstance, hook: Webhook) -> Ticks:
    return Ticks(instance, webhook=hook.url)


def states(receiver: Webhook) -> list[str]:
    return [alert["state"] for alert in receiver.alerts]


@pytest.fixture(autouse=True)
def every_level() -> Iterator[None]:
    """Log entries of every level, whatever an earlier test has configured."""
    before = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**before)


def test_red_and_green_again_are_told_once_each_to_log_webhook_and_mail(instance: dg.DagsterInstance) -> None:
    with webhook() as hook, mail_server() as mails, structlog.testing.capture_logs() as logged:
        ticks = Ticks(instance, webhook=hook.url, email_to=["a@b.example"], smtp_port=mails.port)
        ticks.tick()
        ticks.evaluate(True)
        ticks.tick()
        assert not hook.bodies
        for passed in (False, True):
            ticks.evaluate(passed, "2 of 9 rows")
            ticks.tick()
            assert ticks.tick() == "no check has changed"
        assert states(hook) == ["failed", "passed"]
        assert hook.alerts[0]["text"] == "2 of 9 rows"
        assert len(mails.messages) == 2
    changes = [entry for entry in logged if entry["event"] == "check changed"]
    assert [(e["stream"], e["table"], e["check"], e["state"], e["log_level"]) for e in changes] == [
        ("orders", "orders", "orders_rows", "failed", "warning"),
        ("orders", "orders", "orders_rows", "passed", "info"),
    ]
    assert SECRET not in str(logged)
    assert SECRET not in ticks.cursor
    assert synchronise(home(instance), []) == 2, "both are in the table of events"


def test_a_receiver_that_is_down_gets_each_change_later_and_the_other_one_gets_none_twice(
    instance: dg.DagsterInstance,
) -> None:
    with webhook(status=503) as hook, mail_server() as mails, structlog.testing.capture_logs() as logged:
        ticks = Ticks(instance, webhook=hook.url, email_to=["a@b.example"], smtp_port=mails.port)
        ticks.evaluate(False)
        assert "webhook: the webhook answered 503; 0 sent, 1 wait" in ticks.tick()
        ticks.evaluate(True)
        assert "webhook: 2 wait" in ticks.tick(), "the pause after a failure is kept"
        assert len(hook.paths) == 1
        hook.status = 200
        ticks.later = LONGEST_PAUSE
        assert "webhook: 2 sent" in ticks.tick()
        ticks.tick()
        assert states(hook) == ["failed", "passed"]
        assert len(mails.messages) == 2
    assert SECRET not in str(logged)


def test_what_is_never_taken_is_given_up_with_an_error_in_the_log(instance: dg.DagsterInstance) -> None:
    with webhook(status=500) as hook, structlog.testing.capture_logs() as logged:
        ticks = Ticks(instance, webhook=hook.url, remind_every="0 seconds")
        ticks.evaluate(False)
        ticks.tick()
        ticks.later = 25 * 3600.0
        assert ticks.tick() == "no check has changed"
    (given_up,) = (entry for entry in logged if entry["event"] == "alerts given up")
    assert (given_up["log_level"], given_up["count"], given_up["receiver"]) == ("error", 1, "webhook")


def test_a_sender_that_raises_loses_nothing_and_tells_no_secret(instance: dg.DagsterInstance) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError(f"http://x/{SECRET}")

    ticks = Ticks(instance, webhook=f"http://x/{SECRET}")
    ticks.alerts = CheckAlerts({KEY: "orders"}, ticks.alerts.settings, {"webhook": broken})
    ticks.evaluate(False)
    with structlog.testing.capture_logs() as logged:
        assert "sending raised RuntimeError; 0 sent, 1 wait" in ticks.tick()
    assert SECRET not in str(logged)


def test_what_is_too_long_or_unreadable_holds_nothing_else_up(instance: dg.DagsterInstance) -> None:
    with webhook(longest=12_000) as hook, structlog.testing.capture_logs() as logged:
        ticks = Ticks(instance, webhook=hook.url)
        now = time.time()
        waiting = [
            Transition(f"{n}", f"c{n}", "orders", "orders", "failed", "passed", f"{n} " + "x" * 800, now - n, "")
            for n in range(40)
        ]
        waiting[7] = replace(waiting[7], text="unreadable")
        ticks.cursor = Alerts({}, {"webhook": Receiver(tuple(waiting))}).cursor()
        assert "39 sent" in ticks.tick()
    assert [alert["id"] for alert in hook.alerts] == [f"{n}" for n in range(40) if n != 7]
    assert all(len(json.dumps(body)) <= 12_500 for body in hook.bodies)
    (refused,) = (entry for entry in logged if entry["event"] == "alert refused")
    assert (refused["alert"], refused["log_level"]) == ("orders: check c7 is red", "error")


def test_a_tick_calls_the_heartbeat_and_says_what_to_run(instance: dg.DagsterInstance) -> None:
    with webhook() as hook:
        ticks = Ticks(instance, webhook=hook.url, heartbeat_url=f"{hook.url}/alive")
        ticks.evaluate(False)
        sensor = ticks.alerts.sensor()
        sensor(dg.build_sensor_context(instance=instance, cursor=None))
        assert hook.paths[-1].endswith("/alive")
        ticks = Ticks(instance, webhook=hook.url, heartbeat_url="http://127.0.0.1:1/alive")
        told = ticks.alerts.sensor()(dg.build_sensor_context(instance=instance, cursor=None))
    assert [alert["command"] for alert in hook.alerts] == ["recourse quality show orders_rows"] * 2
    assert "the heartbeat's receiver" in str(told), "and it holds no alert up"


def test_a_disk_that_fills_up_is_yellow_then_red_then_green_again(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook() as hook:
        ticks = Ticks(instance, webhook=hook.url, free_disk_mb=1000)
        for free in (1000, 999, 250, 249, 0, 5000):
            usage = shutil._ntuple_diskusage(10**12, 0, free * 2**20)  # type: ignore[attr-defined]
            monkeypatch.setattr("streaming_jobs.state.health.shutil.disk_usage", lambda _, usage=usage: usage)
            ticks.tick()
    assert [(alert["check"], alert["colour"]) for alert in hook.alerts] == [
        ("disk", "yellow"),
        ("disk", "red"),
        ("disk", "green"),
    ]
    assert "249 MB are free" in hook.alerts[1]["text"] and hook.alerts[1]["command"] == "recourse doctor"


def test_a_stream_that_is_stopped_on_purpose_or_recovered_is_no_change(ticks: Ticks, hook: Webhook) -> None:
    error, warn = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    for verdict in (
        CheckVerdict(True, error, "well", "orders is running"),
        CheckVerdict(False, warn, "stopped", "orders is stopped"),
        CheckVerdict(True, error, "well", "orders is running"),
        CheckVerdict(False, error, "red: dead", "orders is dead"),
        CheckVerdict(False, warn, "recovering", "orders is recovering"),
        CheckVerdict(False, warn, "job YAML: line 3", "orders is running; databricks.yml:3"),
        CheckVerdict(True, error, "well", "orders is running"),
    ):
        ticks.instance.report_runless_asset_event(verdict.evaluation(KEY))
        ticks.tick()
    assert states(hook) == ["failed", "warning", "passed"]


def of_suites(instance: dg.DagsterInstance, worker: str = "") -> None:
    """A run of suites that has begun and has not given its outcome."""
    tags = {**run_tags(home(instance)), **({WORKER_TAG: worker} if worker else {})}
    planned(instance, dg.DagsterRunStatus.STARTED, KEY, tags)


def test_while_a_check_is_run_again_its_last_outcome_counts(ticks: Ticks, hook: Webhook) -> None:
    ticks.evaluate(False)
    of_suites(ticks.instance)
    ticks.tick()
    ticks.tick()
    assert states(hook) == ["failed"]


def test_a_check_whose_run_was_killed_is_red(ticks: Ticks, hook: Webhook) -> None:
    ticks.evaluate(True)
    ticks.tick()
    of_suites(ticks.instance, f"{identity().rsplit(':', 2)[0]}:1:1.00")
    assert len(end_lost(ticks.instance, home(ticks.instance))) == 1
    assert end_lost(ticks.instance, home(ticks.instance)) == []
    ticks.tick()
    ticks.tick()
    assert states(hook) == ["failed"]
    newest = ticks.instance.event_log_storage.get_latest_asset_check_execution_by_key([KEY])[KEY]
    assert newest.evaluation is not None
    assert "failed before it had evaluated" in str(newest.evaluation.description)


def test_a_lost_run_that_was_being_canceled_ends_as_canceled(instance: dg.DagsterInstance) -> None:
    of_suites(instance, f"{identity().rsplit(':', 2)[0]}:1:1.00")
    (run,) = instance.get_runs()
    instance.report_run_canceling(run)
    assert len(end_lost(instance, home(instance))) == 1
    assert [run.status for run in instance.get_runs()] == [dg.DagsterRunStatus.CANCELED]


@pytest.mark.parametrize(("suites", "told"), [([], True), (["orders_rows"], True), (["stock_rows"], False)])
def test_a_suite_that_a_run_of_the_job_has_not_evaluated_is_red(
    ticks: Ticks, hook: Webhook, suites: list[str], told: bool
) -> None:
    @dg.op(name=OP, config_schema={"suites": [str]})
    def run_suites() -> None:
        raise MemoryError

    @dg.job(name=JOB, tags=run_tags(ticks.alerts.settings))
    def quality() -> None:
        run_suites()

    failed = quality.execute_in_process(
        run_config(ticks.alerts.settings, suites), instance=ticks.instance, raise_on_error=False
    )
    ticks.tick()
    ticks.tick()
    assert states(hook) == ["failed"] * told
    assert [alert["run"] for alert in hook.alerts] == [failed.run_id] * told


def test_a_run_whose_process_lives_or_is_elsewhere_is_left_alone(instance: dg.DagsterInstance) -> None:
    of_suites(instance, identity())
    of_suites(instance, "elsewhere:1:1.00")
    of_suites(instance)
    assert end_lost(instance, home(instance)) == []


STATUS = "recourse streams status orders"
RED = Transition("a:1", "health", "orders", "orders", "failed", "passed", "it is dead", 1_000_000.0, "r1", STATUS)
GREEN = Transition("b:2", "rows", "stock", "stock", "passed", "failed", "all is well", 1_000_001.0, "")


def settings(**values: Any) -> Settings:
    return Settings(home=Path("/shop"), quality=QualitySettings(**values))


def test_the_webhook_gets_all_changes_in_one_request() -> None:
    with webhook() as receiver:
        assert post(settings(webhook=receiver.url, ui_url="http://ui:3000/"), [RED, GREEN]) is None
    (body,) = receiver.bodies
    assert body["text"].splitlines() == [
        "[critical] orders: check health is red: it is dead",
        f"next: {STATUS}",
        "http://ui:3000/runs/r1",
        "[info] stock: check rows is green again: all is well",
        "http://ui:3000/assets/stock?view=checks&checkDetail=rows",
        f"host {socket.gethostname()}, home /shop",
    ]
    where = {"host": socket.gethostname(), "home": "/shop"}
    assert where.items() <= body.items()
    first = {
        **where,
        "severity": "critical",
        "command": STATUS,
        "link": "http://ui:3000/runs/r1",
        "run": "r1",
        "id": "a:1",
        "state": "failed",
        "before": "passed",
        "colour": "red",
        "time": "1970-01-12T13:46:40+00:00",
        "table": "orders",
        "stream": "orders",
        "check": "health",
    }
    assert first.items() <= body["alerts"][0].items()
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
    assert failure == DeliveryFailure(f"the webhook answered {status}", refused=status == 400)
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


def text_of(failure: DeliveryFailure | None) -> str:
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
    soon = time.monotonic() + 60
    assert beat(settings(), soon) is None
    with webhook() as receiver:
        assert beat(settings(heartbeat_url=receiver.url), soon) is None
        assert receiver.paths == ["/services/T000/s3cret"]
        receiver.status = 500
        assert beat(settings(heartbeat_url=receiver.url), soon) == DeliveryFailure(
            "the heartbeat's receiver answered 500"
        )
    assert SECRET not in text_of(beat(settings(heartbeat_url=f"ftp://{SECRET}"), soon))


def test_a_tick_ends_in_time_however_slow_its_receivers_are(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a mail takes less than the time of a step, and a webhook and a heartbeat answer in drops."""
    monkeypatch.setattr(alerts, "LONGEST_SEND", 0.5)
    monkeypatch.setattr(alerts, "LONGEST_TICK", 2.2)
    with webhook(slow=threading.Event()) as hook, mail_server(seconds=0.3) as mails:
        addresses = [f"a{number}@b.example" for number in range(12)]
        ticks = Ticks(
            instance, webhook=hook.url, email_to=addresses, smtp_port=mails.port, heartbeat_url=f"{hook.url}/alive"
        )
        ticks.evaluate(False)
        sensor, began = ticks.alerts.sensor(), time.monotonic()
        told = str(sensor(dg.build_sensor_context(instance=instance, cursor=None)))
        assert time.monotonic() - began < 3.5
        assert hook.slow is not None
        hook.slow.set()
    assert "webhook: sending has not ended within 0.5 s; 0 sent, 1 wait" in told
    assert "e-mail: sending has not ended within 0.5 s; 0 sent, 1 wait" in told
    assert "the heartbeat's receiver has not answered in time" in told


def test_what_a_receiver_takes_after_the_tick_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "LONGEST_SEND", 0.2)
    with mail_server(seconds=1.5) as mails:
        values = settings(email_to=["a@b.example"], smtp_port=mails.port)
        courier = Courier(lambda _, found: mail(values, found))

        def tick(waiting: dict[str, Receiver], now: float) -> tuple[dict[str, Receiver], list[str]]:
            return deliver_all(waiting, now, courier, time.monotonic() + LONGEST_TICK)

        left, words = tick({"e-mail": Receiver((RED,))}, RED.at)
        assert words == ["e-mail: sending has not ended within 0.2 s; 0 sent, 1 wait"]
        left, words = tick({"e-mail": left["e-mail"].with_new([GREEN])}, RED.at + 900)
        assert words == ["e-mail: an earlier message is still being sent, 2 wait"]
        wait_for(lambda: not courier.is_sending("e-mail"), "the end of the mail")
        mails.seconds = 0.0
        monkeypatch.setattr(alerts, "LONGEST_SEND", 30.0)
        left, words = tick(left, RED.at + 900)
        assert words == ["e-mail: 1 sent"] and not left["e-mail"].waiting
    assert len(mails.messages) == 2


def test_a_send_that_never_ends_holds_its_receiver_up_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "LONGEST_SEND", 0.05)
    monkeypatch.setattr(alerts, "LEFT_BEHIND", 0.3)
    hangs, sends = threading.Event(), []

    def send(_: str, found: object) -> None:
        sends.append(found)
        if len(sends) == 1:
            hangs.wait(20)

    courier = Courier(send)
    left, _ = deliver_all({"webhook": Receiver((RED,))}, RED.at, courier, time.monotonic() + LONGEST_TICK)

    def is_sent() -> bool:
        nonlocal left
        left, _ = deliver_all(left, RED.at + 900, courier, time.monotonic() + LONGEST_TICK)
        return not left["webhook"].waiting

    assert not is_sent()
    wait_for(is_sent, "a second send")
    hangs.set()
    assert len(sends) == 2


def test_what_waits_for_a_receiver_that_is_gone_is_given_up_with_an_error_in_the_log(
    instance: dg.DagsterInstance,
) -> None:
    with structlog.testing.capture_logs() as logged:
        ticks = Ticks(instance)
        ticks.cursor = Alerts({}, {"slack 3fa2c1": Receiver((RED, GREEN))}).cursor()
        assert ticks.tick() == "no check has changed"
    (given_up,) = (entry for entry in logged if entry["event"] == "alerts given up")
    assert (given_up["log_level"], given_up["count"], given_up["receiver"]) == ("error", 2, "slack 3fa2c1")
