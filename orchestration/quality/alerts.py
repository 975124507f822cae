"""The sensor that alerts of checks that turn red, yellow, or green again: in the log, and to receivers.

Receivers are a webhook, addresses of e-mail, and services of apprise (`services.py`).

A change is sent at least once. It is first written into the sensor's cursor and removed when the receiver has taken
it; a receiver that is down gets it later, for a day. If the process ends between a delivery and the storing of the
cursor, the change is sent again, with the same `id` and the same Message-ID. A send that takes longer than the tick has
time for is left to its thread: its end counts in a later tick.

It also reports the outcome of a check whose run failed without one (killed, out of memory): failed, because Dagster
would show such a check as if it had never been executed.

Sending raises nothing, and the text of a failure contains no secret: the whole URL of a webhook is one, since for chat
services its path is the password. Errors of the HTTP library quote the URL, so only the kind of an error is reported.
"""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from email.message import EmailMessage
from functools import cached_property, partial
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.parse import quote, urlsplit

import dagster as dg
import msgspec
import structlog
from dagster._core.storage.asset_check_execution_record import (
    COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES,
    AssetCheckExecutionRecord,
    AssetCheckExecutionRecordStatus,
)

from orchestration.quality import services
from orchestration.quality.rules import RULES
from orchestration.quality.suites import COMMAND, suites_of
from orchestration.quality.told_alerts import note_alerts
from orchestration.quality.transitions import (
    COLOUR,
    RANK,
    Alerts,
    DeliveryFailure,
    ObservedCheck,
    Receiver,
    State,
    Timing,
    Transition,
    by_stream,
    handed_over,
)
from orchestration.sessions.health import HEALTH, NO_ALERT
from orchestration.sessions.names import named, table_key, table_of
from orchestration.sessions.ownership import QUALITY_KIND, job_tags
from orchestration.sessions.verdicts import RUN
from streaming_jobs.settings import Settings
from streaming_jobs.settings_services import QualitySettings
from streaming_jobs.state.health import disk_space
from streaming_jobs.text import commands

log = structlog.get_logger()

TIMEOUT = 5.0
"""Seconds for each step of a delivery: connecting, writing, the answer."""
_DISCORD, _DISCORD_TAKES = ("discord.com", "discordapp.com"), 2000
"""Hosts whose webhooks show the field `content`, and its greatest length in characters."""
LOOK_EVERY = 30
"""Seconds between two ticks."""
LONGEST_DELIVERY = 15.0
"""Seconds after which undelivered messages are left to the next tick."""
LONGEST_SEND = 12.0
"""Seconds that a tick waits for one request, mail or heartbeat, however slowly the other side answers each step."""
LONGEST_TICK = 45.0
"""Seconds that sending may last from the begin of a tick: Dagster gives up on a tick after 60, and loses its cursor."""
LEFT_BEHIND = 600.0
"""Seconds after which a send that has never ended no longer holds its receiver up."""

Sender = Callable[[Settings, Sequence[Transition]], DeliveryFailure | None]
_PLANNED = AssetCheckExecutionRecordStatus.PLANNED
_NEWEST = 5
"""Failed runs of suites that a tick reads."""


