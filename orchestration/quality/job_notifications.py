"""The sensor that tells of runs which began, succeeded or failed, where their jobs in the bundle say so.

`email_notifications` go through the mail server of the setting `quality.smtp_host`, `webhook_notifications` to the
webhook of `quality.webhook` and the services of `quality.services`: the ids of a bundle's destinations mean nothing
outside of their workspace. An event is told at least once, in the way of `alerts.py`; a run that a person stopped is
not told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial

import dagster as dg
import structlog

from orchestration.bundle.job import Job, Notification
from orchestration.quality import services
from orchestration.quality.alerts import (
    LONGEST_TICK,
    LOOK_EVERY,
    SENDERS,
    Courier,
    deliver_all,
    queues_of,
    tell_service,
)
from orchestration.quality.told_alerts import note_alerts
from orchestration.quality.transitions import DeliveryFailure, Receiver, State, Transition
from orchestration.sessions.names import named
from orchestration.sessions.ownership import LOCATION_TAG, location_id
from streaming_jobs.settings import Settings

log = structlog.get_logger()

WEBHOOK = "webhook"
NEWEST = 10
"""Runs of a job that a tick reads."""
_KEPT = 10 * NEWEST
"""Events of a job that the cursor remembers: more than the runs that a tick reads can have."""
_EVENTS: Mapping[dg.DagsterRunStatus, str] = {
    dg.DagsterRunStatus.STARTED: "on_start",
    dg.DagsterRunStatus.SUCCESS: "on_success",
    dg.DagsterRunStatus.FAILURE: "on_failure",
}
_STATE: Mapping[str, State] = {"on_start": "passed", "on_success": "passed", "on_failure": "failed"}
_WORDS = {"on_start": "began", "on_success": "succeeded", "on_failure": "failed"}

Send = Callable[[str, Sequence[Transition]], DeliveryFailure | None]


@dataclass(frozen=True)
class Told:
    """The sensor's cursor: since when runs count, by job the events that were noticed, and each receiver's queue.

    Services are in it also with nothing waiting, so that a new one can be told from one that was there.
    """

    since: float
    events: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    receivers: Mapping[str, Receiver] = field(default_factory=dict)

    def cursor(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_cursor(cls, text: str | None, now: float) -> Told:
        """From `cursor`; without a readable one, only runs from now on count."""
        try:
            found = json.loads(text or "{}")
            events = {job: tuple(ids) for job, ids in found["events"].items()}
            receivers = {name: Receiver.of(one) for name, one in found["receivers"].items()}
            return cls(float(found["since"]), events, receivers)
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls(now)


@dataclass(frozen=True)
class JobNotifications:
    """The notifications of jobs. `send` delivers messages to a receiver: `webhook`, a service, or addresses."""

    jobs: Sequence[Job]
    settings: Settings
    send: Send

    def sensor(self) -> dg.SensorDefinition:
        @dg.sensor(
            name=named(self.settings.dagster, "job_notifications"),
            minimum_interval_seconds=LOOK_EVERY,
            default_status=dg.DefaultSensorStatus.RUNNING,
            description="Tells of runs that began, succeeded or failed, as email_notifications and "
            "webhook_notifications of their jobs say.",
        )
        def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
            now, deadline = time.time(), time.monotonic() + LONGEST_TICK
            told, words = self.look(context.instance, Told.of_cursor(context.cursor, now), now, deadline)
            return dg.SensorResult(cursor=told.cursor(), skip_reason=words)

        return tick

    @cached_property
    def _courier(self) -> Courier:
        return Courier(self.send)

    def look(self, instance: dg.DagsterInstance, told: Told, now: float, deadline: float) -> tuple[Told, str]:
        """One tick: what happened since the last one, and what could be delivered before the deadline (monotonic)."""
        in_use = list(services.named(self.settings.quality.services))
        others = (name for name in told.receivers if " " not in name)  # the webhook, and addresses
        receivers = queues_of([*in_use, *others], told.receivers)
        events = {job.key: told.events.get(job.key, ()) for job in self.jobs}
        found: list[Transition] = []
        for job in self.jobs:
            for notification, event in self._events(instance, job, told):
                found.append(event)
                events[job.key] = (*events[job.key], event.id)[-_KEPT:]
                log.info("job event", job=job.key, run=event.run, found=event.title)
                for name in _receivers(notification, self.settings):
                    receivers[name] = receivers.get(name, Receiver()).with_new([event])
        note_alerts(self.settings, found)
        left, words = deliver_all(receivers, now, self._courier, deadline)
        kept = {name: receiver for name, receiver in left.items() if receiver.waiting}
        kept |= {name: left.get(name, Receiver()) for name in in_use}
        return Told(told.since, events, kept), "; ".join(words) or "nothing to tell"

    def _events(self, instance: dg.DagsterInstance, job: Job, told: Told) -> Iterator[tuple[Notification, Transition]]:
        by_event = {one.event: one for one in job.notifications}
        name, tags = named(self.settings.dagster, job.key), {LOCATION_TAG: location_id(self.settings)}
        ours = dg.RunsFilter(job_name=name, tags=tags, statuses=list(_EVENTS))
        for record in reversed(instance.get_run_records(ours, limit=NEWEST)):
            run = record.dagster_run
            happened = [("on_start", record.start_time), (_EVENTS[run.status], record.end_time)]
            for event, at in happened:
                id_ = f"{run.run_id}:{event}"
                if (
                    event in by_event
                    and at is not None
                    and at >= told.since
                    and id_ not in told.events.get(job.key, ())
                ):
                    yield by_event[event], _message(job, run, event, at)


def _message(job: Job, run: dg.DagsterRun, event: str, at: float) -> Transition:
    by = run.tags.get("dagster/schedule_name") or run.tags.get("dagster/sensor_name") or "a person"
    return Transition(
        id=f"{run.run_id}:{event}",
        check="run",
        table=f"job {job.key}",
        stream="",
        state=_STATE[event],
        before="unknown",
        text=f"launched by {by}",
        at=at,
        run=run.run_id,
        title=f"job {job.name}: run {run.run_id[:8]} {_WORDS[event]}",
    )


def _receivers(notification: Notification, settings: Settings) -> Iterator[str]:
    if notification.webhook:
        if settings.quality.webhook.get_secret_value():
            yield WEBHOOK
        yield from services.named(settings.quality.services)
    if notification.emails:
        yield ",".join(notification.emails)


def send(settings: Settings, receiver: str, messages: Sequence[Transition]) -> DeliveryFailure | None:
    """Send messages to the webhook, a service, or addresses, by the senders of the checks' alerts."""
    if receiver in services.named(settings.quality.services):
        return tell_service(settings, receiver, messages)
    if receiver == WEBHOOK:
        return SENDERS["webhook"](settings, messages)
    quality = settings.quality.model_copy(update={"email_to": receiver.split(",")})
    return SENDERS["e-mail"](settings.model_copy(update={"quality": quality}), messages)


def job_sensors(jobs: Sequence[Job], settings: Settings) -> list[dg.SensorDefinition]:
    """The sensor for the jobs that have notifications; none without any."""
    noticed = [job for job in jobs if job.notifications]
    return [JobNotifications(noticed, settings, partial(send, settings)).sensor()] if noticed else []
