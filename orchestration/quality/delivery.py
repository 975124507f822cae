"""Sending alerts: JSON to a webhook, e-mail by SMTP. Neither raises; the text of a failure has no secret in it.

A webhook's URL is a secret as a whole, as those of chat services are: its path is the password. Errors of the HTTP
library quote it, so of an error only the kind is told.
"""

from __future__ import annotations

import smtplib
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.message import EmailMessage
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.parse import quote, urlsplit

import msgspec
import structlog

from orchestration.quality.transitions import COLOUR, State, Transition
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import QualitySettings

log = structlog.get_logger()

TIMEOUT = 5.0
"""Seconds for each step of a delivery: connecting, writing, the answer."""
_NOT_TAKEN = (400, 413, 422)
"""Answers to a request that is too long, or that the receiver cannot read: the same one would be refused again."""
_DISCORD, _DISCORD_TAKES = ("discord.com", "discordapp.com"), 2000
"""Hosts whose webhooks show the field `content`, and how many characters of it they take."""


@dataclass(frozen=True)
class Failure:
    """Why nothing was taken; `refused`: these messages are the reason, and smaller parts of them may be taken."""

    text: str
    refused: bool = False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send alerts, and the secret in the URL, to somebody else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Refused; the answer then counts as an error."""


def payload(settings: Settings, found: Sequence[Transition]) -> dict[str, Any]:
    """The body of the POST: `text`, which chat services show, and each change with its fields; Discord's own form."""
    where = _where(settings)
    text = "\n".join(["\n".join(_lines(settings, t)) for t in found] + [f"host {where['host']}, home {where['home']}"])
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
    return f"{address}/assets/{quote(one.table.partition(', ')[0])}?view=checks&checkDetail={quote(one.check)}"


def post(settings: Settings, found: Sequence[Transition]) -> Failure | None:
    """POST them to the webhook in one request; an answer other than 2xx is a failure."""
    url = settings.quality.webhook.get_secret_value()
    headers = {"Content-Type": "application/json", "Idempotency-Key": _digest(found)}
    return _request("the webhook", url, "POST", msgspec.json.encode(payload(settings, found)), headers)


def beat(settings: Settings) -> Failure | None:
    """Call `quality.heartbeat_url`, so that its owner notices when nothing calls it any more."""
    url = settings.quality.heartbeat_url.get_secret_value()
    if not url:
        return None
    if not url.startswith(("http://", "https://")):
        return Failure("quality.heartbeat_url is not a URL that begins with http:// or https://")
    return _request("the heartbeat's receiver", url, "GET", None, {})


def _request(who: str, url: str, method: str, data: bytes | None, headers: Mapping[str, str]) -> Failure | None:
    try:
        request = urllib.request.Request(  # noqa: S310 - the settings or the caller have checked the scheme
            url, data=data, headers={**headers, "User-Agent": "recourse"}, method=method
        )
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return Failure(f"{who} answered {error.code}", refused=error.code in _NOT_TAKEN)
    except urllib.error.URLError as error:
        return Failure(f"{who} could not be reached: {_kind(error.reason)}")
    except (OSError, HTTPException, ValueError) as error:
        return Failure(f"{who} could not be reached: {_kind(error)}")


def mail(settings: Settings, found: Sequence[Transition]) -> Failure | None:
    """Send them in one e-mail to all addresses; a failure if the server refuses any of them."""
    quality = settings.quality
    address = f"{quality.smtp_host}:{quality.smtp_port}"
    try:
        message = _message(settings, found)
        with _mail_server(quality) as server:
            refused = server.send_message(message)
    except smtplib.SMTPDataError as error:
        return Failure(f"the mail server {address} did not take it: {_kind(error)}", refused=error.smtp_code >= 500)
    except (OSError, smtplib.SMTPException, ValueError) as error:
        return Failure(f"the mail server {address} did not take it: {_kind(error)}")
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
    first, further = found[0], len(found) - 1
    message["Subject"] = f"{first.headline}{f', and {further} more' if further else ''} ({where['host']})"
    message["From"] = settings.quality.email_from
    message["To"] = ", ".join(settings.quality.email_to)
    message["Message-ID"] = f"<{_digest(found)}@recourse>"  # the same when it is sent again
    parts = ["\n".join([*_lines(settings, t), _time(t.at), *([f"run {t.run}"] if t.run else [])]) for t in found]
    message.set_content("\n\n".join([*parts, f"host {where['host']}, home {where['home']}"]) + "\n")
    return message


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


SENDERS: Mapping[str, Any] = {"webhook": post, "e-mail": mail}
"""By the receiver's name."""


def receivers(settings: QualitySettings) -> dict[str, State]:
    """The receivers that the settings name, each with the least severity that it is told of."""
    least: dict[str, State] = {"warning": "warning", "critical": "failed"}
    named: dict[str, State] = {}
    if settings.webhook.get_secret_value():
        named["webhook"] = least[settings.webhook_severity]
    if settings.email_to:
        named["e-mail"] = least[settings.email_severity]
    return named