@dataclass(frozen=True)
class CheckAlerts:
    """Alerts of the checks; `stream_of` has each check and the stream whose table it is about."""

    stream_of: Mapping[dg.AssetCheckKey, str]
    settings: Settings
    senders: Mapping[str, Sender] = field(default_factory=lambda: dict(SENDERS))

    def sensor(self) -> dg.SensorDefinition:
        @dg.sensor(
            name=named(self.settings.dagster, "check_alerts"),
            minimum_interval_seconds=LOOK_EVERY,
            default_status=dg.DefaultSensorStatus.RUNNING,
            description="Tells of checks that turn red, yellow, or green again: in the log, and to the receivers of "
            "the settings quality.webhook, quality.services and quality.email_to. Calls quality.heartbeat_url.",
        )
        def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
            deadline = time.monotonic() + LONGEST_TICK
            before = Alerts.of_cursor(context.cursor)
            alerts, words = self.look(context.instance, before, time.time(), deadline - LONGEST_SEND)
            if failure := beat(self.settings, deadline):
                log.warning("heartbeat not delivered", found=failure.text)
                words += f"; {failure.text}"
            return dg.SensorResult(cursor=alerts.cursor(), skip_reason=words)

        return tick

    def look(self, instance: dg.DagsterInstance, alerts: Alerts, now: float, deadline: float) -> tuple[Alerts, str]:
        """One tick: find what has changed, log it, send what waits. Returns the new state, and the tick in words.

        Sending ends before the deadline, by the monotonic clock.
        """
        quality = self.settings.quality
        seen = [*by_stream(outcomes(instance, self.stream_of, self.settings), HEALTH), of_disk(self.settings, now)]
        timing = Timing(quality.alert_after.total_seconds(), quality.remind_every.total_seconds())
        alerts = replace(alerts, receivers=queues_of(receivers(quality), alerts.receivers))
        alerts, found = alerts.look(seen, receivers(quality), now, timing)
        for change in found:
            log_change = log.info if change.state == "passed" else log.warning
            log_change(
                "check not mended" if change.reminder else "check changed",
                stream=change.stream,
                table=change.table,
                check=change.check,
                state=change.state,
                before=change.before,
                found=change.text,
                run=change.run or None,
            )
        note_alerts(self.settings, found)
        left, words = deliver_all(alerts.receivers, now, self._courier, deadline)
        words = [change.headline for change in found] + words
        return Alerts(alerts.known, left), "; ".join(words) or "no check has changed"

    @cached_property
    def _courier(self) -> Courier:
        return Courier(self._send)

    def _send(self, name: str, found: Sequence[Transition]) -> DeliveryFailure | None:
        sender = self.senders.get(name)
        return sender(self.settings, found) if sender is not None else tell_service(self.settings, name, found)


@dataclass(frozen=True)
class _Sending:
    """A send that its tick has not seen end."""

    found: Sequence[Transition]
    ended: Future[DeliveryFailure | None]
    begun: float


@dataclass(frozen=True)
class Courier:
    """Sends messages by `send`, in threads, each within `LONGEST_SEND`.

    What is still being sent then is not sent a second time meanwhile, and if it arrives, not again.
    """

    send: Callable[[str, Sequence[Transition]], DeliveryFailure | None]
    _late: dict[str, _Sending] = field(default_factory=dict, init=False)
    """By the receiver; of this process."""

    def __call__(self, name: str, found: Sequence[Transition]) -> DeliveryFailure | None:
        """Send messages; a failure if that does not end in time."""
        sending = _Sending(found, _in_thread(partial(self.send, name, found)), time.monotonic())
        try:
            return sending.ended.result(LONGEST_SEND)
        except TimeoutError:
            self._late[name] = sending
            return DeliveryFailure(f"sending has not ended within {LONGEST_SEND:g} s")

    def is_sending(self, name: str) -> bool:
        """True if a send to the receiver that came to no end in time still runs."""
        late = self._late.get(name)
        return late is not None and not late.ended.done() and time.monotonic() - late.begun < LEFT_BEHIND

    def sent_late(self, name: str) -> Sequence[Transition]:
        """The messages that the receiver has taken after their tick; each is returned once."""
        late = self._late.pop(name, None)
        return late.found if late is not None and late.ended.done() and late.ended.result() is None else ()


def _in_thread(send: Callable[[], DeliveryFailure | None]) -> Future[DeliveryFailure | None]:
    """What a send gives, from a thread that does not keep the process; its exception is a failure."""
    ended: Future[DeliveryFailure | None] = Future()

    def run() -> None:
        try:
            ended.set_result(send())
        except Exception as error:  # noqa: BLE001 - a lost cursor would lose alerts; the text may quote the URL
            ended.set_result(DeliveryFailure(f"sending raised {type(error).__name__}"))

    threading.Thread(target=run, name="alerts", daemon=True).start()
    return ended


