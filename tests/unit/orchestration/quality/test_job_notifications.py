"""Notifications of the jobs of a bundle: which events are told, to whom, once, and again after a failed delivery."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from pydantic import SecretStr

from orchestration.bundle.job import Job, Notification, Task
from orchestration.event_table import synchronise
from orchestration.quality import job_notifications
from orchestration.quality.alerts import DeliveryFailure
from orchestration.quality.job_notifications import JobNotifications, Told, job_sensors, send
from orchestration.quality.services import named
from orchestration.quality.transitions import Transition
from orchestration.sessions.ownership import LOCATION_TAG, location_id
from streaming_jobs.settings import Settings

TOLD = (Notification("on_failure", ("a@x.org", "b@x.org"), webhook=True), Notification("on_start", (), webhook=True))
SESSION = Task("session", "recourse-streams", "recourse-session", ())
JOB = Job("orders", "[dev] orders", "", {}, (), None, 0, (SESSION,), Path("x.yml"), notifications=TOLD)


@dg.job(name="orders")
def orders() -> None:
    @dg.op
    def nothing() -> None: ...

    nothing()


class Ticks:
    """Ticks of the sensor; `sent` has what each receiver got."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self.settings, self.instance = settings, instance
        self.down = ""
        self.sent: list[tuple[str, str]] = []
        self.told = Told(time.time() - 60)

    def send(self, receiver: str, messages: Sequence[Transition]) -> DeliveryFailure | None:
        if receiver == self.down:
            return DeliveryFailure("is down")
        self.sent += [(receiver, message.headline) for message in messages]
        return None

    def run(self, status: dg.DagsterRunStatus, *, ours: bool = True) -> str:
        tags = {LOCATION_TAG: location_id(self.settings) if ours else "other"}
        run = self.instance.create_run_for_job(orders, tags=tags)
        self.instance.report_dagster_event(_event("PIPELINE_START", run), run.run_id)
        if status is dg.DagsterRunStatus.FAILURE:
            self.instance.report_run_failed(run)
        elif status is dg.DagsterRunStatus.CANCELED:
            self.instance.report_run_canceled(run)
        elif status is dg.DagsterRunStatus.SUCCESS:
            self.instance.report_dagster_event(_event("PIPELINE_SUCCESS", run), run.run_id)
        return run.run_id[:8]

    def tick(self, now: float | None = None) -> str:
        self.told, words = JobNotifications([JOB], self.settings, self.send).look(
            self.instance, Told.of_cursor(self.told.cursor(), 0), now or time.time(), time.monotonic() + 60
        )
        return words


def _event(kind: str, run: dg.DagsterRun) -> dg.DagsterEvent:
    return dg.DagsterEvent(event_type_value=kind, job_name=run.job_name)


@pytest.fixture
def ticks(tmp_path: Path) -> Iterator[Ticks]:
    settings = Settings(home=tmp_path)
    settings = settings.model_copy(
        update={"quality": settings.quality.model_copy(update={"webhook": SecretStr("https://x.org/hook")})}
    )
    with dg.DagsterInstance.ephemeral() as instance:
        yield Ticks(settings, instance)


MAIL = "a@x.org,b@x.org"


def test_a_failed_run_is_told_once_to_all_receivers_of_its_job(ticks: Ticks) -> None:
    run = ticks.run(dg.DagsterRunStatus.FAILURE)
    ticks.tick()
    began, failed = f"job [dev] orders: run {run} began", f"job [dev] orders: run {run} failed"
    assert sorted(ticks.sent) == [(MAIL, failed), ("webhook", began), ("webhook", failed)]
    assert ticks.tick() == "nothing to tell"
    assert len(ticks.sent) == 3
    assert synchronise(ticks.settings, []) == 2, "both are in the table of events"


def test_what_the_job_does_not_ask_for_is_not_told(ticks: Ticks) -> None:
    for status in (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.CANCELED):
        ticks.run(status)
    ticks.run(dg.DagsterRunStatus.FAILURE, ours=False)
    ticks.tick()
    assert [text.split(" ")[-1] for _, text in ticks.sent] == ["began"]


