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
from dataclasses import asdict
from datetime import UTC, datetime
from email.message import EmailMessage
from http.client import HTTPException, HTTPMessage
from typing import IO, Any

import msgspec
import structlog

from orchestration.quality.transitions import COLOUR, Transition
from streaming_jobs.settings_sections import QualitySettings

log = structlog.get_logger()

TIMEOUT = 5.0
"""Seconds for each step of a delivery: connecting, writing, the answer."""
Failure = str
"""Why nothing was taken; empty if all was."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send alerts, and the secret in the URL, to somebody else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Refused; the answer then counts as an error."""


def payload(found: Sequence[Transition]) -> dict[str, Any]:
    """The body of the POST: `text`, which chat services show, and each change with its fields."""
    return {
        "text": "\n".join(f"{t.headline}: {t.text}" for t in found),
        "alerts": [{**asdict(t), "colour": COLOUR[t.state], "time": _time(t.at)} for t in found],
    }


def post(settings: QualitySettings, found: Sequence[Transition]) -> Failure:
    """POST them to the webhook in one request; an answer other than 2xx is a failure."""
    url = settings.webhook.get_secret_value()
    if not url.startswith(("http://", "https://")):
        return "quality.webhook is not a URL that begins with http:// or https://"
    try:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            url,
            data=msgspec.json.encode(payload(found)),
            headers={"Content-Type": "application/json", "User-Agent": "recourse", "Idempotency-Key": _digest(found)},
            method="POST",
        )
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answered {error.code}"
    except urllib.error.URLError as error:
        return f"the webhook could not be reached: {_kind(error.reason)}"
    except (OSError, HTTPException, ValueError) as error:
        return f"the webhook could not be reached: {_kind(error)}"


def mail(settings: QualitySettings, found: Sequence[Transition]) -> Failure:
    """Send them in one e-mail to all addresses; a failure if the server refuses any of them."""
    try:
        message = _message(settings, found)
        with smtplib.SMTP(settings.smtp_host, settings.smtp_port, timeout=TIMEOUT) as server:
            refused = server.send_message(message)
    except (OSError, smtplib.SMTPException, ValueError) as error:
        return f"the mail server {settings.smtp_host}:{settings.smtp_port} did not take it: {_kind(error)}"
    if refused:  # the others have it, and would have it twice if it were sent again
        log.warning("the mail server refused some addresses", refused=sorted(refused))
    return ""


def _message(settings: QualitySettings, found: Sequence[Transition]) -> EmailMessage:
    message = EmailMessage()
    first, further = found[0], len(found) - 1
    message["Subject"] = f"{first.headline}{f', and {further} more' if further else ''}"
    message["From"] = settings.email_from
    message["To"] = ", ".join(settings.email_to)
    message["Message-ID"] = f"<{_digest(found)}@recourse>"  # the same when it is sent again
    message.set_content("\n\n".join(f"{t.headline}\n{_time(t.at)}\n{t.text}{_run(t)}" for t in found) + "\n")
    return message


def _run(one: Transition) -> str:
    return f"\nrun {one.run}" if one.run else ""


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


def receivers(settings: QualitySettings) -> list[str]:
    """The receivers that the settings name."""
    named = {"webhook": bool(settings.webhook.get_secret_value()), "e-mail": bool(settings.email_to)}
    return [name for name, is_named in named.items() if is_named]