def deliver_all(
    receivers: Mapping[str, Receiver], now: float, courier: Courier, deadline: float
) -> tuple[dict[str, Receiver], list[str]]:
    """Send what waits for each receiver, until the deadline; what is left of them, and the deliveries in words."""
    sent = {name: deliver(name, receiver, now, courier, deadline) for name, receiver in receivers.items()}
    left = {name: receiver for name, (receiver, _) in sent.items()}
    return left, [f"{name}: {text}" for name, (_, text) in sent.items() if text]


def queues_of(receivers: Iterable[str], queues: Mapping[str, Receiver]) -> dict[str, Receiver]:
    """The queues of these receivers, also of one with a new URL; what waits for one that is gone is given up."""
    kept, lost = handed_over(queues, receivers)
    for name, receiver in lost.items():
        _give_up(name, receiver.waiting)
    return kept


def _give_up(name: str, waiting: Sequence[Transition]) -> None:
    log.error("alerts given up", receiver=name, count=len(waiting), first=waiting[0].headline)


def deliver(name: str, receiver: Receiver, now: float, courier: Courier, deadline: float) -> tuple[Receiver, str]:
    """Send what waits for a receiver; what is left of it, and the delivery in words (empty: nothing was due).

    A send begins only if it has `LONGEST_SEND` until the deadline.
    """
    if courier.is_sending(name):
        return receiver, f"an earlier message is still being sent, {len(receiver.waiting)} wait"
    if late := courier.sent_late(name):
        receiver = receiver.without(late)
    receiver, given_up = receiver.without_old(now)
    if given_up:
        _give_up(name, given_up)
    if not receiver.is_due(now):
        return receiver, f"{len(receiver.waiting)} wait" if receiver.waiting else ""
    if time.monotonic() + LONGEST_SEND > deadline:
        return receiver, f"{len(receiver.waiting)} wait for the next tick"
    sent, begun = 0, time.monotonic()
    chunk = receiver.chunk()
    until = min(begun + LONGEST_DELIVERY, deadline - LONGEST_SEND)
    while chunk and time.monotonic() < until:
        failure = courier(name, chunk)
        if failure is None:
            sent += len(chunk)
        elif not failure.refused:
            later = receiver.refused(now)
            log.warning(
                "alerts not delivered", receiver=name, found=failure.text, again_in_s=round(later.next_try - now)
            )
            return later, f"{failure.text}; {sent} sent, {len(receiver.waiting)} wait"
        elif len(chunk) > 1:  # too long, or one of them cannot be read
            chunk = chunk[: len(chunk) // 2]
            continue
        else:
            log.error("alert refused", receiver=name, found=failure.text, alert=chunk[0].headline)
        receiver = receiver.without(chunk)
        chunk = receiver.chunk()
    return receiver, f"{sent} sent" + (f", {len(receiver.waiting)} wait" if receiver.waiting else "")


def of_disk(settings: Settings, now: float) -> ObservedCheck:
    """The free space of home, state and tables as an outcome: reported while alerts can still be sent."""
    space = disk_space(settings)
    state: State = {"green": "passed", "yellow": "warning", "red": "failed"}[space.colour]  # type: ignore[assignment]
    return ObservedCheck(
        "disk", str(settings.home), int(now), state, space.text, now, command=commands.doctor(), key="disk"
    )


def outcomes(
    instance: dg.DagsterInstance, stream_of: Mapping[dg.AssetCheckKey, str], settings: Settings
) -> list[ObservedCheck]:
    """The newest outcome of each check that has one; a check that waits or runs has that of its execution before."""
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(stream_of))
    if lost := _lost(instance, list(stream_of), settings, known):
        for key, run in lost.items():
            instance.report_runless_asset_event(_without_outcome(key, run))
        known = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(stream_of))
    failed_runs = _failed(instance, known.values())
    found = []
    for key, newest in known.items():
        if newest.run_id in failed_runs and newest.status is _PLANNED:
            evaluation = _without_outcome(key, newest.run_id)
            instance.report_runless_asset_event(evaluation)
            found.append(_seen(key, newest, evaluation, stream_of[key]))
            continue
        record: Any = newest
        if newest.status is _PLANNED:
            history = instance.event_log_storage.get_asset_check_execution_history(
                key, limit=1, status=COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES
            )
            record = next(iter(history), None)
        if record is not None and record.evaluation is not None and not _without_alert(record.evaluation):
            found.append(_seen(key, record, record.evaluation, stream_of[key]))
    return found