def test_what_could_not_be_delivered_is_told_later(ticks: Ticks) -> None:
    run, ticks.down = ticks.run(dg.DagsterRunStatus.FAILURE), MAIL
    assert "is down; 0 sent, 1 wait" in ticks.tick()
    ticks.down = ""
    assert "1 wait" in ticks.tick()
    ticks.tick(time.time() + 60)
    assert ticks.sent[-1] == (MAIL, f"job [dev] orders: run {run} failed")


def test_runs_before_the_first_tick_are_not_told(ticks: Ticks) -> None:
    ticks.run(dg.DagsterRunStatus.FAILURE)
    ticks.told = Told.of_cursor("not json", time.time() + 1)
    assert ticks.tick() == "nothing to tell"


def test_without_a_webhook_only_addresses_are_told(ticks: Ticks, tmp_path: Path) -> None:
    ticks.settings = Settings(home=tmp_path)
    ticks.run(dg.DagsterRunStatus.FAILURE)
    ticks.tick()
    assert [receiver for receiver, _ in ticks.sent] == [MAIL]


def test_addresses_of_a_job_replace_those_of_the_settings(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []
    monkeypatch.setitem(job_notifications.SENDERS, "e-mail", lambda settings, _: got.append(settings.quality.email_to))
    monkeypatch.setitem(job_notifications.SENDERS, "webhook", lambda *_: got.append(["webhook"]))
    send(ticks.settings, MAIL, [])
    send(ticks.settings, "webhook", [])
    assert got == [["a@x.org", "b@x.org"], ["webhook"]]
    assert job_sensors([], ticks.settings) == []
    assert [sensor.name for sensor in job_sensors([JOB], ticks.settings)] == ["job_notifications"]


def test_a_busy_job_does_not_make_a_quiet_one_be_told_again(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_notifications, "_KEPT", 4)
    ticks.run(dg.DagsterRunStatus.FAILURE)
    ticks.tick()
    before = len(ticks.sent)
    busy = replace(JOB, key="busy")
    events = {**ticks.told.events, "busy": tuple(f"{number}:on_start" for number in range(4))}
    ticks.told = replace(ticks.told, events=events)
    notifications = JobNotifications([busy, JOB], ticks.settings, ticks.send)
    ticks.told, words = notifications.look(ticks.instance, ticks.told, time.time(), time.monotonic() + 60)
    assert words == "nothing to tell" and len(ticks.sent) == before
    assert len(ticks.told.events["busy"]) == 4 and len(ticks.told.events["orders"]) == 2


def services(ticks: Ticks, *urls: str) -> list[str]:
    """Let the settings name these services; their names."""
    quality = ticks.settings.quality.model_copy(update={"services": [SecretStr(url) for url in urls]})
    ticks.settings = ticks.settings.model_copy(update={"quality": quality})
    return list(named(quality.services))


def test_a_service_with_a_new_token_gets_what_waited_for_the_old_one(ticks: Ticks) -> None:
    (old,) = services(ticks, "slack://A/B/old")
    run, ticks.down = ticks.run(dg.DagsterRunStatus.FAILURE), old
    ticks.tick()
    (new,) = services(ticks, "slack://A/B/new")
    ticks.tick()
    assert [headline for receiver, headline in ticks.sent if receiver == new] == [
        f"job [dev] orders: run {run} began",
        f"job [dev] orders: run {run} failed",
    ]
    assert ticks.told.receivers.keys() == {new}


def test_what_waits_for_a_service_that_is_gone_is_not_sent_to_one_that_had_it(ticks: Ticks) -> None:
    well, down = services(ticks, "slack://A/B/well", "slack://A/B/down")
    ticks.run(dg.DagsterRunStatus.FAILURE)
    ticks.down = down
    ticks.tick()
    before = list(ticks.sent)
    services(ticks, "slack://A/B/well")
    assert ticks.tick() == "nothing to tell" and ticks.sent == before
    assert ticks.told.receivers.keys() == {well}