def _seen(
    key: dg.AssetCheckKey, record: AssetCheckExecutionRecord, evaluation: dg.AssetCheckEvaluation, stream: str
) -> ObservedCheck:
    at = record.event.timestamp if record.event is not None else record.create_timestamp
    return ObservedCheck(
        check=key.name,
        table=table_of(key.asset_key),
        id=record.id,
        state=_state(evaluation),
        text=evaluation.description or "",
        at=at,
        run=record.run_id or str(evaluation.metadata[RUN].value if RUN in evaluation.metadata else ""),
        stream=stream,
        command=_command(key, evaluation, stream),
    )


def _command(key: dg.AssetCheckKey, evaluation: dg.AssetCheckEvaluation, stream: str) -> str:
    """What to run next: the plan that a suite offers, else what shows more."""
    if (plan := evaluation.metadata.get(COMMAND)) is not None:
        return str(plan.value)
    if key.name in (HEALTH, RULES):
        return commands.status(stream)
    return commands.show_suite(key.name)


def _state(evaluation: dg.AssetCheckEvaluation) -> State:
    if evaluation.passed:
        return "passed"
    return "warning" if evaluation.severity is dg.AssetCheckSeverity.WARN else "failed"


def _without_alert(evaluation: dg.AssetCheckEvaluation) -> bool:
    """True for a stream that was stopped, is being recovered, or starts: its state before that counts meanwhile."""
    mark = evaluation.metadata.get("verdict")
    return not evaluation.passed and mark is not None and mark.value in NO_ALERT


def _lost(
    instance: dg.DagsterInstance,
    keys: Sequence[dg.AssetCheckKey],
    settings: Settings,
    known: Mapping[dg.AssetCheckKey, AssetCheckExecutionRecord],
) -> dict[dg.AssetCheckKey, str]:
    """The suites that a run of their job has not evaluated because it failed, with the run."""
    failed = dg.RunsFilter(tags=job_tags(settings, QUALITY_KIND), statuses=[dg.DagsterRunStatus.FAILURE])
    suites = [key for key in keys if key.name not in (HEALTH, RULES)]
    lost: dict[dg.AssetCheckKey, str] = {}
    for record in reversed(instance.get_run_records(failed, limit=_NEWEST)):
        begun = int(record.start_time or record.create_timestamp.timestamp())  # storage has whole seconds of outcomes
        chosen = suites_of(settings, record.dagster_run, suites)
        for key in suites:
            if key.name in chosen and (key not in known or known[key].create_timestamp < begun):
                lost[key] = record.dagster_run.run_id
    return lost


def _failed(instance: dg.DagsterInstance, records: Iterable[AssetCheckExecutionRecord]) -> set[str]:
    """The failed runs among the runs without a result."""
    planned = [record.run_id for record in records if record.status is _PLANNED]
    if not planned:
        return set()
    failed = dg.RunsFilter(run_ids=planned, statuses=[dg.DagsterRunStatus.FAILURE])
    return {run.run_id for run in instance.get_runs(failed)}


def _without_outcome(key: dg.AssetCheckKey, run: str) -> dg.AssetCheckEvaluation:
    return dg.AssetCheckEvaluation(
        asset_key=key.asset_key,
        check_name=key.name,
        passed=False,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"Run {run[:8]} failed before it had evaluated this check; its log says why.",
        metadata={RUN: dg.MetadataValue.dagster_run(run)},
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send alerts, and the secret in the URL, to another party."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Refused; the answer then counts as an error."""


def payload(settings: Settings, found: Sequence[Transition]) -> dict[str, Any]:
    """The body of the POST: `text`, which chat services show, and each change with its fields; Discord's own form."""
    where, text = _where(settings), _text(settings, found)
    if urlsplit(settings.quality.webhook.get_secret_value()).hostname in _DISCORD:
        return {"content": text[:_DISCORD_TAKES] if len(found) == 1 else text}  # a longer one is refused, and halved
    return {
        "text": text,
        "alerts": [
            {
                **asdict(t),
                **where,
                "severity": t.severity,
                "colour": COLOUR[t.state],
                "time": _time(t.at),
                "link": link(settings, t),
            }
            for t in found
        ],
        **where,
    }


def link(settings: Settings, one: Transition) -> str:
    """The page of the run, or else of the table's checks, in Dagster's UI; empty if its address is not known."""
    address = settings.quality.ui_url.rstrip("/")
    if not address or one.table.startswith("/"):  # the disk's: no page shows it
        return ""
    if one.run:
        return f"{address}/runs/{quote(one.run)}"
    path = "/".join(table_key(settings.dagster, one.table.partition(", ")[0]).path)
    return f"{address}/assets/{quote(path)}?view=checks&checkDetail={quote(one.check)}"


def post(settings: Settings, found: Sequence[Transition]) -> DeliveryFailure | None:
    """POST them to the webhook in one request; an answer other than 2xx is a failure."""
    url = settings.quality.webhook.get_secret_value()
    headers = {"Content-Type": "application/json", "Idempotency-Key": _digest(found)}
    return _request("the webhook", url, "POST", msgspec.json.encode(payload(settings, found)), headers)


def tell_service(settings: Settings, name: str, found: Sequence[Transition]) -> DeliveryFailure | None:
    """Send them in one message to a service of `quality.services`."""
    worst = max((t.state for t in found), key=lambda state: RANK[state])
    url = services.named(settings.quality.services)[name]
    return services.notify(name, url, _title(settings, found), _text(settings, found), worst, several=len(found) > 1)


def beat(settings: Settings, deadline: float) -> DeliveryFailure | None:
    """Call `quality.heartbeat_url`, so that its owner notices when the calls stop; ends before the deadline."""
    url = settings.quality.heartbeat_url.get_secret_value()
    if not url:
        return None
    if not url.startswith(("http://", "https://")):
        return DeliveryFailure("quality.heartbeat_url is not a URL that begins with http:// or https://")
    ended = _in_thread(partial(_request, "the heartbeat's receiver", url, "GET", None, {}))
    try:
        return ended.result(min(max(deadline - time.monotonic(), 0.0), LONGEST_SEND))
    except TimeoutError:
        return DeliveryFailure("the heartbeat's receiver has not answered in time")


def _request(who: str, url: str, method: str, data: bytes | None, headers: Mapping[str, str]) -> DeliveryFailure | None:
    try:
        request = urllib.request.Request(  # noqa: S310 - the settings or the caller have checked the scheme
            url, data=data, headers={**headers, "User-Agent": "recourse"}, method=method
        )
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return DeliveryFailure(f"{who} answered {error.code}", refused=error.code in services.NOT_TAKEN)
    except urllib.error.URLError as error:
        return DeliveryFailure(f"{who} could not be reached: {_kind(error.reason)}")
    except (OSError, HTTPException, ValueError) as error:
        return DeliveryFailure(f"{who} could not be reached: {_kind(error)}")


def mail(settings: Settings, found: Sequence[Transition]) -> DeliveryFailure | None:
    """Send them in one e-mail to all addresses; a failure if the server refuses any of them."""
    quality = settings.quality
    address = f"{quality.smtp_host}:{quality.smtp_port}"
    try:
        message = _message(settings, found)
        with _mail_server(quality) as server:
            refused = server.send_message(message)
    except smtplib.SMTPDataError as error:
        return DeliveryFailure(
            f"the mail server {address} did not take it: {_kind(error)}", refused=error.smtp_code >= 500
        )
    except (OSError, smtplib.SMTPException, ValueError) as error:
        return DeliveryFailure(f"the mail server {address} did not take it: {_kind(error)}")
    if refused:  # the others have it, and would have it twice if it were sent again
        log.warning("the mail server refused some addresses", refused=sorted(refused))
    return None


def _mail_server(quality: QualitySettings) -> smtplib.SMTP:
    """A connection, encrypted and logged in as the settings say."""
    context = ssl.create_default_context()
    if quality.smtp_security == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(quality.smtp_host, quality.smtp_port, timeout=TIMEOUT, context=context)
    else:
        server = smtplib.SMTP(quality.smtp_host, quality.smtp_port, timeout=TIMEOUT)
    try:
        if quality.smtp_security == "starttls":
            server.starttls(context=context)
        if quality.smtp_user:
            server.login(quality.smtp_user, quality.smtp_password.get_secret_value())
    except BaseException:
        server.close()
        raise
    return server


def _message(settings: Settings, found: Sequence[Transition]) -> EmailMessage:
    message = EmailMessage()
    where = _where(settings)
    message["Subject"] = _title(settings, found)
    message["From"] = settings.quality.email_from
    message["To"] = ", ".join(settings.quality.email_to)
    message["Message-ID"] = f"<{_digest(found)}@recourse>"  # the same when it is sent again
    parts = ["\n".join([*_lines(settings, t), _time(t.at), *([f"run {t.run}"] if t.run else [])]) for t in found]
    message.set_content("\n\n".join([*parts, f"host {where['host']}, home {where['home']}"]) + "\n")
    return message


def _title(settings: Settings, found: Sequence[Transition]) -> str:
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0].headline}{more} ({_where(settings)['host']})"


def _text(settings: Settings, found: Sequence[Transition]) -> str:
    where = _where(settings)
    return "\n".join(["\n".join(_lines(settings, t)) for t in found] + [f"host {where['host']}, home {where['home']}"])


def _lines(settings: Settings, one: Transition) -> list[str]:
    """A message for a person: what changed, what was found, what to run, where to look."""
    lines = [f"[{one.severity}] {one.headline}: {one.text}"]
    if one.command and one.state != "passed":
        lines.append(f"next: {one.command}")
    return [*lines, *([page] if (page := link(settings, one)) else [])]


def _where(settings: Settings) -> dict[str, str]:
    return {"host": socket.gethostname(), "home": str(settings.home)}


def _digest(found: Sequence[Transition]) -> str:
    from hashlib import sha256

    return sha256("\n".join(t.id for t in found).encode()).hexdigest()[:32]


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _kind(error: object) -> str:
    """The kind of an error, and the system's own word for it; never its text, which may quote the URL."""
    if isinstance(error, smtplib.SMTPResponseException):
        return f"{type(error).__name__} {error.smtp_code}"
    if isinstance(error, (socket.gaierror, ssl.SSLError)) or not isinstance(error, OSError):
        return type(error).__name__
    return f"{type(error).__name__}{f' {error.strerror}' if error.strerror else ''}"


SENDERS: dict[str, Sender] = {"webhook": post, "e-mail": mail}
"""By the receiver's name; `tell_service` has all others."""


def receivers(settings: QualitySettings) -> dict[str, State]:
    """The receivers that the settings name, each with the lowest severity sent to it."""
    least: dict[str, State] = {"warning": "warning", "critical": "failed"}
    named: dict[str, State] = {}
    if settings.webhook.get_secret_value():
        named["webhook"] = least[settings.webhook_severity]
    named |= dict.fromkeys(services.named(settings.services), least[settings.services_severity])
    if settings.email_to:
        named["e-mail"] = least[settings.email_severity]
    return named
